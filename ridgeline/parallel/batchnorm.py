"""Batch norm over the samples of all ranks.

Written by hand because torch's SyncBatchNorm runs on accelerators only, and counts a borrowed sample
(see `share.py`) as a real one. One all-gather forward (mean, sum of squared deviations and count of
each rank, merged without cancellation), one all-reduce backward. Called by `apply.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ridgeline.errors import UsageError
from ridgeline.parallel.mesh import all_gather_single
from ridgeline.parallel.share import Share


class _Normalize(torch.autograd.Function):
    """x -> (x - mean) / sqrt(var + eps) with statistics of every rank; no affine part."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, num_real: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [0, *range(2, x.dim())]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = wide.new_full((1,), x.numel() // x.shape[1] if num_real else 0)
        var, mean = torch.var_mean(wide, dims, correction=0)
        local = torch.cat([mean, var * count, count])
        world = dist.get_world_size(group)
        gathered = local.new_empty(world * local.numel())
        all_gather_single(gathered, local, group=group)
        means, deviations, counts = gathered.view(world, -1).split(
            [x.shape[1], x.shape[1], 1], dim=1
        )
        total = counts.sum()
        divisor = total.clamp(min=1)  # 0 when all ranks only borrow: a filler, but not a NaN
        mean = (means * counts).sum(0) / divisor
        spread = deviations * (counts > 0) + counts * (means - mean) ** 2
        var = spread.sum(0) / divisor
        invstd = torch.rsqrt(var + eps)
        shape = [1, -1] + [1] * (x.dim() - 2)
        normal = (wide - mean.view(shape)) * invstd.view(shape)
        ctx.save_for_backward(normal, invstd, divisor)
        ctx.num_real, ctx.group, ctx.dtype = num_real, group, x.dtype
        ctx.mark_non_differentiable(mean, var, total)
        # Wide, so that weight and bias see it, and their gradients are taken of it, unrounded.
        return normal, mean, var, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        normal, invstd, divisor = ctx.saved_tensors
        dims = [0, *range(2, normal.dim())]
        shape = [1, -1] + [1] * (normal.dim() - 2)
        grad = grad.to(normal.dtype)
        sums = torch.stack([grad.sum(dims), (grad * normal).sum(dims)])
        dist.all_reduce(sums, group=ctx.group)
        if ctx.num_real == 0:  # the borrowed sample is in nobody's statistics
            return torch.zeros_like(normal, dtype=ctx.dtype), None, None, None
        mean_grad, mean_grad_normal = (sums / divisor).unbind(0)
        dx = grad - mean_grad.view(shape) - normal * mean_grad_normal.view(shape)
        return (dx * invstd.view(shape)).to(ctx.dtype), None, None, None


class SyncBatchNorm(_BatchNorm):
    """Stands in for BatchNorm1d, 2d or 3d: the same parameters, buffers and evaluation."""

    group: dist.ProcessGroup
    share: Share

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            # Without running statistics those of this rank's samples: in an evaluation a rank may
            # have none, and the others would wait for it.
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=not self.track_running_stats,
                eps=self.eps,
            )
        out, mean, var, total = _Normalize.apply(input, self.eps, self.share.num_real, self.group)
        if self.track_running_stats and self.training:
            self._update_running(mean, var, total)
        if self.affine:
            shape = [1, -1] + [1] * (input.dim() - 2)
            out = out * self.weight.view(shape) + self.bias.view(shape)
        # Never what backward has kept: an in-place activation may follow.
        return out.to(input.dtype, copy=not self.affine)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, var: Tensor, total: Tensor) -> None:
        seen = (total > 0).to(self.running_mean.dtype)
        self.num_batches_tracked.add_(seen.to(self.num_batches_tracked.dtype))
        if self.momentum is None:  # cumulative average
            factor = seen / self.num_batches_tracked.clamp(min=1)
        else:
            factor = seen * self.momentum
        unbiased = var * (total / (total - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def apply_sync_batch_norm(model: nn.Module, group: dist.ProcessGroup, share: Share) -> nn.Module:
    """Replace every batch norm in `model` by one over all ranks of `group`."""
    made: dict[int, SyncBatchNorm] = {}

    def convert(module: nn.Module, path: str) -> nn.Module:
        if isinstance(module, _KNOWN):
            _require_plain(module, path)
            # One norm may stand in several places; it stays one.
            if id(module) not in made:
                made[id(module)] = _convert(module, group, share)
            return made[id(module)]
        for name, child in list(module._modules.items()):
            if child is not None:
                changed = convert(child, f"{path}.{name}" if path else name)
                if changed is not child:
                    setattr(module, name, changed)
        return module

    return convert(model, "")


_KNOWN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _require_plain(norm: _BatchNorm, path: str) -> None:
    """A subclass with a forward of its own does more than normalise, and that would be lost."""
    if type(norm).forward not in {known.forward for known in _KNOWN}:
        raise UsageError(
            f"ddp.sync_batch_norm=true: {path or 'the model'} is a {type(norm).__name__}, a batch "
            "norm with a forward of its own, which cannot be replaced; use plain BatchNorm layers "
            "or leave ddp.sync_batch_norm out"
        )


def _convert(norm: _BatchNorm, group: dist.ProcessGroup, share: Share) -> SyncBatchNorm:
    new = SyncBatchNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats
    )
    new.group, new.share = group, share
    # The same Parameter and buffer objects, so that ties and an optimizer made before stay valid.
    for name in ("weight", "bias"):
        new.register_parameter(name, getattr(norm, name))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        new.register_buffer(name, getattr(norm, name))
    new.train(norm.training)
    return new
