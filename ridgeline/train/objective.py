"""A model and its loss as one module, so that both are compiled, replicated and traced together.

The user's module stays as it is inside; its parameters and state-dict keys are its own. Called by
`setup.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.data.batch import Batch
from ridgeline.models.inputs import call_arguments
from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.ddp import Replicated, watch_last_gradient
from ridgeline.parallel.precision import Precision
from ridgeline.train.clock import BETWEEN, PIECE, Clock
from ridgeline.train.step import ForwardBackward
from ridgeline.train.tasks import Loss


class Objective(nn.Module):
    """inputs, targets -> the mean loss over the samples given."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, inputs: Any, targets: Tensor) -> Tensor:
        args, kwargs = call_arguments(inputs)
        return self.loss(self.model(*args, **kwargs), targets)


def build_forward_backward(
    arranged: Arranged, precision: Precision, clock: Clock, begin: Callable[[], None]
) -> ForwardBackward:
    """Forward and backward over this rank's microbatches; `begin` is called first in every step."""
    if arranged.staged is not None:
        return _through_stages(arranged, precision, begin)
    return _one_after_another(arranged, precision, clock, begin)


def _one_after_another(
    arranged: Arranged, precision: Precision, clock: Clock, begin: Callable[[], None]
) -> ForwardBackward:
    """Each microbatch forward and backward, reducing gradients in the last one only."""
    objective, share = arranged.objective, arranged.share
    exposed = [False]
    replicated = objective if isinstance(objective, Replicated) else None
    if replicated is not None:

        def last_gradient() -> None:
            clock.mark("backward_s")
            exposed[0] = True

        watch_last_gradient(replicated, last_gradient)

    def forward_backward(batch: Batch, clock: Clock) -> Tensor:
        begin()
        arranged.num_samples_here = sum(batch.units)
        total: Tensor | None = None
        last = len(batch.inputs) - 1
        parts = zip(batch.inputs, batch.targets, batch.counts, strict=True)
        for index, (inputs, targets, count) in enumerate(parts):
            share.num_real = count
            name_samples(arranged, batch, index)
            weight = batch.units[index] / batch.num_global_units
            reduces = index == last
            with nullcontext() if reduces else arranged.skip_reduction():
                with precision.autocast():
                    loss = objective(inputs, targets)
                clock.mark("forward_s")
                exposed[0] = False
                precision.backward(_weigh(loss, arranged.weight_of(batch.units, index, weight)))
                clock.mark("comm_s" if reduces and exposed[0] else "backward_s")
            if reduces and replicated is not None:
                replicated.require_gradients()
            part = loss.detach() * weight
            total = part if total is None else total + part
        if arranged.needs_finish:
            arranged.finish_gradients()
            clock.mark("comm_s")
        assert total is not None
        return total

    return forward_backward


def _through_stages(
    arranged: Arranged, precision: Precision, begin: Callable[[], None]
) -> ForwardBackward:
    """All microbatches through the pipeline, in the order of its schedule."""
    staged = arranged.staged
    assert staged is not None

    def forward_backward(batch: Batch, clock: Clock) -> Tensor:
        begin()
        arranged.num_samples_here = sum(batch.units)
        shares = [units / batch.num_global_units for units in batch.units]
        scale = precision.scale()
        weights = [
            arranged.weight_of(batch.units, index, share) * scale
            for index, share in enumerate(shares)
        ]

        def prepare(index: int) -> None:
            arranged.share.num_real = batch.counts[index]
            name_samples(arranged, batch, index)

        def mark(part: str, then: str = "") -> None:
            clock.mark(part, then or (PIECE if part == "bubble_s" else BETWEEN))

        clock.last = BETWEEN  # what a rank does until its first microbatch is there
        with precision.autocast():
            total = staged.forward_backward(
                batch.inputs, batch.targets, batch.counts, weights, prepare, mark
            )
        clock.mark("bubble_s", "backward_s")  # what comes is what comes after backward
        arranged.finish_gradients()
        clock.mark("comm_s")
        factors = [share / weight for share, weight in zip(shares, weights, strict=True) if weight]
        return total * (factors[0] if factors else 0.0)

    return forward_backward


def name_samples(arranged: Arranged, batch: Batch, index: int) -> None:
    """Tell dropout which samples the microbatch at hand has; nothing where there is no dropout."""
    randomness = arranged.randomness
    if randomness is not None and randomness.is_used:
        randomness.begin(step_key(batch), sample_ids(batch, index, arranged.mesh.device))


def step_key(batch: Batch) -> int:
    """A number of its own for each step of a run, whatever the number of steps of an epoch."""
    return (batch.epoch << 32) + batch.step


def sample_ids(batch: Batch, index: int, device: torch.device) -> Tensor:
    ids = torch.from_numpy(batch.indices[index])
    if device.type == "cuda":
        ids = ids.pin_memory()
    return ids.to(device, non_blocking=True)


def _weigh(loss: Tensor, weight: float) -> Tensor:
    return loss if weight == 1.0 else loss * weight
