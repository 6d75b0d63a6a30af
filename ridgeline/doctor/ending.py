"""A climb that is told to end: by a scheduler's time limit, or its warning, or `timeout` as by Ctrl-C.

Called by `climb.py`; imports without torch.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TOLD = (signal.SIGTERM, signal.SIGUSR1)
"""How a job's end is said; the second is what `ridgeline launch` and schedulers send some time before."""


@contextmanager
def told_interrupts() -> Iterator[None]:
    """The first such signal inside is an interrupt; further ones change nothing while all is written."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python hands signals to the main thread only
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        for one in TOLD:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in TOLD}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
