"""Convolution and transposed convolution of tiles: any kernel, stride, dilation, padding and groups.

Each rank computes its part of the output from the rows and columns of the input that part looks at.
Where most of it looks at the tile alone, that interior is computed while the halo travels, and the
border in strips afterwards; the tile is then never copied, so nothing is kept twice for backward.
Called by `dispatch.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.parallel.spatial.grid import Span, overlap
from ridgeline.parallel.spatial.halo import Halo, narrow
from ridgeline.parallel.spatial.tensor import TileTensor, settle


@dataclass(frozen=True)
class Windows:
    """Sliding windows along one dim: output o looks at [o*stride - before, ... + reach)."""

    size: int
    stride: int
    before: int
    reach: int
    """From the first to one past the last element of a window."""
    num_out: int

    def inputs(self, outputs: Span) -> Span:
        """What a span of outputs looks at, padding included."""
        low, high = outputs
        return low * self.stride - self.before, (high - 1) * self.stride - self.before + self.reach

    def clipped(self, outputs: Span) -> Span:
        return overlap((0, self.size), self.inputs(outputs))

    def interior(self, outputs: Span, held: Span) -> Span:
        """Of `outputs` those that look at nothing but `held`."""
        low = max(outputs[0], -((-held[0] - self.before) // self.stride))
        high = min(outputs[1], (held[1] - self.reach + self.before) // self.stride + 1)
        return low, max(low, high)


def spread(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """One number for every spatial dim."""
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) * count if len(value) == 1 else tuple(value)


def _padding(
    padding: str | int | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Before and after, per dim; 'same' puts an odd one after."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    assert not isinstance(padding, str)
    return [(p, p) for p in spread(padding, len(kernel))]


def convolve(
    func: Callable[..., Tensor],
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Any:
    num = weight.dim() - 2
    if not isinstance(input, TileTensor) or len(input.sizes) != num + 2:
        return NotImplemented
    if input.axes[0] is not None or input.axes[1] is not None:
        return NotImplemented
    x, kernel = input, weight.shape[2:]
    stride, dilation = spread(stride, num), spread(dilation, num)
    pads = _padding(padding, kernel, dilation)
    windows = {}
    for i in range(num):
        reach = dilation[i] * (kernel[i] - 1) + 1
        size = x.sizes[2 + i]
        num_out = (size + sum(pads[i]) - reach) // stride[i] + 1
        if num_out < 1:
            return NotImplemented  # torch itself has the words for it
        windows[2 + i] = Windows(size, stride[i], pads[i][0], reach, num_out)
    split = x.split_dims
    x = _pad_whole_dims(x, pads, split)
    native = [0 if 2 + i in split or p[0] != p[1] else p[0] for i, p in enumerate(pads)]

    def run(part: Tensor) -> Tensor:
        return func(part, weight, bias, stride, native, dilation, groups)

    sizes = (x.sizes[0], weight.shape[0], *(windows[2 + i].num_out for i in range(num)))
    return slide(x, {dim: windows[dim] for dim in split}, run, sizes)


def _pad_whole_dims(
    x: TileTensor, pads: Sequence[tuple[int, int]], split: Sequence[int]
) -> TileTensor:
    """Uneven padding of dims that are whole, which the plain operation cannot do by itself."""
    amounts = [(0, 0) if 2 + i in split or p[0] == p[1] else p for i, p in enumerate(pads)]
    if not any(sum(p) for p in amounts):
        return x
    local = F.pad(x.local, [n for p in reversed(amounts) for n in p])
    sizes = [*x.sizes[:2], *(s + sum(p) for s, p in zip(x.sizes[2:], amounts, strict=True))]
    return TileTensor(local, sizes, x.axes, x.grid)


def slide(
    x: TileTensor,
    windows: dict[int, Windows],
    run: Callable[[Tensor], Tensor],
    sizes: Sequence[int],
) -> Tensor:
    """A convolution along the split dims `windows`; `run` is the plain one, unpadded there."""
    grid = x.grid
    outputs = {d: grid.own(x.axes[d], w.num_out) for d, w in windows.items()}
    halo = Halo(x, _needed(x, windows))
    interior = {d: w.interior(outputs[d], x.own(d)) for d, w in windows.items()}
    share = 1.0
    for d, (low, high) in interior.items():
        share *= (high - low) / (outputs[d][1] - outputs[d][0])
    if grid.overlap and share >= 0.5 and (share < 1 or halo.num_phases == 0):
        local = _run_in_strips(x, halo, windows, outputs, interior, run)
    else:
        window = {d: w.inputs(outputs[d]) for d, w in windows.items()}
        local = run(halo.complete().cut(window))
    return settle(local, sizes, x.axes, grid)


def _needed(x: TileTensor, windows: dict[int, Windows]) -> dict[int, list[Span]]:
    needed = {}
    for dim, w in windows.items():
        axis = x.axes[dim]
        assert axis is not None
        needed[dim] = [w.clipped(span) for span in x.grid.spans(axis, w.num_out)]
    return needed


def _run_in_strips(
    x: TileTensor,
    halo: Halo,
    windows: dict[int, Windows],
    outputs: dict[int, Span],
    interior: dict[int, Span],
    run: Callable[[Tensor], Tensor],
) -> Tensor:
    """The interior while the halo is under way, then the strips around it."""
    dims = sorted(windows)
    if not dims:
        return run(x.local)
    # One part of the interior for each phase of the exchange.
    low, high = interior[dims[0]]
    num_parts = min(halo.num_phases, high - low)
    bounds = [low + i * (high - low) // num_parts for i in range(num_parts + 1)]
    parts = []
    for part in itertools.pairwise(bounds):
        block = x.local
        for dim in dims:
            wanted = windows[dim].inputs(part if dim == dims[0] else interior[dim])
            block = narrow(block, dim, x.own(dim)[0], wanted)
        parts.append(run(block))
        halo.advance()
    halo.complete()
    middle = _join(parts, dims[0])

    def strip(spans: dict[int, Span]) -> list[Tensor]:
        if any(low == high for low, high in spans.values()):
            return []
        return [run(halo.cut({d: windows[d].inputs(spans[d]) for d in dims}))]

    for dim in reversed(dims):  # columns beside the interior, then rows over the whole width
        around = {d: interior[d] if d < dim else outputs[d] for d in dims}
        before = strip({**around, dim: (outputs[dim][0], interior[dim][0])})
        after = strip({**around, dim: (interior[dim][1], outputs[dim][1])})
        middle = _join([*before, middle, *after], dim)
    return middle


def _join(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def convolve_transposed(
    func: Callable[..., Tensor],
    input: Any,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Any:
    num = weight.dim() - 2
    if not isinstance(input, TileTensor) or len(input.sizes) != num + 2:
        return NotImplemented
    if input.axes[0] is not None or input.axes[1] is not None:
        return NotImplemented
    x, kernel, split = input, weight.shape[2:], input.split_dims
    stride, dilation = spread(stride, num), spread(dilation, num)
    padding, extra = spread(padding, num), spread(output_padding, num)
    native_padding, native_extra = list(padding), list(extra)
    sizes = [x.sizes[0], weight.shape[1] * groups]
    needed = {}
    for i in range(num):
        dim, reach = 2 + i, dilation[i] * (kernel[i] - 1) + 1
        size = (x.sizes[dim] - 1) * stride[i] - 2 * padding[i] + reach + extra[i]
        sizes.append(size)
        axis = x.axes[dim]
        if dim in split:
            assert axis is not None
            native_padding[i] = native_extra[i] = 0
            needed[dim] = [
                _sources(span, x.sizes[dim], stride[i], padding[i], reach)
                for span in x.grid.spans(axis, size)
            ]
    halo = Halo(x, needed).complete()
    window = {d: spans[x.grid.rank(x.axes[d])] for d, spans in needed.items()}  # type: ignore[arg-type]
    # The bias comes after: rows that output_padding adds have nothing but a bias.
    out = func(
        halo.cut(window), weight, None, stride, native_padding, native_extra, groups, dilation
    )
    for dim, (first, _) in window.items():
        begin = first * stride[dim - 2] - padding[dim - 2]
        out = _crop(out, dim, begin, x.grid.own(x.axes[dim], sizes[dim]))
    if bias is not None:
        out = out + bias.to(out.dtype).view(-1, *([1] * num))
    return settle(out, sizes, x.axes, x.grid)


def _sources(outputs: Span, size: int, stride: int, padding: int, reach: int) -> Span:
    """The inputs that reach a span of outputs; at least one, for the plain operation's sake."""
    low = -((reach - 1 - outputs[0] - padding) // stride)
    high = (outputs[1] - 1 + padding) // stride + 1
    low = min(max(low, 0), size - 1)
    return low, max(low + 1, min(high, size))


def _crop(out: Tensor, dim: int, begin: int, span: Span) -> Tensor:
    """`span` of what begins at `begin`, with zeros where it does not reach."""
    have = overlap((begin, begin + out.shape[dim]), span)
    out = narrow(out, dim, begin, have)
    if have == span:
        return out
    padding = [0] * (2 * out.dim())
    place = 2 * (out.dim() - 1 - dim)
    if have[0] == have[1]:
        padding[place] = span[1] - span[0]
    else:
        padding[place], padding[place + 1] = have[0] - span[0], span[1] - have[1]
    return F.pad(out, padding)


HANDLERS: dict[str, Callable[..., Any]] = {
    "conv2d": convolve,
    "conv3d": convolve,
    "conv_transpose2d": convolve_transposed,
    "conv_transpose3d": convolve_transposed,
}
