"""Gradients sent in bf16: half the bytes, where replicas wait for them."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    exchange_s,
    layout_of,
    waits_for_ranks,
)
from ridgeline.layout import check_layout

SHARE = 0.4
"""Of the communication that nothing hides: half of its bytes, and none of its latency."""


def _applies(step: Step, config: RunConfig) -> str | None:
    layout = layout_of(config)
    why = waits_for_ranks(step)
    if layout.dp == 1 or layout.compress != "none" or why is None:
        return None
    if config.model.dtype != "float32" or check_layout(layout.replace(compress="bf16")):
        return None
    return f"{why}, and gradients are sent in float32"


REMEDY = Remedy(
    name="gradients in bf16",
    line="model.register_comm_hook(None, torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    ".bf16_compress_hook)",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, SHARE * exchange_s(step)),
    change=lambda config: ["layout.compress=bf16"],
    risk="rounding",
    of_ranks=True,
)
