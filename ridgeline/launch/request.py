"""A job from what was asked: options, the site's profile, the scheduler's script, its place in the queue.

`Wanted` is what was said, with None where nothing was; the site fills in the rest; what nobody said is the
scheduler's own default. Called by `ridgeline launch` and `ridgeline train --on`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from ridgeline.errors import UsageError
from ridgeline.launch.env import ARRAY, REQUEUE, WARN_S
from ridgeline.launch.job import LOGS, RECORD, SCRIPT, Container, Job
from ridgeline.launch.records import JobRecord, find_record, new_record, write_record
from ridgeline.launch.schedulers.contract import Scheduler
from ridgeline.launch.schedulers.table import find_scheduler, require_installed
from ridgeline.launch.script import write_script
from ridgeline.launch.sites import Site, load_site


@dataclass(frozen=True)
class Wanted:
    """Options for a job in a queue, as they were said."""

    name: str | None = None
    nodes: int | None = None
    per_node: int | None = None
    time_s: int | None = None
    warn_s: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gpus_per_node: int | None = None
    cpus_per_rank: int | None = None
    gpu_type: str | None = None
    count_nodes: bool = False
    memory: str | None = None
    exclusive: bool = False
    array: str | None = None
    chain: int = 1
    after: tuple[str, ...] = ()
    requeue: bool | None = None
    """None: a job with a time limit does, one without or in a chain does not."""
    requeue_only_asked: bool = False
    """Only when the command asks for it, by its exit code."""
    site: str | None = None
    container: str | None = None
    """An image; the runtime is the site's, else Apptainer."""
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


def fill_from_site(wanted: Wanted) -> tuple[Wanted, Site | None]:
    """What the site's profile adds to what was said."""
    if wanted.site is None:
        return wanted, None
    site = load_site(wanted.site)
    names = {one.name for one in fields(Job)} & {one.name for one in fields(Wanted)}
    said = {name: getattr(wanted, name) for name in names}
    # What is off by default and was not asked for is not said.
    filled = site.fill({name: value for name, value in said.items() if value is not False})
    return replace(wanted, **{name: filled[name] for name in filled if name in names}), site


def choose_container(image: str | None, site: Site | None) -> Container | None:
    if image is None:
        return None
    runtime = site.container if site is not None and site.container else "apptainer"
    return Container(runtime, image)


def make_job(wanted: Wanted, body: Sequence[str], folder: Path, workdir: Path, name: str) -> Job:
    requeue = wanted.requeue
    if requeue is None:  # the links of a chain are the slots
        requeue = wanted.time_s is not None and wanted.chain == 1
    job = Job(
        name=wanted.name or name,
        body=tuple(body),
        folder=folder,
        workdir=workdir,
        nodes=wanted.nodes or 1,
        per_node=wanted.per_node or 1,
        cpus_per_rank=wanted.cpus_per_rank,
        gpus_per_node=wanted.gpus_per_node,
        gpu_type=wanted.gpu_type,
        count_nodes=wanted.count_nodes,
        memory=wanted.memory,
        time_s=wanted.time_s,
        requeue=requeue,
        array=wanted.array,
        after=wanted.after,
        partition=wanted.partition,
        account=wanted.account,
        qos=wanted.qos,
        constraint=wanted.constraint,
        reservation=wanted.reservation,
        exclusive=wanted.exclusive,
        directives=wanted.directives,
        setup=wanted.setup,
    )
    if wanted.warn_s is not None:
        job = replace(job, warn_s=wanted.warn_s)
    said = {WARN_S: str(job.warn_before_s)}
    if job.requeue:
        said[REQUEUE] = "asked" if wanted.requeue_only_asked else "1"
    if job.array is not None:
        said[ARRAY] = "1"
    return replace(job, variables={**wanted.variables, **said})


def render_job(job: Job, scheduler: str) -> str:
    return find_scheduler(scheduler).render(job)


def submit_job(job: Job, name: str, chain: int = 1) -> list[JobRecord]:
    """Write the script into the job's folder and hand it over, `chain` times one after the other."""
    if chain < 1:
        raise UsageError(f"--chain {chain} is no number of jobs; write 1 or more")
    scheduler = find_scheduler(name)
    require_installed(scheduler)
    _require_no_other(job, scheduler)
    text = scheduler.render(job)  # what is wrong with it is known before anything is written
    (job.folder / LOGS).mkdir(parents=True, exist_ok=True)
    records: list[JobRecord] = []
    for number in range(chain):
        if number:
            job = replace(job, after=(records[-1].id,))
            text = scheduler.render(job)
        script = job.folder / (SCRIPT if number == 0 else f"job-{number + 1}.sh")
        write_script(script, text)
        records.append(_hand_over(job, scheduler, script))
        # At once: a link that is refused leaves those before it in the queue.
        ids = tuple(record.id for record in records)
        records = [replace(record, chain=ids if chain > 1 else ()) for record in records]
        # An id of any link leads to the folder; the folder's own record is the first one's.
        for record in reversed(records):
            write_record(record)
    return records


def _require_no_other(job: Job, scheduler: Scheduler) -> None:
    """Two jobs in one folder would train in one run, and the record of the first would be lost."""
    if not (job.folder / RECORD).is_file():
        return
    known = find_record(str(job.folder))
    if known.scheduler != scheduler.name or set(job.after) & {known.id, *known.chain}:
        return
    alive = {
        number: state
        for number in known.chain or (known.id,)
        if (state := scheduler.status(number).state) in ("waiting", "running")
    }
    for last, state in reversed(alive.items()):
        raise UsageError(
            f"{job.folder} is that of job {last}, which is {state}; wait with --after {last}, end it "
            f"with `ridgeline launch cancel {last}`, or choose another folder"
        )


def _hand_over(job: Job, scheduler: Scheduler, script: Path) -> JobRecord:
    return new_record(
        scheduler.submit(script),
        scheduler.name,
        job.name,
        job.folder,
        job.nodes,
        job.per_node,
        job.array,
        job.after,
    )
