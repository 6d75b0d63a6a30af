"""bf16 between the blocks, which halves what norms and residual sums read and write."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import MANY_CONVOLUTIONS, look_at
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    elementwise_s,
    is_narrow,
    layout_of,
    on_cuda,
)


def _applies(step: Step, config: RunConfig) -> str | None:
    if not on_cuda(step) or not is_narrow(config) or config.tune.residual != "wide":
        return None
    look = look_at(config)
    if not look.num_blocks or look.num_conv2d >= MANY_CONVOLUTIONS or layout_of(config).pp > 1:
        return None
    return f"what goes from block to block ({look.num_blocks} of them) is in float32"


REMEDY = Remedy(
    name="narrow residual",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.3 * elementwise_s(step)),
    change=lambda config: ["tune.residual=bf16"],
    risk="rounding",
)
