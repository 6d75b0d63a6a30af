"""Interpreters ahead: they have imported everything and wait for a recipe while other states start.

Starting Python, torch and a CUDA context takes as long as some tens of steps, and a climb does it for every
remedy. So some processes are always a start ahead. They get ready while a state compiles, and are waited
for before anything is timed, so that nobody measures beside them. One that dies is no loss: another is
started when it is needed. Used by `states.py`, from the threads of `ahead.py` too; imports without torch.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import RunError

READY_S = 600.0
"""To import on a slow file system; then something is wrong."""


@dataclass
class Spare:
    """A process that waits for a recipe, and how long it took to get there."""

    process: subprocess.Popen[str]
    started: float
    log: Path
    ready_s: float | None = None

    def wait(self) -> float:
        """Seconds from its start until it was ready."""
        if self.ready_s is None:
            stdout = self.process.stdout
            assert stdout is not None
            answers = bool(select.select([stdout], [], [], READY_S)[0])
            line = stdout.readline() if answers else ""
            if not line:
                self.process.kill()
                what = "ended" if answers else f"was not ready within {READY_S:.0f} s"
                raise RunError(f"a process for a state {what}; see {self.log}")
            self.ready_s = float(json.loads(line)["ready"]) - self.started
        return self.ready_s

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def give(self, recipe: Path, log: Path) -> None:
        assert self.process.stdin is not None
        line = json.dumps({"recipe": str(recipe), "log": str(log)})
        try:
            print(line, file=self.process.stdin, flush=True)
        except OSError as error:
            raise RunError(f"a process for a state ended; see {self.log}") from error

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def start(variables: Sequence[str], arguments: Sequence[str], log: Path) -> Spare:
    """A process of Python with its output in `log`, in a session of its own: an interrupt is for the climb,
    which then ends what it started."""
    begun = time.time()  # on a loaded machine it may be well on its way before this one goes on
    with log.open("a") as errors:
        process = subprocess.Popen(
            ["env", *variables, sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    return Spare(process, begun, log)


class Spares:
    """Keeps so many processes ahead of those that were taken."""

    def __init__(
        self, variables: Sequence[str], arguments: Sequence[str], log: Path, number: int = 1
    ) -> None:
        self._call = (tuple(variables), tuple(arguments), log)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._number = number
        self._next: list[Spare] = []
        self._lock = threading.Lock()
        """States that start at the same time prepare and wait at the same time."""
        self._closed = False

    def take(self) -> Spare:
        """One that is ready: the first that was prepared, or one that is started now."""
        self.settle()
        with self._lock:
            spare = self._next.pop(0) if self._next else start(*self._call)
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
                self._next.append(start(*self._call))

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
            spare.process.kill()
        with self._lock:
            while self._next:
                self._next.pop().close()
