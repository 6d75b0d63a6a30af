"""The norm of a gradient that no rank has whole, and those of single parameters.

Squares are summed where the parts are: over the tensor-parallel ranks for parameters that are split
among them, over the ranks that have different experts, over the shards of ZeRO, over the stages of a
pipeline. A parameter that two stages hold (a tied embedding), or all shards (one without dimensions),
counts once. Called by `arranged.py` and, for optimizers that look at each layer, `train/setup.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.optim.layerwise import Whole
from ridgeline.optim.update import norms_of

if TYPE_CHECKING:
    from ridgeline.parallel.arranged import Arranged


def build_norm(built: Arranged) -> Callable[[], Tensor]:
    """A function that gives the norm of the whole gradient, the same on every rank."""
    mesh = built.mesh
    splits = built.view.splits if built.view is not None else {}
    elsewhere = built.staged.counted_elsewhere if built.staged is not None else frozenset()
    trainables = [t for t in built.trainables() if t.name not in elsewhere]
    if built.is_fully_sharded and mesh.axis_rank("shard") > 0:
        trainables = [t for t in trainables if t.num_dims > 0]  # the first shard counts the others
    spread = built.experts.names if built.experts is not None else frozenset()
    experts = [t.parameter for t in trainables if t.name in spread]
    split = [t.parameter for t in trainables if t.name in splits]
    whole = [t.parameter for t in trainables if t.name not in splits and t.name not in spread]
    shards = mesh.group("shard") if built.layout.zero else None
    # One type on all ranks, also on one that has nothing to sum; float32 at least.
    is_double = any(t.parameter.dtype.to_real() is torch.float64 for t in built.trainables())
    wide = torch.float64 if is_double else torch.float32

    def norm() -> Tensor:
        total = _square_sum(split, wide, mesh.device)
        group = mesh.group("tp")
        if group is not None and splits:
            dist.all_reduce(total, group=group)
        total += _square_sum(whole, wide, mesh.device)
        if shards is not None:
            dist.all_reduce(total, group=shards)
        if built.experts is not None:
            apart = _square_sum(experts, wide, mesh.device)
            for group in built.experts.groups.parts:
                dist.all_reduce(apart, group=group)
            total += apart
        stages = mesh.group("pp")
        if stages is not None:
            dist.all_reduce(total, group=stages)
        return total.sqrt()

    return norm


def build_whole(built: Arranged) -> Whole | None:
    """A function that sums squares of this rank's parts, a column for each of `built.trainables()`, over
    the ranks that share a parameter; None where every rank has them whole.

    Ranks that share one agree on the columns of the sum: of ZeRO's flat shards each has pieces of other
    parameters, and all know of every one.
    """
    mesh, trainables = built.mesh, built.trainables()
    splits = built.view.splits if built.view is not None else {}
    flat = any(flat.num_shards > 1 for flat in built.flats)
    shards = mesh.group("shard") if flat or built.is_fully_sharded else None
    halves = mesh.group("tp") if splits else None
    experts = built.experts
    if shards is None and halves is None and experts is None:
        return None
    # In an order of their own: uneven halves of a split model are cut into other buckets.
    known = {t.name for t in trainables} | {name for flat in built.flats for name in flat.names}
    names = sorted(known | (experts.everywhere if experts is not None else frozenset()))
    places = {name: place for place, name in enumerate(names)}
    mine = torch.tensor([places[t.name] for t in trainables], device=mesh.device)
    split = torch.tensor([name in splits for name in names], device=mesh.device)
    spread = torch.tensor(
        [experts is not None and name in experts.everywhere for name in names], device=mesh.device
    )

    def whole(squares: Tensor) -> Tensor:
        total = squares.new_zeros(len(squares), len(names), device=mesh.device)
        total.index_add_(1, mine, squares.to(mesh.device))
        apart = total * spread
        if shards is not None:
            dist.all_reduce(total, group=shards)
        if halves is not None:
            added = total * split
            dist.all_reduce(added, group=halves)
            total = torch.where(split, added, total)
        if experts is not None:
            for group in experts.groups.parts:
                dist.all_reduce(apart, group=group)
            total = torch.where(spread, apart, total)
        return total[:, mine].to(squares.device)

    return whole


def _square_sum(
    parameters: list[torch.nn.Parameter], wide: torch.dtype, device: torch.device
) -> Tensor:
    """Of this rank's own gradients, on the device of the ranks' network."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [getattr(g, "_local_tensor", g) for g in gradients]
    local = [g for g in local if g.numel()]
    places: dict[torch.device, list[Tensor]] = {}
    for gradient in local:
        places.setdefault(gradient.device, []).append(gradient)
    total = torch.zeros((), dtype=wide, device=device)
    for members in places.values():
        # Together, since a large model has hundreds and the device does nothing else meanwhile.
        norms = torch.stack(norms_of(members, wide))
        total += norms.square().sum().to(device)
    return total
