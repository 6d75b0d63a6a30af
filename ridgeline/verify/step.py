"""A step of one device, taken apart: from given weights to gradients, and from given gradients to weights.

Between the two `follow.py` puts what a layout had in their place. Called by `reference.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.data.batch import Batch
from ridgeline.models.inputs import change_each
from ridgeline.parallel.precision import AUTOCAST
from ridgeline.train.setup import Training
from ridgeline.verify.record import Tensors, from_numpy

NUDGE = 2.0**-40
"""Relative: what comes of it in float64 is far below the bound of a proof there."""


@torch.no_grad()
def load_state(model: nn.Module, state: Tensors) -> None:
    own = model.state_dict()
    for name, value in state.items():
        own[name].copy_(from_numpy(value, own[name]))


def backward(training: Training, batch: Batch, way: str) -> float:
    """Leaves the gradients of a batch, or of a replica's share; returns its part of the loss.

    plain: as one device does; reordered: the samples of each microbatch in another order; narrow: weights
    and gradients in 16 bits, as sharded replicas keep them; nudged: weights a little off, by what float64
    hardly feels and what flips the last digit of a number here and there that a model has cast to float32.
    """
    given = _reordered(batch) if way == "reordered" else batch
    with _CHANGED.get(way, lambda _: nullcontext())(training):
        share = training.forward_backward(training.to_device(given), training.clock)
    return float(share.double())


def is_finite(gradients: Tensors) -> bool:
    return all(np.isfinite(value).all() for value in gradients.values())


def update(training: Training, gradients: Tensors, is_left_out: bool) -> None:
    """The update one device does with these gradients.

    One `is_left_out` where any gradient overflowed, a replica's elsewhere too; of that loss scaling has to
    hear, because it goes on with another scale.
    """
    training.optimizer.zero_grad(set_to_none=True)
    if is_left_out and training.precision.scaler is None:
        return
    scale = training.precision.scale()
    for name, parameter in training.model.named_parameters():
        if name in gradients:
            value = from_numpy(gradients[name], parameter)
            parameter.grad = value.reshape(parameter.shape) * (torch.inf if is_left_out else scale)
    training.update()


@contextmanager
def _narrow(training: Training) -> Iterator[None]:
    """Weights, and with them gradients, in the 16 bits of the precision; both are given back wide. Those of
    norms with running statistics stay what these are: torch takes no other pair."""
    dtype = AUTOCAST[training.precision.name]
    wide = [
        (parameter, parameter.data)
        for module in training.model.modules()
        if getattr(module, "running_mean", None) is None
        for parameter in module.parameters(recurse=False)
        if not parameter.is_complex()
    ]
    for parameter, data in wide:
        parameter.data = data.to(dtype)
    yield
    for parameter, data in wide:
        gradient, parameter.grad = parameter.grad, None
        parameter.data = data
        parameter.grad = None if gradient is None else gradient.to(data.dtype)


@contextmanager
def _nudged(training: Training) -> Iterator[None]:
    """The same nudges at every step; the weights are given back as they were."""
    generator = torch.Generator().manual_seed(0)
    kept = [(parameter, parameter.detach().clone()) for parameter in training.model.parameters()]
    with torch.no_grad():
        for parameter, data in kept:
            noise = torch.rand(data.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(1 + NUDGE * (2 * noise.to(data) - 1))
    yield
    with torch.no_grad():
        for parameter, data in kept:
            parameter.copy_(data)


_CHANGED: dict[str, Callable[[Training], AbstractContextManager[None]]] = {
    "narrow": _narrow,
    "nudged": _nudged,
}


def _reordered(batch: Batch) -> Batch:
    """The samples of each microbatch from the last to the first: the same sums in another order."""

    def turned(part: Tensor) -> Tensor:
        return part.flip(0)

    indices = tuple(part[::-1].copy() for part in batch.indices)
    inputs = [change_each(part, turned) for part in batch.inputs]
    return replace(
        batch, inputs=inputs, targets=[turned(part) for part in batch.targets], indices=indices
    )
