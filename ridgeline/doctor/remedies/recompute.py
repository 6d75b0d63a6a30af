"""Activations kept instead of computed again, where they fit."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import (
    LEAST_FREE,
    Remedy,
    Step,
    amdahl,
    free_share,
    layout_of,
)


def _applies(step: Step, config: RunConfig) -> str | None:
    recompute, free = layout_of(config).recompute, free_share(step)
    if recompute == "none" or (free is not None and free < LEAST_FREE):
        return None
    room = f", and {free:.0%} of the memory is free" if free is not None else ""
    return f"recompute={recompute} computes activations twice{room}"


REMEDY = Remedy(
    name="no recompute",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(
        step, (0.25 if layout_of(config).recompute == "full" else 0.05) * step.step_s
    ),
    change=lambda config: ["layout.recompute=none"],
    risk="none",
)
