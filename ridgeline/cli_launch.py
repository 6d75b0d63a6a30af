"""`ridgeline launch`: any command on many ranks, under the scheduler that is there, and what became of it.

Needs no torch. Added to the app by `cli.py`, which takes the options of jobs from here for `train --on`.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ridgeline.errors import Requeue, RunError, UsageError, unknown_word

if TYPE_CHECKING:
    from ridgeline.launch.env import Limits
    from ridgeline.launch.nodes import Place
    from ridgeline.launch.request import Wanted


class _CommandsOrJob(TyperGroup):
    """`ridgeline launch -N 2 -- python x.py` without a word for it: what is no command of ours is a job."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            if not args[0].startswith("-"):
                place = "`ridgeline launch`; what the ranks are to run stands behind --"
                raise unknown_word("command", args[0], self.commands, place)
            if "--" not in args and "--help" not in args:
                raise UsageError(
                    "what the ranks are to run stands behind --, e.g. ridgeline launch -n 2 -- python x.py"
                )
            args = ["start", *args]
        return super().parse_args(ctx, args)


launch_app = typer.Typer(
    help="Start a command on many ranks, under the scheduler that is there: "
    "ridgeline launch -N 2 -n 4 -- python train.py (its options: ridgeline launch start --help).",
    no_args_is_help=True,
    cls=_CommandsOrJob,
)

Nodes = Annotated[int | None, typer.Option("-N", "--nodes", min=1, help="Nodes.")]
Bind = Annotated[str, typer.Option(help="Cores of each rank: auto, cores or none.")]
Hosts = Annotated[str | None, typer.Option(help="For ssh and mpi: node1,node2:4, or a file.")]
Ssh = Annotated[str | None, typer.Option("--ssh-command", help="What connects to a host.")]
Name = Annotated[str | None, typer.Option(help="What the scheduler calls the job.")]
Time = Annotated[
    str | None, typer.Option("--time", help="Limit: minutes, h:mm:ss, or 90m, 2h, 1d.")
]
Warn = Annotated[
    int | None, typer.Option("--warn", min=0, help="Seconds before the limit to stop.")
]
Partition = Annotated[str | None, typer.Option("-p", "--partition", help="Or queue.")]
Account = Annotated[str | None, typer.Option("-A", "--account", help="Or project.")]
Qos = Annotated[str | None, typer.Option(help="Quality of service.")]
Constraint = Annotated[str | None, typer.Option("-C", "--constraint", help="Kind of node.")]
Reservation = Annotated[str | None, typer.Option(help="A reservation of the scheduler's.")]
Gpus = Annotated[int | None, typer.Option("--gpus-per-node", min=0, help="GPUs of each node.")]
Cpus = Annotated[int | None, typer.Option("--cpus-per-rank", min=1, help="Cores of each rank.")]
Memory = Annotated[str | None, typer.Option(help="Of each node, e.g. 64G.")]
Exclusive = Annotated[bool, typer.Option("--exclusive", help="Whole nodes.")]
Array = Annotated[str | None, typer.Option(help="Indices of an array of jobs: 0-9, 1,3, 0-9%2.")]
Chain = Annotated[int, typer.Option(min=1, help="So many jobs, each when the last is over.")]
After = Annotated[list[str] | None, typer.Option(help="Wait for this job; may be given again.")]
PutBack = Annotated[
    bool | None,
    typer.Option("--requeue/--no-requeue", help="Back into the queue at the time limit."),
]
SiteName = Annotated[str | None, typer.Option("--site", help="Profile of a machine; or a file.")]
Image = Annotated[str | None, typer.Option("--container", help="An image the ranks run in.")]
Directive = Annotated[
    list[str] | None, typer.Option(help="A further option for the scheduler; may be given again.")
]
Setup = Annotated[
    list[str] | None, typer.Option(help="A line of shell before the command; may be given again.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the job script and stop.")]
Here = Annotated[
    bool | None,
    typer.Option(
        "--here/--submit", help="In a job: use its nodes (the default there), or submit another."
    ),
]

_FIELDS = (
    "rank",
    "world_size",
    "local_rank",
    "local_world_size",
    "node_rank",
    "master_addr",
    "master_port",
)


@launch_app.command("start")
def start(
    command: Annotated[list[str], typer.Argument(help="What every rank runs, behind --.")],
    scheduler: Annotated[
        str,
        typer.Option(help="auto, local, slurm, lsf, pbs, flux, mpi, ssh or ray."),
    ] = "auto",
    nodes: Nodes = None,
    per_node: Annotated[
        int | None, typer.Option("-n", "--per-node", min=1, help="Ranks on each node; default: 1.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the script and the logs go; default: jobs/NAME-TIME.")
    ] = None,
    bind: Bind = "auto",
    hosts: Hosts = None,
    ssh: Ssh = None,
    name: Name = None,
    limit: Time = None,
    warn: Warn = None,
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    constraint: Constraint = None,
    reservation: Reservation = None,
    gpus: Gpus = None,
    cpus: Cpus = None,
    memory: Memory = None,
    exclusive: Exclusive = False,
    array: Array = None,
    chain: Chain = 1,
    after: After = None,
    requeue: PutBack = None,
    site: SiteName = None,
    container: Image = None,
    directive: Directive = None,
    setup: Setup = None,
    here: Here = None,
    dry_run: DryRun = False,
) -> None:
    """Start a command on every rank: in a queue where there is one, else here and now."""
    wanted = read_wanted(
        name=name, nodes=nodes, per_node=per_node, limit=limit, warn_s=warn, partition=partition,
        account=account, qos=qos, constraint=constraint, reservation=reservation,
        gpus_per_node=gpus, cpus_per_rank=cpus, memory=memory, exclusive=exclusive, array=array,
        chain=chain, after=after, requeue=requeue, site=site, container=container,
        directives=directive, setup=setup,
    )  # fmt: skip
    said = wanted
    kind, place, wanted = where_to(scheduler, "--scheduler", wanted, bind, hosts, ssh)
    called = wanted.name or Path(command[0]).stem
    if queued(kind, here):
        # A command that knows nothing of being stopped would start over and over.
        wanted = replace(wanted, requeue_only_asked=wanted.requeue is None)
        where = folder or _new_folder(called, make=not dry_run)
        again = ["launch", "--scheduler", kind, "--here", "--folder", str(where.absolute())]
        again += place_options(place, wanted)
        job = job_of(wanted, [*again, "--", *command], where, called)
        hand_over(job, kind, wanted.chain, dry_run)
        return
    if dry_run:
        raise UsageError(
            f"--dry-run prints the script of a job, and {kind} has none here: it starts the ranks itself"
        )
    refuse_queue_options(kind, said, hosts, here)
    _run_here(kind, place, command, folder, wanted)


def _new_folder(called: str, make: bool) -> Path:
    """A folder of its own for each job, also for two in one second."""
    stamp = f"{_plain(called)}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, 1000):
        path = Path("jobs") / (stamp if number == 1 else f"{stamp}-{number}")
        if not make and not path.exists():
            return path
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(
                f"cannot make {path} ({error.strerror}); choose another place with --folder DIR"
            ) from error
        return path
    raise UsageError(f"a thousand jobs named {stamp} are there already; choose a --folder")


def _plain(name: str) -> str:
    from ridgeline.launch.job import Job

    return Job(name, (), Path(), Path()).scheduler_name


def _run_here(
    kind: str, place: Place, command: list[str], folder: Path | None, wanted: Wanted
) -> None:
    """Ranks now, in the nodes of the job around or on hosts that answer."""
    from ridgeline.launch.job import LOGS
    from ridgeline.launch.nodes import allocation_of, build_spread
    from ridgeline.launch.supervise import supervise

    limits = limits_here(kind, wanted)
    spread = build_spread(kind, place)
    where = folder or _new_folder(wanted.name or Path(command[0]).stem, make=True)
    given = allocation_of(kind)
    if limits.array and given is not None and given.array_index:
        where = where / given.array_index
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with told(where), put_back(kind):
        try:
            supervise(spread, command, spread.num_ranks, where / LOGS, limits)
        except KeyboardInterrupt:
            raise RunError(f"interrupted; what the ranks wrote is in {where / LOGS}") from None


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
            typer.echo(f"ridgeline: {refused}; submit the script again", err=True)
        raise


def read_wanted(
    limit: str | None,
    after: list[str] | None,
    directives: list[str] | None,
    setup: list[str] | None,
    **said: Any,
) -> Wanted:
    """The options of a job, checked as far as they can be by themselves."""
    from ridgeline.launch.job import read_time
    from ridgeline.launch.request import Wanted

    return Wanted(
        time_s=None if limit is None else read_time(limit, "--time"),
        after=tuple(after or ()),
        directives=tuple(directives or ()),
        setup=tuple(setup or ()),
        **said,
    )


def where_to(
    said: str, option: str, wanted: Wanted, bind: str, hosts: str | None, ssh: str | None
) -> tuple[str, Place, Wanted]:
    """The scheduler, the place for ranks in its nodes, and the options with the site's added."""
    from ridgeline.launch.nodes import Place, resolve_kind
    from ridgeline.launch.request import choose_container, fill_from_site

    check_bind(bind)
    wanted, site = fill_from_site(wanted)
    if said == "auto" and site is not None and site.scheduler is not None:
        said = site.scheduler
    kind = resolve_kind(said, option)
    place = Place(
        nodes=wanted.nodes,
        per_node=wanted.per_node,
        hosts=hosts,
        ssh=ssh,
        bind=bind,
        container=choose_container(wanted.container, site),
        cpus_per_rank=wanted.cpus_per_rank,
        gpus_per_node=wanted.gpus_per_node,
    )
    return kind, place, wanted


def refuse_job_options(wanted: Wanted, hosts: str | None, dry_run: bool, here: bool | None) -> None:
    """Options that mean nothing without a scheduler are not passed over in silence."""
    from ridgeline.launch.request import Wanted

    given = [
        name
        for name, value in vars(wanted).items()
        if value != getattr(Wanted(), name) and name not in ("per_node", "time_s", "warn_s")
    ]
    given += ["hosts"] if hosts else []
    given += ["dry-run"] if dry_run else []
    given += ["here"] if here is not None else []
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


def refuse_queue_options(kind: str, said: Wanted, hosts: str | None, here: bool | None) -> None:
    """What only a queue could do is not passed over in silence where there is none. In a job of one, its
    script says the same again."""
    from ridgeline.launch.nodes import WITHOUT_QUEUE
    from ridgeline.launch.request import Wanted

    if here:
        return
    given = [name for name in _QUEUE_ONLY if getattr(said, name) != getattr(Wanted(), name)]
    given += ["hosts"] if hosts and kind not in ("ssh", "mpi") else []
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


def hand_over(job: Any, kind: str, chain: int, dry_run: bool) -> None:
    """Print the script, or submit it and print the id."""
    from ridgeline.launch.request import render_job, submit_job

    if dry_run:
        typer.echo(render_job(job, kind), nl=False)
        return
    records = submit_job(job, kind, chain)
    for record in records:
        waits = f", after {', '.join(record.after)}" if record.after else ""
        typer.echo(f"job {record.id}: {job.folder}{waits}")


@launch_app.command()
def status(
    job: Annotated[str, typer.Argument(help="An id, or the folder of a job.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print where a job stands, in one line."""
    from ridgeline.launch.records import find_record
    from ridgeline.launch.schedulers.table import find_scheduler

    record = find_record(job)
    found = find_scheduler(record.scheduler).status(record.id)
    if as_json:
        typer.echo(json.dumps({**asdict(record), **asdict(found)}))
        return
    parts = [f"job {record.id}: {found.state}"]
    if found.said and found.said.lower() != found.state:
        parts[0] += f" ({found.said})"
    parts += [f"on {found.nodes}"] if found.nodes else []
    parts += [f"exit code {found.exit_code}"] if found.exit_code is not None else []
    parts += [found.reason] if found.reason else []
    typer.echo(f"{', '.join(parts)}; {record.folder}")


@launch_app.command()
def logs(
    job: Annotated[str, typer.Argument(help="An id, or the folder of a job.")],
    rank: Annotated[int | None, typer.Option(min=0, help="What this rank wrote.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="Of each file, the last so many.")] = 40,
) -> None:
    """Print what a job wrote, the error of the rank that failed first on top."""
    from ridgeline.launch.logs import show_logs
    from ridgeline.launch.records import find_record

    typer.echo(show_logs(Path(find_record(job).folder), rank, lines))


@launch_app.command()
def cancel(
    jobs: Annotated[list[str], typer.Argument(help="Ids, or folders of jobs.")],
) -> None:
    """Take jobs out of the queue, or end them."""
    from ridgeline.launch.records import find_record
    from ridgeline.launch.schedulers.table import find_scheduler

    for record in [find_record(job) for job in jobs]:
        scheduler = find_scheduler(record.scheduler)
        # Links of a chain that come after it go first, or they would start in its place.
        later = record.chain[record.chain.index(record.id) :] if record.id in record.chain else ()
        for number in reversed(later or (record.id,)):
            state = scheduler.status(number).state
            if state in ("done", "failed", "cancelled", "timeout"):
                typer.echo(f"job {number}: was over already ({state})")
                continue
            scheduler.cancel(number)
            typer.echo(f"job {number}: cancelled")


@launch_app.command("list")
def list_jobs(
    num: Annotated[int, typer.Option("-n", min=1, help="The newest so many.")] = 10,
) -> None:
    """List the jobs that were submitted from this account."""
    from ridgeline.launch.records import list_records

    for record in list_records()[:num]:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.submitted))
        size = f"{record.nodes} x {record.per_node}"
        typer.echo(
            f"{record.scheduler}:{record.id:<12} {when}  {size:<8} {record.name}  {record.folder}"
        )


@launch_app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print who this process is among the ranks, and which variable said so."""
    from ridgeline.launch.env import read_rank_env

    found = read_rank_env()
    if as_json:
        values = asdict(found)
        values["said"] = dict(found.said)
        typer.echo(json.dumps(values))
        return
    said = dict(found.said)
    typer.echo(f"{'launcher':<17} {found.source}")
    for name in _FIELDS:
        value = getattr(found, name)
        typer.echo(f"{name:<17} {value!s:<24} {said.get(name, '-')}")
    typer.echo(f"{'nodes':<17} {', '.join(found.nodes) or 'not said'}")
