"""Threads that read and prepare the next batches while the step runs."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import Remedy, Step, amdahl, layout_of

LEAST_WAIT = 0.02
"""Share of the step spent waiting for data below which nobody would notice."""
MOST, ENOUGH = 16, 4
LEAST_CORES = 4
"""Of a rank, where a layout has more ranks than one machine."""


def wanted_readers(config: RunConfig) -> int:
    """Of each rank: those of one machine share its cores, of which each has some."""
    import psutil

    cores = psutil.cpu_count() or 1
    here = min(layout_of(config).world_size, max(1, cores // LEAST_CORES))
    return max(2, min(MOST, cores // here - 1))


def wanted_prefetch(config: RunConfig) -> int:
    """Batches ahead of each reader: with many of them, what they have in hand is far enough ahead, and
    every further batch is memory of the host."""
    return max(config.data.prefetch, 1 if wanted_readers(config) >= ENOUGH else 2)


def _applies(step: Step, config: RunConfig) -> str | None:
    if step.data_s < LEAST_WAIT * step.step_s or config.data.workers:
        return None
    if config.data.threads >= wanted_readers(config) and config.data.prefetch >= wanted_prefetch(
        config
    ):
        return None
    return f"{step.data_s / step.step_s:.0%} of the step waits for data"


REMEDY = Remedy(
    name="reading threads",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.9 * step.data_s),
    change=lambda config: [
        f"data.threads={wanted_readers(config)}",
        f"data.prefetch={wanted_prefetch(config)}",
    ],
    risk="none",
    feeds=True,
)
