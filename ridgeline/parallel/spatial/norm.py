"""Batch, group, instance and layer norm of tiles, with the statistics of the whole image.

One function normalises over any dims, some of which are in pieces: local mean and sum of squared
deviations are merged over the ranks by one small all-reduce per axis (in float64, where squares can be
subtracted), and backward needs one more. It keeps the tile itself, which the layer before keeps as
well, and no second copy. Called by `dispatch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ridgeline.parallel.spatial.comm import reduce_over
from ridgeline.parallel.spatial.tensor import TileTensor, align, groups_of, like

Groups = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True)
class Over:
    """What is normalised over: dims of the tile, `count` elements in all tiles of `groups`."""

    dims: list[int]
    count: int
    eps: float
    groups: Groups


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias over `dims` of all tiles; and mean, biased var.

    Weight and bias are broadcast. They are in here because the normalised image would otherwise be
    kept for them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        over: Over,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        num_local = math.prod(x.shape[d] for d in over.dims)
        var, mean = torch.var_mean(wide, over.dims, correction=0, keepdim=True)
        mean, var = _merge(mean, var, num_local / over.count, over.groups)
        invstd = torch.rsqrt(var + over.eps)
        ctx.save_for_backward(x, mean, invstd, weight)
        ctx.over, ctx.bias_shape = over, None if bias is None else bias.shape
        ctx.mark_non_differentiable(mean, var)
        out = (wide - mean) * invstd
        if weight is not None:
            out = out * weight
        if bias is not None:
            out = out + bias
        return out.to(x.dtype), mean, var

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, invstd, weight = ctx.saved_tensors
        over = ctx.over
        grad = grad.to(mean.dtype)
        normal = (x.to(mean.dtype) - mean) * invstd
        of_weight = of_bias = None
        if ctx.bias_shape is not None:
            of_bias = grad.sum_to_size(ctx.bias_shape)
        if weight is not None:
            of_weight = (grad * normal).sum_to_size(weight.shape).to(weight.dtype)
            grad = grad * weight
        sums = torch.stack(
            [grad.sum(over.dims, keepdim=True), (grad * normal).sum(over.dims, keepdim=True)]
        )
        of_grad, of_normal = (reduce_over(sums, over.groups) / over.count).unbind(0)
        grad = (grad - of_grad - normal * of_normal) * invstd
        return grad.to(x.dtype), of_weight, of_bias, None


def _merge(mean: Tensor, var: Tensor, share: float, groups: Groups) -> tuple[Tensor, Tensor]:
    """Statistics of all ranks from those of each, which has `share` of the elements."""
    kind, mean, var = mean.dtype, mean.double(), var.double()
    if kind == torch.float64:  # nothing wider to subtract squares in: the mean first
        middle = reduce_over(mean * share, groups)
        return middle, reduce_over((var + (mean - middle).square()) * share, groups)
    sums = reduce_over(torch.stack([mean, var + mean.square()]) * share, groups)
    return sums[0].to(kind), (sums[1] - sums[0].square()).clamp(min=0).to(kind)


def normalize(
    local: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], over: Over
) -> tuple[Tensor, Tensor, Tensor]:
    """`weight` and `bias` are seen as `shape`, which is broadcast."""
    weight = None if weight is None else weight.reshape(shape)
    bias = None if bias is None else bias.reshape(shape)
    out, mean, var = _Normalize.apply(local, weight, bias, over)
    return out, mean, var


@torch.no_grad()
def _update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value.to(running.dtype).view_as(running), alpha=momentum)


def _channels(x: Any) -> bool:
    return isinstance(x, TileTensor) and len(x.sizes) >= 3 and x.axes[:2] == (None, None)


def batch_norm(
    func: Callable[..., Tensor],
    input: Any,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not _channels(input) or func is not F.batch_norm:
        return NotImplemented
    x = input
    dims = [0, *range(2, len(x.sizes))]
    groups = groups_of(x, dims)
    if not training or not groups:
        args = (running_mean, running_var, weight, bias, training, momentum, eps)
        return like(func(x.local, *args), x)
    count = math.prod(x.sizes[d] for d in dims)
    shape = [1, -1] + [1] * (len(x.sizes) - 2)
    out, mean, var = normalize(x.local, weight, bias, shape, Over(dims, count, eps, groups))
    _update(running_mean, mean, momentum)
    _update(running_var, var * (count / max(count - 1, 1)), momentum)
    return like(out, x)


def instance_norm(
    func: Callable[..., Tensor],
    input: Any,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not _channels(input) or func is not F.instance_norm:
        return NotImplemented
    x = input
    dims = list(range(2, len(x.sizes)))
    groups = groups_of(x, dims)
    if not use_input_stats or not groups:
        args = (running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        return like(func(x.local, *args), x)
    count = math.prod(x.sizes[d] for d in dims)
    shape = [1, -1] + [1] * (len(x.sizes) - 2)
    out, mean, var = normalize(x.local, weight, bias, shape, Over(dims, count, eps, groups))
    _update(running_mean, mean.mean(0), momentum)
    _update(running_var, var.mean(0) * (count / max(count - 1, 1)), momentum)
    return like(out, x)


def group_norm(
    func: Callable[..., Tensor],
    input: Any,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    if not _channels(input) or input.sizes[1] % num_groups:
        return NotImplemented
    x = input
    groups = groups_of(x, range(2, len(x.sizes)))
    if not groups:
        return like(F.group_norm(x.local, num_groups, weight, bias, eps), x)
    grouped = x.local.unflatten(1, (num_groups, -1))
    count = math.prod(x.sizes[1:]) // num_groups
    over = Over(list(range(2, grouped.dim())), count, eps, groups)
    shape = [1, num_groups, -1] + [1] * (len(x.sizes) - 2)
    return like(normalize(grouped, weight, bias, shape, over)[0].flatten(1, 2), x)


def layer_norm(
    func: Callable[..., Tensor],
    input: Any,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    if not isinstance(input, TileTensor):
        return NotImplemented
    x = input
    num = len(x.sizes)
    if tuple(normalized_shape) != x.sizes[num - len(normalized_shape) :]:
        return NotImplemented  # torch itself has the words for it
    dims = list(range(num - len(normalized_shape), num))
    groups = groups_of(x, dims)
    if not groups:
        return like(F.layer_norm(x.local, normalized_shape, weight, bias, eps), x)
    count = math.prod(x.sizes[d] for d in dims)
    weight, bias = (align(v, x.axes, x.sizes, x.grid) for v in (weight, bias))
    shape = [x.local.shape[d] for d in dims]
    return like(normalize(x.local, weight, bias, shape, Over(dims, count, eps, groups))[0], x)


HANDLERS: dict[str, Callable[..., Any]] = {
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "group_norm": group_norm,
    "layer_norm": layer_norm,
}
