"""What to do with a batch whose loss is no number, or far above the ones before it (`guard` in a recipe).

With `skip` the weights are left as they were before it; with `rollback` the run goes back to its last
checkpoint and comes past the batch without learning from it. Ranks judge the global loss before the
update, which costs a small exchange and a look at the device every step; with `stop`, the default, nothing
of that happens and the run ends soon after. Called by `run.py`.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.data.batch import Batch
from ridgeline.errors import UsageError, WouldRepeat
from ridgeline.train.clock import Clock
from ridgeline.train.setup import Training

_FEWEST = 5
"""Losses before which none is called far above the others."""


@dataclass(frozen=True)
class BadBatch:
    """A batch that was not learned from."""

    epoch: int
    batch: int
    loss: float
    reason: str


class Guard:
    """Watches over the steps of `training`; use `self.training` from then on."""

    def __init__(self, training: Training, skipped: Callable[[], list[list[int]]]) -> None:
        self._config = training.config.guard
        self._mesh, self._arranged = training.mesh, training.arranged
        self._skipped = skipped
        self._recent: deque[float] = deque(maxlen=self._config.window)
        self._num_bad = 0
        self._found: BadBatch | None = None
        self._place = (0, 0)
        self._share: Tensor | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self.training = training
        if not self.is_on:
            return
        if training.arranged.compression is not None and self._config.on_bad == "skip":
            raise UsageError(
                f"guard.on_bad=skip with {training.mesh.layout}: what compression left out of a bad "
                "gradient would come back in the next; use guard.on_bad=rollback"
            )
        self._scaler = training.precision.scaler
        self._forward_backward, self._update = training.forward_backward, training.update
        care = training.arranged.care(training.optimizer)
        self._clear = care.clear if care is not None else training.optimizer.zero_grad
        self.training = replace(
            training, forward_backward=self._watched, update=self._guarded_update
        )

    @property
    def is_on(self) -> bool:
        return self._config.on_bad != "stop" or self._config.spike > 0

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what the next judgement depends on."""
        return {"recent": list(self._recent), "num_bad": self._num_bad}

    def restore(self, state: dict[str, Any]) -> None:
        self._recent = deque(state["recent"], maxlen=self._config.window)
        # Going back in a run that goes on must not forget what was found since.
        self._num_bad = max(self._num_bad, state["num_bad"])

    def take(self) -> BadBatch | None:
        """What the step just done has found, once."""
        found, self._found = self._found, None
        return found

    def _watched(self, batch: Batch, clock: Clock) -> Tensor:
        self._place = (batch.epoch, batch.step)
        # A bad batch goes through batch norm before anyone has seen its loss.
        live = [buffer for part in self._arranged.parts for buffer in part.buffers()]
        self._buffers = [(buffer, buffer.clone()) for buffer in live]
        self._share = self._forward_backward(batch, clock)
        return self._share

    def _guarded_update(self) -> Tensor | None:
        assert self._share is not None
        loss = float(self._mesh.sum_over_data(self._share.double()))
        reason = self._judge(loss)
        if not reason:
            self._recent.append(loss)
            return self._update()
        epoch, batch = self._place
        self._found = BadBatch(epoch, batch, loss, reason)
        self._num_bad += list(self._place) not in self._skipped()
        action = self._config.on_bad
        if action == "stop" or self._num_bad > self._config.most:
            limit = f" after {self._config.most} bad batches" if action != "stop" else ""
            raise WouldRepeat(
                f"batch {batch} of epoch {epoch}: {reason}; the run stopped{limit}. Lower train.lr, set "
                "train.clip, or look at that batch"
            )
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        self._clear()
        return None

    def _judge(self, loss: float) -> str:
        """Why the batch is bad, the same on every rank; empty when it is not."""
        reason = ""
        if list(self._place) in self._skipped():
            reason = "it was bad before"
        elif not math.isfinite(loss):
            reason = f"loss is {loss}"
        elif self._config.spike and len(self._recent) >= _FEWEST:
            usual = statistics.median(self._recent)
            if loss > self._config.spike * usual:
                reason = f"loss is {loss:.4g} where {usual:.4g} is usual"
        if not reason and self._scaler is None and not self._gradients_are_finite():
            reason = "a gradient is no number"
        group = self._mesh.world_group
        if group is not None:
            flag = torch.tensor([float(bool(reason))], device=self._mesh.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
            if flag.item() and not reason:
                reason = "a gradient is no number on another rank"
        return reason

    def _gradients_are_finite(self) -> bool:
        found = [t.parameter.grad for t in self._arranged.trainables()]
        local = [getattr(g, "_local_tensor", g) for g in found if g is not None]
        local = [g for g in local if g.numel()]
        if not local:
            return True
        norms = torch._foreach_norm(local)
        return bool(torch.stack([norm.float() for norm in norms]).isfinite().all())
