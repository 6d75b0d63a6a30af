"""The schedulers that there are, and which of them is here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from ridgeline.errors import UsageError, unknown_word
from ridgeline.launch.schedulers.contract import Scheduler
from ridgeline.launch.schedulers.flux import FLUX
from ridgeline.launch.schedulers.lsf import LSF
from ridgeline.launch.schedulers.pbs import PBS
from ridgeline.launch.schedulers.slurm import SLURM

SCHEDULERS: dict[str, Scheduler] = {one.name: one for one in (SLURM, LSF, PBS, FLUX)}

LOCAL = "local"
"""What `detect_scheduler` answers where there is no scheduler."""

Which = Callable[[str], str | None]


def detect_scheduler(environ: Mapping[str, str], which: Which = shutil.which) -> str:
    """The scheduler that this process runs in a job of, else one that takes jobs here, else `local`.

    In a job the innermost counts, which is the last of the table: Flux is run inside of jobs of the others.
    """
    for name in reversed(SCHEDULERS):
        if SCHEDULERS[name].inside(environ) is not None:
            return name
    for name, scheduler in SCHEDULERS.items():
        if which(scheduler.programs[0]):
            return name
    return LOCAL


def find_scheduler(name: str, place: str = "--scheduler") -> Scheduler:
    if name not in SCHEDULERS:
        raise unknown_word("scheduler", name, SCHEDULERS, place)
    return SCHEDULERS[name]


def require_installed(scheduler: Scheduler, which: Which = shutil.which) -> None:
    """Raises with the program that is missing, and with what there is instead."""
    missing = [program for program in scheduler.programs if not which(program)]
    if not missing:
        return
    here = [name for name, one in SCHEDULERS.items() if which(one.programs[0])]
    instead = f"here is {', '.join(here)}" if here else "here is no scheduler: use local"
    raise UsageError(
        f"{scheduler.name} needs {missing[0]}, which is not installed or not on PATH; {instead}"
    )
