"""Processes that work for another one: they leave its signals to it, and end when it does.

Ctrl-C and a scheduler's warnings reach every process of a job. Only the one in charge acts on them.
Needs no torch. Called by `processes.py` and `work.py`.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

TRAINERS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def end_with_parent() -> None:
    """Watch the process that this one works for. One that was killed cannot end its workers, and under a
    fork server the parent that the system knows is the server, which lives on."""
    threading.Thread(target=_watch, name="ridgeline-watch", daemon=True).start()


def _watch() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


@contextmanager
def signals_held() -> Iterator[None]:
    """Start processes with the trainer's signals blocked.

    The mask is inherited, so that the fork server, which can be told nothing else, and workers that
    are still starting survive them. The trainer gets what arrived in between afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TRAINERS_SIGNALS)
    try:
        # Multiprocessing starts this helper on the way and unblocks SIGINT when it does.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, TRAINERS_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
