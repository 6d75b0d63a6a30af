"""Autocast to fp16 with a scaled loss, where the device has no bf16 (before Ampere)."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.bf16 import RATE
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    elementwise_s,
    has_bf16,
    layout_of,
    on_cuda,
    products_s,
)


def _applies(step: Step, config: RunConfig) -> str | None:
    layout = layout_of(config)
    if not on_cuda(step) or layout.precision not in RATE or config.model.dtype == "float16":
        return None
    if has_bf16(step):
        return None  # the same speed with more range, and no loss to scale
    return f"products are in {layout.precision}, and the device has tensor cores for fp16, not for bf16"


def _gain(step: Step, config: RunConfig) -> float:
    rate = RATE.get(layout_of(config).precision, 1.0)
    return amdahl(step, products_s(step) * (1 - 1 / rate) + 0.25 * elementwise_s(step))


REMEDY = Remedy(
    name="fp16",
    applies=_applies,
    predicted_gain=_gain,
    change=lambda config: ["layout.precision=fp16"],
    risk="rounding",
)
