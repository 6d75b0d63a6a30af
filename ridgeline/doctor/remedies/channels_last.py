"""Channels last in memory, the order in which tensor cores convolve."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import MANY_CONVOLUTIONS, look_at
from ridgeline.doctor.remedies.contract import (
    CONVOLUTION,
    Remedy,
    Step,
    amdahl,
    layout_of,
    on_cuda,
    products_s,
    seconds,
)


def _applies(step: Step, config: RunConfig) -> str | None:
    look = look_at(config)
    if not on_cuda(step) or config.model.channels_last or look.num_other_conv:
        return None
    if look.num_conv2d < MANY_CONVOLUTIONS or layout_of(config).precision not in (
        "bf16",
        "fp16",
        "fp8",
    ):
        return None  # a patch embedding alone gains nothing, nor does float32
    return f"{look.num_conv2d} convolutions read their channels from far apart"


REMEDY = Remedy(
    name="channels last",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(
        step, 0.5 * (seconds(step, CONVOLUTION) or products_s(step))
    ),
    change=lambda config: ["model.channels_last=true"],
    risk="order",
)
