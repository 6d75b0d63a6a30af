"""How gradients travel in ZeRO 1 and 2: buckets in flight over the ranks, and the rounds of stage 2.

A round is one backward: each bucket is started as soon as it is complete, in an order that all ranks
share, and what is not complete when backward ends is reduced then, with zeros for parameters that had
no part. So a parameter that is used on one rank and not on another does not hang the job. Called by
`zero.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.parallel.flat import Bucket, Slot

# torch 2.13 has renamed it, and warns of the name that 2.11 has.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(eq=False)
class _Flight:
    """A bucket on its way over the ranks."""

    bucket: Bucket
    buffer: Tensor
    """What is being reduced; this rank's slice of it receives the result."""
    work: dist.Work | None
    copies_left: bool


class Flights:
    """Averages buckets over the shard ranks, then over the copies, while other work goes on."""

    def __init__(
        self,
        shard_group: dist.ProcessGroup | None,
        copies_group: dist.ProcessGroup | None,
        landed: Callable[[Bucket, Tensor], None],
    ) -> None:
        self._group, self._copies, self._landed = shard_group, copies_group, landed
        self._rank = 0 if shard_group is None else dist.get_rank(shard_group)
        self._flights: list[_Flight] = []

    def start(self, bucket: Bucket, buffer: Tensor) -> None:
        """`buffer` is this rank's values of the bucket, and is overwritten."""
        work = None
        if self._group is not None:
            work = _reduce_scatter(
                bucket.slice_of(buffer, self._rank),
                buffer,
                op=dist.ReduceOp.AVG,
                group=self._group,
                async_op=True,
            )
        self._flights.append(_Flight(bucket, buffer, work, self._copies is not None))

    def advance(self) -> None:
        """Every flight one leg further: over the shard ranks, over the copies, landed."""
        for flight in list(self._flights):
            if flight.work is not None:
                flight.work.wait()
            result = flight.bucket.slice_of(flight.buffer, self._rank)
            if flight.copies_left:
                flight.copies_left = False
                flight.work = dist.all_reduce(
                    result, op=dist.ReduceOp.AVG, group=self._copies, async_op=True
                )
            else:
                self._flights.remove(flight)
                self._landed(flight.bucket, result)

    def land_all(self) -> None:
        while self._flights:
            self.advance()


class Rounds:
    """Stage 2: takes each gradient as it comes, fills buckets with them and sends them off."""

    def __init__(self, buckets: list[Bucket], flights: Flights) -> None:
        self._buckets, self._flights = buckets, flights
        self._filling: dict[int, Tensor] = {}
        self._filled: set[int] = set()
        self._next = 0
        self._is_open = False
        self.num_done = 0
        """Since the last `begin`."""
        self.used: set[int] = set()
        """Parameters, by index, that had a gradient since then."""

    def arrived(self, bucket: Bucket, slot: Slot) -> None:
        """A gradient is there; called during backward."""
        if not self._is_open:
            self._is_open = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        self._collect(bucket, slot)
        while self._next < len(self._buckets):
            following = self._buckets[self._next]
            if not all(slot.index in self._filled for slot in following.slots):
                return
            self._launch()

    def is_left(self) -> bool:
        """Whether a gradient was put there without a hook, as pipelines that split backward do."""
        return any(s.parameter.grad is not None for bucket in self._buckets for s in bucket.slots)

    @torch.no_grad()
    def end(self) -> None:
        """Reduce what is left and wait for all of it."""
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            for slot in bucket.slots:
                self._collect(bucket, slot)
            self._launch()
        self._flights.land_all()
        self._filled.clear()
        self._next, self._is_open = 0, False
        self.num_done += 1

    def begin(self) -> None:
        """A new step."""
        self.num_done = 0
        self.used.clear()

    def reset(self) -> None:
        """Forget a round that did not end, as after an error in backward."""
        self._flights.land_all()
        self._filling.clear()
        self._filled.clear()
        self._next, self._is_open = 0, False
        self.begin()

    def _backward_ended(self) -> None:
        if self._is_open:  # a backward inside this one may have ended the round
            self.end()

    def _collect(self, bucket: Bucket, slot: Slot) -> None:
        """Move a gradient into its bucket; one that comes too late is left for the next round."""
        gradient = slot.parameter.grad
        if gradient is None or bucket.number < self._next:
            return
        slot.parameter.grad = None
        self.used.add(slot.index)
        gradient = to_dense(gradient)
        if bucket.number not in self._filling:
            if gradient.dtype == bucket.kind.dtype and _fills(gradient, bucket, slot):
                self._filling[bucket.number] = gradient.as_strided((bucket.size,), (1,))
                self._filled.add(slot.index)
                return
            self._filling[bucket.number] = _zeros(bucket)
        view = slot.view(self._filling[bucket.number])
        if slot.index in self._filled:
            view.add_(gradient)
        else:
            view.copy_(gradient)
        self._filled.add(slot.index)

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        buffer = self._filling.pop(bucket.number, None)
        self._flights.advance()  # those before have had the time of one bucket
        # Without a gradient here there may be one on another rank.
        self._flights.start(bucket, _zeros(bucket) if buffer is None else buffer)
        self._next += 1


def _fills(gradient: Tensor, bucket: Bucket, slot: Slot) -> bool:
    """Whether the gradient is laid out as its bucket is, and can be sent without a copy."""
    return gradient.numel() == bucket.size and gradient.stride() == slot.stride


def _zeros(bucket: Bucket) -> Tensor:
    return torch.zeros(bucket.size, dtype=bucket.kind.dtype, device=bucket.kind.device)


def to_dense(gradient: Tensor) -> Tensor:
    """The gradient of an embedding may be sparse."""
    return gradient.to_dense() if gradient.layout is not torch.strided else gradient
