"""Tasks done in processes, with a count of how far they are.

The processes come from a fork server, leave the signals of a user or a scheduler to the one in charge, end
when it does, and stop soon after one of them has failed. Needs no torch. Called by `pack.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, connection
from multiprocessing.process import BaseProcess
from typing import Any

from ridgeline.data.children import end_with_parent, signals_held
from ridgeline.errors import RunError

# How often a process tells the bar how far it is.
_TELL_EVERY_S = 0.2
# What the count of samples is set to when the processes are to stop.
_STOP = -(2**62)
# How long they may take to; one that writes a sample of its shard needs less.
_ENDS_S = 10.0


def _ignore(number: int) -> None:
    """Nobody is counting."""


# What a process of the work has: set once, before it is given any.
_count: Callable[[int], None] = _ignore
_common: Any = None


def _begin_process(counter: Any, common: Any) -> None:
    """Count in a number that all processes share."""
    global _common

    def add(number: int) -> None:
        with counter.get_lock():
            if counter.value < 0:
                raise _Stopped
            counter.value += number

    _common = common
    end_with_parent()
    _count_with(add)


class _Stopped(Exception):
    """Somebody else has failed, or the user has had enough."""


def _work_here(work: Callable[[Any, Any], Any], task: Any) -> Any:
    return work(_common, task)


def _count_with(add: Callable[[int], None]) -> None:
    global _count
    _count = add


class Tally:
    """Counts samples and tells now and then."""

    def __init__(self) -> None:
        self._untold = 0
        self._last = time.monotonic()

    def add(self) -> None:
        self._untold += 1
        now = time.monotonic()
        if now - self._last > _TELL_EVERY_S:
            self.tell()
            self._last = now

    def tell(self) -> None:
        _count(self._untold)
        self._untold = 0


def run_tasks(
    work: Callable[[Any, Any], Any],
    common: Any,
    tasks: Sequence[Any],
    processes: int,
    tell: Callable[[int], None],
) -> list[Any]:
    """Do all tasks, in processes where there are several, telling how many samples are done."""
    if processes <= 1 or len(tasks) <= 1:
        return _run_here(work, common, tasks, tell)
    context = multiprocessing.get_context("forkserver")
    others = active_children()
    ends_soon = False
    counter = context.Value("q", 0)
    results: dict[Future[Any], Any] = {}
    pool = ProcessPoolExecutor(
        min(processes, len(tasks)), context, initializer=_begin_process, initargs=(counter, common)
    )
    try:
        with signals_held():
            futures = [pool.submit(_work_here, work, task) for task in tasks]
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=_TELL_EVERY_S, return_when=FIRST_COMPLETED)
            tell(counter.value)
            for future in done:
                results[future] = future.result()
    except BrokenProcessPool as error:
        raise RunError(
            "a process of the work was killed, most likely for memory; fewer --processes need less"
        ) from error
    except BaseException:
        ends_soon = True
        with counter.get_lock():
            counter.value = _STOP
        raise
    finally:
        _shut(pool, others, ends_soon)
    tell(counter.value)
    return [results[future] for future in futures]


def _shut(pool: ProcessPoolExecutor, others: Sequence[BaseProcess], ends_soon: bool) -> None:
    """End the processes, whatever comes meanwhile: a pool that is left in the middle of its end by a second
    Ctrl-C waits for them for ever when Python ends. Those that are to stop and do not are killed."""
    interrupted = None
    while True:
        try:
            with signals_held():
                if ends_soon:
                    pool.shutdown(wait=False, cancel_futures=True)
                    _end_soon([one for one in active_children() if one not in others])
                pool.shutdown(wait=True, cancel_futures=True)
            break
        except KeyboardInterrupt as second:
            interrupted = second
    if interrupted is not None:
        raise interrupted


def _end_soon(processes: Sequence[BaseProcess]) -> None:
    until = time.monotonic() + _ENDS_S
    alive = {process.sentinel: process for process in processes}
    while alive and (left := until - time.monotonic()) > 0:
        for sentinel in connection.wait(list(alive), left):
            del alive[sentinel]  # type: ignore[arg-type]
    for process in alive.values():
        process.kill()


def _run_here(
    work: Callable[[Any, Any], Any],
    common: Any,
    tasks: Sequence[Any],
    tell: Callable[[int], None],
) -> list[Any]:
    done = 0

    def add(number: int) -> None:
        nonlocal done
        done += number
        tell(done)

    _count_with(add)
    try:
        return [work(common, task) for task in tasks]
    finally:
        _count_with(_ignore)


def default_processes() -> int:
    """Cores this process may use, at most eight: more do not make a disk faster."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(8, cores)
