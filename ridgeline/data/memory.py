"""Memory for batches: shared where a batch has to leave a process, used again where it does not.

A large batch in new memory costs a page fault every 4 KiB, which takes as long as reading it from the
page cache. Blocks are therefore kept and handed out again, once the last tensor on them is gone. In a
worker process a batch is made where the trainer can see it, so that it is not copied on the way; where it
is bound for a GPU, in pinned memory, which torch keeps and hands out again by itself. Called by sources.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

# Smaller ones come from the heap, which keeps its pages by itself.
_POOLED_BYTES = 1 << 20
_MAX_KEPT_BYTES = 1 << 30


class _Pool:
    """Blocks that nobody uses at the moment, by size."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[np.ndarray]] = {}
        self._kept_bytes = 0
        # What came back. A block can come back at any moment, also to a thread that holds the lock when
        # the garbage collector runs in it; this queue is made for that.
        self._returned: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()

    def take(self, num_bytes: int) -> np.ndarray:
        with self._lock:
            self._sort_returned()
            blocks = self._free.get(num_bytes)
            block = blocks.pop() if blocks else None
            if block is not None:
                self._kept_bytes -= num_bytes
        if block is None:
            block = np.empty(num_bytes, dtype=np.uint8)
        # Views of this array hold on to it, not to the block: when it goes, all of them are gone.
        lent = np.frombuffer(memoryview(block), dtype=np.uint8)
        lent.flags.writeable = True
        weakref.finalize(lent, self._returned.put, block)
        return lent

    def _sort_returned(self) -> None:
        while True:
            try:
                block = self._returned.get_nowait()
            except queue.Empty:
                return
            if self._kept_bytes + block.nbytes <= _MAX_KEPT_BYTES:
                self._free.setdefault(block.nbytes, []).append(block)
                self._kept_bytes += block.nbytes


_pool = _Pool()
_here = threading.local()


@contextlib.contextmanager
def pinned(wanted: bool) -> Iterator[None]:
    """Within it, this thread's large batches are made in pinned memory, where `wanted`."""
    before = getattr(_here, "pins", False)
    _here.pins = wanted
    try:
        yield
    finally:
        _here.pins = before


def empty_batch(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the host."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if get_worker_info() is not None and num_bytes:
        storage = torch.UntypedStorage._new_shared(num_bytes)
        return torch.empty(0, dtype=dtype).set_(storage).view(shape)  # type: ignore[call-overload]
    if num_bytes < _POOLED_BYTES:
        return torch.empty(shape, dtype=dtype)
    if getattr(_here, "pins", False):
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.from_numpy(_pool.take(num_bytes)).view(dtype).view(shape)
