"""Reading ahead in worker processes, which are torch's DataLoader's.

They come from a fork server, not from fork: a rank that reads data has CUDA, NCCL and verbs memory open
and threads that hold locks, and a forked copy of those can hang or corrupt. The server is a clean
process with torch imported once, from which workers fork in milliseconds. The price is that the source
must pickle, and that a script needs its `if __name__ == "__main__"` guard; `start_method="fork"` is
there for those who cannot pay it. Called by `loader.py`.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from ridgeline.data.batch import Batch, Change, Failure, read_batch
from ridgeline.data.children import TRAINERS_SIGNALS, end_with_parent, signals_held
from ridgeline.data.order import BatchPlan
from ridgeline.data.source import Source
from ridgeline.errors import RunError, UsageError

# What torch raises for a worker that is gone: its own check, or the broken connection to it.
_WORKER_ERRORS = (RuntimeError, OSError, EOFError)


class _PlanReader:
    """What the worker processes hold: the source, indexed by plan."""

    def __init__(self, source: Source, change: Change | None) -> None:
        self._source = source
        self._change = change

    def __getitem__(self, plan: BatchPlan) -> Batch | Failure:
        try:
            return read_batch(self._source, plan, self._change)
        except (UsageError, RunError) as error:
            # Sent as a value: torch would re-raise it with a traceback for a message.
            return Failure(error, traceback.format_exc())


class _Plans:
    """The sampler of a DataLoader that outlives its epochs: `current` is replaced for each."""

    def __init__(self) -> None:
        self.current: Iterator[BatchPlan] = iter(())

    def __iter__(self) -> Iterator[BatchPlan]:
        return self.current


class Processes:
    """Worker processes that stay for the life of the loader."""

    def __init__(
        self,
        source: Source,
        change: Change | None,
        num: int,
        prefetch: int,
        pin: bool,
        start_method: str,
    ) -> None:
        context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(["torch", __name__])
        self._plans = _Plans()
        self._generation = 0
        self._data_loader: DataLoader[Any] = DataLoader(
            _PlanReader(source, change),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._plans,
            num_workers=num,
            prefetch_factor=max(1, prefetch),
            persistent_workers=True,
            pin_memory=pin,
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
            with signals_held():
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
            if isinstance(item, Failure):
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
    for name in TRAINERS_SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    end_with_parent()
