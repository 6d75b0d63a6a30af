"""CUDA graphs: a step launched as one, for steps of many short kernels."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import Remedy, Step, amdahl, layout_of, on_cuda


def _applies(step: Step, config: RunConfig) -> str | None:
    layout = layout_of(config)
    if on_cuda(step) and layout.compile and not layout.graphs and layout.accumulate == 1:
        return "each kernel of the compiled step is launched by the host"
    return None


REMEDY = Remedy(
    name="CUDA graphs",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.9 * step.launch_s),
    change=lambda config: ["layout.graphs=true"],
    risk="none",
)
