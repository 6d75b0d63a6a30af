"""Rules for functions that only rearrange: views, permutations, indices, parts, lookups by index.

A cut dim that comes through whole stays cut; a view may turn it into another dim if the pieces come
out the same. The output of a fused projection (`view.mark_fused`) is special: each rank holds its share
of every part, which is no plain cut of the joint dim, until a view or a split takes the parts apart.
Called by `view.py` through its table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ridgeline.parallel.tensor.move import enter, local_shape
from ridgeline.parallel.tensor.rules import run_labels
from ridgeline.parallel.tensor.shapes import follow_strides, follow_view, meta_like, view_groups

if TYPE_CHECKING:
    from ridgeline.parallel.tensor.view import GlobalView


def reshape(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """view, reshape, flatten, unflatten and their like."""
    x = args[0]
    if not isinstance(x, DTensor) or any(isinstance(a, torch.dtype) for a in args):
        return NotImplemented
    after = tuple(func(meta_like(x.shape), *args[1:], **kwargs).shape)
    parts = view.fused_parts(x)
    if parts:
        made = _reshape_fused(view, x, parts, after)
        if made is not None:
            return view.note_view(x, made)
        x = view.whole(x)
    before: list[Placement] = []
    placements: list[Placement] = []
    for place in x.placements:
        to = _follow(view, x, place.dim, after) if isinstance(place, Shard) else None
        before.append(place if to is not None else Replicate())
        placements.append(Replicate() if to is None else Shard(to))
    return view.note_view(x, _rearranged(view, x, before, placements, after))


def _follow(view: GlobalView, x: DTensor, dim: int, after: Sequence[int]) -> int | None:
    to = follow_view(x.shape, after, dim)
    if to is None or after[to] == x.shape[dim]:
        return to
    pieces = 1
    for axis, place in enumerate(x.placements):
        if isinstance(place, Shard) and place.dim == dim:
            pieces *= view.mesh.size(axis)
    return to if x.shape[dim] % pieces == 0 and after[to] % pieces == 0 else None


def _rearranged(
    view: GlobalView,
    x: DTensor,
    before: Sequence[Placement],
    placements: Sequence[Placement],
    after: Sequence[int],
) -> DTensor:
    local = view.local(x, tuple(before), tuple(before))
    local = local.reshape(local_shape(after, view.mesh, tuple(placements)))
    return enter(local, view.mesh, tuple(placements), after)


def _reshape_fused(
    view: GlobalView, x: DTensor, parts: int, after: Sequence[int]
) -> DTensor | None:
    """(..., parts * features) -> (..., parts, heads, width): the heads are cut."""
    last = x.dim() - 1
    groups = view_groups(x.shape, after)
    to = next((second for first, second in groups if first == (last,)), ())
    size = view.mesh.size(view.tp)
    if len(to) < 2 or after[to[0]] != parts or after[to[1]] % size:
        return None
    placements = []
    for axis, place in enumerate(x.placements):
        if axis == view.tp:
            placements.append(Shard(to[1]))
        elif isinstance(place, Shard):
            dim = _follow(view, x, place.dim, after)
            if dim is None:
                return None
            placements.append(Shard(dim))
        else:
            placements.append(place)
    return _rearranged(view, x, x.placements, placements, after)


def rearrange(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Functions whose results are views with dims in another order, taken out or put in."""
    x, *rest = args
    if not isinstance(x, DTensor) or any(isinstance(a, Tensor) for a in rest):
        return NotImplemented
    if view.fused_parts(x):
        x = view.whole(x)
    call = lambda t: func(t, *rest, **kwargs)  # noqa: E731
    found = follow_strides(x.shape, call)
    if found is None:
        return NotImplemented
    placements = tuple(
        Replicate()
        if isinstance(place, Shard) and any(place.dim not in origin for _, origin in found)
        else place
        for place in x.placements
    )
    local = view.local(x, placements, placements)
    outcome = call(local) if func.__name__ not in _SIZED else None
    several = isinstance(outcome, (tuple, list))
    made = []
    for i, (shape, origin) in enumerate(found):
        places = tuple(
            Shard(origin.index(p.dim)) if isinstance(p, Shard) else p for p in placements
        )
        if outcome is None:
            part = local.expand(local_shape(shape, view.mesh, places))
        else:
            part = outcome[i] if several else outcome
        made.append(view.note_view(x, enter(part, view.mesh, places, shape)))
    return tuple(made) if several else made[0]


_SIZED = ("expand", "expand_as", "broadcast_to")  # they name sizes, which are global ones


def part(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """chunk and split: as rearrange, but the parts of a fused projection come apart where cut."""
    x = args[0]
    parts = view.fused_parts(x)
    if parts:
        dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
        shapes = [tuple(t.shape) for t in func(meta_like(x.shape), *args[1:], **kwargs)]
        width = x.shape[-1] // parts
        if dim % x.dim() == x.dim() - 1 and [s[-1] for s in shapes] == [width] * parts:
            local = view.local(x, x.placements, x.placements)
            pieces = local.chunk(parts, -1)
            return tuple(
                view.note_view(x, enter(piece, view.mesh, x.placements, shape))
                for piece, shape in zip(pieces, shapes, strict=True)
            )
    return rearrange(view, func, args, kwargs)


def getitem(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Slices of a cut tensor, or rows of a table by indices that are cut."""
    x, index = args
    if isinstance(index, Tensor):
        if index.dtype not in (torch.int64, torch.int32) or not isinstance(x, Tensor):
            return NotImplemented
        lead = tuple(("i", d) for d in range(index.dim()))
        rest = tuple(range(1, x.dim()))
        return run_labels(
            view, lambda t, i: t[i], [x, index], [(0, *rest), lead], [(*lead, *rest)], frozen={0}
        )
    items = index if isinstance(index, tuple) else (index,)
    plain = all(
        item is None or item is Ellipsis or isinstance(item, (int, slice)) for item in items
    )
    bounds = [b for s in items if isinstance(s, slice) for b in (s.start, s.stop, s.step)]
    if not plain or any(isinstance(b, Tensor) for b in bounds):
        return NotImplemented
    return rearrange(view, func, args, kwargs)


def embedding(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Rows of a whole table; a table cut by rows is in `layers.py`."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    given = dict(zip(names, args, strict=False)) | kwargs
    index, weight = given.pop("input"), given.pop("weight")
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        return NotImplemented
    lead = tuple(range(index.dim()))
    return run_labels(
        view, lambda i, w: F.embedding(i, w, **given), [index, weight], [lead, ("row", "d")],
        [(*lead, "d")], frozen={"row"},
    )  # fmt: skip
