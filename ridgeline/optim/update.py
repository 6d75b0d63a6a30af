"""The end of a step: unscale, clip by the global norm, update, clear.

Chosen once by `build_update`. What else a layout asks for around the update (a norm over shards, weights
to gather again) comes in as a `Care`, so that nothing here knows of techniques. On CUDA a fused
optimizer divides by the clipping factor in the same kernel that updates the weights, which saves a pass
over every gradient. Called by `train/setup.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Update = Callable[[], Tensor | None]
"""Clips, steps and clears the gradients; returns their global norm where one was computed."""


@dataclass(frozen=True)
class Care:
    """What a layout needs around the update, beyond what one device does."""

    gradients: Callable[[], list[Tensor]]
    """This rank's own gradients, as plain tensors."""
    norm: Callable[[], Tensor]
    """Norm of the whole gradient, the same on every rank."""
    agree: Callable[[Tensor], None]
    """Takes the largest over all ranks, in place: whether any gradient overflowed."""
    after_step: Callable[[], None]
    """Brings the weights of all ranks up to date."""
    clear: Callable[[], None]
    """Forgets the gradients."""


def build_update(
    optimizer: Optimizer,
    parameters: list[nn.Parameter],
    clip: float | None,
    scaler: torch.amp.GradScaler | None,
    care: Care | None = None,
) -> Update:
    """The function that ends a step for this optimizer, clipping norm and loss scaling."""
    if care is not None:
        return _careful_update(optimizer, clip, scaler, care)
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


def _careful_update(
    optimizer: Optimizer, clip: float | None, scaler: torch.amp.GradScaler | None, care: Care
) -> Update:
    """For parameters of which every rank holds a part."""

    def step() -> None:
        if scaler is None:
            optimizer.step()
            return
        scaler.step(optimizer)
        scaler.update()

    def update() -> Tensor | None:
        if scaler is not None:
            scaler.unscale_(optimizer)
            # Each rank has seen its own part only; all have to skip the step, or none.
            state = scaler._per_optimizer_states[id(optimizer)]
            for overflow in state["found_inf_per_device"].values():
                care.agree(overflow)
        norm = None
        if clip is not None:
            norm = care.norm()
            shrink_gradients(care.gradients(), norm, clip)
        step()
        care.after_step()
        care.clear()
        return norm

    return update


def shrink_gradients(gradients: list[Tensor], norm: Tensor, clip: float) -> None:
    """Scale gradients in place so that their norm is at most `clip`, as torch's own clipping does."""
    factor = (clip / (norm + 1e-6)).clamp(max=1.0)
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for (dtype, device), members in by_type.items():
        torch._foreach_mul_(members, factor.to(device, dtype))


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
    if getattr(optimizer, "takes_scale", False):
        return True
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and all(p.is_cuda and p.dtype is torch.float32 for p in parameters)


def _folded_update(optimizer: Optimizer, parameters: list[nn.Parameter], clip: float) -> Update:
    def update() -> Tensor | None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = _norm_of(gradients)
        # Fused optimizers divide every gradient by this attribute, put there for loss scaling.
        optimizer.grad_scale = (norm / clip).clamp(min=1.0).float()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    return update


def _norm_of(gradients: list[Tensor]) -> Tensor:
    """In float32 also where gradients are narrower."""
    if all(gradient.dtype is torch.float32 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    return torch.linalg.vector_norm(torch.stack(norms_of(gradients, torch.float32)))


def norms_of(gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Of each tensor, in any order, all on one device. Types apart: given several, torch's one pass over
    all of them becomes a kernel a tensor."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        by_type.setdefault(gradient.dtype, []).append(gradient)
    return [
        norm
        for members in by_type.values()
        for norm in torch._foreach_norm(members, 2.0, dtype=dtype)
    ]
