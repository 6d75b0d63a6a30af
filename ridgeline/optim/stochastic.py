"""AdamW on bf16 weights without masters: `tune.weights=stochastic`.

A bf16 number has eight bits, and an update of a thousandth of a weight would round away every time. Here
the new weight is computed in float32 and rounded up or down by chance, up as often as it is nearer to the
upper neighbour, so that on average nothing is lost. The chance comes from a hash of seed, parameter, step
and place: a run that is repeated or resumed rounds the same, and no generator that dropout uses is touched.
Moments stay in float32. Beside the masters of `master.py` it moves 22 bytes a parameter rather than 28 and
keeps 10 rather than 14. Called by `train/setup.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.config import OptimConfig
from ridgeline.errors import UsageError
from ridgeline.optim.build import decay_groups, list_trainables
from ridgeline.optim.narrow import NarrowAdamW, Row, narrow_weights


class StochasticAdamW(NarrowAdamW):
    """bf16 parameters are rounded by chance, others as usual."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int,
    ) -> None:
        super().__init__(groups, lr, betas, eps)
        self._seed = seed

    def row_of(
        self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Any], place: int
    ) -> Row:
        weight = parameter.detach()
        narrow = weight.dtype is torch.bfloat16
        seed = mix(self._seed, place, int(state["step"])) if narrow else 0
        return Row(weight, grad, state["exp_avg"], state["exp_avg_sq"], seed=seed)


def mix(*numbers: int) -> int:
    """One number of 31 bits from several, far apart for neighbours."""
    found = 0x9E3779B9
    for value in numbers:
        found = (found ^ value) * 0x85EBCA6B & 0xFFFFFFFF
        found = (found ^ found >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        found ^= found >> 16
    return found & 0x7FFFFFFF


def build_stochastic_adamw(
    model: nn.Module, config: OptimConfig, lr: float, seed: int
) -> StochasticAdamW:
    if config.name != "adamw":
        raise UsageError(
            f"tune.weights=stochastic is for optim.name=adamw, not {config.name}; leave it out"
        )
    narrow_weights(model, torch.bfloat16)
    groups = decay_groups(list_trainables(model), config)
    return StochasticAdamW(groups, lr, config.betas, config.eps, seed)
