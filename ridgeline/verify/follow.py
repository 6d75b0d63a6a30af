"""One device follows a layout's training: every step anew from the weights the layout had.

In a low precision two correct trainings part by themselves: rounding changes a gradient a little, Adam
makes a whole step of a gradient near zero, and the next step starts elsewhere. So each step is taken
apart. One device gets the layout's weights and computes loss and gradients of the same batch; then it
gets the layout's gradients and does the update. What is left is one step's rounding, and one device
shows how large that is, in the same precision. Called by `run.py` on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.config import RunConfig
from ridgeline.data.batch import Batch
from ridgeline.launch.env import RankEnv
from ridgeline.parallel.gather import full_gradients, full_state
from ridgeline.parallel.precision import AUTOCAST
from ridgeline.train.setup import Training
from ridgeline.verify.record import (
    Recording,
    Tensors,
    batches,
    build_short,
    metrics_of,
    to_numpy,
    unscaled,
)


def follow(config: RunConfig, env: RankEnv, track: Recording, way: str = "plain") -> Recording:
    """What one device finds at each step of `track`.

    plain: as it is; reordered: the samples of each microbatch in another order; narrow: weights and
    gradients in 16 bits, as sharded replicas keep them.
    """
    training = build_short(config, env)
    training.arranged.train()
    found = Recording()
    before = to_numpy(full_state(training.arranged))
    try:
        for step, batch in enumerate(batches(training)):
            training.set_lr(step)
            _load(training.model, before)
            given = _reordered(batch) if way == "reordered" else batch
            with _narrow(training) if way == "narrow" else nullcontext():
                share = training.forward_backward(training.to_device(given), training.clock)
                gradients = full_gradients(training.arranged)
            found.losses.append(float(share.double()))
            found.gradients.append(unscaled(training, gradients))
            _update(training, track.gradients[step])
            found.weights.append(to_numpy(full_state(training.arranged)))
            before = track.weights[step]
        _load(training.model, before)
        found.metrics = metrics_of(training)
    finally:
        training.close_loaders()
    return found


@torch.no_grad()
def _load(model: nn.Module, state: Tensors) -> None:
    own = model.state_dict()
    for name, value in state.items():
        own[name].copy_(torch.from_numpy(value))


@contextmanager
def _narrow(training: Training) -> Iterator[None]:
    """Weights, and with them gradients, in the 16 bits of the precision."""
    dtype = AUTOCAST[training.precision.name]
    wide = [(parameter, parameter.data) for parameter in training.model.parameters()]
    for parameter, data in wide:
        parameter.data = data.to(dtype)
    yield
    for parameter, data in wide:
        parameter.grad, parameter.data = None, data


def _update(training: Training, gradients: Tensors) -> None:
    """The update one device does with these gradients; none where one of them overflowed."""
    training.optimizer.zero_grad(set_to_none=True)
    if not all(np.isfinite(value).all() for value in gradients.values()):
        return
    scale = training.precision.scale()
    for name, parameter in training.model.named_parameters():
        if name in gradients:
            value = torch.from_numpy(gradients[name]).to(parameter.dtype)
            parameter.grad = value.reshape(parameter.shape) * scale
    training.update()


def _reordered(batch: Batch) -> Batch:
    """The samples of each microbatch from the last to the first: the same sums in another order."""

    def turned(parts: list[Tensor]) -> list[Tensor]:
        return [part.flip(0) for part in parts]

    indices = tuple(part[::-1].copy() for part in batch.indices)
    return replace(
        batch, inputs=turned(batch.inputs), targets=turned(batch.targets), indices=indices
    )
