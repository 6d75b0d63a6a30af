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
from torch.optim import Optimizer

from ridgeline.config import OptimConfig
from ridgeline.errors import UsageError
from ridgeline.optim.build import decay_groups, list_trainables
from ridgeline.optim.master import flat, like, narrow_weights, number
from ridgeline.optim.together import Row, Together

_LOW = 0xFFFF
"""The half of a float32 that bf16 does not have."""


def chance(num: int, seed: Tensor) -> Tensor:
    """16 bits for each of `num` places, as int32: a hash that mixes every bit of place and seed."""
    x = torch.arange(num, dtype=torch.int32, device=seed.device) ^ seed
    x = (x ^ ((x >> 16) & _LOW)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return (x ^ (x >> 16)) & _LOW


def round_by_chance(values: Tensor, bits: Tensor) -> Tensor:
    """float32 as bf16, up with the probability that the rest is of a step. What is not finite stays so."""
    raw = values.view(torch.int32)
    rounded = ((raw + bits) & ~_LOW).view(torch.float32)
    # A carry out of the largest number is infinity, as in any rounding; nan must not become that.
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _update(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    seed: Tensor,
    rate: Tensor,
    decay: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    correction1: Tensor,
    correction2: Tensor,
    divisor: Tensor,
) -> None:
    """One parameter, element by element, as torch's AdamW orders it."""
    wide = grad.to(torch.float32) / divisor
    new_mean = mean + (wide - mean) * (1 - beta1)
    new_square = square * beta2 + wide * wide * (1 - beta2)
    old = weight.to(torch.float32)
    new = old - rate * decay * old
    new = new - (rate / correction1) * new_mean / (new_square.sqrt() / correction2.sqrt() + eps)
    mean.copy_(new_mean)
    square.copy_(new_square)
    if weight.dtype is torch.bfloat16:
        weight.copy_(round_by_chance(new, chance(new.numel(), seed)))
    else:
        weight.copy_(new)


class StochasticAdamW(Optimizer):
    """bf16 parameters are rounded by chance, others as usual.

    `grad_scale`, when set, divides every gradient, as torch's fused optimizers have it.
    """

    takes_scale = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int,
        compiles: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.grad_scale: Tensor | None = None
        self._seed = seed
        self._update = Together(_update, compiles)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        place = 0
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            rows: dict[int, list[Row]] = {}
            for parameter in group["params"]:
                place += 1
                if parameter.grad is None:
                    continue
                device, state = parameter.device, self.state[parameter]
                state["step"] += 1
                done = int(state["step"])
                seed = mix(self._seed, place, done)
                rows.setdefault(done, []).append(
                    (
                        flat(parameter.detach()),
                        flat(like(parameter.grad, parameter)),
                        flat(state["exp_avg"]),
                        flat(state["exp_avg_sq"]),
                        torch.full((), seed, dtype=torch.int32, device=device),
                    )
                )
            for done, alike in rows.items():
                self._update(
                    alike,
                    number(group["lr"], device),
                    number(group["weight_decay"], device),
                    beta1,
                    beta2,
                    group["eps"],
                    number(1 - beta1**done, device),
                    number(1 - beta2**done, device),
                    number(1.0, device) if self.grad_scale is None else self.grad_scale,
                )


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
    trainables = list_trainables(model)
    compiles = trainables[0].parameter.is_cuda
    groups = decay_groups(trainables, config)
    return StochasticAdamW(groups, lr, config.betas, config.eps, seed, compiles)
