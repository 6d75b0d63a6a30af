"""`ridgeline launch`: any command on many ranks, under the scheduler that is there, and what became of it.

Needs no torch. Added to the app by `cli.py`; the options of jobs are in `cli_jobs.py`.
"""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ridgeline.cli_jobs import (
    JobOptions,
    hand_over,
    job_of,
    limits_here,
    place_options,
    put_back,
    queued,
    refuse_queue_options,
    told,
    where_to,
    with_job_options,
)
from ridgeline.errors import RunError, UsageError, unknown_word

if TYPE_CHECKING:
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
@with_job_options
def start(
    command: Annotated[list[str], typer.Argument(help="What every rank runs, behind --.")],
    job: JobOptions,
    scheduler: Annotated[
        str,
        typer.Option(help="auto, local, slurm, lsf, pbs, flux, mpi, ssh or ray."),
    ] = "auto",
    per_node: Annotated[
        int | None, typer.Option("-n", "--per-node", min=1, help="Ranks on each node; default: 1.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the script and the logs go; default: jobs/NAME-TIME.")
    ] = None,
) -> None:
    """Start a command on every rank: in a queue where there is one, else here and now."""
    said = job.wanted(per_node)
    kind, place, wanted = where_to(scheduler, "--scheduler", job, said)
    called = wanted.name or Path(command[0]).stem
    if not queued(kind, job.here):
        refuse_queue_options(kind, job, said)
        _run_here(kind, place, command, folder, wanted)
        return
    # A command that knows nothing of being stopped would start over and over.
    wanted = replace(wanted, requeue_only_asked=wanted.requeue is None)
    where = folder or _new_folder(called, make=not job.dry_run)
    again = ["launch", "--scheduler", kind, "--here", "--folder", str(where.absolute())]
    again += place_options(place, wanted)
    made = job_of(wanted, [*again, "--", *command], where, called)
    hand_over(made, kind, wanted.chain, job.dry_run, "--scheduler")


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
