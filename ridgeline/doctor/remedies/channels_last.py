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
    if config.model.channels_last or look.num_other_conv or look.num_conv2d < MANY_CONVOLUTIONS:
        return None  # a patch embedding alone gains nothing
    if on_cuda(step) and layout_of(config).precision not in ("bf16", "fp16", "fp8"):
        return None  # nor does float32 there
    return f"{look.num_conv2d} convolutions read their channels from far apart"


REMEDY = Remedy(
    name="channels last",
    line="model.to(memory_format=torch.channels_last), and the images too",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(
        step, 0.5 * (seconds(step, CONVOLUTION) or products_s(step))
    ),
    change=lambda config: ["model.channels_last=true"],
    risk="order",
)
