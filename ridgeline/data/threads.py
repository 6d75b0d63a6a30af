"""Reading ahead in threads of the rank's own process.

Several threads read different batches at once and the batches come in order. They suit what leaves
Python alone while it works (reads of files, Pillow's decoders, numpy on large arrays) and save the copy
between processes. Called by `loader.py`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import torch

from ridgeline.data.batch import Batch, Change, Failure, read_pinned
from ridgeline.data.order import BatchPlan
from ridgeline.data.source import Source
from ridgeline.errors import RunError, UsageError

# How long closing waits for a fetch that is under way; a hung file system must not hang the exit.
_JOIN_TIMEOUT_S = 10.0

_Item = Batch | Failure | None
"""None: there are no more."""


def read_in_threads(
    source: Source,
    plans: Iterator[BatchPlan],
    num_threads: int,
    prefetch: int,
    pin: bool,
    change: Change | None,
) -> Iterator[Batch]:
    """Read up to `prefetch` batches a thread ahead, in threads that live as long as this generator.

    The threads hold no reference to the generator, so dropping the generator closes it, and closing
    it ends the threads.
    """
    # A new thread's current device is 0; pinning there would open a context on a device that belongs
    # to another rank.
    device_index = torch.cuda.current_device() if pin else None
    shared = _Shared(source, plans, num_threads * prefetch, device_index, change)
    threads = [
        threading.Thread(target=_fill, args=(shared,), name=f"ridgeline-data-{number}", daemon=True)
        for number in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    try:
        while True:
            item = shared.turns.get().get()
            shared.slots.release()
            if item is None:
                return
            if isinstance(item, Failure):
                raise item.error
            yield item
    finally:
        shared.stop.set()
        for _ in threads:
            shared.slots.release()
        for thread in threads:
            thread.join(_JOIN_TIMEOUT_S)


class _Shared:
    """What the threads of one epoch have in common."""

    def __init__(
        self,
        source: Source,
        plans: Iterator[BatchPlan],
        num_slots: int,
        device_index: int | None,
        change: Change | None,
    ) -> None:
        self.source = source
        self.device_index = device_index
        self.change = change
        self.slots = threading.Semaphore(num_slots)
        self.stop = threading.Event()
        self.turns: queue.SimpleQueue[queue.SimpleQueue[_Item]] = queue.SimpleQueue()
        """A place for each batch, in the order in which they are to come."""
        self._plans = plans
        self._lock = threading.Lock()

    def take(self) -> tuple[BatchPlan | None, queue.SimpleQueue[_Item]]:
        """The next plan and where its batch goes; None at the end."""
        with self._lock:
            place: queue.SimpleQueue[_Item] = queue.SimpleQueue()
            self.turns.put(place)
            try:
                return next(self._plans, None), place
            except Exception as error:
                place.put(_failure(error))
                return None, place


def _fill(shared: _Shared) -> None:
    if shared.device_index is not None:
        torch.cuda.set_device(shared.device_index)
    while True:
        shared.slots.acquire()
        if shared.stop.is_set():
            return
        plan, place = shared.take()
        if plan is None:
            place.put(None)
            return
        try:
            place.put(
                read_pinned(shared.source, plan, shared.change, pin=shared.device_index is not None)
            )
        except Exception as error:
            # Whatever it is, the loop must hear of it: it is waiting.
            place.put(_failure(error))


def _failure(error: Exception) -> Failure:
    if isinstance(error, UsageError | RunError):
        return Failure(error)
    failure = RunError(f"a data thread failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return Failure(failure)
