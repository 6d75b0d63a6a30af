"""bf16 weights with float32 masters: no casts of weights and gradients in the step."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import (
    OPTIMIZER,
    Remedy,
    Step,
    amdahl,
    is_narrow,
    layout_of,
    on_cuda,
    seconds,
)


def _applies(step: Step, config: RunConfig) -> str | None:
    layout = layout_of(config)
    if not on_cuda(step) or not is_narrow(config) or config.tune.weights != "wide":
        return None
    if config.optim.name != "adamw" or layout.world_size > 1 or layout.accumulate > 1:
        return None
    return "weights are cast to bf16 and their gradients back in every step"


REMEDY = Remedy(
    name="bf16 weights",
    applies=_applies,
    # The casts move 12 bytes a parameter, the update 28.
    predicted_gain=lambda step, config: amdahl(step, 12 / 28 * seconds(step, OPTIMIZER)),
    change=lambda config: ["tune.weights=bf16"],
    risk="order",
)
