"""A rank that is asked to stop: SIGTERM and SIGUSR1, as schedulers send them before the time is up.

The first asks for an end after this step; `pulse.py` brings all ranks to the same one. A second ends
the process at once. Python runs signal handlers only when the main thread is back from C, and a rank
spends its time in collectives; so the interpreter's own handler writes the number of the signal to a
pipe, and a thread that reads it acts. Used by `worker.py` and by `run_recipe`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ridgeline.errors import Requeue

STOPPING = (signal.SIGTERM, signal.SIGUSR1)
SAME_S = 5.0
"""A scheduler signals every process of a job, and a launcher that got it forwards it: what arrives
within this time of the first is the same request. On a busy node, or from another one, that takes seconds;
a launcher that is really asked twice ends its ranks itself."""
_JOIN_S = 1.0


class Requests:
    """What this rank was asked from outside; plain attributes, set by the thread that listens."""

    def __init__(self) -> None:
        self.stop = ""
        """The name of the signal that asked for an end, or empty."""
        self.want_save: Callable[[], bool] = lambda: False
        """Whether a checkpoint is due; rank 0's answer counts."""
        self.step: int | None = None
        """The last step this process has done, for the account of whoever ends it."""
        self.deaf = False
        """Set once everything is saved: what arrives now changes nothing."""
        self._since = 0.0

    def hear(self, number: int, orphaned: Callable[[], None]) -> None:
        """One signal; `orphaned` does not return where the signal means that a peer died."""
        if self.deaf or number not in STOPPING:
            return
        if number == signal.SIGTERM:
            orphaned()
        if not self.stop:
            self._since = time.monotonic()
            self.stop = signal.Signals(number).name
        elif time.monotonic() - self._since > SAME_S:
            os._exit(Requeue.exit_code)


@contextmanager
def listening(
    requests: Requests, orphaned: Callable[[], None] = lambda: None
) -> Iterator[Requests]:
    """Hear signals while inside; elsewhere than in the main thread this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    # A handler of Python's has to be there for the interpreter to install its own.
    before = {number: signal.signal(number, lambda *_: None) for number in STOPPING}
    other = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_listen, args=(read_end, other, requests, orphaned), name="ridgeline-signals"
    )
    thread.daemon = True
    thread.start()
    try:
        yield requests
    finally:
        signal.set_wakeup_fd(other)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write_end)  # ends the thread
        thread.join(_JOIN_S)


def _listen(read_end: int, other: int, requests: Requests, orphaned: Callable[[], None]) -> None:
    while numbers := os.read(read_end, 16):
        if other != -1:
            os.write(other, numbers)  # an event loop listened before us
        for number in numbers:
            requests.hear(number, orphaned)
    os.close(read_end)
