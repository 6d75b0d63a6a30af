"""The training loop: a generator that yields one `StepResult` per optimizer step.

What is done around a step (records, evaluation, a progress bar) is the caller's, in plain calls
between two results; there are no callbacks. Called by `run.py`, tests and benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from ridgeline.data.batch import Batch
from ridgeline.train.position import Position
from ridgeline.train.setup import Training
from ridgeline.train.step import StepResult, run_step


def train_loop(training: Training, start: Position | None = None) -> Iterator[StepResult]:
    """The steps from `start` to `training.last_step`, over as many epochs as that takes."""
    position, clock = start or Position(), training.clock
    per_epoch = len(training.loader)
    training.arranged.train()
    clock.start()
    left = max(0, training.last_step - position.step)
    if not left:
        return
    for moving in training.feed(training.loader.onward(position.epoch, position.batch, left)):
        clock.mark("data_s")
        batch = moving.take()
        clock.mark("h2d_s")
        lr = training.set_lr(position.step)
        loss_share, grad_norm = run_step(training.forward_backward, training.update, batch, clock)
        position = position.after(per_epoch)
        yield StepResult(
            step=position.step,
            epoch=batch.epoch,
            position=position,
            loss_share=loss_share,
            grad_norm=grad_norm,
            lr=lr,
            num_samples=batch.num_global,
            time=time.time(),
            times=clock.end_step(),
            ends_epoch=batch.step + 1 == per_epoch,
            samples=used_samples(batch),
            skipped=batch.skipped,
        )
        # What the caller did with the result is part of the step's time but of none of its parts.
        clock.mark("other_s")


def used_samples(batch: Batch) -> tuple[np.ndarray, ...]:
    """Indices of this rank's samples in the batch, without fillers, one array a microbatch."""
    parts = zip(batch.indices, batch.counts, strict=True)
    return tuple(indices[:count] for indices, count in parts)
