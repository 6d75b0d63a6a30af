"""Statistics of channels and max pooling as operators, with plain torch where there is no kernel.

The compiler cannot fuse them with the convolution before (all of a tensor is in a channel's mean) or gains
nothing by it (a pooling reads each value several times), so that hiding them costs nothing, and what it
makes of them itself is slow. What follows from the statistics, down to the running ones, it does see: a
few numbers a channel, one small kernel. Called by `conv_layers.py`; kernels are in `conv_kernels.py`.

Shapes: S splits of all pixels of all samples, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.parallel.operators import build_operator, has_triton

LAST = torch.channels_last
PROGRAMS = 528
"""Parts that statistics are taken in: four for each multiprocessor of a large device."""
COLUMNS = 128
"""Channels of a part at most."""
LEAST_ROWS = 64
"""Pixels of a part at least."""
MOST_IN_WINDOW = 64
"""Values of a pooling's window that a kernel is made for; a byte says which of them was the largest."""


def wide_type(x: Tensor) -> torch.dtype:
    """What sums are taken in."""
    return torch.promote_types(x.dtype, torch.float32)


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the variance (over n, not n - 1) of each channel of a channels-last tensor."""
    num = x.numel() // x.shape[1]
    origins_SC, shifts_SC, spreads_SC = PARTS_OP(x).unbind()
    num_splits = origins_SC.shape[0]  # not `_splits`: whether there is a kernel is nothing to trace
    rows_each = _rows_each(num, x.shape[1]) if num_splits > 1 else num
    begun = torch.arange(num_splits, device=x.device) * rows_each
    shares_S1 = ((num - begun).clamp(max=rows_each).to(shifts_SC.dtype) / num)[:, None]
    # Means as seen from the first origin are small numbers, whose sums have all their digits.
    means_SC = (origins_SC - origins_SC[0]) + shifts_SC
    mean = (means_SC * shares_S1).sum(0)
    between = ((means_SC - mean).square() * shares_S1).sum(0)
    # Sums and squares in floating point may leave less than nothing.
    variance = (spreads_SC.sum(0) / num + between).clamp(min=0)
    return origins_SC[0] + mean, variance


def channel_parts(x: Tensor) -> Tensor:
    """(3, S, C): what `conv_kernels.moments` says, or all rows as one split."""
    rows_each, num_splits = _splits(x)
    if has_kernel(x):
        from ridgeline.parallel.conv_kernels import moments

        return moments(x, rows_each, num_splits, COLUMNS)
    variance, mean = torch.var_mean(x.to(wide_type(x)), (0, 2, 3), correction=0)
    return torch.stack([mean, torch.zeros_like(mean), variance * rows_each])[:, None]


def max_pool(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """F.max_pool2d, and for each maximum where in its window it was, counted row by row in a byte."""
    if has_kernel(x):
        from ridgeline.parallel.conv_kernels import max_pool as call

        return call(x, _outputs(x, kernel, stride, padding), kernel, stride, padding)
    out, index = F.max_pool2d(x, list(kernel), list(stride), list(padding), return_indices=True)
    top, left = _corners(index, stride, padding)
    width = x.shape[3]
    offsets = (index // width - top) * kernel[1] + index % width - left
    return out, offsets.to(torch.uint8)


def max_pool_backward(
    grad: Tensor,
    offsets: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """The gradient of what was pooled, which had `size` in height and width."""
    if has_kernel(grad):
        from ridgeline.parallel.conv_kernels import max_pool_backward as call

        return call(grad, offsets, size, kernel, stride, padding)
    at = offsets.long()
    top, left = _corners(at, stride, padding)
    index = (top + at // kernel[1]) * size[1] + left + at % kernel[1]
    flat = grad.new_zeros((*grad.shape[:2], size[0] * size[1]), dtype=wide_type(grad))
    flat.scatter_add_(2, index.flatten(2), grad.to(flat.dtype).flatten(2))
    return flat.to(grad.dtype).unflatten(2, tuple(size)).contiguous(memory_format=LAST)


def has_kernel(x: Tensor) -> bool:
    """Said alike of a tensor and of what stands for it while a compiler looks."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and has_triton()


def _splits(x: Tensor) -> tuple[int, int]:
    """Rows of a split, and how many splits there are."""
    num_rows = x.numel() // x.shape[1]
    if not has_kernel(x):
        return num_rows, 1
    rows_each = _rows_each(num_rows, x.shape[1])
    return rows_each, _cdiv(num_rows, rows_each)


def _rows_each(num_rows: int, num_channels: int) -> int:
    most = max(1, PROGRAMS // _cdiv(num_channels, COLUMNS))
    return max(LEAST_ROWS, _cdiv(num_rows, most))


def _cdiv(one: int, other: int) -> int:
    return -(-one // other)


def _outputs(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, int]:
    height, width = (
        (x.shape[2 + i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in range(2)
    )
    return height, width


def _corners(out: Tensor, stride: Sequence[int], padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The row and the column of the input at which each output's window begins."""
    rows, columns = (torch.arange(n, device=out.device) for n in out.shape[2:])
    return (rows * stride[0] - padding[0])[:, None], columns * stride[1] - padding[1]


def _fake_parts(x: Tensor) -> Tensor:
    return x.new_empty((3, _splits(x)[1], x.shape[1]), dtype=wide_type(x))


def _fake_max_pool(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:2], *_outputs(x, kernel, stride, padding))
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=LAST)
    return out, torch.empty_like(out, dtype=torch.uint8)


def _fake_max_pool_backward(
    grad: Tensor,
    offsets: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    shape = (*grad.shape[:2], *size)
    return torch.empty(shape, dtype=grad.dtype, device=grad.device, memory_format=LAST)


PARTS_OP = build_operator("channel_parts", channel_parts, _fake_parts)
POOL_OP = build_operator("max_pool", max_pool, _fake_max_pool)
POOL_BACKWARD_OP = build_operator("max_pool_backward", max_pool_backward, _fake_max_pool_backward)
