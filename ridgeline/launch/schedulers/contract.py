"""The form that every scheduler's file fills in: functions over `Job` and `Step`, and nothing kept.

A scheduler renders a job to the text of a script, hands the script over, and answers for it later. In the
nodes it was given it starts ranks by a command of its own (`srun`, `jsrun`, `mpiexec`, `flux run`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.launch.job import Job, JobState, Step


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
    """Ask for the job to be started again once it has ended; False where the exit code `REQUEUE_EXIT` does
    that by itself."""
    inside: Callable[[Mapping[str, str]], Allocation | None]
    """The nodes this process has, when it runs in a job of this scheduler."""
    step: Callable[[Step], list[str]]
    """The command line that starts `step.command` once a rank in these nodes."""
