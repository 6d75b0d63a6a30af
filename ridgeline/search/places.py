"""Where trials run: each is a `ridgeline train` of its own, here on a share of the devices and cores, or as
a job of the scheduler that is there. Imports without torch; called by `run.py`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ridgeline.errors import OURS, Requeue, RunError, UsageError
from ridgeline.launch.env import environment_with
from ridgeline.launch.job import RECORD, JobState
from ridgeline.launch.rank import end_with_parent
from ridgeline.launch.records import JobRecord, find_record
from ridgeline.launch.schedulers.table import SCHEDULERS, find_scheduler

_RAISED = re.compile(r"[A-Za-z_.]*(Error|Exception|Interrupt)\b")
STOP_S = 60.0
"""Seconds that trials get to save what they have before they are killed."""
LOST_S = 300.0
"""A job that its scheduler has not known of for so long is over."""
_TAKEN = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL", "REVOKED")
"""What was done to a job, and is no fault of its trial's."""
_ASK_S = 5.0
"""Between two questions to a scheduler about one job."""


@dataclass(frozen=True)
class Ended:
    """How a trial's run ended: `done`, `stopped` before its time and able to go on, or `failed`."""

    how: str
    words: str = ""
    is_taken: bool = False
    """Whether something was done to it, as to its node, that is no fault of its own."""


class Running(Protocol):
    def poll(self) -> Ended | None: ...

    def stop(self) -> bool:
        """Ask for an end, with what was trained saved; whether that is to be waited for."""

    def kill(self) -> None: ...


class Places(Protocol):
    @property
    def count(self) -> int:
        """Trials that run at a time."""

    @property
    def left(self) -> str:
        """What becomes of them when the search is cut off."""

    def open(self, is_over: Callable[[], bool]) -> None:
        """Before the first; `is_over` says whether anybody still waits for it."""

    def close(self) -> None:
        """After the last."""

    def start(self, words: Sequence[str], run: Path, log: Path, workdir: str) -> Running:
        """`ridgeline WORDS`, which trains in `run`; what it prints goes to `log`."""


@dataclass
class _Process:
    process: subprocess.Popen[bytes]
    log: Path
    begins: int
    """Bytes that were in the log before."""
    places: Local
    slot: int
    over: bool = False

    def poll(self) -> Ended | None:
        code = self.process.poll()
        if code is None:
            return None
        if not self.over:
            self.over = True
            self.places.free.insert(0, self.slot)
        if code == 0:
            return Ended("done")
        how = "stopped" if code in (Requeue.exit_code, -signal.SIGTERM) else "failed"
        killed = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Ended(how, last_words(self.log, self.begins) or killed)

    def stop(self) -> bool:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return True

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Local:
    """Processes of this host, whose ranks are here or wherever their options say."""

    count: int
    devices: tuple[str, ...] = ()
    """Of CUDA; empty: trials find their devices themselves."""
    cores: tuple[int, ...] = ()
    """To be shared out; empty: all trials may use all of them."""
    free: list[int] = field(init=False)
    left = "its trials were saved"

    def __post_init__(self) -> None:
        self.free = list(range(self.count))

    def open(self, is_over: Callable[[], bool]) -> None:
        pass

    def close(self) -> None:
        pass

    def start(self, words: Sequence[str], run: Path, log: Path, workdir: str) -> Running:
        slot = self.free.pop(0)
        try:
            return self._start(words, log, workdir, slot)
        except BaseException:
            self.free.insert(0, slot)
            raise

    def _start(self, words: Sequence[str], log: Path, workdir: str, slot: int) -> Running:
        begins = log.stat().st_size if log.is_file() else 0
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "ridgeline.cli", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment_with(self.variables(slot)),
                cwd=workdir,
                # Ctrl-C is for the search, which asks its trials to save.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        if self.cores:
            with suppress(OSError):
                os.sched_setaffinity(process.pid, self.cores_of(slot))
        return _Process(process, log, begins, self, slot)

    def variables(self, slot: int) -> Mapping[str, str]:
        if not self.devices:
            return {}
        each = len(self.devices) // self.count
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices[slot * each : (slot + 1) * each])}

    def cores_of(self, slot: int) -> tuple[int, ...]:
        """Neighbours, which share caches and memory, and with most vendors' numbers the GPU's side."""
        first, last = (len(self.cores) * s // self.count for s in (slot, slot + 1))
        return self.cores[first:last] or self.cores


@dataclass
class _Job:
    record: JobRecord
    log: Path
    asked: float = 0.0
    known: float = field(default_factory=time.monotonic)
    """When the scheduler last knew of it."""

    def poll(self) -> Ended | None:
        if time.monotonic() - self.asked < _ASK_S:
            return None
        self.asked = time.monotonic()
        try:
            state = find_scheduler(self.record.scheduler).status(self.record.id)
        except (RunError, UsageError):
            return None  # a scheduler that does not answer now does later
        return self.judge(state)

    def may_run(self) -> bool:
        """Whether another job for the same trial could meet it."""
        try:
            state = find_scheduler(self.record.scheduler).status(self.record.id).state
        except (RunError, UsageError):
            return True
        return state in ("waiting", "running", "unknown")

    def judge(self, state: JobState) -> Ended | None:
        if state.state in ("waiting", "running"):
            self.known = time.monotonic()
            return None
        said = f"job {self.record.id}: {state.said} {state.reason}".strip()
        if (
            state.state == "unknown"
        ):  # it forgets jobs that ended, and knows none while it starts anew
            return Ended("stopped", said) if time.monotonic() - self.known > LOST_S else None
        if state.state == "done":
            return Ended("done")
        goes_on = state.state == "timeout" or state.said in _TAKEN
        return Ended(
            "stopped" if goes_on or state.exit_code == Requeue.exit_code else "failed", said
        )

    def stop(self) -> bool:
        """Jobs stay: they need nobody to watch them, and a search that goes on finds them."""
        return False

    def kill(self) -> None:
        pass


@dataclass
class Queue:
    """Every stretch of a trial is a job."""

    count: int
    left = "its jobs stay in the queue"

    def open(self, is_over: Callable[[], bool]) -> None:
        pass

    def close(self) -> None:
        pass

    def start(self, words: Sequence[str], run: Path, log: Path, workdir: str) -> Running:
        if (run / RECORD).is_file():  # of a search that was cut off
            job = _Job(find_record(str(run)), log)
            if job.may_run():
                return job
        with log.open("ab") as out:
            done = subprocess.run(
                [sys.executable, "-m", "ridgeline.cli", *words, "--submit"],
                stdout=out,
                stderr=out,
                cwd=workdir,
            )
        if done.returncode:
            raise RunError(f"no job was submitted: {last_words(log)}")
        return _Job(find_record(str(run)), log, time.monotonic())


def build_places(
    on: str | None, at_once: int | None, ranks: int, devices: Sequence[str], cores: Sequence[int]
) -> Places:
    """`devices` and `cores` are those of this host; a trial has `ranks` of them."""
    if on in SCHEDULERS:
        return Queue(at_once or 4)
    if on is not None:
        return Local(at_once or 1)
    if devices:
        count = at_once or max(1, len(devices) // ranks)
        return Local(count, tuple(devices), tuple(cores) if count > 1 else ())
    count = at_once or 1
    return Local(count, (), tuple(cores) if count > 1 else ())


def last_words(log: Path, begins: int = 0) -> str:
    """The sentence of an error, else what a traceback ends with; of what was written after `begins`."""
    try:
        lines = log.read_bytes()[begins:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line for line in lines if line.startswith(OURS)]
    if said:
        return said[-1].removeprefix(OURS).strip()[:500]
    raised = [line for line in lines if _RAISED.match(line)]
    return raised[-1].strip()[:500] if raised else ""
