"""Time of single kernels on a device: matrix products by shape, attention, and what moves bytes.

A product is cut into tiles; the multiprocessors work through them in waves, and a last wave that is not
full takes as long as a full one. That, the inner dimension's prologue, the memory roofline and a fixed
start make the cliffs that a plain FLOP count does not show. Called by `layer.py`.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2
from typing import Final

from ridgeline.plan.machine import Device

TILES: Final = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.94), (128, 64, 0.82), (64, 64, 0.66))
"""Rows, columns, and what each reaches of the best tile's rate: small tiles load more for each product."""
SPLITS: Final = (1, 2, 3, 4, 8)
"""Into how many pieces the inner dimension may be cut when there are few tiles."""
LEAST_SPLIT: Final = 512


RAMP: Final = 700.0
"""Keys at which a fused attention kernel reaches half of what it does with very many."""
NARROW_HEADS: Final = 0.87
"""What FlashAttention 2 keeps of its rate with heads of 64 instead of 128, as its paper's figures show."""
PLAIN_ATTENTION: Final = 0.53
"""What fused attention in float32 reaches of that type's peak, on a device that is not the host: torch's
memory-efficient kernels with 1024 keys on an H200 (0.42 to 0.55, forward and backward)."""
ALIGNED: Final = {8: 1.0, 4: 0.75, 2: 0.5, 1: 0.3}
"""What a 16-bit product reaches of its rate when its rows begin at multiples of so many elements: below 8
(16 bytes) they can be loaded only in smaller pieces, and below 2 not at all by the asynchronous copies."""


def alignment(size: float, *widths: int) -> float:
    """The share of a product's rate that is left where its matrices' rows have these widths."""
    share = 1.0
    for width in widths:
        for pieces, left in ALIGNED.items():
            if width * size % (2.0 * pieces) == 0:
                share = min(share, left)
                break
    return share


def element_bytes(precision: str) -> float:
    return {"fp8": 1.0, "fp16": 2.0, "bf16": 2.0}.get(precision, 4.0)


@lru_cache(maxsize=65536)
def gemm_s(
    device: Device, m: int, n: int, k: int, batch: int = 1, precision: str = "bf16",
    by_tokens: bool = False,
) -> float:  # fmt: skip
    """Seconds of `batch` products of (m, k) and (k, n); `by_tokens`: of a weight's gradient, where `k`
    counts tokens and no matrix has rows as wide as that."""
    peak = device.peak_flops.get(precision) or device.peak_flops["fp32"]
    rate = peak * device.sustained_clock * device.gemm_efficiency / device.num_sms
    rate *= alignment(element_bytes(precision), n, m if by_tokens else k)
    best = float("inf")
    for rows, columns, share in TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        for splits in SPLITS:
            if splits > 1 and (k < splits * LEAST_SPLIT or tiles > 4 * device.num_sms):
                break
            waves = ceil(tiles * splits / device.num_sms)
            depth = k / splits + device.tile_overhead
            seconds = waves * 2.0 * rows * columns * depth / (rate * share)
            if splits > 1:
                # The pieces are added up in a pass of their own, in float32.
                added = 4.0 * batch * m * n * (splits + 1)
                seconds += added / (device.memory_bandwidth * device.memory_efficiency)
            best = min(best, seconds)
    moved = element_bytes(precision) * batch * (float(m) * k + float(k) * n + float(m) * n)
    return max(best, moved_s(device, moved) - device.kernel_s) + device.kernel_s


def moved_s(device: Device, num_bytes: float, kernels: int = 1) -> float:
    """Seconds of kernels that do nothing but move so many bytes."""
    streaming = num_bytes / (device.memory_bandwidth * device.memory_efficiency)
    return streaming + kernels * device.kernel_s


def flash_s(
    device: Device, batch: int, heads: float, seq: int, keys: int, width: int, causal: bool,
    precision: str, backward: bool, narrow: float = NARROW_HEADS,
) -> float:  # fmt: skip
    """Fused attention: forward two products, backward five, of which a causal mask needs half.

    A head narrower than 128 leaves part of the tensor cores' pipeline to the softmax (`narrow` is the
    share that is left at 64), and short rows are soon over.
    """
    if precision == "tf32":
        precision = "fp32"  # that is for products of matrices alone
    peak = device.peak_flops.get(precision) or device.peak_flops["fp32"]
    flops = 4.0 * batch * heads * seq * keys * width * (0.5 if causal else 1.0)
    if precision == "fp32" and not device.is_host:
        share = PLAIN_ATTENTION
    else:
        share = device.flash_efficiency * keys / (keys + RAMP)
        if width < 128:
            share *= narrow ** log2(128.0 / width)
    if backward:
        flops, share = 2.5 * flops, 0.85 * share
    moved = element_bytes(precision) * batch * heads * width * (2 * seq + 2 * keys)
    return max(flops / (peak * share), moved_s(device, moved)) + device.kernel_s
