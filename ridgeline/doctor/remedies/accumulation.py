"""Fewer, larger microbatches into memory that is free; the batch stays what it is."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import Remedy, Step, amdahl, layout_of


def _applies(step: Step, config: RunConfig) -> str | None:
    layout = layout_of(config)
    if layout.accumulate > 1 and layout.accumulate % 2 == 0 and layout.pp == 1:
        return f"a batch goes through in {layout.accumulate} parts"
    return None


REMEDY = Remedy(
    name="less accumulation",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.05 * step.step_s + 0.5 * step.launch_s),
    change=lambda config: [f"layout.accumulate={layout_of(config).accumulate // 2}"],
    risk="order",
    repeats=True,
)
