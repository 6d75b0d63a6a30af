"""Loader processes, for preparing that holds Python's lock."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import STREAMS
from ridgeline.doctor.remedies.contract import Remedy, Step, amdahl
from ridgeline.doctor.remedies.reading_ahead import LEAST_WAIT, wanted_prefetch, wanted_readers


def _applies(step: Step, config: RunConfig) -> str | None:
    if step.data_s < LEAST_WAIT * step.step_s or config.data.workers >= wanted_readers(config):
        return None
    why = f"{step.data_s / step.step_s:.0%} of the step waits for data"
    if config.data.args.get(STREAMS):
        why += (
            "; its data set only iterates, so that each process would give all samples once more unless "
            "__iter__ takes its share by torch.utils.data.get_worker_info()"
        )
    return why


REMEDY = Remedy(
    name="loader processes",
    line="DataLoader(..., num_workers=N, persistent_workers=True, pin_memory=True)",
    applies=_applies,
    # Less than threads: batches have to come over from another process.
    predicted_gain=lambda step, config: amdahl(step, 0.8 * step.data_s),
    change=lambda config: [
        f"data.workers={wanted_readers(config)}",
        f"data.prefetch={wanted_prefetch(config)}",
    ],
    risk="none",
    feeds=True,
)
