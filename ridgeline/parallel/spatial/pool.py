"""Pooling of tiles: max and average with any window, and adaptive to any output size.

Windows go over tile borders by the same halos as convolution. What differs is the padding: it never
wins a maximum, and an average may or may not count it. Called by `dispatch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.parallel.spatial.comm import sum_over
from ridgeline.parallel.spatial.conv import Windows, spread
from ridgeline.parallel.spatial.grid import Span
from ridgeline.parallel.spatial.halo import Halo, narrow
from ridgeline.parallel.spatial.tensor import TileTensor, fetch_span, groups_of, settle


def _is_pooled(x: Any, num: int) -> bool:
    """A batch of tiles whose channels are whole."""
    return isinstance(x, TileTensor) and len(x.sizes) == num + 2 and x.axes[:2] == (None, None)


def _num_out(size: int, stride: int, padding: int, reach: int, ceil_mode: bool) -> int:
    span = size + 2 * padding - reach
    num = (span + stride - 1 if ceil_mode else span) // stride + 1
    if ceil_mode and (num - 1) * stride >= size + padding:
        num -= 1  # a window may not begin behind the image
    return num


def _windows(
    x: TileTensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> list[Windows]:
    found = []
    for i, size in enumerate(x.sizes[2:]):
        reach = dilation[i] * (kernel[i] - 1) + 1
        num_out = _num_out(size, stride[i], padding[i], reach, ceil_mode)
        found.append(Windows(size, stride[i], padding[i], reach, num_out))
    return found


def _cut_windows(x: TileTensor, windows: Sequence[Windows], value: float) -> Tensor:
    """The part of the image this rank's outputs look at, padded along the split dims."""
    needed, window = {}, {}
    for dim in x.split_dims:
        axis, w = x.axes[dim], windows[dim - 2]
        assert axis is not None
        needed[dim] = [w.clipped(span) for span in x.grid.spans(axis, w.num_out)]
        window[dim] = w.inputs(x.grid.own(axis, w.num_out))
    return Halo(x, needed).complete().cut(window, value)


def max_pool(
    func: Callable[..., Tensor],
    input: Any,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    num = 3 if func.__name__.endswith("3d") else 2
    if not _is_pooled(input, num) or return_indices:
        return NotImplemented
    kernel = spread(kernel_size, num)
    stride = spread(stride, num) if stride else kernel
    padding, dilation = spread(padding, num), spread(dilation, num)
    windows = _windows(input, kernel, stride, padding, dilation, ceil_mode)
    if min(w.num_out for w in windows) < 1:
        return NotImplemented
    lowest = -torch.inf if input.dtype.is_floating_point else torch.iinfo(input.dtype).min
    native = [0 if 2 + i in input.split_dims else p for i, p in enumerate(padding)]
    out = func(_cut_windows(input, windows, lowest), kernel, stride, native, dilation, ceil_mode)
    sizes = [*input.sizes[:2], *(w.num_out for w in windows)]
    return settle(out, sizes, input.axes, input.grid)


def avg_pool(
    func: Callable[..., Tensor],
    input: Any,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    num = 3 if func.__name__.endswith("3d") else 2
    if not _is_pooled(input, num):
        return NotImplemented
    kernel = spread(kernel_size, num)
    stride = spread(stride, num) if stride else kernel
    padding = spread(padding, num)
    windows = _windows(input, kernel, stride, padding, (1,) * num, ceil_mode)
    if min(w.num_out for w in windows) < 1:
        return NotImplemented
    sizes = [*input.sizes[:2], *(w.num_out for w in windows)]
    native = [0 if 2 + i in input.split_dims else p for i, p in enumerate(padding)]
    part = _cut_windows(input, windows, 0.0)
    if divisor_override is None and not any(padding) and not ceil_mode:
        return settle(func(part, kernel, stride), sizes, input.axes, input.grid)
    out = func(part, kernel, stride, native, ceil_mode, True, divisor_override or 1)
    if divisor_override is None:
        for i, w in enumerate(windows):
            outputs = (0, w.num_out)
            if 2 + i in input.split_dims:
                outputs = input.grid.own(input.axes[2 + i], w.num_out)
            counts = _counts(w, outputs, padding[i], count_include_pad)
            shape = [-1 if dim == 2 + i else 1 for dim in range(num + 2)]
            out = out / torch.tensor(counts, dtype=out.dtype, device=out.device).view(shape)
    return settle(out, sizes, input.axes, input.grid)


def _counts(w: Windows, outputs: Span, padding: int, include_pad: bool) -> list[int]:
    """How many elements each window averages over, along one dim."""
    low, high = (-padding, w.size + padding) if include_pad else (0, w.size)
    starts = [o * w.stride - w.before for o in range(*outputs)]
    return [min(start + w.reach, high) - max(start, low) for start in starts]


def adaptive_window(index: int, size: int, num_out: int) -> Span:
    return index * size // num_out, -(-(index + 1) * size // num_out)


def _output_sizes(x: TileTensor, output_size: Any) -> list[int]:
    num = len(x.sizes) - 2
    wanted = (
        [output_size] * num if isinstance(output_size, int) or output_size is None else output_size
    )
    return [x.sizes[2 + i] if n is None else int(n) for i, n in enumerate(wanted)]


def adaptive_avg_pool(func: Callable[..., Tensor], input: Any, output_size: Any) -> Any:
    """Dim by dim, since a mean over a box is a mean of means."""
    num = 3 if func.__name__.endswith("3d") else 2
    if not _is_pooled(input, num):
        return NotImplemented
    x = input
    for i, num_out in enumerate(_output_sizes(x, output_size)):
        local = average_dim(x, 2 + i, num_out)
        sizes = [num_out if dim == 2 + i else size for dim, size in enumerate(x.sizes)]
        x = settle(local, sizes, x.axes, x.grid)
    return x


def average_dim(x: TileTensor, dim: int, num_out: int) -> Tensor:
    """Local part of means over `num_out` windows of a dim, large or small."""
    size, axis = x.sizes[dim], x.axes[dim]
    if num_out == size:
        return x.local
    windows = [adaptive_window(o, size, num_out) for o in range(num_out)]
    if not x.is_split(dim) or x.grid.splits(axis, num_out):
        outputs, first, part = (0, num_out), 0, x.local
        if x.is_split(dim):
            assert axis is not None
            spans = x.grid.spans(axis, num_out)
            needed = [(windows[a][0], windows[b - 1][1]) for a, b in spans]
            outputs, first = x.grid.own(axis, num_out), needed[x.grid.rank(axis)][0]
            part = fetch_span(x, dim, needed)
        return _mean_windows(part, dim, first, windows[outputs[0] : outputs[1]])
    # Fewer windows than ranks: each adds up its own rows, no rank sees the whole.
    low, high = x.own(dim)
    mine = [(max(a, low), max(max(a, low), min(b, high))) for a, b in windows]
    sums = _mean_windows(x.local, dim, low, mine, [b - a for a, b in windows])
    return sum_over(sums, groups_of(x, [dim]))


def _mean_windows(
    part: Tensor, dim: int, first: int, windows: Sequence[Span], counts: Sequence[int] | None = None
) -> Tensor:
    if counts is None:
        counts = [b - a for a, b in windows]
        if sum(counts) == windows[-1][1] - windows[0][0] and len(set(counts)) == 1:
            whole = narrow(part, dim, first, (windows[0][0], windows[-1][1]))
            return whole.unflatten(dim, (len(windows), counts[0])).mean(dim + 1)
    sums = [
        part.narrow(dim, min(max(a - first, 0), part.shape[dim]), b - a).sum(dim, keepdim=True) / n
        for (a, b), n in zip(windows, counts, strict=True)
    ]
    return torch.cat(sums, dim)


def adaptive_max_pool(
    func: Callable[..., Any], input: Any, output_size: Any, return_indices: bool = False
) -> Any:
    """Window by window along split dims: of equal elements the first wins, as in the plain one."""
    num = 3 if func.__name__.endswith("3d") else 2
    if not _is_pooled(input, num) or return_indices:
        return NotImplemented
    x, sizes = input, _output_sizes(input, output_size)
    plain = F.adaptive_max_pool3d if num == 3 else F.adaptive_max_pool2d
    needed, outputs = {}, {}
    for dim in x.split_dims:
        axis, num_out = x.axes[dim], sizes[dim - 2]
        assert axis is not None
        spans = x.grid.spans(axis, num_out)
        outputs[dim] = x.grid.own(axis, num_out)
        needed[dim] = [
            (
                adaptive_window(a, x.sizes[dim], num_out)[0],
                adaptive_window(b - 1, x.sizes[dim], num_out)[1],
            )
            for a, b in spans
        ]
    halo = Halo(x, needed).complete()

    def pooled(windows: dict[int, Span], rest: list[int]) -> Tensor:
        if not rest:
            target = [1 if 2 + i in windows else n for i, n in enumerate(sizes)]
            return plain(halo.cut(windows), target)
        dim, *others = rest
        spans = [adaptive_window(o, x.sizes[dim], sizes[dim - 2]) for o in range(*outputs[dim])]
        return torch.cat([pooled({**windows, dim: span}, others) for span in spans], dim)

    return settle(pooled({}, x.split_dims), [*x.sizes[:2], *sizes], x.axes, x.grid)


HANDLERS: dict[str, Callable[..., Any]] = {
    "max_pool2d": max_pool,
    "max_pool3d": max_pool,
    "avg_pool2d": avg_pool,
    "avg_pool3d": avg_pool,
    "adaptive_avg_pool2d": adaptive_avg_pool,
    "adaptive_avg_pool3d": adaptive_avg_pool,
    "adaptive_max_pool2d": adaptive_max_pool,
    "adaptive_max_pool3d": adaptive_max_pool,
}
