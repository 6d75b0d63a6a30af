"""Optimizers by name, with the fused kernel where the device has one. Called by `train/setup.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ridgeline.config import OptimConfig
from ridgeline.errors import UsageError, unknown_word

_FUSED_DEVICES = ("cuda", "cpu")


def _adamw(
    groups: Iterable[dict[str, Any]], lr: float, config: OptimConfig, fused: bool
) -> Optimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=config.betas, eps=config.eps, fused=fused)


def _adam(
    groups: Iterable[dict[str, Any]], lr: float, config: OptimConfig, fused: bool
) -> Optimizer:
    return torch.optim.Adam(groups, lr=lr, betas=config.betas, eps=config.eps, fused=fused)


def _sgd(
    groups: Iterable[dict[str, Any]], lr: float, config: OptimConfig, fused: bool
) -> Optimizer:
    return torch.optim.SGD(
        groups, lr=lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused
    )


OPTIMIZERS: dict[str, Callable[[Iterable[dict[str, Any]], float, OptimConfig, bool], Optimizer]] = {
    "adamw": _adamw,
    "adam": _adam,
    "sgd": _sgd,
}


def build_optimizer(model: nn.Module, config: OptimConfig, lr: float) -> Optimizer:
    """The optimizer over every trainable parameter of `model`."""
    if config.name not in OPTIMIZERS:
        raise unknown_word("optimizer", config.name, OPTIMIZERS, "optim.name")
    if config.nesterov and config.momentum <= 0:
        raise UsageError("optim.nesterov=true needs optim.momentum above 0 (0.9 is usual)")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise UsageError("the model has no trainable parameter, so there is nothing to optimize")
    fused = all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters)
    groups = decay_groups(parameters, config)
    return OPTIMIZERS[config.name](groups, lr, config, fused)


def decay_groups(parameters: list[nn.Parameter], config: OptimConfig) -> list[dict[str, Any]]:
    """One group, or two when biases and norm weights are spared the weight decay."""
    if config.decay_norms or config.weight_decay == 0:
        return [{"params": parameters, "weight_decay": config.weight_decay}]
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
