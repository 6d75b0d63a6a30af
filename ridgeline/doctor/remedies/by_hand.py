"""Remedies that a recipe cannot be changed for: said, not done."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import Remedy, Step, amdahl, on_cuda


def _waits_for_host(step: Step, config: RunConfig) -> str | None:
    stalls = getattr(step, "stalls", ())
    return f"the host waits for the device at {stalls[0].where}" if stalls else None


SYNCHRONISATIONS = Remedy(
    name="host synchronisations",
    applies=_waits_for_host,
    predicted_gain=lambda step, config: amdahl(step, getattr(step, "host_s", 0.0)),
    change=lambda config: [],
    risk="none",
    advice="keep losses and metrics on the device and read them every few steps, not with .item()",
)
STAGING = Remedy(
    name="packing and staging",
    applies=lambda step, config: (
        "the step waits for data, and they are not on the node's own disk"
        if step.data_s > 0.1 * step.step_s and not config.data.stage
        else None
    ),
    predicted_gain=lambda step, config: amdahl(step, 0.7 * step.data_s),
    change=lambda config: [],
    risk="none",
    advice="`ridgeline data pack` many small files into few, and set data.stage=auto",
)
SPARSITY = Remedy(
    name="2:4 sparsity",
    applies=lambda step, config: None,
    predicted_gain=lambda step, config: 1.0,
    change=lambda config: [],
    risk="rounding",
    advice="prunes half of the weights, so it is a change of the model: for inference, after training",
)
LARGER_BATCH = Remedy(
    name="larger batch",
    applies=lambda step, config: (
        "more than half of the device's memory is free"
        if on_cuda(step) and _free_share(step) > 0.5
        else None
    ),
    predicted_gain=lambda step, config: amdahl(step, 0.5 * step.launch_s),
    change=lambda config: [],
    risk="none",
    advice="raise train.batch, and train.lr by train.lr_rule: that is another training, so it is yours "
    "to decide",
)


def _free_share(step: Step) -> float:
    memory = getattr(step, "memory", None)
    return 1.0 - memory.fill if memory is not None else 0.0


BY_HAND = (SYNCHRONISATIONS, STAGING, LARGER_BATCH, SPARSITY)
