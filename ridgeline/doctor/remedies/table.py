"""Every remedy by name: `REMEDIES`. A new one is a file with a `REMEDY` and a line here."""

from __future__ import annotations

from ridgeline.doctor.remedies import (
    accumulation,
    attention,
    autotune,
    bf16,
    buckets,
    channels_last,
    chunked_loss,
    compile_model,
    device_augment,
    fp8,
    fused_optimizer,
    graphs,
    padding,
    reading_ahead,
    recompute,
    residual,
    tf32,
    weights,
    workers,
)
from ridgeline.doctor.remedies.by_hand import BY_HAND
from ridgeline.doctor.remedies.contract import Remedy

REMEDIES: dict[str, Remedy] = {
    remedy.name: remedy
    for remedy in (
        tf32.REMEDY,
        bf16.REMEDY,
        fp8.REMEDY,
        fused_optimizer.REMEDY,
        compile_model.REMEDY,
        autotune.REMEDY,
        graphs.REMEDY,
        channels_last.REMEDY,
        attention.REMEDY,
        chunked_loss.REMEDY,
        residual.REMEDY,
        weights.REMEDY,
        padding.REMEDY,
        accumulation.REMEDY,
        recompute.REMEDY,
        reading_ahead.REMEDY,
        workers.REMEDY,
        device_augment.REMEDY,
        buckets.REMEDY,
        *BY_HAND,
    )
}

SCRIPT_REMEDIES: dict[str, Remedy] = {
    remedy.name: remedy
    for remedy in (
        tf32.REMEDY,
        bf16.REMEDY,
        fp8.REMEDY,
        fused_optimizer.REMEDY,
        compile_model.REMEDY,
        autotune.REMEDY,
        channels_last.REMEDY,
        attention.REMEDY,
        residual.REMEDY,
        padding.REMEDY,
        recompute.REMEDY,
        workers.REMEDY,
        *BY_HAND,
    )
}
"""Those that can be put on a script of the user's own from outside, and advice."""
