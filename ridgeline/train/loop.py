"""The training loop: a generator that yields one `StepResult` per optimizer step.

What is done around a step (records, evaluation, a progress bar) is the caller's, in plain calls
between two results; there are no callbacks. Called by `run.py`, tests and benchmarks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from ridgeline.train.setup import Training
from ridgeline.train.step import StepResult, run_step


def train_loop(training: Training) -> Iterator[StepResult]:
    """Steps 1 to `training.num_steps`, over as many epochs as that takes."""
    step, epoch, clock = 0, 0, training.clock
    training.arranged.train()
    clock.start()
    while step < training.num_steps:
        for batch in training.loader.epoch(epoch):
            clock.mark("data_s")
            batch = training.to_device(batch)
            clock.mark("h2d_s")
            lr = training.peak_lr * training.schedule(step)
            for group in training.optimizer.param_groups:
                group["lr"] = lr
            loss_share, grad_norm = run_step(
                training.forward_backward, training.update, batch, clock
            )
            step += 1
            yield StepResult(
                step=step,
                epoch=epoch,
                loss_share=loss_share,
                grad_norm=grad_norm,
                lr=lr,
                num_samples=batch.num_global,
                time=time.time(),
                times=clock.end_step(),
                ends_epoch=batch.step + 1 == len(training.loader),
            )
            if step == training.num_steps:
                return
            # What the caller did with the result is part of the step's time but of none of its parts.
            clock.mark("other_s")
        epoch += 1
