"""Batches on their way to the device, so that the step does not wait for the copy.

On CUDA a thread takes batches from the loader as they become ready, copies them and augments them on a
stream of its own, one or two ahead of the step; the step's stream waits for an event that is nearly
always past. On a CPU there is nothing to overlap and a batch is taken as it comes. Called by
`train/loop.py`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from ridgeline.data.batch import Batch

_JOIN_TIMEOUT_S = 10.0

ToDevice = Callable[[Batch], Batch]


class Moving(Protocol):
    """A batch that is on its way."""

    def take(self) -> Batch:
        """The batch on the device, for the current stream."""
        ...


Feed = Callable[[Iterator[Batch]], Iterator[Moving]]


class _Here:
    """A batch that is moved when it is taken."""

    def __init__(self, batch: Batch, to_device: ToDevice) -> None:
        self._batch, self._to_device = batch, to_device

    def take(self) -> Batch:
        return self._to_device(self._batch)


class _OnStream:
    """A batch whose copy was begun on a side stream."""

    def __init__(self, batch: Batch, host: Batch, done: torch.cuda.Event) -> None:
        self._batch, self._done = batch, done
        # Pinned memory must not be used again before the copy from it is over.
        self._host = host

    def take(self) -> Batch:
        stream = torch.cuda.current_stream()
        stream.wait_event(self._done)
        for part in self._batch.tensors():
            # The memory belongs to the side stream, which must not hand it out while it is read here.
            part.record_stream(stream)
        return self._batch


def build_feed(to_device: ToDevice, device: torch.device, ahead: int = 1) -> Feed:
    """How the loop gets its batches: `ahead` of them are on the device before they are wanted."""
    if device.type != "cuda":
        return lambda batches: (_Here(batch, to_device) for batch in batches)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    # One stream for the life of the run: memory is kept by stream.
    side = torch.cuda.Stream(device)
    return lambda batches: _feed(batches, to_device, device, side, ahead)


def _feed(
    batches: Iterator[Batch],
    to_device: ToDevice,
    device: torch.device,
    side: torch.cuda.Stream,
    ahead: int,
) -> Iterator[Moving]:
    ready: queue.SimpleQueue[_OnStream | Exception | None] = queue.SimpleQueue()
    slots = threading.Semaphore(ahead)
    stop = threading.Event()
    thread = threading.Thread(
        target=_move,
        args=(batches, to_device, device, side, ready, slots, stop),
        name="ridgeline-feed",
        daemon=True,
    )
    thread.start()
    try:
        while (item := ready.get()) is not None:
            slots.release()
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        stop.set()
        slots.release()
        thread.join(_JOIN_TIMEOUT_S)


def _move(
    batches: Iterator[Batch],
    to_device: ToDevice,
    device: torch.device,
    side: torch.cuda.Stream,
    ready: queue.SimpleQueue[_OnStream | Exception | None],
    slots: threading.Semaphore,
    stop: threading.Event,
) -> None:
    try:
        torch.cuda.set_device(device)
        with torch.cuda.stream(side):
            while True:
                slots.acquire()
                if stop.is_set():
                    return
                batch = next(batches, None)
                if batch is None:
                    break
                moved = to_device(batch)
                done = torch.cuda.Event()
                done.record(side)
                ready.put(_OnStream(moved, batch, done))
        ready.put(None)
    except Exception as error:
        # As it is: a device that is out of memory is told in another way than a file that is gone.
        ready.put(error)
    finally:
        close = getattr(batches, "close", None)
        if close is not None:
            close()
