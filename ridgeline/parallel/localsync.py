"""Local synchronisation (`sync=local:k`): replicas step on their own, weights are averaged every k
steps.

Post-local SGD (Lin et al. 2020): between two averages nothing is sent, so the model is not
wrapped, its gradients are a rank's own, and the loss is the mean over that rank's own samples.
Each replica counts in the average by the samples it has seen since the last one, which makes
`local:1` with plain SGD the same as training on the whole batch. torch's model averager gives
every rank the same weight and leaves buffers alone, so this is by hand. Called by `apply.py` and
the training loop; the reference by `verify/`.

What is averaged: parameters; buffers of the state dict that hold floats (batch norm's statistics);
with `optimizer=`, also its state (momentum, second moments), after which all replicas are the same
in every respect and one rank's checkpoint holds them all. Without it momentum stays a replica's
own. A moving average of the weights (`optim.ema`) is averaged with them: it is linear, so what comes out
is that of the averaged model. Buffers that hold integers become rank 0's; buffers outside the state dict
are constants and stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.errors import UsageError


class LocalSync:
    """Keeps the replicas of `module` together over the ranks of `group`.

    Weights and buffers of rank 0 are sent to the others as this is made.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        every: int,
        *,
        optimizer: Optimizer | None = None,
        bucket_mb: float = 25.0,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UsageError(
                f"layout sync=local:{every} averages weights every {every} steps, which must be a "
                "whole number of 1 or more, such as sync=local:8"
            )
        self.module, self.group, self.every, self.optimizer = module, group, every, optimizer
        self._bucket_bytes = int(bucket_mb * 2**20)
        self.beside: list[Tensor] = []
        """What else is averaged with the weights, as a moving average of them."""
        self._weight = 0.0
        self._num_steps = 0
        with torch.no_grad():
            averaged, copied = _state_of(module)
            for bucket in _buckets([*averaged, *copied], self._bucket_bytes):
                flat = torch.cat([t.detach().flatten() for t in bucket])
                dist.broadcast(flat, group_src=0, group=group)
                _copy_back(flat, bucket)

    def after_step(self, step: int, weight: float = 1.0) -> bool:
        """Call after the optimizer's step on every rank; whether it averaged.

        `step` is the number of steps done so far, `weight` the number of samples of this rank in
        the step just done, 0 if it had none (or the same on all ranks, if they are even).
        """
        if weight < 0:
            raise UsageError(f"LocalSync.after_step(weight={weight}): a weight is 0 or more")
        self._weight += weight
        self._num_steps += 1
        if step % self.every:
            return False
        return self.finish()

    def finish(self) -> bool:
        """Bring the replicas together now: at the end, before an evaluation or a checkpoint.

        On every rank. Nothing is sent when no step was taken since the last time. Between averages
        it is one more of them, so a run that checkpoints at other than multiples of k is another.
        """
        if not self._num_steps:
            return False
        with torch.no_grad():
            self._average()
        self._weight, self._num_steps = 0.0, 0
        return True

    def read_count(self) -> Tensor:
        """Samples and steps of this replica since the last average, for a checkpoint."""
        return torch.tensor([self._weight, self._num_steps], dtype=torch.float64)

    def write_count(self, values: Tensor) -> None:
        self._weight, self._num_steps = float(values[0]), int(values[1])

    def _average(self) -> None:
        averaged, copied = _state_of(self.module)
        if self.optimizer is not None:
            state = _optimizer_state(self.module, self.optimizer)
            self._require_equal(sum(t.numel() for t in state))
            averaged += state
        averaged += self.beside
        for bucket in _buckets(averaged, self._bucket_bytes):
            flat = _weighed(bucket, self._weight)
            dist.all_reduce(flat, group=self.group)
            total = flat[-1]
            if total > 0:  # else nobody had a sample, and each keeps what it has
                _copy_back(flat[:-1] / total, bucket)
        for bucket in _buckets(copied, self._bucket_bytes):
            flat = torch.cat([t.flatten() for t in bucket])
            dist.broadcast(flat, group_src=0, group=self.group)
            _copy_back(flat, bucket)

    def _require_equal(self, num: int) -> None:
        """The optimizer's state is made as it steps; a rank without it would hang the rest."""
        device = next(self.module.parameters()).device
        bounds = torch.tensor([num, -num], device=device)
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self.group)
        most, least = int(bounds[0]), -int(bounds[1])
        if most != least:
            raise UsageError(
                f"sync=local:{self.every}: the optimizer's state has {most} numbers on one rank "
                f"and {least} on another, so it cannot be averaged; let every parameter have a "
                "gradient on every rank, or make LocalSync without optimizer="
            )


def reference_local_sync(
    replicas: Sequence[nn.Module],
    weights: Sequence[float],
    optimizers: Sequence[Optimizer] | None = None,
    beside: Sequence[Sequence[Tensor]] = (),
) -> None:
    """What `LocalSync` does when it averages, with all replicas in one process, in place.

    A run of n ranks is n deep copies of the model that each step an optimizer of their own on that
    rank's samples; after the steps that are multiples of k, and at the end, this is called with the
    number of samples each has seen since the last time. `beside` is what else each averages.
    """
    with torch.no_grad():
        states = [_state_of(replica) for replica in replicas]
        averaged = [floats for floats, _ in states]
        if optimizers is not None:
            for tensors, replica, optimizer in zip(averaged, replicas, optimizers, strict=True):
                tensors += _optimizer_state(replica, optimizer)
        for tensors, more in zip(averaged, beside, strict=bool(beside)):
            tensors += more
        total = sum(weights)
        for same in zip(*averaged, strict=True):
            if total > 0:
                parts = [_weighed([t], w)[:-1] for t, w in zip(same, weights, strict=True)]
                mean = torch.stack(parts).sum(0) / total
                for tensor in same:
                    _copy_back(mean, [tensor])
        for first, *others in zip(*(integers for _, integers in states), strict=True):
            for other in others:
                other.copy_(first)


def _state_of(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """What is averaged, and what is rank 0's."""
    kept = set(module.state_dict(keep_vars=True))
    averaged: list[Tensor] = list(module.parameters())
    copied: list[Tensor] = []
    for name, buffer in module.named_buffers():
        if name in kept and 0 not in buffer.stride():  # an expanded one is a view of a constant
            counts = not (buffer.is_floating_point() or buffer.is_complex())
            (copied if counts else averaged).append(buffer)
    return [_real(tensor) for tensor in averaged], copied


def _optimizer_state(module: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    state = [
        _real(value)
        for parameter in module.parameters()
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor) and key != "step"
    ]
    return [value for value in state if value.is_floating_point()]


def _real(tensor: Tensor) -> Tensor:
    """The same memory as real numbers."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def _buckets(tensors: Iterable[Tensor], max_bytes: int) -> list[list[Tensor]]:
    """Tensors of one type and device together, up to a size."""
    buckets: dict[tuple[torch.dtype, torch.device], list[list[Tensor]]] = {}
    for tensor in tensors:
        alike = buckets.setdefault((tensor.dtype, tensor.device), [[]])
        if alike[-1] and sum(t.nbytes for t in alike[-1]) + tensor.nbytes > max_bytes:
            alike.append([])
        alike[-1].append(tensor)
    return [bucket for alike in buckets.values() for bucket in alike]


def _weighed(bucket: Sequence[Tensor], weight: float) -> Tensor:
    """The tensors times the weight, and the weight itself last, so that its sum comes along."""
    wide = torch.promote_types(bucket[0].dtype, torch.float32)
    one = bucket[0].new_ones(1, dtype=wide)
    return torch.cat([*(t.detach().flatten().to(wide) for t in bucket), one]) * weight


def _copy_back(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
        tensor.copy_(part.view(tensor.shape))
