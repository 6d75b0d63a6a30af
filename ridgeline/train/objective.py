"""A model and its loss as one module, so that both are compiled, replicated and traced together.

The user's module stays as it is inside; its parameters and state-dict keys are its own. Called by
`setup.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from ridgeline.data.loader import Batch
from ridgeline.parallel.ddp import Replicated, skip_reduction, watch_last_gradient
from ridgeline.parallel.precision import Precision
from ridgeline.parallel.share import Share
from ridgeline.train.clock import Clock
from ridgeline.train.step import ForwardBackward
from ridgeline.train.tasks import Loss


class Objective(nn.Module):
    """inputs, targets -> the mean loss over the samples given."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        return self.loss(self.model(inputs), targets)


def build_forward_backward(
    objective: nn.Module,
    precision: Precision,
    share: Share,
    num_ranks: int,
    clock: Clock,
    begin: Callable[[], None],
) -> ForwardBackward:
    """Forward and backward over this rank's microbatches, reducing gradients in the last one only.

    `begin` is called before anything else in a step.
    """
    exposed = [False]
    if isinstance(objective, Replicated):

        def last_gradient() -> None:
            clock.mark("backward_s")
            exposed[0] = True

        watch_last_gradient(objective, last_gradient)

    def forward_backward(batch: Batch, clock: Clock) -> Tensor:
        begin()
        total: Tensor | None = None
        last = len(batch.inputs) - 1
        parts = zip(batch.inputs, batch.targets, batch.counts, strict=True)
        for index, (inputs, targets, count) in enumerate(parts):
            share.num_real = count
            weight = count / batch.num_global
            reduces = index == last
            with nullcontext() if reduces else skip_reduction(objective):
                with precision.autocast():
                    loss = objective(inputs, targets)
                clock.mark("forward_s")
                exposed[0] = False
                precision.backward(_weigh(loss, weight * num_ranks))
                clock.mark("comm_s" if reduces and exposed[0] else "backward_s")
            part = loss.detach() * weight
            total = part if total is None else total + part
        assert total is not None
        return total

    return forward_backward


def _weigh(loss: Tensor, weight: float) -> Tensor:
    return loss if weight == 1.0 else loss * weight
