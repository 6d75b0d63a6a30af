"""Activations kept instead of computed again, where they fit."""

from __future__ import annotations

from ridgeline.doctor.remedies.contract import Remedy, amdahl, layout_of

REMEDY = Remedy(
    name="no recompute",
    applies=lambda step, config: (
        None
        if layout_of(config).recompute == "none"
        else f"recompute={layout_of(config).recompute} computes activations twice"
    ),
    predicted_gain=lambda step, config: amdahl(
        step, (0.25 if layout_of(config).recompute == "full" else 0.05) * step.step_s
    ),
    change=lambda config: ["layout.recompute=none"],
    risk="none",
)
