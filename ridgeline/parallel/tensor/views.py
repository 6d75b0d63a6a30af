"""Rules for functions that only rearrange: views, permutations, indices, parts, lookups by index.

A cut dim that comes through whole stays cut; a view may turn it into another dim if the pieces come
out the same, or into the runs of a larger one (`runs.py`), until a view or a split takes those apart.
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
from ridgeline.parallel.tensor.runs import cut_dims, follow_cut
from ridgeline.parallel.tensor.shapes import follow_strides, meta_like

if TYPE_CHECKING:
    from ridgeline.parallel.tensor.view import GlobalView


def reshape(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """view, reshape, flatten, unflatten and their like."""
    x = args[0]
    if not isinstance(x, DTensor) or any(isinstance(a, torch.dtype) for a in args):
        return NotImplemented
    if func.__name__ in ("view_as", "reshape_as"):
        after = tuple(args[1].shape)
    else:
        after = tuple(func(meta_like(x.shape), *args[1:], **kwargs).shape)
    places: list[Placement] = []
    runs: list[int] = []
    origin: dict[int, int] = {}
    kept: list[Placement] = []
    for place, num in zip(x.placements, view.runs(x), strict=True):
        to = _follow(view, x, place.dim, num, after) if isinstance(place, Shard) else None
        if to is not None and origin.setdefault(to[0], place.dim) != place.dim:
            to = None  # another dim's pieces are in the same one
        places.append(Replicate() if to is None else Shard(to[0]))
        runs.append(1 if to is None else to[1])
        kept.append(place if to is not None else Replicate())
    pairs = zip(kept, view.runs(x), strict=True)
    before = tuple(num if place.is_shard() else 1 for place, num in pairs)
    local = view.local(x, tuple(kept), tuple(kept), before)
    local = local.reshape(local_shape(after, view.mesh, tuple(places), runs))
    made = view.mark_runs(enter(local, view.mesh, tuple(places), after), tuple(runs))
    return view.note_view(x, made)


def _follow(
    view: GlobalView, x: DTensor, dim: int, runs: int, after: Sequence[int]
) -> tuple[int, int] | None:
    pieces = 1
    for axis, place in enumerate(x.placements):
        if place == Shard(dim):
            pieces *= view.mesh.size(axis)
    return follow_cut(x.shape, after, dim, runs, pieces)


def rearrange(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Functions whose results are views with dims in another order, taken out or put in."""
    x, *rest = args
    if not isinstance(x, DTensor) or any(isinstance(a, Tensor) for a in rest):
        return NotImplemented
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
    pairs = zip(placements, view.runs(x), strict=True)
    runs = tuple(num if place.is_shard() else 1 for place, num in pairs)
    local = view.local(x, placements, placements, runs)
    outcome = call(local) if func.__name__ not in _SIZED else None
    several = isinstance(outcome, (tuple, list))
    made = []
    for i, (shape, origin) in enumerate(found):
        places = tuple(
            Shard(origin.index(p.dim)) if isinstance(p, Shard) else p for p in placements
        )
        if outcome is None:
            part = local.expand(local_shape(shape, view.mesh, places, runs))
        else:
            part = outcome[i] if several else outcome
        result = view.mark_runs(enter(part, view.mesh, places, shape), runs)
        made.append(view.note_view(x, result))
    return tuple(made) if several else made[0]


_SIZED = ("expand", "expand_as", "broadcast_to")  # they name sizes, which are global ones


def part(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """chunk and split: as rearrange, but the runs of a dim come apart where they are cut."""
    x = args[0]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    num = (
        cut_dims(x.placements, view.runs(x)).get(dim % x.dim(), 1) if isinstance(x, DTensor) else 1
    )
    if num > 1:
        shapes = [tuple(t.shape) for t in func(meta_like(x.shape), *args[1:], **kwargs)]
        if [shape[dim] for shape in shapes] == [x.shape[dim] // num] * num:
            pairs = zip(x.placements, view.runs(x), strict=True)
            runs = tuple(1 if place == Shard(dim % x.dim()) else n for place, n in pairs)
            return tuple(
                view.note_view(x, view.mark_runs(enter(t, view.mesh, x.placements, shape), runs))
                for t, shape in zip(view.own(x).chunk(num, dim), shapes, strict=True)
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
