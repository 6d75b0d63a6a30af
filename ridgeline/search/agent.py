"""What a search has on each node of its job: `python -m ridgeline.search.agent [--cpu]`.

It connects to the search (`nodes.py`), says what the node has, starts the trials that it is told to on a
share of that, and says how they ended. When the search is gone, or the scheduler asks for an end, trials
get the time to save what they have. Started once a node by the launcher of the scheduler.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ridgeline.errors import RunError, UsageError, complain
from ridgeline.launch.env import take_search_address, visible_devices
from ridgeline.launch.rank import Line, find_hub
from ridgeline.search.places import STOP_S, Local, Running

KEEP_ALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 10,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 4,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 30_000,
}
"""A node that lost its power says nothing: the kernel asks, and finds out after half a minute."""
_FIND_S = 120.0
_LOOK_S = 0.1
_ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


class Agent:
    """The trials of one node."""

    def __init__(self, line: Line, places: Local, heard: Sequence[int] = ()) -> None:
        self._line, self._places, self._heard = line, places, heard
        self._running: dict[int, Running] = {}

    def serve(self) -> None:
        """Until there is nobody to serve any more, or a signal asks for an end."""
        try:
            while not self._heard:
                ready, _, _ = select.select([self._line.socket], [], [], _LOOK_S)
                orders = self._line.read() if ready else []
                if orders is None or self._line.over:
                    return
                orders, self._line.pending = [*self._line.pending, *orders], []
                for order in orders:
                    self._heed(order)
                self._report()
            self._send({"leaving": signal.Signals(self._heard[0]).name})
        finally:
            self._stop()

    def _heed(self, order: dict[str, Any]) -> None:
        number = order["trial"]
        if order["do"] == "start":
            run, log = Path(order["run"]), Path(order["log"])
            try:
                started = self._places.start(order["words"], run, log, order["workdir"])
            except (OSError, RunError) as error:
                self._tell(number, "failed", f"{socket.gethostname()}: {error}")
                return
            self._running[number] = started
        elif number in self._running:  # else its end and the order have passed each other
            trial = self._running[number]
            (trial.stop if order["do"] == "stop" else trial.kill)()

    def _report(self) -> None:
        for number, trial in list(self._running.items()):
            ended = trial.poll()
            if ended is not None:
                del self._running[number]
                self._tell(number, ended.how, ended.words)

    def _tell(self, number: int, how: str, words: str) -> None:
        self._send({"trial": number, "how": how, "words": words})

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # whoever is gone is found gone when it is read from
            self._line.send(message)

    def _stop(self) -> None:
        for trial in self._running.values():
            trial.stop()
        until = time.monotonic() + STOP_S
        while self._running and time.monotonic() < until:
            time.sleep(_LOOK_S)
            self._report()
        for trial in self._running.values():
            trial.kill()


def count_gpus() -> int:
    import torch

    count: int = torch.cuda.device_count()
    return count


def main(argv: Sequence[str], count: Callable[[], int] = count_gpus) -> int:
    # First: it may take minutes where many nodes import torch, and the search waits for no silent caller.
    devices = [] if "--cpu" in argv else visible_devices(count())
    cores = sorted(os.sched_getaffinity(0))
    try:
        line, token = find_hub(take_search_address(), time.monotonic() + _FIND_S)
    except (RunError, UsageError) as error:
        return complain(error)
    for option, value in KEEP_ALIVE.items():
        line.socket.setsockopt(*option, value)
    line.socket.settimeout(None)
    line.send({"token": token, "host": socket.gethostname(), "devices": len(devices)})
    said = _wait_for_slots(line)
    if said is None:
        return 0
    heard: list[int] = []
    for number in _ENDING:
        signal.signal(number, lambda number, _: heard.append(number))
    slots, used = said["slots"], devices[: said["slots"] * said["ranks"]]
    places = Local(slots, tuple(used), tuple(cores) if slots > 1 else ())
    Agent(line, places, heard).serve()
    return 0


def _wait_for_slots(line: Line) -> dict[str, Any] | None:
    """How many trials run here at a time; None where the search is over before it began."""
    while True:
        messages = line.read()
        if messages is None or line.over:
            return None
        if messages:
            line.pending = messages[1:]  # what is to be started may have come with it
            return messages[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
