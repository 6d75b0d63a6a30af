"""From step results to records: losses of all ranks, times, throughput, MFU.

Ranks exchange their shares of the losses a window of steps at a time, in one small all-reduce, because
one per step would cost more than it tells. On CUDA a window is read only when the next is full, so that
nobody waits for the device. Called by `run.py` on every rank; rank 0 gets the records back.
"""

from __future__ import annotations

import math
import socket
import statistics
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.errors import WouldRepeat
from ridgeline.machine.describe import peak_memory_bytes
from ridgeline.rundir import SPLIT, RankRecord, StepRecord
from ridgeline.train.clock import Times
from ridgeline.train.setup import Training
from ridgeline.train.step import StepResult

_KEPT_TIMES = 2000
"""Steps whose times are kept for the summary of a rank."""


@dataclass(frozen=True)
class _Window:
    """Steps whose losses are on their way."""

    results: list[StepResult]
    values: Tensor
    """On the host: global losses, then global norms where there are any."""
    ready: torch.cuda.Event | None


class Recorder:
    """Collects results on every rank; hands finished records back a window at a time."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._every = training.config.log.every
        self._cuda = training.mesh.device.type == "cuda"
        self._open: list[StepResult] = []
        self._windows: deque[_Window] = deque()
        self._stops_at_nan = training.config.guard.on_bad == "stop"
        self._unchecked: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self._times: deque[Times] = deque(maxlen=_KEPT_TIMES)
        self._num_steps = 0
        facts = training.machine_facts
        peak = facts.peak_flops.get(training.precision.name)
        self._peak = peak * training.mesh.env.world_size if peak else None

    def add(self, result: StepResult) -> list[StepRecord]:
        """Take one result; returns the records that are complete now (on every rank alike)."""
        self._num_steps += 1
        self._open.append(result)
        self._check_finite(result)
        if len(self._open) < self._every:
            return []
        self._exchange()
        # On CUDA leave the newest window in flight: by the time the next is full it has arrived.
        return self._read(keep=1 if self._cuda else 0)

    def flush(self) -> list[StepRecord]:
        """Everything that is left; called before an evaluation and at the end."""
        if self._open:
            self._exchange()
        self._check_pending(wait=True)
        return self._read(keep=0)

    def salvage(self) -> list[StepRecord]:
        """After a failure: the steps not handed out yet, where that needs no other rank."""
        if self._open and self._training.mesh.world_group is None:
            self._exchange()
        return self._read(keep=0)

    def _check_finite(self, result: StepResult) -> None:
        """Stop at the first loss that is not a number; on CUDA as soon as it has reached the host."""
        if not self._cuda:
            self._require_finite(result.step, result.loss_share.item())
            return
        on_host = torch.empty((), dtype=result.loss_share.dtype, pin_memory=True)
        on_host.copy_(result.loss_share, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._unchecked.append((result.step, on_host, arrived))
        self._check_pending(wait=False)

    def _check_pending(self, wait: bool) -> None:
        while self._unchecked:
            step, value, arrived = self._unchecked[0]
            if arrived is not None and not arrived.query():
                if not wait:
                    return
                arrived.synchronize()
            self._unchecked.popleft()
            self._require_finite(step, value.item())

    def _require_finite(self, step: int, loss: float) -> None:
        if not math.isfinite(loss) and self._stops_at_nan:
            rank = self._training.mesh.env.rank
            raise WouldRepeat(
                f"loss is {loss} at step {step} on rank {rank}; the run stopped there. Lower train.lr "
                f"(now {self._training.peak_lr:g}), set train.clip, or look at that batch"
            )

    def _exchange(self) -> None:
        results, self._open = self._open, []
        shares = torch.stack([r.loss_share.double() for r in results])
        losses = self._training.mesh.sum_over_data(shares)
        norms = [r.grad_norm for r in results]
        if any(norm is not None for norm in norms):
            # A batch that was left out has none.
            none = torch.full((), math.nan, dtype=torch.float64, device=losses.device)
            wide = [none if norm is None else norm.double() for norm in norms]
            losses = torch.cat([losses, torch.stack(wide)])
        values = losses
        ready = None
        if self._cuda:
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            on_host.copy_(values, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            values = on_host
        self._windows.append(_Window(results, values, ready))

    def _read(self, keep: int) -> list[StepRecord]:
        records: list[StepRecord] = []
        while len(self._windows) > keep:
            window = self._windows.popleft()
            if window.ready is not None:
                window.ready.synchronize()
            values = window.values.tolist()
            losses, norms = values[: len(window.results)], values[len(window.results) :]
            for index, result in enumerate(window.results):
                norm = norms[index] if norms and result.grad_norm is not None else None
                records.append(self._record(result, losses[index], norm))
        return records

    def _record(self, result: StepResult, loss: float, norm: float | None) -> StepRecord:
        times = result.times.read()
        self._times.append(times)
        step_s = times["step_s"]
        flops = self._training.model_facts.train_flops_per_sample * result.num_samples
        return StepRecord(
            step=result.step,
            epoch=result.epoch,
            time=result.time,
            loss=loss,
            lr=result.lr,
            num_samples=result.num_samples,
            step_s=step_s,
            **{part: times.get(part, 0.0) for part in SPLIT},
            grad_norm=norm,
            mfu=flops / step_s / self._peak if self._peak and step_s > 0 else None,
            memory_bytes=peak_memory_bytes(self._training.mesh.device),
        )

    def summarize_rank(self) -> RankRecord:
        """Medians of this rank over the steps recorded so far, without the first few."""
        times = list(self._times)
        times = times[min(5, len(times) // 10) :]
        steps = sorted(t["step_s"] for t in times) or [0.0]
        split = {
            part: statistics.median(t.get(part, 0.0) for t in times) if times else 0.0
            for part in SPLIT
        }
        mesh = self._training.mesh
        return RankRecord(
            rank=mesh.env.rank,
            host=socket.gethostname(),
            device=str(mesh.device),
            num_steps=self._num_steps,
            step_s=statistics.median(steps),
            step_p95_s=steps[min(len(steps) - 1, int(0.95 * len(steps)))],
            split_s=split,
            peak_memory_bytes=peak_memory_bytes(mesh.device),
        )

    def gather_ranks(self) -> list[RankRecord]:
        """The summary of every rank, on every rank."""
        mine = self.summarize_rank()
        group = self._training.mesh.world_group
        if group is None:
            return [mine]
        everyone: list[RankRecord | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
        return [record for record in everyone if record is not None]
