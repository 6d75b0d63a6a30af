"""Dimensions that no kernel likes, computed as the next multiple of 64."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import look_at
from ridgeline.doctor.remedies.contract import Remedy, Step, amdahl, layout_of, on_cuda, products_s


def _applies(step: Step, config: RunConfig) -> str | None:
    look, layout = look_at(config), layout_of(config)
    if config.tune.pad or not on_cuda(step) or layout.tp > 1 or layout.cp > 1:
        return None
    if not look.num_odd_linears:
        return None
    return f"{look.num_odd_linears} linear layers have a side that is no multiple of 64"


REMEDY = Remedy(
    name="padding",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.1 * products_s(step)),
    change=lambda config: ["tune.pad=64"],
    risk="order",
)
