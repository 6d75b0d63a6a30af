"""CUDA graphs: a step launched as one, for steps of many short kernels."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import Remedy, Step, amdahl, layout_of, on_cuda

SHARE_GAPS = 0.02
"""Of a compiled step's time on the device, between one kernel and the next: a guess, for the order of
trying. What was measured before it was compiled says little of it: then kernels were long."""


def _applies(step: Step, config: RunConfig) -> str | None:
    layout = layout_of(config)
    if on_cuda(step) and layout.compile and not layout.graphs and layout.accumulate == 1:
        return "each kernel of the compiled step is launched by the host"
    return None


REMEDY = Remedy(
    name="CUDA graphs",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(
        step, max(0.9 * step.launch_s, SHARE_GAPS * (step.step_s - step.data_s))
    ),
    change=lambda config: ["layout.graphs=true"],
    risk="none",
)
