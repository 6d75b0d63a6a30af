"""Interpolation and padding of tiles.

Interpolation fetches the rows an output is made of; each output row is a weighted sum of one, two or
four of them, with torch's own weights. Padding moves where
tiles begin, so it is an exchange as well; mirrored and wrapped rows come from wherever they are.
Called by `dispatch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.parallel.spatial.grid import Span, overlap
from ridgeline.parallel.spatial.pool import average_dim
from ridgeline.parallel.spatial.tensor import TileTensor, fetch_span, settle

_NEAREST = ("nearest", "nearest-exact")
_LINEAR = ("linear", "bilinear", "trilinear")
_CUBIC_A = -0.75
"""The constant torch's bicubic kernel has."""


def interpolate(
    func: Callable[..., Tensor],
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    if not isinstance(input, TileTensor) or antialias:
        return NotImplemented
    if mode not in (*_NEAREST, *_LINEAR, "bicubic", "area"):
        return NotImplemented
    x, num = input, len(input.sizes) - 2
    factors = [scale_factor] * num if isinstance(scale_factor, (int, float)) else scale_factor
    if size is not None:
        sizes = [size] * num if isinstance(size, int) else list(size)
    else:
        sizes = [math.floor(s * f) for s, f in zip(x.sizes[2:], factors, strict=True)]
    if size is not None or recompute_scale_factor:
        factors = [None] * num
    for i, (num_out, factor) in enumerate(zip(sizes, factors, strict=True)):
        if num_out == x.sizes[2 + i] and factor in (None, 1):
            continue
        if mode == "area":
            local = average_dim(x, 2 + i, num_out)
        else:
            local = _resize_dim(x, 2 + i, num_out, factor, mode, bool(align_corners))
        new = [num_out if dim == 2 + i else s for dim, s in enumerate(x.sizes)]
        result = settle(local, new, x.axes, x.grid)
        assert isinstance(result, TileTensor)
        x = result
    return x


def _resize_dim(
    x: TileTensor, dim: int, num_out: int, factor: float | None, mode: str, align: bool
) -> Tensor:
    size, axis = x.sizes[dim], x.axes[dim]
    positions, weights = _taps(size, num_out, factor, mode, align)
    if axis is None or not x.is_split(dim):
        return _combine(x.local, dim, positions, weights)
    spans = x.grid.spans(axis, num_out)
    lowest = positions.amin(0).tolist()
    highest = positions.amax(0).tolist()
    needed = [(min(lowest[a:b]), max(highest[a:b]) + 1) for a, b in spans]
    part = fetch_span(x, dim, needed)
    a, b = x.grid.own(axis, num_out)
    first = needed[x.grid.rank(axis)][0]
    return _combine(part, dim, positions[:, a:b] - first, weights[:, a:b])


def _combine(part: Tensor, dim: int, positions: Tensor, weights: Tensor) -> Tensor:
    """Output o is the sum over taps t of weights[t, o] * part[positions[t, o]]."""
    shape = [-1 if d == dim else 1 for d in range(part.dim())]
    positions = positions.to(part.device)
    weights = weights.to(part.device, part.dtype)
    if len(positions) == 1:
        return part.index_select(dim, positions[0])
    total = part.index_select(dim, positions[0]) * weights[0].view(shape)
    for where, weight in zip(positions[1:], weights[1:], strict=True):
        total = total + part.index_select(dim, where) * weight.view(shape)
    return total


def _taps(
    size: int, num_out: int, factor: float | None, mode: str, align: bool
) -> tuple[Tensor, Tensor]:
    """Input positions and weights of every output, each (taps, num_out)."""
    if mode in _NEAREST:
        # torch itself says which: how it rounds is its own affair.
        ramp = torch.arange(size, dtype=torch.float64).view(1, 1, size)
        given = {"size": num_out} if factor is None else {"scale_factor": factor}
        where = F.interpolate(ramp, mode=mode, **given).view(1, -1).long()
        return where, torch.ones(1, num_out, dtype=torch.float64)
    outputs = torch.arange(num_out, dtype=torch.float64)
    if align:
        source = outputs * ((size - 1) / (num_out - 1) if num_out > 1 else 0.0)
    else:
        source = (outputs + 0.5) * (size / num_out if factor is None else 1 / factor) - 0.5
    if mode in _LINEAR:
        source = source.clamp(min=0)
        low = source.long().clamp(max=size - 1)
        part = (source - low).clamp(0, 1)
        return torch.stack([low, (low + 1).clamp(max=size - 1)]), torch.stack([1 - part, part])
    low = source.floor()
    part = source - low
    weights = torch.stack([_cubic(part + 1), _cubic(part), _cubic(1 - part), _cubic(2 - part)])
    where = torch.stack([(low + step).clamp(0, size - 1).long() for step in (-1, 0, 1, 2)])
    return where, weights


def _cubic(distance: Tensor) -> Tensor:
    a, d = _CUBIC_A, distance
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d <= 1, near, far)


def pad(
    func: Callable[..., Tensor],
    input: Any,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Any:
    if not isinstance(input, TileTensor) or len(pad) % 2:
        return NotImplemented
    x, num = input, len(input.sizes)
    amounts = [(0, 0)] * num
    for i in range(len(pad) // 2):
        amounts[num - 1 - i] = (int(pad[2 * i]), int(pad[2 * i + 1]))
    for dim, (before, after) in enumerate(amounts):
        size = x.sizes[dim] + before + after
        if x.is_split(dim) and (before or after):
            if size < 1 or not _mirrors(mode, x.sizes[dim], before, after):
                return NotImplemented  # torch itself has the words for it
            local = _pad_dim(x, dim, before, after, mode, value or 0.0)
            sizes = [size if d == dim else s for d, s in enumerate(x.sizes)]
            result = settle(local, sizes, x.axes, x.grid)
            assert isinstance(result, TileTensor)
            x = result
    rest = [(0, 0) if input.is_split(d) else amount for d, amount in enumerate(amounts)]
    if not any(b or a for b, a in rest):
        return x
    flat = [n for amount in reversed(rest) for n in amount]
    local = func(x.local, flat[: len(pad)], mode=mode, value=value)
    sizes = [size + sum(amount) for size, amount in zip(x.sizes, rest, strict=True)]
    return settle(local, sizes, x.axes, x.grid)


def _mirrors(mode: str, size: int, before: int, after: int) -> bool:
    limit = {"constant": math.inf, "replicate": math.inf, "reflect": size - 1, "circular": size}
    return max(before, after) <= limit.get(mode, -1) and (
        mode == "constant" or min(before, after) >= 0
    )


def _pad_dim(x: TileTensor, dim: int, before: int, after: int, mode: str, value: float) -> Tensor:
    size, axis = x.sizes[dim], x.axes[dim]
    assert axis is not None
    rank = x.grid.rank(axis)
    # Spans of the padded image, in coordinates of the image itself.
    spans = [(a - before, b - before) for a, b in x.grid.spans(axis, size + before + after)]
    local = fetch_span(x, dim, [overlap((0, size), span) for span in spans])
    low, high = spans[rank]
    num_before, num_after = max(0, min(high, 0) - low), max(0, high - max(low, size))
    if mode == "constant":
        amount = [0] * (2 * len(x.sizes))
        amount[2 * (len(x.sizes) - 1 - dim)] = num_before
        amount[2 * (len(x.sizes) - 1 - dim) + 1] = num_after
        return F.pad(local, amount, value=value) if num_before or num_after else local
    pieces = [local]
    if before:
        outside = [(min(a, 0), min(b, 0)) for a, b in spans]
        pieces.insert(0, _fetch_outside(x, dim, outside, num_before, mode))
    if after:
        outside = [(max(a, size), max(b, size)) for a, b in spans]
        pieces.append(_fetch_outside(x, dim, outside, num_after, mode))
    return torch.cat(pieces, dim)


def _fetch_outside(
    x: TileTensor, dim: int, outside: Sequence[Span], count: int, mode: str
) -> Tensor:
    """What stands for positions before or after the image."""
    size = x.sizes[dim]

    def source(span: Span) -> Span:
        low, high = span
        if low == high:
            return 0, 0
        if mode == "circular":
            return (low + size, high + size) if low < 0 else (low - size, high - size)
        if mode == "replicate":
            return (0, 1) if low < 0 else (size - 1, size)
        return (1 - high, 1 - low) if low < 0 else (2 * size - 1 - high, 2 * size - 1 - low)

    found = fetch_span(x, dim, [source(span) for span in outside])
    if mode == "replicate" and count:
        return found.expand(*[count if d == dim else -1 for d in range(found.dim())])
    return found.flip(dim) if mode == "reflect" else found


HANDLERS: dict[str, Callable[..., Any]] = {"interpolate": interpolate, "pad": pad}
