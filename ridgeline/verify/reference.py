"""What trains on one process in a layout's place: one device, or the layout's replicas in turn.

Most layouts arrange the training of one device in another way. `compress` rounds what replicas exchange
and `sync=local:k` lets them drift apart, so one device never computes the same. What can be the same is
the algorithm: here n replicas live in one process, one after the other, and the exchange is plain
arithmetic. Called by `follow.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ridgeline.config import RunConfig
from ridgeline.data.batch import Batch
from ridgeline.launch.env import RankEnv
from ridgeline.layout import Layout
from ridgeline.parallel.compress import Memory, Method, reference_compress
from ridgeline.parallel.gather import full_gradients, full_state, given_to_compression
from ridgeline.parallel.localsync import reference_local_sync
from ridgeline.train.setup import Training
from ridgeline.verify.record import (
    Tensors,
    build_short,
    metrics_of,
    named,
    of_replica,
    to_numpy,
    unscaled,
)
from ridgeline.verify.step import backward, is_finite, load_state, update


def reference_layout(layout: Layout) -> Layout:
    """What of `layout` its reference has: microbatches, because batch norm sees one at a time, and replicas
    that are not the same as one device."""
    alone = Layout(accumulate=max(layout.accumulate, layout.microbatches))
    if layout.dp == 1 or (layout.compress == "none" and layout.sync == "every"):
        return alone
    return alone.replace(dp=layout.dp, compress=layout.compress, sync=layout.sync)


class Reference(Protocol):
    """A training on one process, step by step."""

    trainings: list[Training]

    def load(self, weights: Tensors, gradients: Tensors) -> None:
        """Go on from where a layout was after the step that these were recorded of."""

    def backward(self, batches: list[Batch], way: str) -> tuple[float, Tensors]:
        """Loss and gradients of a global batch, of which each replica gets its share."""

    def update(self, gradients: Tensors) -> Tensors:
        """The weights that these gradients lead to."""

    def evaluate(self) -> dict[str, float]:
        """Metrics of the model as it is."""


def build_reference(config: RunConfig, env: RankEnv, layout: Layout) -> Reference:
    """`layout` is a `reference_layout`; `config` has precision and microbatches, for one process."""
    if layout.sync != "every":
        trainings = [build_short(config, env) for _ in range(layout.dp)]
        return OwnModels(trainings, int(layout.sync.partition(":")[2]))
    return OneModel(build_short(config, env), layout.dp, layout.compress)


def deals(training: Training, num_replicas: int) -> Iterator[list[Batch]]:
    """For each step the batch of every replica, as the ranks of a job would get them."""
    loaders = [training.loader.dealt_to(rank, num_replicas) for rank in range(num_replicas)]
    epochs = (
        zip(*(loader.epoch(epoch) for loader in loaders), strict=True)
        for epoch in itertools.count()
    )
    return map(list, itertools.islice(itertools.chain.from_iterable(epochs), training.num_steps))


class OneModel:
    """Replicas that are the same after every step: one model does the shares of all, or the whole batch."""

    def __init__(self, training: Training, num_replicas: int, how: str) -> None:
        self.trainings = [training]
        self._num_replicas, self._how = num_replicas, how
        # Compression goes by the names in the whole that is replicated, and from them makes its first
        # guess at a low rank.
        whole = training.arranged.objective
        self._trained = {n: p for n, p in whole.named_parameters() if p.requires_grad}
        self._memory: list[Memory] = []

    def load(self, weights: Tensors, gradients: Tensors) -> None:
        load_state(self.trainings[0].model, weights)
        if self._how != "none":
            self._memory = [self._recall(gradients, i) for i in range(self._num_replicas)]

    def backward(self, batches: list[Batch], way: str) -> tuple[float, Tensors]:
        (training,) = self.trainings
        before = to_numpy(full_state(training.arranged))
        everyone: list[dict[str, Tensor]] = []
        loss = 0.0
        # The first replica last, because its running statistics are those that all go on with.
        for batch in reversed(batches):
            load_state(training.model, before)
            loss += backward(training, batch, way)
            # Replicas are averaged, so each one's gradient is of its share times their number.
            gradients = {n: p.grad for n, p in self._trained.items() if p.grad is not None}
            everyone.insert(0, {name: value * len(batches) for name, value in gradients.items()})
            training.optimizer.zero_grad(set_to_none=True)
        reduced = everyone[0]
        if self._how != "none":
            reduced = reference_compress(everyone, self._how, self._memory)
        for name, parameter in self._trained.items():
            parameter.grad = reduced.get(name)
        given = [given_to_compression(training.arranged, memory) for memory in self._memory]
        return loss, unscaled(training, named(full_gradients(training.arranged), given))

    def update(self, gradients: Tensors) -> Tensors:
        (training,) = self.trainings
        update(training, gradients, is_left_out=not is_finite(gradients))
        return to_numpy(full_state(training.arranged))

    def evaluate(self) -> dict[str, float]:
        return metrics_of(self.trainings[0])

    def _recall(self, gradients: Tensors, replica: int) -> Memory:
        """What a replica's compression remembers after a step with these gradients.

        What it gave and was not sent is the error that it adds to its next gradient. The factor that the
        next step starts from matters by the space that its columns span, which is that of the rows of what
        was sent. After an overflow nothing is remembered.
        """
        (training,) = self.trainings
        memory, rank = Memory(), Method.parse(self._how).rank
        names = {id(parameter): name for name, parameter in training.model.named_parameters()}
        own = of_replica(gradients, replica)
        for name, parameter in self._trained.items():
            given = own.get(names[id(parameter)])
            if given is None or not np.isfinite(given).all():
                continue
            sent = gradients[names[id(parameter)]].astype(np.float64).reshape(len(given), -1)
            error = (given.reshape(sent.shape) - sent) * training.precision.scale()
            rows = np.linalg.svd(sent, full_matrices=False)[2][: min(rank, *sent.shape)]
            memory.errors[name] = torch.from_numpy(error).to(parameter.dtype)
            memory.q[name] = torch.from_numpy(rows.T.copy()).to(parameter.dtype)
        return memory


class OwnModels:
    """Replicas that step by themselves, each with a model of its own, and are averaged every k steps."""

    def __init__(self, trainings: list[Training], every: int) -> None:
        self.trainings, self._every = trainings, every
        self._num_steps = 0
        self._seen = [0.0] * len(trainings)
        """What each replica counts by in the next average."""

    def load(self, weights: Tensors, gradients: Tensors) -> None:
        for replica, training in enumerate(self.trainings):
            load_state(training.model, of_replica(weights, replica))

    def backward(self, batches: list[Batch], way: str) -> tuple[float, Tensors]:
        own, loss = [], 0.0
        for replica, (training, batch) in enumerate(zip(self.trainings, batches, strict=True)):
            loss += backward(training, batch, way)
            units = sum(batch.units)
            self._seen[replica] += units
            for parameter in training.model.parameters():
                if parameter.grad is not None:  # of the mean over its own samples
                    parameter.grad *= batch.num_global_units / max(units, 1)
            own.append(full_gradients(training.arranged))
        return loss, unscaled(self.trainings[0], named(own[0], own))

    def update(self, gradients: Tensors) -> Tensors:
        is_left_out = not is_finite(gradients)
        for replica, training in enumerate(self.trainings):
            update(training, of_replica(gradients, replica), is_left_out)
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            self._average()
        own = [full_state(training.arranged) for training in self.trainings]
        return to_numpy(named(own[0], own))

    def evaluate(self) -> dict[str, float]:
        if any(self._seen):  # an evaluation is of the replicas' mean
            self._average()
        return metrics_of(self.trainings[0])

    def _average(self) -> None:
        averages = [training.arranged.average for training in self.trainings]
        reference_local_sync(
            [training.model for training in self.trainings],
            self._seen,
            beside=[average.values for average in averages if average is not None],
        )
        self._seen = [0.0] * len(self.trainings)
