"""Tile sizes of the compiler's fused kernels, measured rather than guessed."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    elementwise_s,
    layout_of,
    on_cuda,
)


def _applies(step: Step, config: RunConfig) -> str | None:
    tune = config.tune
    if not on_cuda(step) or not layout_of(config).compile or tune.search_tiles:
        return None
    if tune.compile_mode == "autotune":  # which searches them too
        return None
    return "the sizes of fused kernels' tiles were guessed by the compiler"


REMEDY = Remedy(
    name="tile search",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.08 * elementwise_s(step)),
    change=lambda config: ["tune.search_tiles=true"],
    risk="order",
    slow=True,
)
