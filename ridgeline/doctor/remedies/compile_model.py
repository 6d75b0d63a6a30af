"""torch.compile of model and loss: element-wise work fused, fewer launches."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    elementwise_s,
    layout_of,
    on_cuda,
)

SHARE_FUSED = 0.6
"""Of element-wise time that goes when neighbours are fused."""


def _applies(step: Step, config: RunConfig) -> str | None:
    layout = layout_of(config)
    if not on_cuda(step) or layout.compile or layout.tp > 1 or layout.cp > 1:
        return None
    return "every operation is a kernel of its own"


REMEDY = Remedy(
    name="compile",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(
        step, SHARE_FUSED * elementwise_s(step) + step.launch_s
    ),
    change=lambda config: ["layout.compile=true"],
    risk="order",
)
