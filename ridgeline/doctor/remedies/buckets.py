"""Larger gradient buckets where replicas wait for their latency."""

from __future__ import annotations

from ridgeline.doctor.remedies.contract import Remedy, layout_of

REMEDY = Remedy(
    name="gradient buckets",
    applies=lambda step, config: (
        "replicas reduce gradients in buckets"
        if layout_of(config).dp > 1 and layout_of(config).zero < 3  # that one goes block by block
        else None
    ),
    predicted_gain=lambda step, config: 1.01,
    change=lambda config: [f"ddp.bucket_mb={4 * config.ddp.bucket_mb:g}"],
    risk="order",
)
