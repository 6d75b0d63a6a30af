"""Linear layers that read the same input as one product."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import look_at
from ridgeline.doctor.remedies.contract import Remedy, Step, amdahl, layout_of, on_cuda, products_s

SHARE_SAVED = 0.005
"""Of the products' time: little, so that others come first. Weights are put together in every step, and on
an H200 a Llama of 1.3B was 3.5 % slower with it (docs/climb.md)."""


def _applies(step: Step, config: RunConfig) -> str | None:
    look, layout = look_at(config), layout_of(config)
    if config.tune.merge or not on_cuda(step) or not look.num_siblings:
        return None
    if layout.tp > 1 or layout.cp > 1 or layout.spatial != (1, 1):
        return None
    return f"{look.num_siblings} linear layers stand beside one that may read the same input"


REMEDY = Remedy(
    name="merged products",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, SHARE_SAVED * products_s(step)),
    change=lambda config: ["tune.merge=true"],
    risk="order",
)
