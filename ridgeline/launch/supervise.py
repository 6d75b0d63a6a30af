"""Any command on many ranks, watched: what `ridgeline launch` does in the nodes that it was given.

The warning before the time limit comes as a signal to this process, or is kept by its own clock where the
scheduler sends none; it goes on to every rank, and what ends after it counts as stopped, not failed.
Training has more to decide (restarts, fewer ranks) and its own file, `survive.py`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ridgeline.errors import Requeue, RunError
from ridgeline.launch.env import Limits
from ridgeline.launch.failures import RankError, clear_accounts
from ridgeline.launch.start import Spread


def supervise(
    spread: Spread, command: list[str], num_ranks: int, logs: Path, limits: Limits
) -> None:
    """Until every rank has ended; raises the first failure, or `Requeue` after a request to stop."""
    logs.mkdir(parents=True, exist_ok=True)
    clear_accounts(logs)
    asked: list[str] = []
    with _listening(spread, asked, limits):
        try:
            spread.run_command(command, num_ranks, logs, None, {})
        except RankError as error:
            if error.failure.node_gone and spread.met and limits.requeue:
                raise Requeue(f"{error}; the job is to go on with other nodes") from None
            if not asked or error.failure.decisive:
                raise RunError(str(error)) from None
    if asked:
        raise Requeue(f"stopped by {asked[0]}; its ranks were told and have ended", asked[0])


@contextmanager
def _listening(spread: Spread, asked: list[str], limits: Limits) -> Iterator[None]:
    """Pass requests on, and make one when the time is nearly up."""

    def hear(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not asked:
            asked.append(name)
        # Not here: a handler may run while the hub's lock is held.
        threading.Thread(target=spread.send_all, args=(name,), daemon=True).start()

    def keep_time() -> None:
        while not over.wait(1.0):
            if limits.ends_at is not None and time.time() > limits.ends_at - limits.warn_s:
                if not asked:
                    asked.append("its clock, before the time limit")
                    spread.send_all("SIGUSR1")
                return

    over = threading.Event()
    before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGUSR1)}
    thread = threading.Thread(target=keep_time, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)
