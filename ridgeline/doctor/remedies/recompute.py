"""Activations kept instead of computed again, where they fit."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    layout_of,
    room_for,
)


def _applies(step: Step, config: RunConfig) -> str | None:
    recompute, room = layout_of(config).recompute, room_for(step)
    if recompute == "none" or room is None:
        return None
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
