"""Every remedy by name: `REMEDIES`. A new one is a file with a `REMEDY` and a line here."""

from __future__ import annotations

from ridgeline.doctor.remedies import (
    accumulation,
    attention,
    autocast,
    autotune,
    buckets,
    channels_last,
    chunked_loss,
    compile_model,
    compress,
    conv_kernels,
    convolution_search,
    device_augment,
    fp8,
    fp8_tensor,
    fused_norms,
    fused_optimizer,
    graphs,
    merge,
    offload,
    padding,
    reading_ahead,
    recompute,
    residual,
    sharding,
    stochastic,
    tf32,
    tiles,
    weights,
    workers,
)
from ridgeline.doctor.remedies.by_hand import BY_HAND, BY_HAND_IN_SCRIPTS
from ridgeline.doctor.remedies.contract import Remedy

REMEDIES: dict[str, Remedy] = {
    remedy.name: remedy
    for remedy in (
        tf32.REMEDY,
        autocast.BF16,
        autocast.FP16,
        fp8.REMEDY,
        fp8_tensor.REMEDY,
        fused_optimizer.REMEDY,
        compile_model.REMEDY,
        compile_model.WHOLE,
        fused_norms.REMEDY,
        autotune.REMEDY,
        tiles.REMEDY,
        graphs.REMEDY,
        channels_last.REMEDY,
        convolution_search.REMEDY,
        conv_kernels.REMEDY,
        attention.REMEDY,
        chunked_loss.REMEDY,
        residual.REMEDY,
        weights.REMEDY,
        stochastic.REMEDY,
        padding.REMEDY,
        merge.REMEDY,
        accumulation.REMEDY,
        recompute.REMEDY,
        reading_ahead.REMEDY,
        workers.REMEDY,
        device_augment.REMEDY,
        offload.REMEDY,
        buckets.REMEDY,
        buckets.SMALLER,
        compress.REMEDY,
        sharding.REMEDY,
        *BY_HAND,
    )
}

SCRIPT_REMEDIES: dict[str, Remedy] = {
    remedy.name: remedy
    for remedy in (
        tf32.REMEDY,
        autocast.BF16,
        fp8.REMEDY,
        fp8_tensor.REMEDY,
        fused_optimizer.REMEDY,
        compile_model.REMEDY,
        compile_model.WHOLE,
        fused_norms.REMEDY,
        autotune.REMEDY,
        tiles.REMEDY,
        channels_last.REMEDY,
        convolution_search.REMEDY,
        conv_kernels.REMEDY,
        attention.REMEDY,
        residual.REMEDY,
        padding.REMEDY,
        recompute.REMEDY,
        workers.REMEDY,
        buckets.REMEDY,
        buckets.SMALLER,
        compress.REMEDY,
        *BY_HAND_IN_SCRIPTS,
    )
}
"""Those that can be put on a script of the user's own from outside, and advice."""
