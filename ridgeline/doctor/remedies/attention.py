"""cuDNN's attention before flash attention, which on Hopper is older."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import MANY_CONVOLUTIONS, look_at
from ridgeline.doctor.remedies.contract import (
    ATTENTION,
    ELEMENTWISE,
    MATRIX,
    Remedy,
    Step,
    amdahl,
    is_narrow,
    on_cuda,
    products_s,
    seconds,
)

SHARE_SAVED = 0.25


def _applies(step: Step, config: RunConfig) -> str | None:
    if not on_cuda(step) or not is_narrow(config) or config.tune.attention != "auto":
        return None
    # Without a look at its kernels, a model of blocks without convolutions is taken to have attention.
    is_known = seconds(step, MATRIX, ELEMENTWISE) > 0
    look = look_at(config)
    if seconds(step, ATTENTION) or (
        not is_known and look.num_blocks and look.num_conv2d < MANY_CONVOLUTIONS
    ):
        return "attention runs on the back end that torch takes by itself"
    return None


REMEDY = Remedy(
    name="cuDNN attention",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(
        step, SHARE_SAVED * (seconds(step, ATTENTION) or 0.15 * products_s(step))
    ),
    change=lambda config: ["tune.attention=cudnn"],
    risk="order",
)
