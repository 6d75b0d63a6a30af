"""Linear layers of the blocks in fp8, with scales a row; the rest stays in bf16."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import look_at
from ridgeline.doctor.remedies.contract import (
    MATRIX,
    Remedy,
    Step,
    amdahl,
    has_fp8,
    layout_of,
    on_cuda,
    products_s,
    seconds,
)

SHARE_SAVED = 0.44
"""Of the products' time: they run 1.8 times as fast."""
CASTS = 180.0
"""What casts take back, as a share of the products' time, times the layers' side (`Look.block_side`): casts
move the numbers that go in and come out, and products compute the more for each the longer the side. Read
off a Llama of width 2048 on an H200; by it a ViT of width 384 loses, and did."""
USUAL_SIDE = 1024.0
SHARE_SAVED_PLAIN = 0.05
"""Where nothing is compiled, so that every search and cast is a kernel of its own: on an H200 that took
more than the products saved. Compiling comes first."""


def _applies(step: Step, config: RunConfig) -> str | None:
    look = look_at(config)
    if not on_cuda(step) or not has_fp8(step):
        return None
    if layout_of(config).precision == "bf16" and look.num_block_linears:
        return f"{look.num_block_linears} linear layers in {look.num_blocks} blocks are in bf16"
    return None


def _gain(step: Step, config: RunConfig) -> float:
    side = look_at(config).block_side or USUAL_SIDE
    share = SHARE_SAVED - CASTS / side
    share = max(0.0, share if layout_of(config).compile else min(share, SHARE_SAVED_PLAIN))
    return amdahl(step, share * (seconds(step, MATRIX) or products_s(step)))


REMEDY = Remedy(
    name="fp8",
    applies=_applies,
    predicted_gain=_gain,
    change=lambda config: ["layout.precision=fp8"],
    risk="rounding",
)
