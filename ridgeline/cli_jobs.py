"""The options of a job, once for every command that starts one, and the rules about them.

`train --on` and `launch` take the same thirty options; here they are the fields of `JobOptions`, which
`with_job_options` spells out on the command line. Where a job goes, what is refused and what its own script
is told again follow from them. Needs no torch. Used by `cli.py` and `cli_launch.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.errors import OURS, Requeue, RunError, UsageError, unknown_word

if TYPE_CHECKING:
    from ridgeline.launch.env import Limits
    from ridgeline.launch.nodes import Place
    from ridgeline.launch.request import Wanted


@dataclass(frozen=True)
class JobOptions:
    """What is asked of a scheduler, field by field as on the command line."""

    nodes: Annotated[int | None, typer.Option("-N", "--nodes", min=1, help="Nodes.")] = None
    bind: Annotated[str, typer.Option(help="Cores of each rank: auto, cores or none.")] = "auto"
    hosts: Annotated[
        str | None, typer.Option(help="For ssh and mpi: node1,node2:4, or a file.")
    ] = None
    ssh: Annotated[str | None, typer.Option("--ssh-command", help="What connects to a host.")] = (
        None
    )
    name: Annotated[str | None, typer.Option(help="What the scheduler calls the job.")] = None
    limit: Annotated[
        str | None, typer.Option("--time", help="Limit: minutes, h:mm:ss, or 90m, 2h, 1d.")
    ] = None
    warn: Annotated[
        int | None, typer.Option("--warn", min=0, help="Seconds before the limit to stop.")
    ] = None
    partition: Annotated[str | None, typer.Option("-p", "--partition", help="Or queue.")] = None
    account: Annotated[str | None, typer.Option("-A", "--account", help="Or project.")] = None
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None
    constraint: Annotated[str | None, typer.Option("-C", "--constraint", help="Kind of node.")] = (
        None
    )
    reservation: Annotated[str | None, typer.Option(help="A reservation of the scheduler's.")] = (
        None
    )
    gpus: Annotated[
        int | None, typer.Option("--gpus-per-node", min=0, help="GPUs of each node.")
    ] = None
    cpus: Annotated[
        int | None, typer.Option("--cpus-per-rank", min=1, help="Cores of each rank.")
    ] = None
    memory: Annotated[str | None, typer.Option(help="Of each node, e.g. 64G.")] = None
    exclusive: Annotated[bool, typer.Option("--exclusive", help="Whole nodes.")] = False
    array: Annotated[
        str | None, typer.Option(help="Indices of an array of jobs: 0-9, 1,3, 0-9%2.")
    ] = None
    chain: Annotated[int, typer.Option(min=1, help="So many jobs, each when the last is over.")] = 1
    after: Annotated[
        list[str] | None, typer.Option(help="Wait for this job; may be given again.")
    ] = None
    requeue: Annotated[
        bool | None,
        typer.Option("--requeue/--no-requeue", help="Back into the queue at the time limit."),
    ] = None
    site: Annotated[str | None, typer.Option("--site", help="Profile of a machine; or a file.")] = (
        None
    )
    container: Annotated[
        str | None, typer.Option("--container", help="An image the ranks run in.")
    ] = None
    directive: Annotated[
        list[str] | None,
        typer.Option(help="A further option for the scheduler; may be given again."),
    ] = None
    setup: Annotated[
        list[str] | None,
        typer.Option(help="A line of shell before the command; may be given again."),
    ] = None
    here: Annotated[
        bool | None,
        typer.Option(
            "--here/--submit",
            help="In a job: use its nodes (the default there), or submit another.",
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the job script and stop.")] = (
        False
    )

    def wanted(self, per_node: int | None) -> Wanted:
        """The job itself, checked as far as its options can be by themselves."""
        from ridgeline.launch.job import read_time
        from ridgeline.launch.request import Wanted

        return Wanted(
            name=self.name,
            nodes=self.nodes,
            per_node=per_node,
            time_s=None if self.limit is None else read_time(self.limit, "--time"),
            warn_s=self.warn,
            partition=self.partition,
            account=self.account,
            qos=self.qos,
            constraint=self.constraint,
            reservation=self.reservation,
            gpus_per_node=self.gpus,
            cpus_per_rank=self.cpus,
            memory=self.memory,
            exclusive=self.exclusive,
            array=self.array,
            chain=self.chain,
            after=tuple(self.after or ()),
            requeue=self.requeue,
            site=self.site,
            container=self.container,
            directives=tuple(self.directive or ()),
            setup=tuple(self.setup or ()),
        )


def with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of `JobOptions` as its last options, in place of its parameter `job`."""
    hints = typing.get_type_hints(JobOptions, include_extras=True)
    added = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(JobOptions)
    ]
    signature = inspect.signature(command, eval_str=True)
    kept = [p for p in signature.parameters.values() if p.name != "job"]

    @functools.wraps(command)
    def spelled_out(*args: Any, **said: Any) -> None:
        options = JobOptions(**{parameter.name: said.pop(parameter.name) for parameter in added})
        command(*args, job=options, **said)

    spelled_out.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    spelled_out.__annotations__ = {p.name: p.annotation for p in (*kept, *added)}
    del spelled_out.__wrapped__
    return spelled_out


@contextmanager
def told(folder: Path) -> Iterator[None]:
    """A failure is left in the folder too, for `ridgeline launch logs`."""
    from ridgeline.launch.logs import clear_failure, note_failure

    try:
        clear_failure(folder)
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}; choose another folder"
        ) from error
    try:
        yield
    except Requeue:
        raise
    except (RunError, UsageError) as error:
        with suppress(OSError):
            note_failure(folder, error)
        raise


@contextmanager
def put_back(kind: str) -> Iterator[None]:
    """A job that was stopped before its end goes back into the queue, where that was asked for."""
    from ridgeline.launch.env import read_limits
    from ridgeline.launch.nodes import allocation_of
    from ridgeline.launch.schedulers.table import SCHEDULERS

    try:
        yield
    except Requeue as error:
        given, scheduler = allocation_of(kind), SCHEDULERS.get(kind)
        limits = read_limits()
        wished = limits.requeue or (limits.requeue_asked and not error.signal)
        if given is None or scheduler is None or not wished:
            raise
        if error.signal == "SIGTERM" and not scheduler.preempted(given.job_id):
            # Cancelled: whoever did that does not want to see the job again.
            raise RunError(str(error)) from None
        typer.echo(f"job {given.job_id} goes back into the queue", err=True)
        sys.stderr.flush()
        # The scheduler may end this process before the next line.
        try:
            scheduler.requeue(given.job_id)
        except RunError as refused:
            typer.echo(f"{OURS}{refused}; submit the script again", err=True)
        raise


def where_to(said: str, option: str, job: JobOptions, wanted: Wanted) -> tuple[str, Place, Wanted]:
    """The scheduler, the place for ranks in its nodes, and the options with the site's added."""
    from ridgeline.launch.nodes import Place, resolve_kind
    from ridgeline.launch.request import choose_container, fill_from_site
    from ridgeline.launch.schedulers.table import SCHEDULERS

    check_bind(job.bind)
    wanted, site = fill_from_site(wanted)
    if said == "auto" and site is not None and site.scheduler is not None:
        said = site.scheduler
    kind = resolve_kind(said, option)
    place = Place(
        nodes=wanted.nodes,
        per_node=wanted.per_node,
        hosts=job.hosts,
        ssh=job.ssh,
        bind=job.bind,
        container=choose_container(wanted.container, site),
        cpus_per_rank=wanted.cpus_per_rank,
        gpus_per_node=wanted.gpus_per_node,
    )
    if kind in SCHEDULERS and site is not None and not job.here:
        for note in site.notes:
            typer.echo(f"{site.name}: {note}", err=True)
    return kind, place, wanted


def refuse_job_options(job: JobOptions, wanted: Wanted) -> None:
    """Options that mean nothing without a scheduler are not passed over in silence."""
    from ridgeline.launch.request import Wanted

    given = [
        name
        for name, value in vars(wanted).items()
        if value != getattr(Wanted(), name) and name not in ("per_node", "time_s", "warn_s")
    ]
    given += ["hosts"] if job.hosts else []
    given += ["dry-run"] if job.dry_run else []
    given += ["here"] if job.here is not None else []
    if given:
        option = {"time_s": "time", "warn_s": "warn", "directives": "directive"}.get(
            given[0], given[0]
        )
        raise UsageError(
            f"--{option.replace('_', '-')} is for jobs; say where with --on, e.g. --on slurm"
        )


_QUEUE_ONLY = (
    "array", "chain", "after", "partition", "account", "qos", "constraint", "reservation", "memory",
    "exclusive", "requeue", "directives", "setup",
)  # fmt: skip


def refuse_queue_options(kind: str, job: JobOptions, said: Wanted) -> None:
    """What only a queue could do is not passed over in silence where there is none. In a job of one, its
    script says the same again."""
    from ridgeline.launch.nodes import WITHOUT_QUEUE
    from ridgeline.launch.request import Wanted

    if job.dry_run:
        raise UsageError(
            f"--dry-run prints the script of a job, and {kind} has none here: it starts the ranks itself"
        )
    if job.here:
        return
    given = [name for name in _QUEUE_ONLY if getattr(said, name) != getattr(Wanted(), name)]
    given += ["hosts"] if job.hosts and kind not in ("ssh", "mpi") else []
    if given and kind in WITHOUT_QUEUE:
        option = {"directives": "directive"}.get(given[0], given[0])
        raise UsageError(f"--{option} means nothing to {kind}, which has no queue; leave it out")


def check_bind(bind: str) -> None:
    from ridgeline.launch.bind import MODES

    if bind not in MODES:
        raise unknown_word("mode", bind, MODES, "--bind")


def limits_here(kind: str, wanted: Wanted) -> Limits:
    """The time there is: what the job's script or its scheduler says, or what was asked for where there is
    no job."""
    from ridgeline.launch.env import read_limits
    from ridgeline.launch.nodes import allocation_of

    limits, given = read_limits(), allocation_of(kind)
    if given is not None:
        return limits if limits.ends_at else replace(limits, ends_at=given.ends_at)
    if wanted.time_s is None:
        return limits
    warn_s = min(120 if wanted.warn_s is None else wanted.warn_s, wanted.time_s // 2)
    return replace(limits, ends_at=time.time() + wanted.time_s, warn_s=warn_s)


def queued(kind: str, here: bool | None) -> bool:
    """Whether this is for the queue: there is one, and this is not a job of it that was given nodes."""
    from ridgeline.launch.nodes import allocation_of
    from ridgeline.launch.schedulers.table import SCHEDULERS

    if kind not in SCHEDULERS:
        if here is False:
            raise UsageError(f"--submit needs a queue, and {kind} has none")
        return False
    inside = allocation_of(kind) is not None
    if here and not inside:
        raise UsageError(f"--here is for use inside a job of {kind}, and this is none")
    return not inside if here is None else not here


def place_options(place: Place, wanted: Wanted) -> list[str]:
    """What the job's own command has to be told again, in its nodes."""
    found = ["-N", str(place.nodes or 1), "-n", str(place.per_node or 1)]
    if place.bind != "auto":
        found += ["--bind", place.bind]
    if place.container is not None:
        found += ["--container", place.container.image]
        found += ["--site", wanted.site] if wanted.site else []
    for option, value in (
        ("--cpus-per-rank", place.cpus_per_rank),
        ("--gpus-per-node", place.gpus_per_node),
    ):
        found += [option, str(value)] if value is not None else []
    return found


def job_of(wanted: Wanted, arguments: list[str], folder: Path, name: str) -> Any:
    from ridgeline.launch.request import make_job

    body = [sys.executable, "-m", "ridgeline.cli", *arguments]
    return make_job(wanted, body, folder.absolute(), Path.cwd(), name)


def hand_over(job: Any, kind: str, chain: int, dry_run: bool, option: str) -> None:
    """Print the script, or submit it and print the id; `option` is the command's for where to run."""
    from ridgeline.launch.request import render_job, submit_job

    if dry_run:
        typer.echo(render_job(job, kind), nl=False)
        return
    try:
        records = submit_job(job, kind, chain)
    except RunError as error:
        raise RunError(f"{error}; {option} local runs it on this machine instead") from error
    for record in records:
        waits = f", after {', '.join(record.after)}" if record.after else ""
        typer.echo(f"job {record.id}: {job.folder}{waits}")
