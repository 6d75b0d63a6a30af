"""The loader: a source read in the order of the plans, ahead of the training step.

Three ways to read, all giving the same batches bit for bit: in line (`prefetch=0`), one background
thread (`workers=0`), or torch DataLoader worker processes (`workers>0`). Threads suit sources that
spend their time in numpy; processes suit decoding. Called by `train/setup.py`.

Worker processes come from a fork server, not from fork: a rank that reads data has CUDA, NCCL and
verbs memory open and threads that hold locks, and a forked copy of those can hang or corrupt. The
server is a clean process with torch imported once, from which workers fork in milliseconds. The
price is that the source must pickle, and that a script needs its `if __name__ == "__main__"` guard;
`start_method="fork"` is there for those who cannot pay it.
"""

from __future__ import annotations

import copy
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ridgeline.data.order import BatchPlan, check_sizes, num_batches, plan_epoch
from ridgeline.data.source import Source
from ridgeline.errors import RunError, UsageError

_MAX_INDICES_SHOWN = 16
# How long closing waits for a fetch that is under way; a hung file system must not hang the exit.
_JOIN_TIMEOUT_S = 10.0
# What torch raises for a worker that is gone: its own check, or the broken connection to it.
_WORKER_ERRORS = (RuntimeError, OSError, EOFError)
# Ctrl-C and a scheduler's warnings reach every process of the job; only the trainer acts on them, and
# the workers end when it does.
_TRAINERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class Batch:
    """This rank's share of one global batch, on the host or on a device."""

    inputs: list[Tensor]
    """One tensor for each microbatch; likewise `targets`, `counts` and `indices`."""
    targets: list[Tensor]
    counts: tuple[int, ...]
    """Real samples in each part; 0 where the part is a filler that must not count."""
    num_global: int
    step: int
    epoch: int
    indices: tuple[np.ndarray, ...]
    num_targets: tuple[int, ...] | None = None
    """Counted targets in each part, where samples have different numbers; see `units`."""
    num_global_targets: int = 0

    @property
    def units(self) -> tuple[int, ...]:
        """What each part counts by in the mean loss: its samples, or its counted targets."""
        return self.counts if self.num_targets is None else self.num_targets

    @property
    def num_global_units(self) -> int:
        """The same of the global batch; at least 1, also where it has no target that counts."""
        return max(self.num_global if self.num_targets is None else self.num_global_targets, 1)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`; from pinned memory the copy does not block the host."""
        return replace(
            self,
            inputs=[part.to(device, non_blocking=True) for part in self.inputs],
            targets=[part.to(device, non_blocking=True) for part in self.targets],
        )

    def pin_memory(self) -> Batch:
        # The name is torch's: DataLoader's pinning thread looks for it.
        return replace(
            self,
            inputs=[part.pin_memory() for part in self.inputs],
            targets=[part.pin_memory() for part in self.targets],
        )


@dataclass(frozen=True)
class _Failure:
    """An error on its way from a thread or process to the loop."""

    error: UsageError | RunError
    trace: str


class Loader:
    """Batches of a source for rank `rank` of `world` (counting data-parallel replicas only).

    `batch` is the global batch. `device` matters only to a source that makes its batches on the
    device by itself (`device_fetch`); others give host tensors, see `Batch.to`.
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
        shuffle: bool = True,
        drop_last: bool = False,
        pin_memory: bool = False,
        prefetch: int = 2,
        device: torch.device | str | None = None,
        start_method: str = "forkserver",
    ) -> None:
        check_sizes(len(source), batch, rank, world, accumulate)
        if workers < 0 or prefetch < 0:
            raise UsageError(f"workers={workers} and prefetch={prefetch} must not be negative")
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
        self.shuffle = shuffle
        self.drop_last = drop_last
        # Pinning without a device is only a warning from torch a batch.
        self.pin_memory = pin_memory and torch.cuda.is_available()
        self.prefetch = prefetch
        self.device = device
        self.start_method = start_method
        self._processes: _Processes | None = None

    def __len__(self) -> int:
        """Batches an epoch."""
        return num_batches(len(self.source), self.batch, self.drop_last)

    def dealt_to(self, rank: int, world: int) -> Loader:
        """The loader that another rank of another number of ranks would have."""
        check_sizes(len(self.source), self.batch, rank, world, self.accumulate)
        other = copy.copy(self)
        other.rank, other.world, other._processes = rank, world, None
        return other

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from batch `start` on.

        With worker processes one epoch is read at a time: starting another ends the earlier one.
        """
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
            getattr(self.source, "count_targets", None),
        )
        if self.device is not None and hasattr(self.source, "device_fetch"):
            return _on_device(self.source, plans, torch.device(self.device))
        if self.workers:
            if self._processes is None:
                self._processes = _Processes(self)
            return self._processes.epoch(plans)
        # Such a source borrows the global generators, which the training thread is using.
        if self.prefetch and not getattr(self.source, "uses_global_rng", False):
            return _in_thread(self.source, plans, self.prefetch, self.pin_memory)
        return _in_line(self.source, plans, self.pin_memory)

    def close(self) -> None:
        """Stop the worker processes, if there are any; a later `epoch` starts them again."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None


def read_batch(source: Source, plan: BatchPlan) -> Batch:
    """Fetch the parts of one plan; an error names the samples that were being read."""
    inputs, targets = [], []
    for part in plan.parts:
        try:
            fetched = source.fetch(part, plan.epoch)
        except Exception as error:
            raise _named(error, plan, part) from error
        if len(fetched) != 2:
            raise UsageError(
                f"source {type(source).__name__} gives {len(fetched)} tensors for a batch; a "
                "Loader needs two, (inputs, targets)"
            )
        inputs.append(fetched[0])
        targets.append(fetched[1])
    return _batch(plan, inputs, targets)


def _batch(plan: BatchPlan, inputs: list[Tensor], targets: list[Tensor]) -> Batch:
    counts = tuple(int(weight) for weight in plan.weights)
    return Batch(
        inputs,
        targets,
        counts,
        plan.num_global,
        plan.step,
        plan.epoch,
        plan.parts,
        plan.targets,
        plan.num_global_targets,
    )


def _named(error: Exception, plan: BatchPlan, part: np.ndarray) -> UsageError | RunError:
    shown = ", ".join(str(index) for index in part[:_MAX_INDICES_SHOWN].tolist())
    if len(part) > _MAX_INDICES_SHOWN:
        shown += f", ... ({len(part)} in all)"
    where = f"while reading samples [{shown}] of epoch {plan.epoch}, batch {plan.step}"
    if isinstance(error, UsageError):
        return UsageError(f"{error} ({where})")
    return RunError(f"{type(error).__name__}: {error} ({where})")


def _in_line(source: Source, plans: Iterator[BatchPlan], pin: bool) -> Iterator[Batch]:
    for plan in plans:
        batch = read_batch(source, plan)
        yield batch.pin_memory() if pin else batch


def _on_device(source: Any, plans: Iterator[BatchPlan], device: torch.device) -> Iterator[Batch]:
    for plan in plans:
        fetched = [source.device_fetch(part, device) for part in plan.parts]
        yield _batch(plan, [parts[0] for parts in fetched], [parts[1] for parts in fetched])


def _in_thread(
    source: Source, plans: Iterator[BatchPlan], prefetch: int, pin: bool
) -> Iterator[Batch]:
    """Read up to `prefetch` batches ahead in a thread that lives as long as this generator.

    The thread holds no reference to the generator, so dropping the generator closes it, and
    closing it ends the thread.
    """
    ready: queue.SimpleQueue[Batch | _Failure | None] = queue.SimpleQueue()
    slots = threading.Semaphore(prefetch)
    stop = threading.Event()
    # A new thread's current device is 0; pinning there would open a context on a device that
    # belongs to another rank.
    device_index = torch.cuda.current_device() if pin else None
    thread = threading.Thread(
        target=_fill,
        args=(source, plans, ready, slots, stop, device_index),
        name="ridgeline-data",
        daemon=True,
    )
    thread.start()
    try:
        while (item := ready.get()) is not None:
            slots.release()
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stop.set()
        slots.release()
        thread.join(_JOIN_TIMEOUT_S)


def _fill(
    source: Source,
    plans: Iterator[BatchPlan],
    ready: queue.SimpleQueue[Batch | _Failure | None],
    slots: threading.Semaphore,
    stop: threading.Event,
    device_index: int | None,
) -> None:
    try:
        if device_index is not None:
            torch.cuda.set_device(device_index)
        for plan in plans:
            slots.acquire()
            if stop.is_set():
                return
            batch = read_batch(source, plan)
            ready.put(batch if device_index is None else batch.pin_memory())
        ready.put(None)
    except (UsageError, RunError) as error:
        ready.put(_Failure(error, ""))
    except Exception as error:
        # Whatever it is, the loop must hear of it: it is waiting on the queue.
        failure = RunError(f"the data thread failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        ready.put(_Failure(failure, ""))


class _PlanReader:
    """What the worker processes hold: the source, indexed by plan."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, plan: BatchPlan) -> Batch | _Failure:
        try:
            return read_batch(self._source, plan)
        except (UsageError, RunError) as error:
            # Sent as a value: torch would re-raise it with a traceback for a message.
            return _Failure(error, traceback.format_exc())


class _Plans:
    """The sampler of a DataLoader that outlives its epochs: `current` is replaced for each."""

    def __init__(self) -> None:
        self.current: Iterator[BatchPlan] = iter(())

    def __iter__(self) -> Iterator[BatchPlan]:
        return self.current


class _Processes:
    """Worker processes that stay for the life of the loader."""

    def __init__(self, loader: Loader) -> None:
        context = multiprocessing.get_context(loader.start_method)
        if loader.start_method == "forkserver":
            context.set_forkserver_preload(["torch", __name__])
        self._plans = _Plans()
        self._generation = 0
        self._data_loader: DataLoader[Any] = DataLoader(
            _PlanReader(loader.source),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._plans,
            num_workers=loader.workers,
            prefetch_factor=max(1, loader.prefetch),
            persistent_workers=True,
            pin_memory=loader.pin_memory,
            multiprocessing_context=context,
            worker_init_fn=_ignore_signals,
            # Without one of its own, DataLoader draws a number an epoch from the generator that
            # the model's dropout uses, and the number of workers would change the training.
            generator=torch.Generator(),
        )

    def epoch(self, plans: Iterator[BatchPlan]) -> Iterator[Batch]:
        self._generation += 1
        return self._batches(plans, self._generation)

    def _batches(self, plans: Iterator[BatchPlan], generation: int) -> Iterator[Batch]:
        self._check_current(generation)
        self._plans.current = plans
        try:
            with _signals_held():
                items = iter(self._data_loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"the data source cannot be sent to worker processes: {error}; define it at the "
                "top level of a module, or use workers=0 or start_method='fork'"
            ) from error
        except _WORKER_ERRORS as error:
            raise self._died(error) from error
        while True:
            self._check_current(generation)
            try:
                item = next(items)
            except StopIteration:
                return
            except _WORKER_ERRORS as error:
                raise self._died(error) from error
            if isinstance(item, _Failure):
                raise item.error from RuntimeError(f"in a data worker process:\n{item.trace}")
            yield item

    def _died(self, error: Exception) -> RunError:
        self.close()
        return RunError(
            f"reading from the data worker processes failed: {error!r}; a worker that was killed "
            "often ran out of memory: use fewer workers or a smaller prefetch"
        )

    def _check_current(self, generation: int) -> None:
        if generation != self._generation:
            raise RunError(
                "this epoch of the loader ended when a later one was started; with workers > 0 "
                "a Loader reads one epoch at a time"
            )

    def close(self) -> None:
        self._generation += 1
        iterator = self._data_loader._iterator
        if iterator is not None:
            # Not left to garbage collection, which may come after the interpreter's shutdown.
            iterator._shutdown_workers()  # type: ignore[attr-defined]
            self._data_loader._iterator = None


def _ignore_signals(worker: int) -> None:
    for name in _TRAINERS_SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank, name="ridgeline-watch", daemon=True).start()


def _end_with_rank() -> None:
    """A rank that was killed cannot end its workers, and torch's own watch looks at the parent
    process, which under a fork server is the server and lives on: wait for the rank itself."""
    rank = multiprocessing.parent_process()
    if rank is not None:
        multiprocessing.connection.wait([rank.sentinel])
        os._exit(1)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Start processes with the trainer's signals blocked.

    The mask is inherited, so that the fork server, which can be told nothing else, and workers that
    are still starting survive them. The trainer gets what arrived in between afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINERS_SIGNALS)
    try:
        # Multiprocessing starts this helper on the way and unblocks SIGINT when it does.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, _TRAINERS_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
