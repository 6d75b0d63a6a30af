"""Where the main thread is, looked at from a thread beside it: which line of code a pause belongs to.

Every couple of milliseconds the frames of the main thread are read, without stopping it; a profiler that
records every call would cost more than what it looks for. Called by `probe.py`.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import time
import warnings
from collections import Counter
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import ridgeline
from ridgeline.doctor.trace import Sample

INTERVAL_S = 0.002
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(ridgeline.__file__).parent)
_DOCTOR = str(Path(__file__).parent)
_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_IDLE = ("threading.py", "queue.py", "selectors.py", "connection.py", "feed.py", "popen_fork.py")


class Sampler:
    """A thread that looks at the main thread between `start` and `stop`."""

    def __init__(self, main: int) -> None:
        self._main = main
        self.samples: list[Sample] = []
        self.reading: Counter[tuple[str, str]] = Counter()
        """Where the loader was, in ticks, while the step waited for it."""
        self.in_data = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ridgeline-doctor", daemon=True)

    def start(self) -> None:
        # Plain Python gives way to another thread only so often, and would hide from a slower one.
        self._before_s = sys.getswitchinterval()
        sys.setswitchinterval(INTERVAL_S / 4)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(5.0)
        sys.setswitchinterval(self._before_s)

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            frames = sys._current_frames()
            frame = frames.get(self._main)
            if frame is None:
                continue
            if self.in_data:
                self._look_at_loader(frame, frames)
            place = find_place(frame)
            self.samples.append(Sample(time.time_ns(), *place, state_of(frame)))
            del frame, frames

    def _look_at_loader(self, main: FrameType, frames: dict[int, FrameType]) -> None:
        """The main thread's place where it reads itself; else that of the threads that read for it."""
        if not _is_idle(main):
            self.reading[find_place(main)] += 1
            return
        mine = threading.get_ident()
        for ident, frame in frames.items():
            if ident not in (self._main, mine) and not _is_idle(frame):
                self.reading[find_place(frame)] += 1


class SyncWatch:
    """Which lines make the host wait for a CUDA device: torch warns of them for as long as this is open."""

    def __init__(self) -> None:
        self.places: Counter[tuple[str, str]] = Counter()
        self._catch = warnings.catch_warnings()

    def open(self) -> None:
        self._catch.__enter__()
        warnings.simplefilter("always")
        before = warnings.showwarning

        def show(message: Any, *rest: Any, **more: Any) -> None:
            if "synchronizing" in str(message):
                self.places[find_place(sys._getframe(1))] += 1
            else:
                before(message, *rest, **more)

        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")

    def close(self) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._catch.__exit__(None, None, None)


def _is_idle(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(_IDLE)


def find_place(frame: FrameType) -> tuple[str, str]:
    """`file:line (function)` and the line itself: of the user's own code where there is any in the stack,
    else of ours, else of whatever runs."""
    ours: FrameType | None = None
    at: FrameType | None = frame
    while at is not None:
        name = at.f_code.co_filename
        if name.startswith(_DOCTOR):
            break  # what is further out has called the doctor
        if name.startswith(_OURS):
            ours = ours or at
        elif not name.startswith(("<", _TORCH, *_LIBRARY)):
            return _describe(at)
        at = at.f_back
    return _describe(ours or frame)


def _describe(frame: FrameType) -> tuple[str, str]:
    return _describe_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@lru_cache(4096)
def _describe_line(name: str, number: int, function: str) -> tuple[str, str]:
    code = linecache.getline(name, number).strip()
    return f"{_short(name)}:{number} ({function})", code


def _short(name: str) -> str:
    path = Path(name)
    for root in (Path.cwd(), Path(_OURS).parent, Path(_TORCH).parent):
        if path.is_relative_to(root):
            return str(path.relative_to(root))
    return name


def state_of(frame: FrameType) -> str:
    """What the innermost frames say: inside torch's backward engine, in communication, or running."""
    at: FrameType | None = frame
    for _ in range(12):
        if at is None:
            break
        name, function = at.f_code.co_filename, at.f_code.co_name
        if function == "_engine_run_backward":
            return "backward"
        if f"{_TORCH}/distributed" in name or name.startswith(f"{_OURS}/parallel/"):
            return "comm"
        if not name.startswith((_TORCH, _OURS)):
            break
        at = at.f_back
    return "run"
