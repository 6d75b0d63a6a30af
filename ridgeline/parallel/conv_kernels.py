"""Statistics of channels, and max pooling both ways, as one kernel each over channels-last tensors.

What the compiler makes of them moves a half to a tenth of the bytes a second that a copy does: its
reductions over all but the channels read little at a time, and its gradient of a pooling looks at every
window with 64-bit arithmetic. Here neighbouring threads read neighbouring channels, 16 bytes each, and
positions are 32-bit numbers divided by constants. Called by `conv_ops.py` on CUDA, where torch brings
Triton along.

Shapes: R rows (a sample's every pixel is one), C channels, S splits of the rows; N samples, H and W the
input's height and width, OH and OW the output's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.parallel.operators import on_device_of

MOMENTS_TILE = 4096
"""Values that a program has in registers at a time; `benchmarks/gpu_conv.py` tries others."""
MOMENTS_STAGES = 3
"""Tiles that are read ahead of the one that is added up."""
MOMENTS_WARPS = 4
POOL_TILE = 2048
POOL_COLUMNS = 64
"""Channels of a tile; its positions are as many as there is room for."""
POOL_WARPS = 4

LAST = torch.channels_last


@triton.jit  # type: ignore[misc,unused-ignore]
def _moments(
    values, parts, num_rows, num_channels, rows_each,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    split = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    r = tl.arange(0, BLOCK_R)
    there = c < num_channels
    begin = split.to(tl.int64) * rows_each
    num_here = tl.minimum(num_rows - begin, rows_each).to(tl.int32)
    start = values + begin * num_channels
    places = start + r[:, None] * num_channels + c[None, :]
    inside = (r < num_here)[:, None] & there[None, :]
    tile = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    origin = tl.sum(tile, 0) / tl.minimum(num_here, BLOCK_R)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for done in tl.range(0, num_here, BLOCK_R, num_stages=STAGES):
        inside = (done + r < num_here)[:, None] & there[None, :]
        tile = tl.load(places, mask=inside, other=0.0).to(tl.float32)
        gap = tl.where(inside, tile - origin[None, :], 0.0)
        total += gap
        squares += gap * gap
        places += BLOCK_R * num_channels
    shift = tl.sum(total, 0) / num_here
    spread = tl.sum(squares, 0) - shift * shift * num_here
    out, step = parts + split * num_channels + c, tl.num_programs(0) * num_channels
    tl.store(out, origin, mask=there)
    tl.store(out + step, shift, mask=there)
    tl.store(out + 2 * step, spread, mask=there)


def moments(x_NCHW: Tensor, rows_each: int, num_splits: int, columns: int) -> Tensor:
    """(3, S, C) in float32, of each split of the rows: the mean of its first tile, how far from there its
    own mean is, and its sum of squared distances from that. Sums are of distances from the first tile's
    mean, so that nothing cancels where the mean is large; one row would do, if none lay far out."""
    x_NCHW = x_NCHW.contiguous(memory_format=LAST)
    num_channels = x_NCHW.shape[1]
    parts = x_NCHW.new_empty((3, num_splits, num_channels), dtype=torch.float32)
    block_c = min(columns, triton.next_power_of_2(num_channels))
    grid = (num_splits, triton.cdiv(num_channels, block_c))
    with on_device_of(x_NCHW):
        _moments[grid](
            x_NCHW, parts, x_NCHW.numel() // num_channels, num_channels, rows_each,
            BLOCK_R=MOMENTS_TILE // block_c, BLOCK_C=block_c, STAGES=MOMENTS_STAGES,
            num_warps=MOMENTS_WARPS,
        )  # fmt: skip
    return parts


@triton.jit  # type: ignore[misc,unused-ignore]
def _pool(
    values, out, offsets, num_positions, num_channels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    block = tl.program_id(0)
    if WIDE:
        block = block.to(tl.int64)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = (p < num_positions)[:, None] & (c < num_channels)[None, :]
    top = (p // OW) % OH * SH - PH
    left = p % OW * SW - PW
    row = p // (OW * OH) * H
    best = tl.full((BLOCK_P, BLOCK_C), float("-inf"), tl.float32)
    # Where there is nothing above -inf, torch names the first value that is no padding.
    inner = tl.maximum(-top, 0) * KW + tl.maximum(-left, 0)
    at = tl.zeros((BLOCK_P, BLOCK_C), tl.int32) + inner.to(tl.int32)[:, None]
    for kh in tl.static_range(KH):
        for kw in tl.static_range(KW):
            h, w = top + kh, left + kw
            inside = ((h >= 0) & (h < H) & (w >= 0) & (w < W))[:, None] & real
            place = ((row + h) * W + w) * num_channels
            value = tl.load(
                values + place[:, None] + c[None, :], mask=inside, other=float("-inf")
            ).to(tl.float32)
            better = (value > best) | (value != value)
            best = tl.where(better, value, best)
            at = tl.where(better, kh * KW + kw, at)
    place = (p * num_channels)[:, None] + c[None, :]
    tl.store(out + place, best.to(out.dtype.element_ty), mask=real)
    tl.store(offsets + place, at.to(tl.uint8), mask=real)


@triton.jit  # type: ignore[misc,unused-ignore]
def _pool_backward(
    grad, offsets, grad_values, num_positions, num_channels,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    block = tl.program_id(0)
    if WIDE:
        block = block.to(tl.int64)
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = (p < num_positions)[:, None] & (c < num_channels)[None, :]
    # A position is a block of as many values as the windows move on by: the windows that the first value of
    # every block is in are at the same distance, so that what an offset is compared with is a constant.
    ROWS: tl.constexpr = (H - 1 + PH) // SH - PH // SH + 1
    COLUMNS: tl.constexpr = (W - 1 + PW) // SW - PW // SW + 1
    h, w = (p // COLUMNS) % ROWS + PH // SH, p % COLUMNS + PW // SW
    n = p // (COLUMNS * ROWS)
    for a in tl.static_range(SH):
        for b in tl.static_range(SW):
            total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
            # From the last of its rows back, that is from the first window on, as torch adds them up.
            for i in tl.static_range((KH - a + SH - 1) // SH):
                for j in tl.static_range((KW - b + SW - 1) // SW):
                    kh = a + ((KH - a + SH - 1) // SH - 1 - i) * SH
                    kw = b + ((KW - b + SW - 1) // SW - 1 - j) * SW
                    oh, ow = h - kh // SH, w - kw // SW
                    inside = ((oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW))[:, None] & real
                    place = (((n * OH + oh) * OW + ow) * num_channels)[:, None] + c[None, :]
                    at = tl.load(offsets + place, mask=inside, other=255).to(tl.int32)
                    value = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
                    total += tl.where(at == kh * KW + kw, value, 0.0)
            ih, iw = h * SH + (a - PH), w * SW + (b - PW)
            inside = ((ih >= 0) & (ih < H) & (iw >= 0) & (iw < W))[:, None] & real
            place = (((n * H + ih) * W + iw) * num_channels)[:, None] + c[None, :]
            tl.store(grad_values + place, total.to(grad_values.dtype.element_ty), mask=inside)


def max_pool(
    x_NCHW: Tensor,
    size: tuple[int, int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The maxima, `size` of them in height and width, and where in its window each was, row by row."""
    x_NCHW = x_NCHW.contiguous(memory_format=LAST)
    num, channels, height, width = x_NCHW.shape
    out = _empty((num, channels, *size), x_NCHW)
    offsets = torch.empty_like(out, dtype=torch.uint8)
    sizes = (height, width, *size, *kernel, *stride, *padding)
    _start(_pool, x_NCHW, (x_NCHW, out, offsets), num * size[0] * size[1], sizes)
    return out, offsets


def max_pool_backward(
    grad: Tensor,
    offsets: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """The input's gradient, `size` in height and width. Each value of it looks into the windows that it is
    in, so that no two threads add to one place."""
    grad, offsets = grad.contiguous(memory_format=LAST), offsets.contiguous(memory_format=LAST)
    num, channels, *outputs = grad.shape
    made = _empty((num, channels, *size), grad)
    sizes = (*size, *outputs, *kernel, *stride, *padding)
    blocks = [(size[i] - 1 + padding[i]) // stride[i] - padding[i] // stride[i] + 1 for i in (0, 1)]
    _start(_pool_backward, made, (grad, offsets, made), num * blocks[0] * blocks[1], sizes)
    return made


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=LAST)


def _start(
    kernel: triton.JITFunction,
    largest: Tensor,
    tensors: tuple[Tensor, ...],
    num_positions: int,
    sizes: tuple[int, ...],
) -> None:
    num_channels = largest.shape[1]
    block_c = min(POOL_COLUMNS, triton.next_power_of_2(num_channels))
    block_p = POOL_TILE // block_c
    grid = (triton.cdiv(num_positions, block_p), triton.cdiv(num_channels, block_c))
    wide = largest.numel() >= 2**31 - POOL_TILE
    with on_device_of(largest):
        kernel[grid](
            *tensors, num_positions, num_channels, *sizes, WIDE=wide, BLOCK_P=block_p,
            BLOCK_C=block_c, num_warps=POOL_WARPS,
        )  # fmt: skip
