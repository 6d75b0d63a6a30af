"""Indexing, splitting, joining and moving of tiles.

What leaves the dims in pieces alone is the same operation on the tile; along such a dim, slices, joins,
flips and rolls fetch what now lies on another rank. Called by `dispatch.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.parallel.spatial.grid import Span, overlap
from ridgeline.parallel.spatial.tensor import (
    TileTensor,
    align,
    as_dim,
    fetch_span,
    like,
    settle,
    wrap,
)


def getitem(func: Any, input: Any, index: Any) -> Any:
    if not isinstance(input, TileTensor):
        return NotImplemented
    plan = _expand_index(index, len(input.sizes))
    if plan is None:
        return NotImplemented
    x: Any = input
    order: list[int] = []
    local_index: list[Any] = []
    dim = 0
    for item in plan:
        if item is None:
            order.append(-1)
            local_index.append(None)
            continue
        if x.axes[dim] is None or item == slice(None):
            local_index.append(item)
        elif isinstance(item, int):
            at = as_dim(item, x.sizes[dim])
            local = fetch_span(x, dim, [(at, at + 1)] * x.grid.size(x.axes[dim]))
            x = TileTensor(local, _with(x.sizes, dim, 1), x.axes, x.grid)
            local_index.append(0)
        else:
            x = _slice_dim(x, dim, item)
            local_index.append(slice(None))
        if not isinstance(item, int):
            order.append(dim)
        dim += 1
    return like(x.local[tuple(local_index)], x, order)


def _with(sizes: Sequence[int], dim: int, size: int) -> list[int]:
    return [size if d == dim else s for d, s in enumerate(sizes)]


def _expand_index(index: Any, num_dims: int) -> list[Any] | None:
    """One item for every dim, and None for new ones; nothing where there are tensors in it."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(
        i is None
        or i is Ellipsis
        or isinstance(i, slice)
        or (isinstance(i, int) and not isinstance(i, bool))
        for i in items
    ):
        return None
    missing = num_dims - sum(i is not None and i is not Ellipsis for i in items)
    if missing < 0:
        return None
    at = next((n for n, i in enumerate(items) if i is Ellipsis), len(items))
    return items[:at] + [slice(None)] * missing + [i for i in items[at:] if i is not Ellipsis]


def _slice_dim(x: TileTensor, dim: int, item: slice) -> TileTensor:
    axis = x.axes[dim]
    assert axis is not None
    start, stop, step = item.indices(x.sizes[dim])
    size = len(range(start, stop, step))
    needed = [
        (start + a * step, start + (b - 1) * step + 1) if a < b else (0, 0)
        for a, b in x.grid.spans(axis, size)
    ]
    local = fetch_span(x, dim, needed)
    if step != 1:
        local = local[(slice(None),) * dim + (slice(None, None, step),)]
    return TileTensor(local, _with(x.sizes, dim, size), x.axes, x.grid)


def setitem(func: Any, input: Any, index: Any, value: Any) -> Any:
    """Where the dims in pieces are left whole; a value is broadcast as always."""
    if not isinstance(input, TileTensor):
        return NotImplemented
    plan = _expand_index(index, len(input.sizes))
    if plan is None:
        return NotImplemented
    items = [i for i in plan if i is not None]
    if any(i != slice(None) for d, i in enumerate(items) if input.is_split(d)):
        return NotImplemented
    shown = getitem(None, input, index)
    if isinstance(value, Tensor) and isinstance(shown, TileTensor):
        value = align(value, shown.axes, shown.sizes, shown.grid)
    elif isinstance(value, TileTensor):
        return NotImplemented
    input.local[tuple(plan)] = value
    return None


def select(func: Any, input: Any, dim: int, index: int) -> Any:
    return _index_dim(input, dim, index)


def narrow(func: Any, input: Any, dim: int, start: int, length: int) -> Any:
    if not isinstance(start, int):
        return NotImplemented
    start = start % input.sizes[as_dim(dim, len(input.sizes))]
    return _index_dim(input, dim, slice(start, start + length))


def _index_dim(x: Any, dim: int, item: Any) -> Any:
    if not isinstance(x, TileTensor):
        return NotImplemented
    return getitem(None, x, (slice(None),) * as_dim(dim, len(x.sizes)) + (item,))


def split(func: Any, input: Any, sizes: Any, dim: int = 0) -> Any:
    if not isinstance(input, TileTensor):
        return NotImplemented
    total = input.sizes[as_dim(dim, len(input.sizes))]
    if isinstance(sizes, int):
        sizes = [min(sizes, total - at) for at in range(0, total, sizes)]
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    parts = itertools.pairwise(bounds)
    return tuple(_index_dim(input, dim, slice(a, b)) for a, b in parts)


def chunk(func: Any, input: Any, chunks: int, dim: int = 0) -> Any:
    total = input.sizes[as_dim(dim, len(input.sizes))]
    return split(func, input, -(-total // chunks), dim)


def unbind(func: Any, input: Any, dim: int = 0) -> Any:
    if not isinstance(input, TileTensor) or input.is_split(as_dim(dim, len(input.sizes))):
        return NotImplemented
    return tuple(_index_dim(input, dim, i) for i in range(input.sizes[dim]))


# Joining and moving


def _common(tensors: Sequence[Any]) -> TileTensor | None:
    return next((t for t in tensors if isinstance(t, TileTensor)), None)


def cat(func: Any, tensors: Sequence[Any], dim: int = 0, **kwargs: Any) -> Any:
    x = _common(tensors)
    if x is None or kwargs or any(t.dim() != len(x.sizes) for t in tensors):
        return NotImplemented
    at = as_dim(dim, len(x.sizes))
    if any(_rest(t.shape, at) != _rest(x.sizes, at) for t in tensors):
        return NotImplemented
    axis = x.axes[at]
    sizes = _with(x.sizes, at, sum(t.shape[at] for t in tensors))
    if axis is None:
        aligned = [align(t, x.axes, _with(x.sizes, at, t.shape[at]), x.grid) for t in tensors]
        return wrap(torch.cat(aligned, at), sizes, x.axes, x.grid)
    # Along a dim in pieces: of each operand what falls into this rank's part of the result.
    pieces, begin = [], 0
    for t in tensors:
        size = t.shape[at]
        spans = [_within(span, begin, size) for span in x.grid.spans(axis, sizes[at])]
        if isinstance(t, TileTensor) and t.axes == x.axes:
            pieces.append(fetch_span(t, at, spans))
        else:
            low, high = spans[x.grid.rank(axis)]
            others = [None if d == at else a for d, a in enumerate(x.axes)]
            part = align(t, others, _with(x.sizes, at, size), x.grid)
            pieces.append(part.narrow(at, low, high - low))
        begin += size
    return settle(torch.cat(pieces, at), sizes, x.axes, x.grid)


def _within(span: Span, begin: int, size: int) -> Span:
    low, high = overlap((begin, begin + size), span)
    return low - begin, high - begin


def _rest(sizes: Sequence[int], dim: int) -> list[int]:
    return [size for d, size in enumerate(sizes) if d != dim]


def stack(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    x = _common(tensors)
    if x is None or any(tuple(t.shape) != x.sizes for t in tensors):
        return NotImplemented
    at = as_dim(dim, len(x.sizes) + 1)
    aligned = [align(t, x.axes, x.sizes, x.grid) for t in tensors]
    order = list(range(len(x.sizes)))
    order.insert(at, -1)
    return like(torch.stack(aligned, at), x, order)


def flip(func: Any, input: Any, *dims: Any) -> Any:
    if not isinstance(input, TileTensor):
        return NotImplemented
    given = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    local, x = input.local, input
    for dim in (as_dim(d, len(input.sizes)) for d in given):
        size, axis = x.sizes[dim], x.axes[dim]
        if axis is not None and x.is_split(dim):
            local = fetch_span(x, dim, [(size - b, size - a) for a, b in x.grid.spans(axis, size)])
        local = local.flip(dim)
        x = TileTensor(local, x.sizes, x.axes, x.grid)
    return x


def roll(func: Any, input: Any, shifts: Any, dims: Any = None) -> Any:
    if not isinstance(input, TileTensor) or dims is None or dims == ():
        return NotImplemented
    amounts = [shifts] if isinstance(shifts, int) else shifts
    places = [dims] if isinstance(dims, int) else dims
    x: Any = input
    for amount, dim in zip(amounts, places, strict=True):
        at = as_dim(dim, len(input.sizes))
        if not x.is_split(at):
            x = like(x.local.roll(amount, at), x)
            continue
        amount = amount % x.sizes[at]
        if amount:
            cut_at = x.sizes[at] - amount
            x = torch.cat(
                [_index_dim(x, at, slice(cut_at, None)), _index_dim(x, at, slice(cut_at))], at
            )
    return x


HANDLERS: dict[str, Callable[..., Any]] = {
    "__getitem__": getitem,
    "__setitem__": setitem,
    "select": select,
    "narrow": narrow,
    "split": split,
    "chunk": chunk,
    "unbind": unbind,
    **dict.fromkeys(("cat", "concat", "concatenate"), cat),
    "stack": stack,
    "flip": flip,
    "roll": roll,
}
