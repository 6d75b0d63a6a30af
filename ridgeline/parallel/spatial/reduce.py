"""Reductions and losses of tiles.

A reduction over a dim in pieces is the local one and then one over the ranks; what comes out has no
trace of the image any more and is a plain tensor, the same on every rank. A loss is its values element
by element, then a mean or a sum of them. Called by `dispatch.py`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.parallel.spatial.comm import largest_over, sum_over
from ridgeline.parallel.spatial.tensor import TileTensor, align, as_dim, groups_of, like


def _dims(x: TileTensor, dim: Any) -> list[int]:
    num = len(x.sizes)
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(num))
    given = [dim] if isinstance(dim, int) else list(dim)
    return sorted(as_dim(d, num) for d in given)


def _left(local: Tensor, x: TileTensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A reduced tensor (dims kept) as a tile of the dims that are left."""
    kept = [-1 if d in dims else d for d in range(len(x.sizes))]
    if keepdim:
        return like(local, x, kept)
    return like(local.squeeze(tuple(dims)) if dims else local, x, [d for d in kept if d >= 0])


def _sum(x: TileTensor, dims: list[int], dtype: torch.dtype | None) -> Tensor:
    local = x.local.sum(dims, keepdim=True, dtype=dtype)
    return sum_over(local, groups_of(x, dims))


def sum_(
    func: Callable[..., Tensor],
    input: Any,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if not isinstance(input, TileTensor):
        return NotImplemented
    dims = _dims(input, dim)
    return _left(_sum(input, dims, dtype), input, dims, keepdim)


def mean(
    func: Callable[..., Tensor],
    input: Any,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if not isinstance(input, TileTensor):
        return NotImplemented
    dims = _dims(input, dim)
    kind = dtype or input.dtype
    if not kind.is_floating_point:
        return NotImplemented  # torch itself has the words for it
    if not groups_of(input, dims):
        local = input.local.mean(dims, keepdim=True, dtype=dtype)
    else:
        # Summed in float32 at least: the sum of an image can be past what float16 holds.
        wide = torch.promote_types(kind, torch.float32)
        count = math.prod(input.sizes[d] for d in dims)
        local = (_sum(input, dims, wide) / count).to(kind)
    return _left(local, input, dims, keepdim)


def largest(func: Callable[..., Tensor], input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """amax, amin, and max and min of everything, along a dim, or of two tensors."""
    if isinstance(dim, Tensor):
        return (torch.maximum if func.__name__ == "max" else torch.minimum)(input, dim)
    if not isinstance(input, TileTensor):
        return NotImplemented
    name = func.__name__
    if name in ("max", "min") and dim is not None:
        return _along(func, input, dim, keepdim)
    dims = _dims(input, dim)
    sign = -1 if name in ("min", "amin") else 1
    value = largest_over(input.local * sign, dims, groups_of(input, dims)) * sign
    return _left(value, input, dims, keepdim)


def _along(func: Callable[..., Any], x: TileTensor, dim: Any, keepdim: bool = False) -> Any:
    """Values and indices, or indices alone, along one dim that is whole."""
    if not isinstance(dim, int) or x.is_split(as_dim(dim, len(x.sizes))):
        return NotImplemented
    at = as_dim(dim, len(x.sizes))
    found = func(x.local, at, keepdim=True)
    if isinstance(found, Tensor):
        return _left(found, x, [at], keepdim)
    return type(found)([_left(part, x, [at], keepdim) for part in found])


def along(func: Callable[..., Any], input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return _along(func, input, dim, keepdim) if isinstance(input, TileTensor) else NotImplemented


def reduce_whole(
    func: Callable[..., Any], input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """Reductions that are known for whole dims alone."""
    if not isinstance(input, TileTensor) or dim is None:
        return NotImplemented
    dims = _dims(input, dim)
    if any(input.is_split(d) for d in dims):
        return NotImplemented
    over: Any = dims[0] if isinstance(dim, int) else dims
    return _left(func(input.local, over, keepdim=True, **kwargs), input, dims, keepdim)


def variance(
    func: Callable[..., Any], input: Any, dim: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """var, std, var_mean and std_mean; `unbiased` is the old word for `correction`."""
    if not isinstance(input, TileTensor):
        return NotImplemented
    if isinstance(dim, bool):  # var(unbiased)
        args, dim = (dim, *args), None
    names = ("unbiased", "keepdim")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    correction = given.get("correction")
    if correction is None:
        correction = 1 if given.get("unbiased", True) else 0
    dims, keepdim = _dims(input, dim), bool(given.get("keepdim", False))
    count = math.prod(input.sizes[d] for d in dims)
    groups = groups_of(input, dims)
    middle = sum_over(input.local.sum(dims, keepdim=True), groups) / count
    squares = (input.local - middle).square().sum(dims, keepdim=True)
    value = sum_over(squares, groups) / max(count - correction, 0)
    if func.__name__.startswith("std"):
        value = value.sqrt()
    if func.__name__.endswith("_mean"):
        return _left(value, input, dims, keepdim), _left(middle, input, dims, keepdim)
    return _left(value, input, dims, keepdim)


# Losses


def elementwise_loss(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    """mse_loss, l1_loss and their like: every tensor among the arguments is broadcast."""
    bound = inspect.signature(func).bind(*args, **kwargs).arguments
    x = next((v for v in bound.values() if isinstance(v, TileTensor)), None)
    shapes = [v.shape for v in bound.values() if isinstance(v, Tensor)]
    if x is None or bound.get("reduce") is not None or bound.get("size_average") is not None:
        return NotImplemented
    if torch.broadcast_shapes(*shapes) != x.sizes:
        return NotImplemented
    reduction = bound.pop("reduction", "mean")
    local = {name: align(v, x.axes, x.sizes, x.grid) for name, v in bound.items()}
    each = like(func(**local, reduction="none"), x)
    if reduction == "batchmean":
        return each.sum() / x.sizes[0]
    return _reduced(each, reduction)


def _reduced(each: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.mean()


def class_loss(
    func: Callable[..., Tensor],
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """cross_entropy and nll_loss over every pixel."""
    if not isinstance(input, TileTensor) or len(input.sizes) < 3 or input.axes[1] is not None:
        return NotImplemented
    if size_average is not None or reduce is not None:
        return NotImplemented
    x = input
    per_pixel = [0, *range(2, len(x.sizes))]
    axes = [x.axes[d] for d in per_pixel]
    is_probability = target.dim() == len(x.sizes)
    if is_probability:
        local_target = align(target, x.axes, x.sizes, x.grid)
    else:
        local_target = align(target, axes, [x.sizes[d] for d in per_pixel], x.grid)
    extra = {"label_smoothing": label_smoothing} if func is F.cross_entropy else {}
    each = like(
        func(x.local, local_target, weight, ignore_index=ignore_index, reduction="none", **extra),
        x,
        per_pixel,
    )
    if reduction != "mean" or is_probability:
        return _reduced(each, reduction)
    # The mean is over the weights of the pixels that count: more than 16 bits can count.
    counted = local_target != ignore_index
    wide = torch.promote_types(each.dtype, torch.float32)
    if weight is None:
        amounts = counted.to(wide)
    else:
        amounts = weight.to(wide)[local_target.where(counted, 0)] * counted
    return (each.to(wide).sum() / like(amounts, x, per_pixel).sum()).to(each.dtype)


_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div poisson_nll_loss "
    "binary_cross_entropy_with_logits soft_margin_loss"
)

HANDLERS: dict[str, Callable[..., Any]] = {
    "sum": sum_,
    "mean": mean,
    "amax": largest,
    "amin": largest,
    "max": largest,
    "min": largest,
    "argmax": along,
    "argmin": along,
    "median": along,
    "any": reduce_whole,
    "all": reduce_whole,
    "logsumexp": reduce_whole,
    "prod": reduce_whole,
    "count_nonzero": reduce_whole,
    "var": variance,
    "std": variance,
    "var_mean": variance,
    "std_mean": variance,
    "cross_entropy": class_loss,
    "nll_loss": class_loss,
    **dict.fromkeys(_LOSSES.split(), elementwise_loss),
}
