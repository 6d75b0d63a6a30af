"""Ranks that measure together: what they agree on, and how one of them times a piece of work.

Agreements go over a group of the CPU's network, also where GPUs are measured: it works when NCCL does not,
so that what goes wrong on one rank is told to all and none of them is left waiting. Called by
`collectives.py` and `stragglers.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.errors import RunError

Work = Callable[[], object]
GROUP_TIMEOUT = timedelta(seconds=90)
"""Of one collective: what takes longer than a second or two is left out beforehand."""


@dataclass
class Meeting:
    """This rank among those that measure."""

    rank: int
    size: int
    control: dist.ProcessGroup
    """All ranks, over gloo."""
    device: torch.device
    backend: str
    """Of what is measured."""
    _groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = field(default_factory=dict)

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def gather(self, value: Any) -> list[Any]:
        """What each rank has to say, on all of them."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """The largest of each over the ranks."""
        if not seconds:
            return []
        values = torch.tensor(list(seconds), dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.control)
        return [float(value) for value in values]

    def agree(self, what: str, work: Callable[[], Any]) -> Any:
        """Do something that may fail on this rank; where it fails on any, all of them raise the same."""
        problem, value = None, None
        try:
            value = work()
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        problems = self.gather(problem)
        for rank, told in enumerate(problems):
            if told is not None:
                raise RunError(f"rank {rank} cannot {what}: {told}")
        return value

    def group(self, lists: tuple[tuple[int, ...], ...]) -> dist.ProcessGroup | None:
        """The group of the list that holds this rank; None on ranks of no list. Every rank calls this
        with the same lists. Groups are kept for as long as the process lives: leaving one can hang."""
        if lists not in self._groups:
            # Torch names a group by how many a rank has made before, so those in no list make one too.
            mine = next((ranks for ranks in lists if self.rank in ranks), (self.rank,))
            self._groups[lists] = dist.new_group(
                list(mine),
                timeout=GROUP_TIMEOUT,
                backend=self.backend,
                use_local_synchronization=True,
            )
            # A group's first operation has to be one of all its ranks, before any pair talks.
            dist.all_reduce(torch.zeros(1, device=self.device), group=self._groups[lists])
        return self._groups[lists] if any(self.rank in ranks for ranks in lists) else None

    @property
    def everyone(self) -> dist.ProcessGroup:
        """All ranks, by the backend that is measured."""
        group = self.group((tuple(range(self.size)),))
        assert group is not None
        return group

    def time(self, work: Work | None, count: int) -> float:
        """Seconds of one of `count` times this work on this rank, begun together by all ranks; no work is
        0. On a GPU by events, on a CPU by the clock after a barrier."""
        self.barrier()
        if work is None:
            return 0.0
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            work()  # the barrier is the hosts'; after this the devices begin together too
            begin.record()
            for _ in range(count):
                work()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3 / count
        began = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - began) / count
