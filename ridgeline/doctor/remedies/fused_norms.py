"""RMS norms and rotary positions as one kernel each, in a model that is not compiled."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import look_at
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    elementwise_s,
    layout_of,
    on_cuda,
)


def _applies(step: Step, config: RunConfig) -> str | None:
    layout = layout_of(config)
    if not on_cuda(step) or layout.compile or config.tune.norms != "own":
        return None
    if layout.tp > 1 or layout.cp > 1 or not look_at(config).num_norms:
        return None
    return f"{look_at(config).num_norms} norms are several kernels each"


REMEDY = Remedy(
    name="fused norms and rotary",
    applies=_applies,
    # Less than compiling everything, so that is tried first.
    predicted_gain=lambda step, config: amdahl(step, 0.3 * elementwise_s(step)),
    change=lambda config: ["tune.norms=fused"],
    risk="order",
)
