"""One scale a tensor for fp8: no search for the largest value of every row and column."""

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


def _applies(step: Step, config: RunConfig) -> str | None:
    if (
        on_cuda(step)
        and layout_of(config).precision == "fp8"
        and config.tune.fp8_scaling != "tensor"
    ):
        return "every row and column of a product has a scale that is searched for"
    return None


REMEDY = Remedy(
    name="fp8 tensor scales",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.15 * elementwise_s(step)),
    change=lambda config: ["tune.fp8_scaling=tensor"],
    risk="rounding",
)
