"""Interpreters ahead: they have imported everything and wait for a recipe while other states start.

Starting Python, torch and a CUDA context takes as long as some tens of steps, and a climb does it for every
remedy. So some processes are always a start ahead. They get ready while a state compiles, and are waited
for before anything is timed, so that nobody measures beside them. One that dies is no loss: another is
started when it is needed. Used by `states.py`, from the threads of `ahead.py` too; imports without torch.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.doctor.processes import Process, Processes, rank_log, start
from ridgeline.errors import RunError
from ridgeline.launch.rank import free_ports

READY_S = 600.0
"""To import on a slow file system; then something is wrong."""


@dataclass
class Spare:
    """Processes that wait for a recipe, one a rank, and how long they took to get there."""

    ranks: Processes
    log: Path
    ready_s: float | None = None

    @property
    def process(self) -> Process:
        """Of the first rank."""
        return self.ranks.processes[0]

    @property
    def started(self) -> float:
        return self.ranks.started

    def wait(self) -> float:
        """Seconds from its start until it was ready."""
        if self.ready_s is None:
            begun = time.monotonic()
            try:
                answers = self.ranks.listen(READY_S)
            except RunError as error:
                self.ranks.kill()
                late = time.monotonic() - begun >= READY_S
                what = f"was not ready within {READY_S:.0f} s" if late else "ended"
                raise RunError(f"a process for a state {what}; see {self.log}") from error
            self.ready_s = max(float(answer["ready"]) for answer in answers) - self.started
        return self.ready_s

    @property
    def is_alive(self) -> bool:
        return self.ranks.is_alive

    def give(self, recipe: Path, log: Path) -> None:
        """The recipe, where what is printed goes from now on, and where ranks meet: a port that was free
        when they began may have been taken since."""
        num_ranks = len(self.ranks.processes)
        port = free_ports(1)[0] if num_ranks > 1 else 0
        self.ranks.logs = tuple(rank_log(log, rank) if rank else log for rank in range(num_ranks))
        for rank, place in enumerate(self.ranks.logs):
            place.touch()
            try:
                self.ranks.tell(rank, {"recipe": str(recipe), "log": str(place), "port": port})
            except OSError as error:
                raise RunError(f"a process for a state ended; see {self.log}") from error

    def close(self) -> None:
        for process in self.ranks.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


class Spares:
    """Keeps so many ahead of those that were taken, each of as many ranks."""

    def __init__(
        self,
        variables: Sequence[str],
        arguments: Sequence[str],
        log: Path,
        number: int = 1,
        num_ranks: int = 1,
    ) -> None:
        self._call = (tuple(variables), tuple(arguments), log, num_ranks)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._number = number
        self._next: list[Spare] = []
        self._lock = threading.Lock()
        """States that start at the same time prepare and wait at the same time."""
        self._closed = False

    def _start(self) -> Spare:
        return Spare(start(*self._call), self._call[2])

    def take(self) -> Spare:
        """One that is ready: the first that was prepared, or one that is started now."""
        self.settle()
        with self._lock:
            spare = self._next.pop(0) if self._next else self._start()
        try:
            spare.wait()
        except BaseException:
            spare.close()
            raise
        return spare

    def prepare(self) -> None:
        """Start those that are missing."""
        with self._lock:
            while len(self._next) < self._number and not self._closed:
                self._next.append(self._start())

    def settle(self) -> None:
        """Until they are ready and do nothing any more; one that died is forgotten."""
        with self._lock:
            for spare in list(self._next):
                with contextlib.suppress(RunError):
                    spare.wait()
                if spare.ready_s is None or not spare.is_alive:
                    self._next.remove(spare)
                    spare.close()

    def close(self) -> None:
        """For good. Who waits for one of them meanwhile is told that it ended."""
        self._closed = True
        for spare in list(self._next):
            spare.ranks.kill()
        with self._lock:
            while self._next:
                self._next.pop().close()
