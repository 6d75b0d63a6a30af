"""AdamW whose matrices the model sees in bf16 and the update in float32: `tune.weights=bf16`.

Under autocast every step casts every matrix to bf16 on its way into a product, and its gradient back. Here
the bf16 copy is the parameter, and the one pass that updates the float32 master also reads the bf16
gradient and writes the bf16 weight: 28 bytes a parameter and step rather than 40. The numbers are those
of autocast with torch's AdamW. Only weights that autocast would cast are narrowed; embeddings, norms and
biases stay. The masters are optimizer state, so checkpoints have them. Called by `train/setup.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer

from ridgeline.config import OptimConfig
from ridgeline.errors import UsageError
from ridgeline.optim.build import decay_groups, list_trainables
from ridgeline.optim.together import Row, Together


def _update(
    master: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    weight: Tensor | None,
    rate: Tensor,
    decay: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    correction1: Tensor,
    correction2: Tensor,
    divisor: Tensor,
) -> None:
    """One parameter, element by element, as torch's AdamW orders it; `weight` is the narrow copy."""
    wide = grad.to(master.dtype) / divisor
    new_mean = mean + (wide - mean) * (1 - beta1)
    new_square = square * beta2 + wide * wide * (1 - beta2)
    new = master - rate * decay * master
    new = new - (rate / correction1) * new_mean / (new_square.sqrt() / correction2.sqrt() + eps)
    mean.copy_(new_mean)
    square.copy_(new_square)
    master.copy_(new)
    if weight is not None:
        weight.copy_(new)


class MasterAdamW(Optimizer):
    """`parameters` of which some are narrower than their masters; see `narrow_weights`.

    `grad_scale`, when set, divides every gradient, as torch's fused optimizers have it.
    """

    takes_scale = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        masters: dict[nn.Parameter, Tensor],
        compiles: bool,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.grad_scale: Tensor | None = None
        self._update = Together(_update, compiles)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            master = masters.get(parameter)
            base = parameter.detach() if master is None else master
            state = self.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(base)
            state["exp_avg_sq"] = torch.zeros_like(base)
            if master is not None:
                state["master"] = master

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            if not members:
                continue
            device = members[0].device
            rows: dict[float, list[Row]] = {}
            beta1, beta2 = group["betas"]
            rate = number(group["lr"], device)
            decay = number(group["weight_decay"], device)
            divisor = number(1.0, device) if self.grad_scale is None else self.grad_scale
            for parameter in members:
                state = self.state[parameter]
                state["step"] += 1
                master = state.get("master")
                rows.setdefault(float(state["step"]), []).append(
                    (
                        flat(parameter.detach() if master is None else master),
                        flat(like(parameter.grad, parameter)),
                        flat(state["exp_avg"]),
                        flat(state["exp_avg_sq"]),
                        None if master is None else flat(parameter.detach()),
                    )
                )
            for done, alike in rows.items():
                corrections = (number(1 - beta**done, device) for beta in (beta1, beta2))
                self._update(alike, rate, decay, beta1, beta2, group["eps"], *corrections, divisor)


def number(value: float, device: torch.device) -> Tensor:
    """On the device without a copy from the host, and no constant of a compiled kernel."""
    return torch.full((), value, dtype=torch.float32, device=device)


def flat(value: Tensor) -> Tensor:
    """All elements in the order of memory, which is the same for all tensors of a parameter."""
    return value.as_strided((value.numel(),), (1,))


def like(grad: Tensor, parameter: Tensor) -> Tensor:
    if grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter).copy_(grad)


def narrow_weights(model: nn.Module, dtype: torch.dtype) -> dict[nn.Parameter, Tensor]:
    """Give the matrices that autocast would cast this type; returns what they were, by parameter."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    masters = {}
    for parameter, modules in owners.items():
        products = all(isinstance(module, (nn.Linear, _ConvNd)) for module in modules)
        narrow = products and parameter.dim() > 1 and parameter.dtype is torch.float32
        if narrow and parameter.requires_grad:
            masters[parameter] = _dense(parameter.detach())
            parameter.data = masters[parameter].to(dtype)
    return masters


def _dense(value: Tensor) -> Tensor:
    return value if value.is_contiguous() else value.clone()


def build_master_adamw(model: nn.Module, config: OptimConfig, lr: float) -> MasterAdamW:
    if config.name != "adamw":
        raise UsageError(
            f"tune.weights=bf16 is for optim.name=adamw, not {config.name}; leave it out"
        )
    masters = narrow_weights(model, torch.bfloat16)
    trainables = list_trainables(model)
    compiles = trainables[0].parameter.is_cuda
    groups = decay_groups(trainables, config)
    return MasterAdamW(groups, lr, config.betas, config.eps, masters, compiles)
