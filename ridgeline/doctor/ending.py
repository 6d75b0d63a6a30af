"""A climb that is told to end: by a scheduler's time limit or `timeout` as by Ctrl-C.

Called by `climb.py`; imports without torch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """The first SIGTERM inside is an interrupt; further ones change nothing while all is written."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python hands signals to the main thread only
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
