"""References for layouts that are not the training of one device: compression and local steps.

`compress` rounds what replicas exchange and `sync=local:k` lets them drift apart, so one device never
computes the same. What can be the same is the algorithm: here n replicas live in one process, one after
the other, and the exchange is plain arithmetic. Called by `run.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ridgeline.config import RunConfig
from ridgeline.data.batch import Batch
from ridgeline.launch.env import RankEnv
from ridgeline.layout import Layout
from ridgeline.parallel.compress import Memory, reference_compress
from ridgeline.parallel.gather import full_gradients, full_state
from ridgeline.parallel.localsync import reference_local_sync
from ridgeline.train.setup import Training
from ridgeline.verify.record import Recording, build_short, metrics_of, to_numpy, unscaled


def needs_simulation(layout: Layout) -> bool:
    return layout.dp > 1 and (layout.compress != "none" or layout.sync != "every")


def simulate(config: RunConfig, env: RankEnv, layout: Layout) -> Recording:
    """The training of `layout`'s replicas on one process; `config` has microbatches and precision."""
    if layout.sync != "every":
        return _local_steps(config, env, layout.dp, int(layout.sync.partition(":")[2]))
    return _compressed(config, env, layout.dp, layout.compress)


def _compressed(config: RunConfig, env: RankEnv, num_replicas: int, how: str) -> Recording:
    training = build_short(config, env)
    # By their names in the whole that is replicated, of which the first guess at a low rank is made.
    whole = training.arranged.objective
    named = [(n, p) for n, p in whole.named_parameters() if p.requires_grad]
    memory: list[Memory] = []
    recording = _begin(training)
    for step, batches in enumerate(_deals(training, num_replicas)):
        everyone, loss = [], 0.0
        for batch in batches:
            share = _backward(training, batch, step)
            loss += float(share.double())
            # Replicas are averaged, so each one's gradient is of its share times their number.
            everyone.append({n: p.grad * num_replicas for n, p in named if p.grad is not None})
            training.optimizer.zero_grad(set_to_none=True)
        reduced = reference_compress(everyone, how, memory)
        for name, parameter in named:
            parameter.grad = reduced.get(name)
        recording.losses.append(loss)
        recording.gradients.append(unscaled(training, full_gradients(training.arranged)))
        training.update()
        recording.weights.append(to_numpy(full_state(training.arranged)))
    recording.metrics = metrics_of(training)
    return recording


def _local_steps(config: RunConfig, env: RankEnv, num_replicas: int, every: int) -> Recording:
    replicas = [build_short(config, env) for _ in range(num_replicas)]
    recording = _begin(replicas[0])
    seen = [0.0] * num_replicas
    for step, batches in enumerate(_deals(replicas[0], num_replicas)):
        loss = 0.0
        gradients: dict[str, Tensor] = {}
        for index, (training, batch) in enumerate(zip(replicas, batches, strict=True)):
            loss += float(_backward(training, batch, step).double())
            factor = batch.num_global_units / max(sum(batch.units), 1)
            for parameter in training.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= factor
            if index == 0:
                named = training.model.named_parameters()
                gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
            training.update()
            seen[index] += sum(batch.units)
        if (step + 1) % every == 0:
            reference_local_sync([training.model for training in replicas], seen)
            seen = [0.0] * num_replicas
        recording.losses.append(loss)
        recording.gradients.append(unscaled(replicas[0], gradients))
        recording.weights.append(to_numpy(full_state(replicas[0].arranged)))
    if any(seen):  # an evaluation is of the replicas' mean
        reference_local_sync([training.model for training in replicas], seen)
    recording.metrics = metrics_of(replicas[0])
    return recording


def _begin(training: Training) -> Recording:
    training.arranged.train()
    return Recording(num_parameters=training.model_facts.num_parameters)


def _backward(training: Training, batch: Batch, step: int) -> Tensor:
    training.set_lr(step)
    share: Tensor = training.forward_backward(training.to_device(batch), training.clock)
    return torch.as_tensor(share)


def _deals(training: Training, num_replicas: int) -> Iterator[list[Batch]]:
    """For each step the batch of every replica, as the ranks of a job would get them."""
    loaders = [training.loader.dealt_to(rank, num_replicas) for rank in range(num_replicas)]
    epoch, left = 0, training.num_steps
    while left:
        for batches in zip(*(loader.epoch(epoch) for loader in loaders), strict=True):
            yield list(batches)
            left -= 1
            if not left:
                return
        epoch += 1
