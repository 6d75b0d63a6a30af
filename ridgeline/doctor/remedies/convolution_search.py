"""The fastest kernel for each shape of convolution, found by timing them before the first step."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import MANY_CONVOLUTIONS, look_at
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


def _spent_s(step: Step, config: RunConfig) -> float:
    """On convolutions. Those that run as matrix products go by their names; in a model of many they are
    what all products are, and in one that cuts an image into patches next to nothing."""
    look = look_at(config)
    many = look.num_conv2d + look.num_other_conv >= MANY_CONVOLUTIONS
    return seconds(step, CONVOLUTION) or (products_s(step) if many else 0.0)


REMEDY = Remedy(
    name="convolution search",
    line="torch.backends.cudnn.benchmark = True",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.15 * _spent_s(step, config)),
    change=lambda config: ["tune.search_convolutions=true"],
    risk="order",
)
