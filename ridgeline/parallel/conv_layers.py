"""Batch norms and max pools with kernels of our own, in a compiled model: `tune.conv_kernels`.

Forward statistics and both ways of a pooling are operators (`conv_ops.py`); normalisation, running
statistics and the gradient are plain torch, which the compiler fuses with the activations and sums around
them. Backward keeps the norm's input as it came, in bf16 where that is what it was, and a byte for each
pooled value. Layers keep their parameters, buffers and names. They do what they always did in evaluation,
and with tensors whose channels do not lie together. Called by `apply.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.parallel.conv_ops import (
    LAST,
    MOST_IN_WINDOW,
    POOL_BACKWARD_OP,
    POOL_OP,
    channel_moments,
)
from ridgeline.parallel.operators import as_type


class _Normalize(torch.autograd.Function):
    """(x - mean) * rstd * weight + bias with the statistics of x itself, whose part in the gradient is
    written out here: two sums over x, and then a pass over it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.of_bias = None if bias is None else bias.dtype
        out = (as_type(x, mean.dtype) - _spread(mean)) * _spread(rstd)
        if weight is not None:
            out = out * _spread(weight)
        if bias is not None:
            out = out + _spread(bias)
        return as_type(out, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight = ctx.saved_tensors  # once: see parallel/recompute.py
        num = x.numel() // x.shape[1]
        grad = as_type(grad, mean.dtype)
        gap = as_type(x, mean.dtype) - _spread(mean)
        total = grad.sum((0, 2, 3))
        along = (grad * gap).sum((0, 2, 3)) * rstd
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            factor = rstd if weight is None else rstd * weight
            parallel = gap * _spread(rstd * along / num)
            grad_x = as_type((grad - _spread(total / num) - parallel) * _spread(factor), x.dtype)
        if weight is not None:
            grad_weight = as_type(along, weight.dtype)
        grad_bias = None if ctx.of_bias is None else as_type(total, ctx.of_bias)
        return grad_x, None, None, grad_weight, grad_bias


def _spread(channels: Tensor) -> Tensor:
    return channels[None, :, None, None]


class _MaxPool(torch.autograd.Function):
    """Sizes come one by one, as plain constants, which a compiler takes in any version."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kh: int, kw: int, sh: int, sw: int, ph: int, pw: int
    ) -> Tensor:
        ctx.window, ctx.size = ([kh, kw], [sh, sw], [ph, pw]), list(x.shape[2:])
        out: Tensor
        out, offsets = POOL_OP(x, *ctx.window)
        ctx.save_for_backward(offsets)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,) = ctx.saved_tensors
        made = POOL_BACKWARD_OP(grad, offsets, ctx.size, *ctx.window)
        return made, None, None, None, None, None, None


class KernelBatchNorm2d(nn.BatchNorm2d):
    """A batch norm after `apply_conv_kernels`, which changes its class and nothing else of it."""

    def forward(self, input: Tensor) -> Tensor:
        # One value a channel has no variance, which torch says.
        fits = _is_channels_last(input) and input.numel() > input.shape[1]
        if not self.training or not fits:
            return super().forward(input)
        with torch.no_grad():
            mean, variance = channel_moments(input.detach())
            rstd = torch.rsqrt(variance + self.eps)
            if self.track_running_stats:
                self._update_running(mean, variance, input.numel() // input.shape[1])
        out: Tensor = _Normalize.apply(input, mean, rstd, self.weight, self.bias)
        return out

    def _update_running(self, mean: Tensor, variance: Tensor, num: int) -> None:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:  # cumulative average
            factor = 1.0 / self.num_batches_tracked.to(mean.dtype)
        else:
            factor = self.momentum
        unbiased = variance * (num / (num - 1))
        for running, found in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running + (found - running) * factor)


class KernelMaxPool2d(nn.MaxPool2d):
    """The same of a max pooling."""

    def forward(self, input: Tensor) -> Tensor:
        kernel, stride, padding = window_of(self)
        fits = _is_channels_last(input) and all(
            input.shape[2 + i] + 2 * padding[i] >= kernel[i] for i in range(2)
        )
        if not self.training or not fits:
            return super().forward(input)
        out: Tensor = _MaxPool.apply(input, *kernel, *stride, *padding)
        return out


def _is_channels_last(x: Tensor) -> bool:
    last: bool = x.is_contiguous(memory_format=LAST) if x.dim() == 4 else False
    return last and x.numel() > 0 and x.is_floating_point()


def window_of(pool: nn.MaxPool2d) -> tuple[tuple[int, int], ...]:
    """Kernel, stride and padding, each in height and width."""
    return tuple(
        (each, each) if isinstance(each, int) else (each[0], each[1])
        for each in (pool.kernel_size, pool.stride, pool.padding)
    )


def has_conv_kernel(module: nn.Module) -> bool:
    """Whether the module is changed; subclasses are not, as what they do beside is not known."""
    if type(module) is nn.BatchNorm2d:
        return True
    if type(module) is not nn.MaxPool2d or module.ceil_mode or module.return_indices:
        return False
    kernel, _, padding = window_of(module)
    fits = kernel[0] * kernel[1] <= MOST_IN_WINDOW and module.dilation in (1, (1, 1))
    # More padding than half a window torch refuses, and says so.
    return fits and all(2 * padding[i] <= kernel[i] for i in range(2))


def apply_conv_kernels(module: nn.Module, layout: Layout) -> int:
    """Change the class of every batch norm and max pool that has kernels; returns how many."""
    if not layout.compile:
        raise UsageError(
            "tune.conv_kernels=true is for a compiled model: op by op, torch's own batch norm is one "
            "kernel and this would be several; add compile=true to the layout, or leave it out"
        )
    if layout.tp > 1 or layout.cp > 1 or layout.spatial != (1, 1):
        raise UsageError(
            f"tune.conv_kernels=true and {layout} do not compose: tp, cp and spatial run the layers on "
            "parts of their tensors; leave one of them out"
        )
    changed = {id(child): child for child in module.modules() if has_conv_kernel(child)}
    for child in changed.values():
        norm = isinstance(child, nn.BatchNorm2d)
        child.__class__ = KernelBatchNorm2d if norm else KernelMaxPool2d
    return len(changed)
