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

from ridgeline.config import OptimConfig
from ridgeline.errors import UsageError
from ridgeline.optim.build import decay_groups, list_trainables
from ridgeline.optim.narrow import NarrowAdamW, Row, narrow_weights


class MasterAdamW(NarrowAdamW):
    """Of its parameters some are narrower than their masters; see `narrow_weights`."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        masters: dict[nn.Parameter, Tensor],
    ) -> None:
        super().__init__(groups, lr, betas, eps)
        for parameter, master in masters.items():
            self.state[parameter]["master"] = master

    def row_of(
        self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Any], place: int
    ) -> Row:
        weight, moments = parameter.detach(), (state["exp_avg"], state["exp_avg_sq"])
        if "master" in state:
            return Row(state["master"], grad, *moments, narrow=weight)
        return Row(weight, grad, *moments)


def build_master_adamw(model: nn.Module, config: OptimConfig, lr: float) -> MasterAdamW:
    if config.name != "adamw":
        raise UsageError(
            f"tune.weights=bf16 is for optim.name=adamw, not {config.name}; leave it out"
        )
    masters = narrow_weights(model, torch.bfloat16)
    groups = decay_groups(list_trainables(model), config)
    return MasterAdamW(groups, lr, config.betas, config.eps, masters)
