"""A rank that watches itself: when its main thread gets nowhere for too long, the job ends and says why.

A collective waits for ever for a rank that does not come, and nothing in torch says which one. So a
thread on each rank looks at the marks of the step's clock, which say where the rank is. Half way to the
limit it writes down where that is, in a file, since no other rank can be relied on; at the limit the
ranks' files are put together (`hang.py`) and the process ends, so that whoever started it can start it
again. Built by `alive.py`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from ridgeline.config import WatchConfig
from ridgeline.launch.env import RankEnv
from ridgeline.launch.ranks import stack_file, write_aside
from ridgeline.parallel.mesh import SIDE
from ridgeline.train.clock import Clock
from ridgeline.train.hang import Account, account_file, conclude

_LOOKS = 20
"""How often the thread looks within the limit, but at least once a second."""
_OVERSLEPT_S = 2.0
_AFTER = {
    "": "data",
    "other_s": "data",
    "data_s": "copy to the device",
    "h2d_s": "forward",
    "forward_s": "backward",
    "backward_s": "gradient exchange",
    "comm_s": "optimizer",
    "optimizer_s": "between steps",
}
"""Where a rank is, by the part of the step that was over last; a pipeline says it itself."""
_T = TypeVar("_T")


class Watch:
    """Where this rank is, and a thread that minds it. With a limit of 0 there is no thread."""

    def __init__(
        self, config: WatchConfig, env: RankEnv, clock: Clock, log_dir: Path | None
    ) -> None:
        self.step = 0
        """Steps that are done."""
        self._config, self._env, self._clock, self._log_dir = config, env, clock, log_dir
        self._phase = ""
        self._ticks = 0
        self._first = True
        self._main = threading.get_ident()
        self._ended = threading.Event()
        if log_dir is not None and config.timeout_s > 0:
            threading.Thread(target=self._mind, name="ridgeline-watch", daemon=True).start()

    def after(self, step: int) -> None:
        """A step is done; plain attributes, so this costs next to nothing."""
        self.step, self._first = step, False

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Something that is no step: evaluate, save, load."""
        self._phase = phase
        self._ticks += 1
        try:
            yield
        finally:
            self._phase = ""
            self._ticks += 1

    def counting(self, function: Callable[..., _T]) -> Callable[..., _T]:
        """The same function, each call of which shows that the rank gets on."""

        def counted(*args: Any) -> _T:
            self._ticks += 1
            return function(*args)

        return counted

    def close(self) -> None:
        self._ended.set()

    @property
    def place(self) -> tuple[int, str]:
        """The step that is being made, and where in it the rank is."""
        return self.step + 1, self._phase or _AFTER.get(self._clock.last, self._clock.last)

    def _limit_s(self) -> float:
        """The first step may compile, and files may be large."""
        slow = self._first or self._phase in ("save", "load")
        return max(self._config.first_step_s if slow else 0.0, self._config.timeout_s)

    def _mind(self) -> None:
        pause_s = min(1.0, self._config.timeout_s / _LOOKS)
        seen: object = None
        since = looked = time.monotonic()
        written = False
        while not self._ended.wait(pause_s):
            now = time.monotonic()
            # A job that was suspended as a whole, or a laptop that slept, is not a rank that hangs.
            overslept = now - looked > pause_s + _OVERSLEPT_S
            looked = now
            place = (self._clock.num_marks, self._ticks, self.step)
            if place != seen or overslept:
                seen, since = place, now
                if written:
                    self._take_back()
                    written = False
                continue
            idle_s = now - since
            if idle_s >= self._limit_s():
                self._end(idle_s)
            elif idle_s >= self._limit_s() / 2 and not written:
                self._write(idle_s, final=False)
                written = True

    def _write(self, idle_s: float, final: bool) -> Account:
        assert self._log_dir is not None
        step, phase = self.place
        frame = sys._current_frames().get(self._main)
        stack = traceback.format_stack(frame) if frame is not None else []
        account = Account(
            rank=self._env.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            attempt=self._env.attempt,
            step=step,
            phase=phase,
            idle_s=idle_s,
            collective=pending_collective(with_side=phase in ("save", "load")),
            stack=stack,
            final=final,
        )
        path = account_file(self._log_dir, self._env.rank)
        write_aside(path, json.dumps(asdict(account), indent=1))
        return account

    def _take_back(self) -> None:
        assert self._log_dir is not None
        with suppress(OSError):
            account_file(self._log_dir, self._env.rank).unlink()

    def _end(self, idle_s: float) -> None:
        """Never returns: with the main thread stuck there is nothing to go back to."""
        assert self._log_dir is not None
        try:
            account = self._write(idle_s, final=True)
            conclude(self._log_dir, account, self._env.world_size, self._limit_s())
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(1)


def pending_collective(with_side: bool) -> str:
    """The oldest collective that this rank has started and not finished, from torch's flight recorder;
    empty when there is none, or no record. Side groups belong to other threads than the step's."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return ""
    try:
        entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    except (RuntimeError, ValueError, TypeError):
        return ""
    for entry in entries:
        group, label = entry["process_group"][0], entry["process_group"][1]
        if entry["retired"] or entry["state"] == "completed" or label == f"{SIDE}pulse":
            continue
        if label.startswith(SIDE) and not with_side:
            continue
        sizes = ", ".join("x".join(str(n) for n in size) for size in entry["input_sizes"])
        number = entry["collective_seq_id"] or entry["p2p_seq_id"]
        return f"{entry['profiling_name']} of [{sizes}], number {number} of group {label or group}"
    return ""


def answer_stack_requests(log_dir: Path, rank: int) -> None:
    """On SIGUSR2 write every thread's Python stack to a file, also when the lock is held in C."""
    path = stack_file(log_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Stays open for the life of the process: the handler may not open files.
    file = path.open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)
