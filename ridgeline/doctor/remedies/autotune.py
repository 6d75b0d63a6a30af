"""Matrix kernels chosen by measuring them while compiling."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import Remedy, Step, amdahl, layout_of, on_cuda, products_s


def _applies(step: Step, config: RunConfig) -> str | None:
    if on_cuda(step) and layout_of(config).compile and config.tune.compile_mode != "autotune":
        return "matrix kernels were chosen without being measured"
    return None


REMEDY = Remedy(
    name="autotune",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.02 * products_s(step)),
    change=lambda config: ["tune.compile_mode=autotune"],
    risk="order",
    slow=True,
)
