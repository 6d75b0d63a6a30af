"""Output layer and cross-entropy together, some tokens at a time: memory before speed."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import look_at
from ridgeline.doctor.remedies.contract import (
    LOSS,
    Remedy,
    Step,
    amdahl,
    layout_of,
    on_cuda,
    seconds,
)

LARGE = 16_384


def _applies(step: Step, config: RunConfig) -> str | None:
    layout = layout_of(config)
    if config.tune.loss != "full" or not on_cuda(step) or layout.pp > 1 or layout.zero == 3:
        return None
    outputs = look_at(config).num_outputs
    if outputs < LARGE or config.train.task not in ("auto", "causal_lm", "masked_lm"):
        return None
    return f"logits of {outputs:,} classes are written, read and kept in full"


REMEDY = Remedy(
    name="chunked loss",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.2 * seconds(step, LOSS)),
    change=lambda config: ["tune.loss=chunked"],
    risk="order",
)
