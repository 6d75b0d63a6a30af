"""Dimensions that no kernel likes, computed as the next multiple of 64."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import MANY_CONVOLUTIONS, look_at
from ridgeline.doctor.remedies.contract import (
    CONVOLUTION,
    MATRIX,
    Remedy,
    Step,
    amdahl,
    layout_of,
    on_cuda,
    products_s,
    seconds,
)


def _applies(step: Step, config: RunConfig) -> str | None:
    look, layout = look_at(config), layout_of(config)
    if config.tune.pad or not on_cuda(step) or layout.tp > 1 or layout.cp > 1:
        return None
    if not look.num_odd_linears:
        return None
    return f"{look.num_odd_linears} linear layers have a side that is no multiple of 64"


def _predicted(step: Step, config: RunConfig) -> float:
    """A tenth of what such layers take; in a convolutional network that is the last layer, next to
    nothing, where kernels were not told apart."""
    look = look_at(config)
    linear_s = seconds(step, MATRIX)
    if not linear_s and look.num_conv2d < MANY_CONVOLUTIONS and not seconds(step, CONVOLUTION):
        linear_s = products_s(step)
    return amdahl(step, 0.1 * look.odd_share * linear_s)


REMEDY = Remedy(
    name="padding",
    applies=_applies,
    predicted_gain=_predicted,
    change=lambda config: ["tune.pad=64"],
    risk="order",
)
