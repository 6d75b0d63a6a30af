"""The loader: a source read in the order of the plans, ahead of the training step.

Three ways to read, all giving the same batches bit for bit: in line (`prefetch=0`), in threads of this
process (`threads=n`), or in worker processes (`workers=n`). Threads suit sources that leave Python alone
while they work; processes suit those that do not. Where it is in the data is a number, so that going on
after a restart, with other ranks, other workers or another format, reads nothing it does not use. Called
by `train/setup.py`.
"""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.data.batch import Batch, Change, read_batch, read_pinned
from ridgeline.data.order import (
    BatchPlan,
    Blocks,
    check_sizes,
    num_batches,
    plan_epoch,
    plan_windows,
)
from ridgeline.data.processes import Processes
from ridgeline.data.source import Source
from ridgeline.data.threads import read_in_threads
from ridgeline.errors import RunError, UsageError

# Batches that a source is asked for before they are read.
_ASKED_AHEAD = 2


class Loader:
    """Batches of a source for rank `rank` of `world` (counting data-parallel replicas only).

    `batch` is the global batch. `device` matters only to a source that makes its batches on the
    device by itself (`device_fetch`); others give host tensors, see `Batch.to`. `blocks` shuffles for
    files that are read in order; with `one_node` all ranks share the memory that holds files. `change`
    is done to a batch where it is read, or with `change_later` left to whoever brings it to the device
    (`Batch.settle`); `pairs` fetches the mates of samples for it too.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        accumulate: int = 1,
        workers: int = 0,
        threads: int = 1,
        shuffle: bool = True,
        blocks: Blocks | None = None,
        one_node: bool = False,
        drop_last: bool = False,
        pin_memory: bool = False,
        prefetch: int = 2,
        device: torch.device | str | None = None,
        start_method: str = "forkserver",
        pairs: bool = False,
        change: Change | None = None,
        change_later: bool = False,
    ) -> None:
        check_sizes(len(source), batch, rank, world, accumulate)
        if workers < 0 or prefetch < 0 or threads < 1:
            raise UsageError(
                f"workers={workers} and prefetch={prefetch} must not be negative, and threads={threads} "
                "must be at least 1"
            )
        if not num_batches(len(source), batch, drop_last):
            raise UsageError(
                f"the data set has {len(source)} samples and gives no whole batch of {batch} with "
                "drop_last=true; use a smaller batch or drop_last=false"
            )
        self.source = source
        self.batch = batch
        self.rank = rank
        self.world = world
        self.seed = seed
        self.accumulate = accumulate
        self.workers = workers
        self.threads = threads
        self.shuffle = shuffle
        self.blocks = blocks
        self.one_node = one_node
        self.pairs = pairs
        self.change = None if change_later else change
        """What is done to a batch where it is read."""
        self._pending = change if change_later else None
        self.drop_last = drop_last
        # Pinning without a device is only a warning from torch a batch.
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.prefetch = prefetch
        self.device = device
        self.start_method = start_method
        self._processes: Processes | None = None

    def __len__(self) -> int:
        """Batches an epoch."""
        return num_batches(len(self.source), self.batch, self.drop_last)

    def dealt_to(self, rank: int, world: int) -> Loader:
        """The loader that another rank of another number of ranks would have."""
        check_sizes(len(self.source), self.batch, rank, world, self.accumulate)
        other = copy.copy(self)
        other.rank, other.world, other._processes = rank, world, None
        return other

    def varied(
        self,
        *,
        source: Source | None = None,
        workers: int | None = None,
        threads: int | None = None,
        prefetch: int | None = None,
    ) -> Loader:
        """The same batches, from another source of such samples or read in another way."""
        other = copy.copy(self)
        other.source = self.source if source is None else source
        other.workers = self.workers if workers is None else workers
        other.threads = self.threads if threads is None else threads
        other.prefetch = self.prefetch if prefetch is None else prefetch
        other._processes = None
        check_sizes(len(other.source), other.batch, other.rank, other.world, other.accumulate)
        return other

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from batch `start` on.

        With worker processes one epoch is read at a time: starting another ends the earlier one.
        """
        return self._pended(self._read(self._plans(epoch, start)))

    def onward(self, epoch: int, start: int, count: int) -> Iterator[Batch]:
        """`count` batches from batch `start` of `epoch` on, over as many epochs as that takes.

        The first of an epoch are read while the last of the one before are used, so that nobody waits
        where one ends.
        """
        if start >= len(self):
            raise RunError(f"epoch {epoch} has {len(self)} batches, and none from batch {start} on")
        first = self._plans(epoch, start)
        plans = chain(first, chain.from_iterable(map(self._plans, itertools.count(epoch + 1))))
        return self._pended(self._read(islice(plans, count)))

    def _plans(self, epoch: int, start: int = 0) -> Iterator[BatchPlan]:
        """Those of one epoch; what it reads is asked for before."""
        plans = plan_epoch(
            len(self.source),
            self.batch,
            self.rank,
            self.world,
            self.seed,
            epoch,
            self.accumulate,
            self.shuffle,
            self.drop_last,
            start,
            self.blocks,
            self.pairs,
            getattr(self.source, "count_targets", None),
        )
        if self.shuffle and self.blocks is not None and hasattr(self.source, "ahead"):
            return self._asking_ahead(plans, epoch, self.blocks)
        return plans

    def _pended(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            batch.pending = self._pending
            yield batch

    def _read(self, plans: Iterator[BatchPlan]) -> Iterator[Batch]:
        if self.device is not None and hasattr(self.source, "device_fetch"):
            made = _MadeOnDevice(self.source, torch.device(self.device))
            return (read_batch(made, plan, self.change) for plan in plans)
        if self.prefetch and hasattr(self.source, "ask"):
            plans = self._asking(plans)
        if self.workers:
            if self._processes is None:
                self._processes = Processes(
                    self.source,
                    self.change,
                    self.workers,
                    self.prefetch,
                    self.pin_memory,
                    self.start_method,
                )
            return self._processes.epoch(plans)
        # Such a source borrows the global generators, which the training thread is using.
        if self.prefetch and not getattr(self.source, "uses_global_rng", False):
            return read_in_threads(
                self.source, plans, self.threads, self.prefetch, self.pin_memory, self.change
            )
        return self._in_line(plans)

    def _in_line(self, plans: Iterator[BatchPlan]) -> Iterator[Batch]:
        for plan in plans:
            yield read_pinned(self.source, plan, self.change, pin=self.pin_memory)

    def _asking(self, plans: Iterator[BatchPlan]) -> Iterator[BatchPlan]:
        """The same plans; the system is asked for the samples of each a little before it is handed out,
        so that the disk works while a reader does something else."""
        waiting: deque[BatchPlan] = deque()
        for plan in plans:
            for part in plan.parts:
                self.source.ask(part)  # type: ignore[attr-defined]
            waiting.append(plan)
            if len(waiting) > _ASKED_AHEAD:
                yield waiting.popleft()
        yield from waiting

    def _asking_ahead(
        self, plans: Iterator[BatchPlan], epoch: int, blocks: Blocks
    ) -> Iterator[BatchPlan]:
        """The same plans; the system is asked for what is read of a window before it is begun. Where
        other nodes read some of it, this rank's samples alone, so that no node is sent all of them."""
        windows = plan_windows(len(self.source), self.seed, epoch, blocks)
        ends: list[int] = []
        for window in windows:
            size = sum(last - first for first, last in window)
            ends.append(size + (ends[-1] if ends else 0))
        if self.world > 1 and not self.one_node:
            yield from self._asking_for_own(plans, ends)
            return
        asked = 0
        for plan in plans:
            begun = bisect_right(ends, plan.step * self.batch)
            # The window that is being read and the one after it.
            for window in windows[max(asked, begun) : begun + 2]:
                for first, last in window:
                    self.source.ahead(first, last)  # type: ignore[attr-defined]
            asked = begun + 2
            yield plan

    def _asking_for_own(self, plans: Iterator[BatchPlan], ends: list[int]) -> Iterator[BatchPlan]:
        """`ends`: where windows end in the epoch's order."""
        before: list[BatchPlan] = []
        for _, group in groupby(plans, lambda plan: bisect_right(ends, plan.step * self.batch)):
            window = list(group)
            wanted = np.unique(np.concatenate([x for p in window for x in (*p.parts, *p.mates)]))
            # In the order they lie in, neighbours together.
            cuts = np.flatnonzero(np.diff(wanted) != 1)
            firsts, lasts = wanted[[0, *(cuts + 1)]], wanted[[*cuts, -1]]
            for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
                self.source.ahead(first, last + 1)  # type: ignore[attr-defined]
            yield from before
            before = window
        yield from before

    def close(self) -> None:
        """Stop the worker processes, if there are any; a later `epoch` starts them again."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None


class _MadeOnDevice:
    """A source that makes its batches on the device, asked as any other."""

    def __init__(self, source: Any, device: torch.device) -> None:
        self.info = source.info
        self._source, self._device = source, device

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = self._source.device_fetch(indices, self._device)
        return made
