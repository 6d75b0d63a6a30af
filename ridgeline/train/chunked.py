"""The losses of language models with the output layer inside: `tune.loss=chunked`.

Each is a sum of cross-entropies in which every token has a share, so one function serves all of them.
Called by `setup.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.parallel.linear_loss import defer_head, linear_cross_entropy
from ridgeline.train.tasks import IGNORED, Loss, Task, main_output
from ridgeline.tuning import TuneConfig


def _causal_shares(counted_BT: Tensor) -> Tensor:
    return counted_BT / counted_BT.sum().clamp(min=1)


def _masked_shares(counted_BT: Tensor) -> Tensor:
    return counted_BT / counted_BT.sum(1, keepdim=True).clamp(min=1) / counted_BT.shape[0]


SHARES: dict[str, Callable[[Tensor], Tensor]] = {
    "causal_lm": _causal_shares,
    "masked_lm": _masked_shares,
}
"""What each token counts for in a task's loss, from which of them have a target."""


def choose_loss(
    model: nn.Module, task: Task, tune: TuneConfig, layout: Layout, example: tuple[Any, ...]
) -> Loss:
    """The task's loss as the recipe wants it computed; may change the model's output layer."""
    if tune.loss == "full":
        return task.loss
    if task.name not in SHARES:
        raise UsageError(
            f"tune.loss=chunked is for the tasks {' and '.join(SHARES)}, and this is {task.name}; leave "
            "it out"
        )
    for field, used in (
        ("tp", layout.tp > 1),
        ("cp", layout.cp > 1),
        ("pp", layout.pp > 1),
        ("zero", layout.zero == 3),
    ):
        if used:
            raise UsageError(
                f"tune.loss=chunked and {field}={getattr(layout, field)} do not compose: the loss reads "
                f"the whole weight of the output layer, which {field} takes apart; leave one of them out"
            )
    head = defer_head(model, example, main_output)
    shares = SHARES[task.name]

    def chunked(outputs: Any, targets: Tensor) -> Tensor:
        hidden = main_output(outputs)
        if not head.training:
            return task.loss(outputs, targets)
        counted = targets != IGNORED
        return linear_cross_entropy(
            hidden.flatten(0, -2),
            head.weight,
            head.bias,
            torch.where(counted, targets, 0).flatten(),
            shares(counted.float()).flatten(),
            tune.loss_chunk,
        )

    return chunked
