"""torch.compile of model and loss: element-wise work fused, fewer launches.

A model of many blocks is compiled block by block first: one block's code serves all of them, so that every
further state of the climb starts in a fraction of the time. The whole in one piece, which can fuse across
blocks and lets a graph do without copies between them, is a remedy of its own after that.
"""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import MANY_CONVOLUTIONS, look_at
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    elementwise_s,
    layout_of,
    on_cuda,
)

SHARE_FUSED = 0.6
"""Of element-wise time that goes when neighbours are fused."""
SHARE_BETWEEN = 0.05
"""Of it that lies between one block and the next."""
MANY_BLOCKS = 6


def _applies(step: Step, config: RunConfig) -> str | None:
    layout = layout_of(config)
    if layout.compile or layout.tp > 1 or layout.cp > 1:
        return None
    return "every operation is a kernel of its own" if on_cuda(step) else "no operations are fused"


def _change(config: RunConfig) -> list[str]:
    look = look_at(config)
    # Blocks of a convolutional network have many shapes, and each of them is code of its own.
    alike = look.num_blocks >= MANY_BLOCKS and look.num_conv2d < MANY_CONVOLUTIONS
    regional = alike and config.tune.compile_mode == "default"
    return ["layout.compile=true", *(["tune.compile_mode=regional"] if regional else [])]


REMEDY = Remedy(
    name="compile",
    line="model = torch.compile(model)",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(
        step, SHARE_FUSED * elementwise_s(step) + step.launch_s
    ),
    change=_change,
    risk="order",
)

WHOLE = Remedy(
    name="compile in one piece",
    applies=lambda step, config: (
        "blocks were compiled one by one"
        if layout_of(config).compile and config.tune.compile_mode == "regional"
        else None
    ),
    predicted_gain=lambda step, config: amdahl(
        step, SHARE_BETWEEN * elementwise_s(step) + 0.5 * step.launch_s
    ),
    change=lambda config: ["tune.compile_mode=default"],
    risk="order",
)
