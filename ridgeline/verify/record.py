"""Train a few steps and keep every loss, gradient and weight, gathered to full tensors.

This is the trainer itself: `build_training`, its loaders, its step, its evaluation; only the records
differ. So what is compared is what runs. Called on every rank by `run.py`; the result is complete on
rank 0.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ridgeline.checkpoint.manifest import AVERAGE
from ridgeline.config import RunConfig
from ridgeline.data.batch import Batch
from ridgeline.data.subset import FirstSamples
from ridgeline.launch.env import RankEnv
from ridgeline.parallel.gather import (
    full_gradients,
    full_state,
    replica_gradients,
    replica_states,
)
from ridgeline.train.evaluate import evaluate
from ridgeline.train.setup import Training, build_training

Tensors = dict[str, np.ndarray]

_REPLICA = "replica/"


@dataclass
class Recording:
    """What a short training did. One entry a step; on ranks other than 0 tensors are missing.

    Gradients and weights have the model's own names. What belongs to one replica stands beside them, as
    `name_of` says.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensors] = field(default_factory=list)
    """Of the global batch's mean loss, before clipping."""
    weights: list[Tensors] = field(default_factory=list)
    """After the update; with the buffers of the state dict."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of an evaluation after the last step."""
    averages: Tensors = field(default_factory=dict)
    """The moving averages of the weights after the last step, where `optim.ema` keeps them; named as in
    checkpoints."""
    notes: list[str] = field(default_factory=list)
    num_parameters: int = 0
    has_batch_norm: bool = False


def record_training(config: RunConfig, env: RankEnv) -> Recording:
    """Train `config.train.steps` steps; every rank calls this."""
    training = build_short(config, env)
    arranged = training.arranged
    recording = Recording(notes=list(arranged.notes))
    recording.num_parameters = training.model_facts.num_parameters
    recording.has_batch_norm = any(isinstance(m, _BatchNorm) for m in training.model.modules())
    try:
        arranged.train()
        for step, batch in enumerate(batches(training)):
            training.set_lr(step)
            share = training.forward_backward(training.to_device(batch), training.clock)
            loss = training.mesh.sum_over_data(share.double())
            recording.losses.append(float(loss))
            gradients = named(full_gradients(arranged), replica_gradients(arranged))
            recording.gradients.append(unscaled(training, gradients))
            training.update()
            recording.weights.append(
                to_numpy(named(full_state(arranged), replica_states(arranged)))
            )
        recording.metrics = metrics_of(training)
        recording.averages = averages_of(training, recording.gradients)
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


def averages_of(training: Training, gradients: list[Tensors]) -> Tensors:
    """The moving averages of what has had gradients; nothing where the recipe keeps none."""
    arranged = training.arranged
    if arranged.average is None:
        return {}
    trained = {name for step in gradients for name in step}
    with arranged.averaged():
        state = full_state(arranged).items()
        return to_numpy({AVERAGE + name: value for name, value in state if name in trained})


def batches(training: Training) -> Iterator[Batch]:
    """The batches of all steps, over as many epochs as that takes."""
    return training.loader.onward(0, 0, training.num_steps)


def name_of(replica: int, name: str) -> str:
    """A tensor of one replica in a recording."""
    return f"{_REPLICA}{replica}/{name}"


def is_common(name: str) -> bool:
    """Whether a tensor of a recording is no single replica's."""
    return not name.startswith(_REPLICA)


def named(
    common: dict[str, torch.Tensor], own: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """What all replicas have and what each has for itself, as a recording holds it."""
    result = dict(common)
    for replica, tensors in enumerate(own):
        result |= {name_of(replica, name): value for name, value in tensors.items()}
    return result


def of_replica(tensors: Tensors, replica: int) -> Tensors:
    """What a recording has of one replica alone, by the model's own names."""
    prefix = name_of(replica, "")
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}


def unscaled(training: Training, gradients: dict[str, torch.Tensor]) -> Tensors:
    """Gradients of the loss itself, where fp16 has scaled it."""
    scale = training.precision.scale()
    # A quotient of numpy is no array where the parameter is a single number.
    return {name: np.asarray(value / scale) for name, value in to_numpy(gradients).items()}


def from_numpy(value: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """One tensor of `to_numpy` in the type of another."""
    found = torch.from_numpy(value)
    return (torch.view_as_complex(found) if like.is_complex() else found).to(like.dtype)


def to_numpy(tensors: dict[str, torch.Tensor]) -> Tensors:
    """Copies on the host; types that numpy does not have become float32, which holds them all, and
    complex numbers pairs of real ones, as in files."""
    result = {}
    for name, value in tensors.items():
        value = value.detach().cpu().resolve_conj()
        if value.layout != torch.strided:
            value = value.to_dense()  # the gradient of a sparse embedding
        if value.is_complex():
            value = torch.view_as_real(value)
        if value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        result[name] = value.numpy().copy()
    return result
