"""TF32: products of float32 matrices on tensor cores, with ten bits of each factor."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import Remedy, Step, amdahl, layout_of, on_cuda, products_s

RATE = 4.0
"""How much faster products are; the published rates are 7 times apart, but operands take longer to come."""


def _applies(step: Step, config: RunConfig) -> str | None:
    if on_cuda(step) and layout_of(config).precision == "fp32" and config.model.dtype != "float64":
        return "products are in float32, off the tensor cores"
    return None


REMEDY = Remedy(
    name="tf32",
    line='torch.set_float32_matmul_precision("high")',
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, products_s(step) * (1 - 1 / RATE)),
    change=lambda config: ["layout.precision=tf32"],
    risk="rounding",
)
