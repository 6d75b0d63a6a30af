"""One optimizer step: forward and backward over the microbatches, then the update.

The two functions come from `setup.py`, which chose them once for the layout; nothing here asks which
technique is in use. Called by `loop.py`, and by a benchmark that wants a step without a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ridgeline.data.batch import Batch
from ridgeline.optim.update import Update
from ridgeline.train.clock import Clock, Pending
from ridgeline.train.position import Position

ForwardBackward = Callable[[Batch, Clock], Tensor]
"""Leaves gradients of the global batch's loss; returns this rank's share of that loss."""


@dataclass(frozen=True)
class StepResult:
    """What one step left behind; tensors may still be on their way on the device."""

    step: int
    epoch: int
    loss_share: Tensor
    """Sum of this over the data ranks is the loss of the global batch."""
    grad_norm: Tensor | None
    lr: float
    num_samples: int
    time: float
    """When the step was over for the host, in seconds since 1970."""
    times: Pending
    ends_epoch: bool
    position: Position
    """Where the run is now: what a checkpoint after this step goes on from."""
    samples: tuple[np.ndarray, ...] = ()
    """Indices of the samples of this rank, one array a microbatch."""
    skipped: tuple[str, ...] = ()
    """Sentences on samples of this rank that could not be read and were passed over."""


def run_step(
    forward_backward: ForwardBackward, update: Update, batch: Batch, clock: Clock
) -> tuple[Tensor, Tensor | None]:
    loss_share = forward_backward(batch, clock)
    grad_norm = update()
    clock.mark("optimizer_s")
    return loss_share, grad_norm
