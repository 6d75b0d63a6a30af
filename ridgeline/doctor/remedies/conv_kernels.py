"""Kernels of our own for what the compiler does slowly in a convolutional network."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import look_at
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    elementwise_s,
    layout_of,
    on_cuda,
)


def _applies(step: Step, config: RunConfig) -> str | None:
    layout = layout_of(config)
    if not on_cuda(step) or not layout.compile or config.tune.conv_kernels:
        return None
    if layout.tp > 1 or layout.cp > 1 or layout.spatial != (1, 1):
        return None
    if layout.dp > 1 and config.ddp.sync_batch_norm:  # norms over all ranks have code of their own
        return None
    num = look_at(config).num_conv_kernels
    if not config.model.channels_last or not num:
        return None
    return f"{num} batch norms and max pools move fewer bytes a second than they could"


REMEDY = Remedy(
    name="convolutional kernels",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, 0.15 * elementwise_s(step)),
    change=lambda config: ["tune.conv_kernels=true"],
    risk="order",
)
