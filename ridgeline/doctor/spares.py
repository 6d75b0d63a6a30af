"""An interpreter ahead: it has imported everything and waits for a recipe while another state starts.

Starting Python, torch and a CUDA context takes as long as some tens of steps, and a climb does it for every
remedy. So one process is always a start ahead. It gets ready while a state compiles, and is waited for
before anything is timed, so that nobody measures beside it. One that dies is no loss: another is started
when it is needed. Used by `states.py`; imports without torch.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
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
    with log.open("a") as errors:
        process = subprocess.Popen(
            ["env", *variables, sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    return Spare(process, time.time(), log)


class Spares:
    """Keeps one process ahead of those that were taken."""

    def __init__(self, variables: Sequence[str], arguments: Sequence[str], log: Path) -> None:
        self._call = (tuple(variables), tuple(arguments), log)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._next: Spare | None = None

    def take(self) -> Spare:
        """One that is ready: the one that was prepared, or one that is started now."""
        self.settle()
        spare, self._next = self._next or start(*self._call), None
        try:
            spare.wait()
        except RunError:
            spare.close()
            raise
        return spare

    def prepare(self) -> None:
        """Start the next one."""
        if self._next is None:
            self._next = start(*self._call)

    def settle(self) -> None:
        """Until the next one is ready and does nothing any more; one that died is forgotten."""
        if self._next is None:
            return
        with contextlib.suppress(RunError):
            self._next.wait()
        if self._next.ready_s is None or not self._next.is_alive:
            self.close()

    def close(self) -> None:
        if self._next is not None:
            spare, self._next = self._next, None
            spare.close()
