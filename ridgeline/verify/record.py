"""Train a few steps and keep every loss, gradient and weight, gathered to full tensors.

This is the trainer itself: `build_training`, its loaders, its step, its evaluation; only the records
differ. So what is compared is what runs. Called on every rank by `ranks.py`; the result is complete on
rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ridgeline.config import RunConfig
from ridgeline.data.batch import Batch
from ridgeline.data.subset import FirstSamples
from ridgeline.launch.env import RankEnv
from ridgeline.parallel.gather import full_gradients, full_state
from ridgeline.train.evaluate import evaluate
from ridgeline.train.setup import Training, build_training

Tensors = dict[str, np.ndarray]


@dataclass
class Recording:
    """What a short training did. One entry a step; on ranks other than 0 tensors are missing."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    """Of the global batch's mean loss, before clipping."""
    weights: list[Tensors] = field(default_factory=list)
    """After the update; with the buffers of the state dict."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of an evaluation after the last step."""
    notes: list[str] = field(default_factory=list)
    num_parameters: int = 0


def record_training(config: RunConfig, env: RankEnv) -> Recording:
    """Train `config.train.steps` steps; every rank calls this."""
    training = build_short(config, env)
    recording = Recording(notes=list(training.arranged.notes))
    recording.num_parameters = training.model_facts.num_parameters
    try:
        training.arranged.train()
        for step, batch in enumerate(batches(training)):
            training.set_lr(step)
            share = training.forward_backward(training.to_device(batch), training.clock)
            loss = training.mesh.sum_over_data(share.double())
            recording.losses.append(float(loss))
            recording.gradients.append(unscaled(training, full_gradients(training.arranged)))
            training.update()
            recording.weights.append(to_numpy(full_state(training.arranged)))
        recording.metrics = metrics_of(training)
    finally:
        training.close_loaders()
    return recording


def build_short(config: RunConfig, env: RankEnv) -> Training:
    """The training with epochs of two batches, of which the second is uneven: ranks and microbatches
    get shares of different sizes, and what they add up to has to be weighed. With `data.drop_last`
    there is no such batch."""
    training = build_training(replace(config, data=replace(config.data, stage="")), env)
    loader = copy.copy(training.loader)
    loader.source = FirstSamples(loader.source, loader.batch + loader.batch // 2 + 1)
    return replace(training, loader=loader)


def metrics_of(training: Training) -> dict[str, float]:
    """What an evaluation says of the model as it is; nothing where the recipe has no data for one."""
    if training.eval_loader is None:
        return {}
    return evaluate(
        training.arranged,
        training.task,
        training.eval_loader,
        training.precision,
        training.to_device,
        step=training.num_steps,
        epoch=0,
    ).metrics


def batches(training: Training) -> Iterator[Batch]:
    """The batches of all steps, over as many epochs as that takes."""
    epoch, left = 0, training.num_steps
    while left:
        for batch in training.loader.epoch(epoch):
            yield batch
            left -= 1
            if not left:
                return
        epoch += 1


def unscaled(training: Training, gradients: dict[str, torch.Tensor]) -> Tensors:
    """Gradients of the loss itself, where fp16 has scaled it."""
    scale = training.precision.scale()
    return {name: value / scale for name, value in to_numpy(gradients).items()}


def to_numpy(tensors: dict[str, torch.Tensor]) -> Tensors:
    """Copies on the host; types that numpy does not have become float32, which holds them all."""
    result = {}
    for name, value in tensors.items():
        value = value.detach().cpu()
        if value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        result[name] = value.numpy().copy()
    return result
