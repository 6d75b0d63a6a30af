"""bf16 weights rounded by chance in place of float32 masters: fewer bytes in the update."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import OPTIMIZER, Remedy, Step, amdahl, on_cuda, seconds


def _applies(step: Step, config: RunConfig) -> str | None:
    if on_cuda(step) and config.tune.weights == "bf16":
        return "the update reads and writes a float32 copy of every bf16 weight"
    return None


REMEDY = Remedy(
    name="stochastic rounding",
    applies=_applies,
    # 22 bytes a parameter rather than 28.
    predicted_gain=lambda step, config: amdahl(step, 6 / 28 * seconds(step, OPTIMIZER)),
    change=lambda config: ["tune.weights=stochastic"],
    risk="rounding",
)
