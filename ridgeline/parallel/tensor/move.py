"""The border between plain tensors and DTensors, with the gradient's placement said on both sides.

DTensor is used as a value with a global shape, a placement on each mesh axis and `redistribute`; what
computes is plain torch on plain local tensors. `leave` gives the local tensor of a DTensor in a
placement, `enter` makes a DTensor of a local tensor. Both are differentiable, and a gradient that
comes back through `leave` is always in the placement of the DTensor itself, so that gradients of
several uses add up without thought. A DTensor that was made of a local tensor remembers it (`own_of`):
whoever wants it just as it is gets that tensor, and no gradient has to cross the border twice. Called by
`view.py` and by every rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ridgeline.parallel.tensor.split import chunk_sizes

Placements = tuple[Placement, ...]


def leave(x: DTensor, placements: Placements, grads: Placements) -> Tensor:
    """The local tensor of `x` in `placements`; `grads` says what a rank's gradient of it is."""
    return _Leave.apply(x, placements, grads)  # type: ignore[no-any-return]


def enter(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    shape: Sequence[int],
    grads: Placements | None = None,
) -> DTensor:
    """A DTensor of `shape`; the gradient that goes back to `local` is brought to `grads` first."""
    shape, kept = torch.Size(shape), plain_gradient(placements)
    if local.requires_grad and torch.is_grad_enabled():
        made = _Enter.apply(local, mesh, placements, shape, kept if grads is None else grads)
    else:
        local = local.detach()
        made = _build(local, mesh, placements, shape)
    if grads is None or grads == kept:
        with torch._C.DisableTorchFunction():
            made.__dict__["_own"] = local, made.grad_fn
    return made  # type: ignore[no-any-return]


def own_of(x: DTensor) -> Tensor | None:
    """The local tensor that `x` was made of, where its gradient is the local part of `x`'s: not when a
    function of somebody's own has given `x` another history since."""
    own, made_by = x.__dict__.get("_own", (None, None))
    if own is None:
        return None
    with torch._C.DisableTorchFunction():
        is_same = x.grad_fn is made_by and x.requires_grad == own.requires_grad
    return own if is_same else None


def redistribute(x: DTensor, placements: Placements) -> DTensor:
    """`x` in other placements, for where no gradients are followed. Also makes Partial of Shard and
    Replicate."""
    if placements == x.placements:
        return x
    wanted = tuple(
        have if want.is_partial() and not have.is_partial() else want
        for have, want in zip(x.placements, placements, strict=True)
    )
    # One axis at a time, the inner of two cuts of a dim first: torch would do so too, and warn.
    for axis in reversed(range(len(wanted))):
        if wanted[axis].is_replicate() and not x.placements[axis].is_replicate():
            x = x.redistribute(placements=_with(x.placements, axis, Replicate()))
    if wanted != x.placements:
        x = x.redistribute(placements=wanted)
    for axis, want in enumerate(placements):
        if want.is_partial() and not x.placements[axis].is_partial():
            x = _as_partial(x, axis)
    return x


def local_of(x: DTensor) -> Tensor:
    """For where no gradients are followed."""
    local = x._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


@lru_cache(maxsize=4096)
def plain_gradient(placements: Placements) -> Placements:
    """What the gradient of a tensor in `placements` is kept in: the same, but never pending."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def local_shape(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Placements,
    runs: Sequence[int] | None = None,
) -> list[int]:
    """Shape of this rank's part of a tensor of the global `shape`; `runs` as in `runs.py`."""
    local = list(shape)
    for dim in {p.dim for p in placements if isinstance(p, Shard)}:
        axes = [axis for axis, place in enumerate(placements) if place == Shard(dim)]
        num = runs[axes[0]] if runs is not None else 1
        length = local[dim] // num
        for axis in axes:
            length = chunk_sizes(length, mesh.size(axis))[mesh.get_local_rank(axis)]
        local[dim] = num * length
    return local


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: Placements, grads: Placements) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape, ctx.grads = x.device_mesh, x.placements, x.shape, grads
        local = local_of(redistribute(x, placements))
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None, None]:
        whole = _build(grad.contiguous(), ctx.mesh, ctx.grads, ctx.shape)
        return redistribute(whole, plain_gradient(ctx.placements)), None, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        mesh: DeviceMesh,
        placements: Placements,
        shape: torch.Size,
        grads: Placements,
    ) -> DTensor:
        ctx.grads = grads
        return _build(local.view_as(local), mesh, placements, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None, None, None, None]:
        return local_of(redistribute(grad, ctx.grads)), None, None, None, None


def _build(local: Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> DTensor:
    # What `DTensor.from_local` does, without its node of autograd and its checks: 90 us a call.
    spec = _spec(mesh, placements, shape, local.dtype)
    return DTensor.__new__(DTensor, local, spec, requires_grad=local.requires_grad)


@lru_cache(maxsize=4096)
def _spec(
    mesh: DeviceMesh, placements: Placements, shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def _as_partial(x: DTensor, axis: int) -> DTensor:
    """A sum over `axis` that gives `x`: each rank's own part and zeros, or all of it on the first."""
    mesh, placement = x.device_mesh, x.placements[axis]
    if x.placements.count(placement) > 1:  # two axes cut one dim, the second within the first
        placement = Replicate()
        x = x.redistribute(placements=_with(x.placements, axis, placement))
    local, rank = local_of(x), mesh.get_local_rank(axis)
    if isinstance(placement, Shard):
        shape = local_shape(x.shape, mesh, _with(x.placements, axis, Replicate()))
        sizes = chunk_sizes(shape[placement.dim], mesh.size(axis))
        whole = local.new_zeros(shape)
        whole.narrow(placement.dim, sum(sizes[:rank]), sizes[rank]).copy_(local)
        local = whole
    elif rank:
        local = torch.zeros_like(local)
    return _build(local, mesh, _with(x.placements, axis, Partial()), x.shape)


def _with(placements: Placements, axis: int, placement: Placement) -> Placements:
    return (*placements[:axis], placement, *placements[axis + 1 :])
