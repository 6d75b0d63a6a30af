"""Gradient buckets of another size: larger ones where replicas wait for their latency, smaller ones where
the first is sent too late to be hidden."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.model_look import look_at
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    exchange_s,
    layout_of,
    waits_for_ranks,
)

FACTOR = 4.0
"""Between a size that is tried and the one before it."""
SHARE_LARGER, SHARE_SMALLER = 0.3, 0.1
"""Of the communication that nothing hides."""
LEAST_MB = 1.0
"""Of the first bucket, which torch's reducer has whatever it is told, and its compiler insists on."""
SHARE_TINY, TINY_MB = 0.6, 4.0
"""Of it where buckets are smaller than this, so that sending one is mostly latency."""
_GRADIENT_BYTES = 4.0
_BYTES_PER_MB = 2.0**20


def _reduces(step: Step, config: RunConfig) -> str | None:
    layout = layout_of(config)
    if layout.dp == 1 or layout.zero == 3 or layout.sync != "every":  # zero=3 goes block by block
        return None
    return waits_for_ranks(step)


def _of_all_mb(config: RunConfig) -> float | None:
    """All gradients of a rank in one bucket; None where the model is not known."""
    layout = layout_of(config)
    bytes_here = _GRADIENT_BYTES * look_at(config).num_parameters / (layout.tp * layout.pp)
    return bytes_here / _BYTES_PER_MB or None


def _larger(step: Step, config: RunConfig) -> str | None:
    why, size, most = _reduces(step, config), config.ddp.bucket_mb, _of_all_mb(config)
    if why is None or (most is not None and size >= most):
        return None
    return f"{why}, and gradients are reduced in buckets of {size:g} MB"


def _smaller(step: Step, config: RunConfig) -> str | None:
    why, size, most = _reduces(step, config), config.ddp.bucket_mb, _of_all_mb(config)
    layout = layout_of(config)
    if layout.zero == 1 or layout.pp > 1 or layout.ep > 1:
        return None  # these reduce all of it after backward, which there is nothing to hide behind
    if why is None or size / FACTOR < LEAST_MB or (most is not None and size / FACTOR >= most):
        return None
    return (
        f"{why}, and nothing is reduced before the first {min(size, most or size):.3g} MB are there"
    )


def _gain_of_larger(step: Step, config: RunConfig) -> float:
    share = SHARE_TINY if config.ddp.bucket_mb < TINY_MB else SHARE_LARGER
    return amdahl(step, share * exchange_s(step))


REMEDY = Remedy(
    name="gradient buckets",
    line="DistributedDataParallel(..., bucket_cap_mb=100)",
    applies=_larger,
    predicted_gain=_gain_of_larger,
    change=lambda config: [f"ddp.bucket_mb={FACTOR * config.ddp.bucket_mb:g}"],
    risk="order",
    repeats=True,
    of_ranks=True,
    settles="smaller gradient buckets",
)
SMALLER = Remedy(
    name="smaller gradient buckets",
    line="DistributedDataParallel(..., bucket_cap_mb=6)",
    applies=_smaller,
    predicted_gain=lambda step, config: amdahl(step, SHARE_SMALLER * exchange_s(step)),
    change=lambda config: [f"ddp.bucket_mb={config.ddp.bucket_mb / FACTOR:g}"],
    risk="order",
    of_ranks=True,
)
