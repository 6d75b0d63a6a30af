"""The fastest kernel for each shape of convolution, found by timing them before the first step."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import look_at
from ridgeline.doctor.remedies.contract import (
    CONVOLUTION,
    Remedy,
    Step,
    amdahl,
    on_cuda,
    products_s,
    seconds,
)


def _applies(step: Step, config: RunConfig) -> str | None:
    look = look_at(config)
    if not on_cuda(step) or config.tune.search_convolutions or config.train.deterministic:
        return None
    count = look.num_conv2d + look.num_other_conv
    return f"kernels of {count} convolutions were chosen without being timed" if count else None


REMEDY = Remedy(
    name="convolution search",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(
        step, 0.15 * (seconds(step, CONVOLUTION) or products_s(step))
    ),
    change=lambda config: ["tune.search_convolutions=true"],
    risk="order",
)
