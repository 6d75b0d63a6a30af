"""N ranks on this machine: started, watched, and all ended when one fails.

Written by hand because torch's elastic agent takes two seconds to import, in a process that computes
nothing, before the first rank can start; and of what it does (rendezvous of nodes, restarts) none is used
here: restarts are `survive.py`'s. The variables are torchrun's, so that a script cannot tell the two apart.
Rank 0 owns the terminal while the others write to `logs/`, the error shown is that of the rank which failed
first, and Ctrl-C ends every rank at once. Called by `start.py`; imports without torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from ridgeline.launch.env import LAUNCHER, RANK_VARIABLES
from ridgeline.launch.failures import RankFailure, raise_first, read_failures, signal_name
from ridgeline.launch.rank import free_ports

SHUTDOWN_S = 5.0
"""Seconds that ranks get to end after a signal before they are killed."""
_LOOK_S = 0.05
_ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Ends of the whole command; SIGTERM and SIGUSR1 are the caller's."""


class _Heard(KeyboardInterrupt):
    """One of these signals came."""

    def __init__(self, number: int) -> None:
        super().__init__(f"got {signal.Signals(number).name}")
        self.number = number


def run_ranks(
    command: list[str],
    num_processes: int,
    log_dir: Path,
    threads: int,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run `command` on every rank and wait; raises the first failure, or KeyboardInterrupt."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        LAUNCHER: str(os.getpid()),
        **RANK_VARIABLES,
        **(variables or {}),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "TORCHELASTIC_RUN_ID": f"ridgeline-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    environment.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    ranks: list[subprocess.Popen[bytes]] = []
    number = int(signal.SIGTERM)
    log_dir.mkdir(parents=True, exist_ok=True)
    try:
        with _hearing():
            for rank in range(num_processes):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(_start(command, rank, {**environment, **place}, log_dir))
            failed = _wait(ranks)
    except _Heard as heard:
        number = heard.number
        raise
    finally:
        _end(ranks, number)
        for rank in range(1, num_processes):
            _drop_empty(log_dir, rank)
    if failed:
        _raise_first(failed, log_dir)


@contextmanager
def _hearing() -> Iterator[None]:
    """These signals interrupt whatever runs here; only the main thread may ask for that."""

    def hear(number: int, frame: FrameType | None) -> None:
        raise _Heard(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, hear) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _logs(log_dir: Path, rank: int) -> tuple[Path, Path]:
    return log_dir / f"rank{rank}.stdout.log", log_dir / f"rank{rank}.stderr.log"


def _start(
    command: list[str], rank: int, environment: Mapping[str, str], log_dir: Path
) -> subprocess.Popen[bytes]:
    """In a session of its own, so that Ctrl-C is this process's to pass on."""
    with ExitStack() as files:
        out, err = (
            files.enter_context(path.open("wb")) if rank else None for path in _logs(log_dir, rank)
        )
        return subprocess.Popen(
            [sys.executable, *command],
            env=dict(environment),
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def _wait(ranks: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Until all have ended well, or one has not: exit codes of those that failed by then."""
    while True:
        codes = {rank: process.poll() for rank, process in enumerate(ranks)}
        if failed := {rank: code for rank, code in codes.items() if code}:
            return failed
        if None not in codes.values():
            return {}
        time.sleep(_LOOK_S)


def _end(ranks: list[subprocess.Popen[bytes]], number: int) -> None:
    """Each rank with all that it has started: asked first, killed when it does not hear."""
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        _send(process, number)
    until = time.monotonic() + SHUTDOWN_S
    while any(process.poll() is None for process in running) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    for process in running:
        if process.poll() is None:
            _send(process, signal.SIGKILL)
            process.wait()


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _raise_first(codes: Mapping[int, int], log_dir: Path) -> NoReturn:
    """Turn what is seen of dead processes, and the ranks' own accounts, into one error."""
    # A rank that failed first may have been seen only after the others: read all.
    failures = read_failures(log_dir)
    told = {failure.rank for failure in failures}
    for rank, code in codes.items():
        if rank in told:
            continue
        if code < 0:
            text = f"was killed by {signal_name(-code)}"
            # Ranks end each other with SIGTERM, too, once one has failed.
            failures.append(RankFailure(rank, time.time(), text, echo=code == -signal.SIGTERM))
        else:
            failures.append(RankFailure(rank, time.time(), f"ended with exit code {code}"))
    raise_first(failures, log_dir)


def _drop_empty(log_dir: Path, rank: int) -> None:
    for path in _logs(log_dir, rank):
        with suppress(OSError):
            if not path.read_bytes().strip():
                path.unlink()
