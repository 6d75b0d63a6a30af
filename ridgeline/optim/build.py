"""Optimizers by name, with the fused kernel where the device has one. Called by `train/setup.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ridgeline.config import OptimConfig
from ridgeline.errors import UsageError, unknown_word
from ridgeline.optim.layerwise import LAYERWISE, Whole, build_layerwise

_FUSED_DEVICES = ("cuda", "cpu")
_WHOLE_ONLY = ("sgd",)
"""Optimizers whose one kernel torch has for whole tensors and not for shards."""


@dataclass(frozen=True)
class Trainable:
    """Something an optimizer updates: a parameter, or the part of one that this rank looks after."""

    name: str
    """Of the whole parameter in the model."""
    parameter: nn.Parameter
    num_dims: int
    """Of the whole parameter: a flat part of a matrix is still decayed like one."""


def list_trainables(model: nn.Module) -> list[Trainable]:
    return [Trainable(n, p, p.dim()) for n, p in model.named_parameters() if p.requires_grad]


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


def build_optimizer(
    what: nn.Module | Sequence[Trainable],
    config: OptimConfig,
    lr: float,
    fused: bool = True,
    whole: Whole | None = None,
) -> Optimizer:
    """The optimizer over every trainable parameter of a model, or over the parts listed; `fused` asks
    for one kernel for all of them, where the device has it, and `whole` sums squares over the ranks that
    hold parts of a parameter."""
    if config.name not in OPTIMIZERS and config.name not in LAYERWISE:
        raise unknown_word("optimizer", config.name, [*OPTIMIZERS, *LAYERWISE], "optim.name")
    if config.nesterov and config.momentum <= 0:
        raise UsageError("optim.nesterov=true needs optim.momentum above 0 (0.9 is usual)")
    trainables = list_trainables(what) if isinstance(what, nn.Module) else list(what)
    if not trainables:
        raise UsageError("the model has no trainable parameter, so there is nothing to optimize")
    parameters = [t.parameter for t in trainables]
    fused = fused and all(
        p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters
    )
    if config.name in _WHOLE_ONLY and any(isinstance(p, DTensor) for p in parameters):
        fused = False
    groups = [one for group in decay_groups(trainables, config) for one in _alike(group)]
    if config.name in LAYERWISE:
        scaled = [t.parameter for t in trainables if t.num_dims > 1]
        return build_layerwise(groups, lr, config, scaled, whole, parameters)
    return OPTIMIZERS[config.name](groups, lr, config, fused)


def _alike(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group, or two where some are shards in torch's sense and others are not: one kernel takes no
    two kinds."""
    shards = [p for p in group["params"] if isinstance(p, DTensor)]
    plain = [p for p in group["params"] if not isinstance(p, DTensor)]
    return [{**group, "params": found} for found in (shards, plain) if found]


def decay_groups(trainables: list[Trainable], config: OptimConfig) -> list[dict[str, Any]]:
    """One group, or two when biases and norm weights are spared the weight decay."""
    parameters = [t.parameter for t in trainables]
    if config.decay_norms or config.weight_decay == 0:
        return [{"params": parameters, "weight_decay": config.weight_decay}]
    matrices = [t.parameter for t in trainables if t.num_dims > 1]
    vectors = [t.parameter for t in trainables if t.num_dims <= 1]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
