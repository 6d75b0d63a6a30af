"""Autocast to bf16: products in 2 bytes on tensor cores, sums and weights in float32."""

from __future__ import annotations

from ridgeline.config import RunConfig
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

RATE = {"fp32": 8.0, "tf32": 2.0}
"""How much faster products are, by what they were in."""


def _applies(step: Step, config: RunConfig) -> str | None:
    if on_cuda(step) and has_bf16(step) and layout_of(config).precision in RATE:
        return f"products are in {layout_of(config).precision}"
    return None


def _gain(step: Step, config: RunConfig) -> float:
    rate = RATE.get(layout_of(config).precision, 1.0)
    return amdahl(step, products_s(step) * (1 - 1 / rate) + 0.25 * elementwise_s(step))


REMEDY = Remedy(
    name="bf16",
    applies=_applies,
    predicted_gain=_gain,
    change=lambda config: ["layout.precision=bf16"],
    risk="rounding",
)
