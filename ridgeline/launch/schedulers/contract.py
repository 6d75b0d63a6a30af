"""The form that every scheduler's file fills in: functions over `Job` and `Step`, and nothing kept.

A scheduler renders a job to the text of a script, hands the script over, and answers for it later. In the
nodes it was given it starts ranks by a command of its own (`srun`, `jsrun`, `mpiexec`, `flux run`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import UsageError
from ridgeline.launch.job import Job, JobState, Step
from ridgeline.launch.script import ENDS_AT

_IN_ORDER = ("running", "waiting", "unknown", "failed", "timeout", "cancelled", "done")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Allocation:
    """The nodes that this process may use, as the scheduler around it says."""

    job_id: str
    nodes: tuple[str, ...]
    """Empty where the scheduler counts but does not name them."""
    num_nodes: int
    restarts: int = 0
    """How often this job was put back into the queue before."""
    array_index: str = ""
    ends_at: float | None = None
    """Seconds since 1970, where the environment says when the time is up."""
    cpus_per_node: int | None = None
    """The fewest that it has on a node, where its launcher gives fewer to those who do not ask."""


@dataclass(frozen=True)
class Scheduler:
    """What can be asked of one kind of scheduler."""

    name: str
    programs: tuple[str, ...]
    """Commands that have to be installed, the submitting one first."""
    render: Callable[[Job], str]
    """The whole job script: directives, set-up, body."""
    submit: Callable[[Path], str]
    """Hand a script over; the job's id."""
    status: Callable[[str], JobState]
    cancel: Callable[[str], None]
    requeue: Callable[[str], bool]
    """Ask for the job to be started again. True: it will be, and where a job asks for itself it is ended by
    that. False: ending with the code of `errors.Requeue` does it. A `RunError` where the scheduler does
    neither: submit the script again."""
    inside: Callable[[Mapping[str, str]], Allocation | None]
    """The nodes this process has, when it runs in a job of this scheduler."""
    step: Callable[[Step], list[str]]
    """The command line that starts `step.command` once a rank in these nodes."""
    preempted: Callable[[str], bool] = lambda job_id: False
    """Whether a job that gets SIGTERM has to make room for another, and was not cancelled."""


def number(environ: Mapping[str, str], *variables: str) -> int | None:
    """The whole number in the first of these that is set."""
    for variable in variables:
        said = environ.get(variable)
        if said:
            if not re.fullmatch("[0-9]+", said):
                raise UsageError(f"{variable}={said!r} in the environment is not a whole number")
            return int(said)
    return None


def ends_at(environ: Mapping[str, str], *variables: str) -> float | None:
    """When the time is up, from the scheduler where it says, else from what the script has left."""
    seconds = number(environ, *variables, ENDS_AT)
    return float(seconds) if seconds else None


def list_hosts(step: Step) -> tuple[str, ...]:
    """The hosts of a step, none of which a launcher could take for anything else."""
    for host in step.hosts:
        if not _HOST.fullmatch(host):
            raise UsageError(f"{host!r} is no name of a host; letters, digits, - and . make one")
    if step.hosts and len(step.hosts) != step.nodes:
        raise UsageError(
            f"{step.nodes} nodes are wanted and {len(step.hosts)} are named ({', '.join(step.hosts)}); "
            "name as many"
        )
    return step.hosts


def gather(states: Iterable[JobState]) -> JobState:
    """One state for the tasks of an array: it runs while one runs, and has failed when one has."""
    every = list(states)
    if len(every) == 1:
        return every[0]
    worst = min(every, key=lambda one: _IN_ORDER.index(one.state))
    counts = Counter(one.said for one in every)
    said = ", ".join(f"{word} x{num}" for word, num in counts.items())
    nodes = ",".join(
        dict.fromkeys(one.nodes for one in every if one.nodes and one.state == worst.state)
    )
    return JobState(worst.state, said, nodes, worst.exit_code, worst.reason)
