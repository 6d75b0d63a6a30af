"""Autocast: products in 2 bytes on tensor cores, sums and weights in float32.

bf16 where the device has it, a CPU too; fp16, with a scaled loss, on GPUs before Ampere, which do not.
"""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    bf16_rate,
    elementwise_s,
    has_bf16,
    layout_of,
    on_cuda,
    products_s,
)

RATE = {"fp32": 8.0, "tf32": 2.0}
"""How much faster products are on a GPU, by what they were in."""
LEAST_RATE = 1.3
"""From which a CPU is taken to multiply bf16 faster: its measured products differ by less by chance."""


def _bf16_applies(step: Step, config: RunConfig) -> str | None:
    precision = layout_of(config).precision
    if precision not in RATE or (config.model.dtype == "float64"):
        return None
    if on_cuda(step):
        return f"products are in {precision}" if has_bf16(step) else None
    rate = bf16_rate(step)
    if rate < LEAST_RATE:
        return None
    return f"products are in {precision}, and this CPU does them {rate:.1f} times as fast in bf16"


def _fp16_applies(step: Step, config: RunConfig) -> str | None:
    precision = layout_of(config).precision
    if not on_cuda(step) or precision not in RATE or config.model.dtype == "float16":
        return None
    if has_bf16(step):
        return None  # the same speed with more range, and no loss to scale
    return f"products are in {precision}, and the device has tensor cores for fp16, not for bf16"


def _gain(step: Step, config: RunConfig) -> float:
    rate = RATE.get(layout_of(config).precision, 1.0) if on_cuda(step) else bf16_rate(step)
    return amdahl(step, products_s(step) * (1 - 1 / rate) + 0.25 * elementwise_s(step))


BF16 = Remedy(
    name="bf16",
    line="with torch.autocast(device, dtype=torch.bfloat16): around the forward pass",
    applies=_bf16_applies,
    predicted_gain=_gain,
    change=lambda config: ["layout.precision=bf16"],
    risk="rounding",
)
FP16 = Remedy(
    name="fp16",
    applies=_fp16_applies,
    predicted_gain=_gain,
    change=lambda config: ["layout.precision=fp16"],
    risk="rounding",
)
