"""Threads that read and prepare the next batches while the step runs."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import Remedy, Step, amdahl

LEAST_WAIT = 0.02
"""Share of the step spent waiting for data below which nobody would notice."""
MOST = 16


def wanted_readers(config: RunConfig) -> int:
    import psutil

    cores = psutil.cpu_count() or 1
    return max(2, min(MOST, cores - 1))


def _applies(step: Step, config: RunConfig) -> str | None:
    if step.data_s < LEAST_WAIT * step.step_s or config.data.workers:
        return None
    if config.data.threads >= wanted_readers(config) and config.data.prefetch >= 2:
        return None
    return f"{step.data_s / step.step_s:.0%} of the step waits for data"


REMEDY = Remedy(
    name="reading threads",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.9 * step.data_s),
    change=lambda config: [
        f"data.threads={wanted_readers(config)}",
        f"data.prefetch={max(config.data.prefetch, 2)}",
    ],
    risk="none",
    feeds=True,
)
