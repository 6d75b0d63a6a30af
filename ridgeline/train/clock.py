"""Where a step's time goes, measured without making the step slower.

A clock is told when each part of a step is over. On the host that is a reading of the time; on CUDA it
is an event in the stream, read only once the device has passed it, so that nobody waits. What a CUDA
clock calls waiting for data is therefore time in which the device had nothing to do.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

Times = dict[str, float]

PIECE, BETWEEN = "a microbatch", "waiting for other stages"
"""What comes next in a step of a pipeline."""


class Pending(Protocol):
    """The parts of one step, some of which may still be running on the device."""

    def read(self) -> Times: ...

    def is_finished(self) -> bool:
        """Whether `read` would answer without waiting for the device."""


class Clock(Protocol):
    last: str
    """Where a rank is: the part that was over last, or what was said to come; empty before the first."""
    num_marks: int

    def start(self) -> None:
        """Begin (or begin again, after something that is no part of a step)."""

    def mark(self, part: str, then: str = "") -> None:
        """Everything since the mark before belongs to `part`; `then` names what comes now, where that does
        not follow from it."""

    def end_step(self) -> Pending:
        """Close the step; what follows belongs to the next."""


class _HostTimes:
    def __init__(self, times: Times) -> None:
        self._times = times

    def read(self) -> Times:
        return self._times

    def is_finished(self) -> bool:
        return True


class HostClock:
    """For devices that compute while Python waits."""

    def __init__(self) -> None:
        self.last, self.num_marks = "", 0
        self.start()

    def start(self) -> None:
        self._last = self._begin = time.perf_counter()
        self._times: Times = {}

    def mark(self, part: str, then: str = "") -> None:
        now = time.perf_counter()
        self._times[part] = self._times.get(part, 0.0) + now - self._last
        self._last = now
        self.last = then or part
        self.num_marks += 1

    def end_step(self) -> Pending:
        now = time.perf_counter()
        times = {**self._times, "step_s": now - self._begin}
        self._last = self._begin = now
        self._times = {}
        return _HostTimes(times)


class _CudaTimes:
    def __init__(self, marks: list[tuple[str, torch.cuda.Event]], begin: torch.cuda.Event) -> None:
        self._marks, self._begin = marks, begin

    def read(self) -> Times:
        self._marks[-1][1].synchronize()
        times: Times = {}
        last = self._begin
        for part, event in self._marks:
            times[part] = times.get(part, 0.0) + last.elapsed_time(event) / 1e3
            last = event
        times["step_s"] = self._begin.elapsed_time(last) / 1e3
        return times

    def is_finished(self) -> bool:
        return self._marks[-1][1].query()


class CudaClock:
    """For devices that compute while Python goes on."""

    def __init__(self) -> None:
        self.last, self.num_marks = "", 0
        self.start()

    def start(self) -> None:
        self._begin = self._record()
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    @staticmethod
    def _record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, part: str, then: str = "") -> None:
        self._marks.append((part, self._record()))
        self.last = then or part
        self.num_marks += 1

    def end_step(self) -> Pending:
        times = _CudaTimes(self._marks, self._begin)
        self._begin = self._marks[-1][1]
        self._marks = []
        return times


def build_clock(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()
