"""Cross-entropy of logits that are cut along the classes: no rank ever holds a whole row of them.

The maximum, the sum of exponentials and the target's logit are each reduced over the ranks, one number
a position; the gradient is local. Written by hand because torch's `loss_parallel` takes over every
cross-entropy of a program and knows neither label smoothing nor an uneven vocabulary. Called by
`view.py` for `F.cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ridgeline.parallel.tensor.move import enter
from ridgeline.parallel.tensor.rules import elementwise, reduction
from ridgeline.parallel.tensor.split import chunk_sizes

if TYPE_CHECKING:
    from ridgeline.parallel.tensor.view import GlobalView

_NAMES = ("input", "target", "weight")


def cross_entropy(view: GlobalView, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """F.cross_entropy with class indices, the classes cut over the tensor axis or not."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    logits, target = given["input"], given["target"]
    old_words = given.get("size_average") is not None or given.get("reduce") is not None
    if given.get("weight") is not None or old_words or not isinstance(logits, DTensor):
        return NotImplemented
    if target.is_floating_point() or logits.dim() < 2:
        return NotImplemented
    ignore, smoothing = given.get("ignore_index", -100), given.get("label_smoothing", 0.0)
    # Dims of the logits other than the classes are those of the target, in order.
    places: list[Placement] = []
    others: list[Placement] = []
    runs = []
    for axis, place in enumerate(logits.placements):
        # Runs of positions stay as they are; those of classes would need targets in their order.
        runs.append(view.runs(logits)[axis] if place.is_shard() and place.dim != 1 else 1)
        if not isinstance(place, Shard) or (place.dim == 1 and axis != view.tp):
            places.append(Replicate())
            others.append(Replicate())
        else:
            places.append(place)
            whole = place.dim == 1
            others.append(Replicate() if whole else Shard(place.dim - (place.dim > 1)))
    local = view.local(logits, tuple(places), tuple(places), tuple(runs))
    target = view.local(target, tuple(others), tuple(others), tuple(runs))
    if view.tp is not None and places[view.tp] == Shard(1):
        lengths = chunk_sizes(logits.shape[1], view.mesh.size(view.tp))
        rank = view.mesh.get_local_rank(view.tp)
        first, group = sum(lengths[:rank]), view.mesh.get_group(view.tp)
    else:
        first, group = 0, None
    wide = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
    each_local = _Loss.apply(wide, target, logits.shape[1], first, group, ignore, smoothing)
    # Sums and counts of positions are taken in the wide type, and only the result is narrow again.
    narrow = each_local.dtype if torch.is_autocast_enabled(local.device.type) else local.dtype
    shape = (logits.shape[0], *logits.shape[2:])
    each = view.mark_runs(enter(each_local, view.mesh, tuple(others), shape), tuple(runs))
    how = given.get("reduction", "mean")
    if how == "none":
        return elementwise(view, torch.Tensor.to, (each, narrow), {})
    total = reduction(view, torch.sum, (each,), {})
    if how == "sum":
        return elementwise(view, torch.Tensor.to, (total, narrow), {})
    counted = enter((target != ignore).to(each_local.dtype), view.mesh, tuple(others), shape)
    counted = view.mark_runs(counted, tuple(runs))
    mean = elementwise(view, torch.div, (total, reduction(view, torch.sum, (counted,), {})), {})
    return elementwise(view, torch.Tensor.to, (mean, narrow), {})


class _Loss(torch.autograd.Function):
    """The loss of each position, classes in dim 1 of which this rank has those from `first` on."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        num_classes: int,
        first: int,
        group: dist.ProcessGroup | None,
        ignore: int,
        smoothing: float,
    ) -> Tensor:
        here = logits.shape[1]
        shape = [logits.shape[0], *logits.shape[2:]]
        top = logits.amax(1) if here else logits.new_full(shape, -torch.inf)
        if group is not None:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        shifted = logits - top.unsqueeze(1)
        mine = (target >= first) & (target < first + here) & (target != ignore)
        index = torch.where(mine, target - first, 0).unsqueeze(1)
        if here:
            hit = torch.where(mine, shifted.gather(1, index).squeeze(1), 0)
        else:
            hit = torch.zeros_like(top)
        exponentials = shifted.exp()
        sums = torch.stack([exponentials.sum(1), hit, shifted.sum(1)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        norm, hit, total = sums.unbind(0)
        loss = norm.log() - (1 - smoothing) * hit
        if smoothing:
            loss = loss - smoothing * total / num_classes
        valid = target != ignore
        ctx.save_for_backward(exponentials / norm.unsqueeze(1), index, mine, valid)
        ctx.num_classes, ctx.smoothing = num_classes, smoothing
        return torch.where(valid, loss, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        softmax, index, mine, valid = ctx.saved_tensors
        d_logits = softmax - ctx.smoothing / ctx.num_classes if ctx.smoothing else softmax.clone()
        if softmax.shape[1]:
            share = mine.unsqueeze(1).to(softmax.dtype) * (1 - ctx.smoothing)
            d_logits.scatter_add_(1, index, -share)
        d_logits *= torch.where(valid, grad, 0).unsqueeze(1)
        return d_logits, None, None, None, None, None, None
