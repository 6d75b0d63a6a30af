"""What lies on the host brought back to the device, where it fits."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    layout_of,
    room_for,
)

SHARE = {"optimizer": 0.3, "params": 0.5, "activations": 0.3}
"""Of a step, that copies and the host's arithmetic take."""


def _applies(step: Step, config: RunConfig) -> str | None:
    kept, room = layout_of(config).offload, room_for(step)
    if kept == "none" or room is None:
        return None
    return f"offload={kept} fetches from the host in every step{room}"


REMEDY = Remedy(
    name="no offload",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(
        step, SHARE.get(layout_of(config).offload, 0.0) * step.step_s
    ),
    change=lambda config: ["layout.offload=none"],
    risk="order",
)
