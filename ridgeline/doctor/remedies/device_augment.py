"""Decoding and augmentation on the device, from half the bytes."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import Remedy, Step, amdahl, on_cuda


def _applies(step: Step, config: RunConfig) -> str | None:
    if on_cuda(step) and config.data.augment.where == "host":
        return "samples are decoded and changed on the CPU"
    return None


REMEDY = Remedy(
    name="augment on the device",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.5 * step.data_s),
    change=lambda config: ["data.augment.where=device"],
    risk="none",
    feeds=True,
)
