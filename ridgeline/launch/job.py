"""What is asked of a scheduler, and what is known of a job that was given to one: plain values.

`Job` is filled in by `cli_jobs.py` from options and a site's profile; a scheduler's file turns it into a
script. `Step` is what starts the ranks inside the nodes that were given. Nothing here runs anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.errors import UsageError

SCRIPT, RECORD, OUTPUT, LOGS = "job.sh", "job.json", "job.out", "logs"
"""What a job's folder holds: the script, the record of it, what it printed, and a file a rank."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class Container:
    """An image that every rank runs in."""

    runtime: str
    """A key of `containers.RUNTIMES`."""
    image: str
    binds: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One job: how much of the machine, for how long, and what runs on its first node."""

    name: str
    """As it was given; `scheduler_name` is what schedulers get."""
    body: tuple[str, ...]
    """The command that is run once, on the first node, and starts the ranks."""
    folder: Path
    workdir: Path
    nodes: int = 1
    per_node: int = 1
    """Ranks on each node."""
    cpus_per_rank: int | None = None
    gpus_per_node: int | None = None
    gpu_type: str | None = None
    """As the site calls it, where it has several, e.g. `h100`."""
    memory: str | None = None
    """Of a node, e.g. `64G`; written as the scheduler wants it."""
    time_s: int | None = None
    warn_s: int = 120
    """How long before the time limit the job is to be told."""
    requeue: bool = False
    """Whether the job may be started again by the scheduler, or by itself."""
    array: str | None = None
    """`0-9`, `1,3,5`, `0-9%2`: so many jobs that differ in their index."""
    after: tuple[str, ...] = ()
    """Jobs that have to be over before, however they ended."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclusive: bool = False
    count_nodes: bool = False
    """LSF: ask for nodes, as machines with `jsrun` take it, and not for slots."""
    directives: tuple[str, ...] = ()
    """Further options for the scheduler, as they would stand behind `#SBATCH` and its like."""
    setup: tuple[str, ...] = ()
    """Lines of shell before the body: modules, environments. The user's own, so not quoted."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Exported before the body."""

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def output(self) -> Path:
        """What the job printed; in an array, `job.7.out` for index 7."""
        return self.folder / OUTPUT

    @property
    def warn_before_s(self) -> int:
        """`warn_s`, or half of a time limit that is shorter: a job is not told before it works."""
        return self.warn_s if self.time_s is None else min(self.warn_s, self.time_s // 2)

    @property
    def shown_time(self) -> str:
        return "" if self.time_s is None else show_time(self.time_s)

    @property
    def scheduler_name(self) -> str:
        """The name in letters that no scheduler and no shell takes for anything else."""
        return _UNSAFE.sub("-", self.name).strip("-.+")[:64] or "ridgeline"


@dataclass(frozen=True)
class Step:
    """Ranks to be started in nodes that are there already: `command` on each."""

    command: tuple[str, ...]
    nodes: int
    per_node: int
    hosts: tuple[str, ...] = ()
    """Which nodes, where it matters; empty: the launcher's choice."""
    cpus_per_rank: int | None = None
    gpus_per_node: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set for the command on top of the environment of whoever starts the step: whoever starts it sets them
    there too, since most launchers pass their environment on and take no variables of their own."""
    together: bool = True
    """Whether one that fails is to end the others, which would wait for it; launchers of MPI end them
    anyway."""

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class JobState:
    """Where a job stands. `state` is one of `STATES`."""

    state: str
    said: str
    """The scheduler's own word for it."""
    nodes: str = ""
    exit_code: int | None = None
    reason: str = ""
    """Why it waits or how it failed, where the scheduler says."""


STATES = ("waiting", "running", "done", "failed", "cancelled", "timeout", "unknown")


def read_time(text: str, place: str) -> int:
    """Seconds of a time limit: `30` (minutes, as schedulers take it), `1:30:00`, `2-12:00:00`, `90m`, `2h`.

    >>> read_time("1:30:00", "--time"), read_time("90m", "--time"), read_time("2-00", "--time")
    (5400, 5400, 172800)
    """
    said = text.strip()
    if said[-1:] in _UNITS and said[:-1].isdigit():
        seconds = int(said[:-1]) * _UNITS[said[-1]]
    else:
        match = _TIME.fullmatch(said)
        if match is None:
            raise UsageError(
                f"{place} {text!r} is not a time; write minutes (90), h:mm:ss (1:30:00), d-hh:mm:ss, or "
                "a number with s, m, h or d"
            )
        days, *parts = match.groups()
        numbers = [int(part) for part in parts if part is not None]
        if days is not None:
            hours, minutes, rest = [*numbers, 0, 0][:3]
        elif len(numbers) == 3:
            hours, minutes, rest = numbers
        else:
            hours, (minutes, rest) = 0, [*numbers, 0][:2]
        seconds = int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + rest
    if seconds <= 0:
        raise UsageError(f"{place} {text!r} is no time at all; a job needs at least a second")
    return seconds


def show_time(seconds: int) -> str:
    """`h:mm:ss`, which every scheduler takes.

    >>> show_time(5400)
    '01:30:00'
    """
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{rest:02d}"
