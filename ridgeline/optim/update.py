"""The end of a step: unscale, clip by the global norm, update, clear.

Chosen once by `build_update`. On CUDA a fused optimizer divides by the clipping factor in the same
kernel that updates the weights, which saves a pass over every gradient. Called by `train/setup.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Update = Callable[[], Tensor | None]
"""Clips, steps and clears the gradients; returns their global norm where one was computed."""


def build_update(
    optimizer: Optimizer,
    parameters: list[nn.Parameter],
    clip: float | None,
    scaler: torch.amp.GradScaler | None,
) -> Update:
    """The function that ends a step for this optimizer, clipping norm and loss scaling."""
    if scaler is not None:
        return _scaled_update(optimizer, parameters, clip, scaler)
    if clip is not None and _can_fold(optimizer, parameters):
        return _folded_update(optimizer, parameters, clip)

    def update() -> Tensor | None:
        norm = nn.utils.clip_grad_norm_(parameters, clip) if clip is not None else None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    return update


def _scaled_update(
    optimizer: Optimizer,
    parameters: list[nn.Parameter],
    clip: float | None,
    scaler: torch.amp.GradScaler,
) -> Update:
    def update() -> Tensor | None:
        norm = None
        if clip is not None:
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(parameters, clip)
        scaler.step(optimizer)  # leaves the weights alone when a gradient overflowed
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return norm

    return update


def _can_fold(optimizer: Optimizer, parameters: list[nn.Parameter]) -> bool:
    """The fused kernels take the divisor in single precision, so that is where this is exact."""
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and all(p.is_cuda and p.dtype is torch.float32 for p in parameters)


def _folded_update(optimizer: Optimizer, parameters: list[nn.Parameter], clip: float) -> Update:
    def update() -> Tensor | None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        # Fused optimizers divide every gradient by this attribute, put there for loss scaling.
        optimizer.grad_scale = (norm / clip).clamp(min=1.0).float()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    return update
