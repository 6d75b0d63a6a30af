"""One kernel for the whole optimizer step instead of several a tensor."""

from __future__ import annotations

from ridgeline.doctor.remedies.contract import OPTIMIZER, Remedy, amdahl, seconds

REMEDY = Remedy(
    name="fused optimizer",
    line="AdamW(..., fused=True)",
    applies=lambda step, config: (
        None if config.tune.fused_optimizer else "the optimizer goes over the weights several times"
    ),
    predicted_gain=lambda step, config: amdahl(step, 0.6 * seconds(step, OPTIMIZER)),
    change=lambda config: ["tune.fused_optimizer=true"],
    risk="order",
)
