"""N ranks on this machine: started, watched, and all ended when one fails.

Written by hand because torch's elastic agent takes two seconds to import, in a process that computes
nothing, before the first rank can start; and of what it does (rendezvous of nodes, restarts) none is used
here: restarts are `survive.py`'s. The variables are those that torchrun sets. Rank 0 owns the terminal, the
others write to `logs/`, the error shown is that of the rank which failed first, and Ctrl-C ends every rank
at once. Called by `start.py`; imports without torch.
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
from typing import NamedTuple, NoReturn, Protocol

from ridgeline.launch.env import LAUNCHER, RANK_VARIABLES
from ridgeline.launch.failures import RankFailure, raise_first, read_failures, signal_name
from ridgeline.launch.rank import end_with_parent, free_ports
from ridgeline.launch.warm import Template, Templates

SHUTDOWN_S = 5.0
"""Seconds that ranks get to end after a signal before they are killed, and to be gone after that."""
_LOOK_S = 0.05
_ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Ends of the whole command; SIGTERM and SIGUSR1 are the caller's."""

_OWN = ("RANK", "LOCAL_RANK", "ROLE_RANK")
_THREADS = "OMP_NUM_THREADS"
"""Read when a library is loaded, so that another number is another template's."""
_CHANGING = ("CUDA_VISIBLE_DEVICES",)
"""What an attempt may have otherwise than the one before, and which is read when a device is opened."""


class Process(Protocol):
    """A rank that was started."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...


class Death(NamedTuple):
    """How a rank ended, and when that was seen."""

    code: int
    time: float


class _Heard:
    """Signals that came: looked at between two looks at the ranks, so that none tears anything apart."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)


def run_ranks(
    command: list[str],
    num_processes: int,
    log_dir: Path,
    threads: int,
    variables: Mapping[str, str] | None = None,
    templates: Templates | None = None,
) -> None:
    """Run `command` on every rank and wait; raises the first failure, or KeyboardInterrupt. With
    `templates` ranks are forked from one process where that is possible."""
    environment = _environment(num_processes, threads, variables or {})
    told = {*rank_variables(num_processes, threads, variables), *_OWN, *_CHANGING} - {_THREADS}
    log_dir.mkdir(parents=True, exist_ok=True)
    templates = templates or Templates(is_wanted=False)
    ranks: list[Process] = []
    with _hearing() as heard:
        failed: dict[int, Death] = {}
        number = int(signal.SIGTERM)
        try:
            template = templates.get(
                command, environment, told, lambda: bool(heard.numbers) or templates.is_stopped
            )
            for rank in range(num_processes):
                if heard.numbers or templates.is_stopped:
                    break
                place = {name: str(rank) for name in _OWN}
                ranks.append(_start(command, rank, {**environment, **place}, log_dir, template))
            if templates.is_stopped and len(ranks) < num_processes:
                failed = {len(ranks): Death(-signal.SIGKILL, time.time())}
            else:
                failed = _wait(ranks, heard)
            number = _pass_on(heard.numbers[0]) if heard.numbers else number
        finally:
            _end(ranks, number, heard)
            for rank in range(1, num_processes):
                _drop_empty(log_dir, rank)
    if failed:
        _raise_first(failed, log_dir)
    if heard.numbers:
        raise KeyboardInterrupt(f"got {signal_name(heard.numbers[0])}")


def _pass_on(number: int) -> int:
    """What ranks are told: not to leave all of their memory in a file each, as SIGQUIT would have them."""
    return signal.SIGINT if number == signal.SIGQUIT else number


def _environment(num_processes: int, threads: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Of every rank; what a launcher around this one has said of its own ranks is said anew."""
    found = {**os.environ, **rank_variables(num_processes, threads, variables)}
    found.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    found.pop("TORCHELASTIC_ERROR_FILE", None)
    return found


def rank_variables(
    num_processes: int, threads: int, variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What the ranks on this machine are told of each other, with `variables` of the caller's; the number
    of each is put beside it."""
    return {
        _THREADS: str(threads),
        LAUNCHER: str(os.getpid()),
        **RANK_VARIABLES,
        **(variables or {}),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "ROLE_WORLD_SIZE": str(num_processes),
        "ROLE_NAME": "default",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        "TORCHELASTIC_RUN_ID": f"ridgeline-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # Rank 0 serves the store itself.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


@contextmanager
def _hearing() -> Iterator[_Heard]:
    """These signals are noted; only the main thread may ask for that. What is ignored, as a lost terminal
    is under `nohup`, stays so."""
    heard = _Heard()
    if threading.current_thread() is not threading.main_thread():
        yield heard
        return
    wanted = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, heard.hear) for number in wanted}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _logs(log_dir: Path, rank: int) -> tuple[Path, Path]:
    return log_dir / f"rank{rank}.stdout.log", log_dir / f"rank{rank}.stderr.log"


def _start(
    command: list[str],
    rank: int,
    environment: Mapping[str, str],
    log_dir: Path,
    template: Template | None,
) -> Process:
    """In a session of its own, so that Ctrl-C is this process's to pass on. What ranks before it wrote to
    the same logs stays there."""
    with ExitStack() as files:
        out, err = (
            files.enter_context(path.open("ab")) if rank else None for path in _logs(log_dir, rank)
        )
        forked = template and template.fork(command, environment, out, err)
        return forked or subprocess.Popen(
            [sys.executable, *command],
            env=dict(environment),
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def _wait(ranks: list[Process], heard: _Heard) -> dict[int, Death]:
    """Until all have ended well, one has not, or a signal came: those that failed by then."""
    while not heard.numbers:
        codes = {rank: process.poll() for rank, process in enumerate(ranks)}
        if failed := {rank: Death(code, time.time()) for rank, code in codes.items() if code}:
            return failed
        if None not in codes.values():
            return {}
        time.sleep(_LOOK_S)
    return {}


def _end(ranks: list[Process], number: int, heard: _Heard) -> None:
    """Each rank with all that it has started: asked first, killed when it does not hear, at once after
    another signal. One that not even that ends (a device that hangs in its driver) is left behind."""
    before = len(heard.numbers)
    for process in ranks:
        if process.poll() is None:
            _send(process, number)
    until = time.monotonic() + SHUTDOWN_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < until:
        if len(heard.numbers) > before:
            break
        time.sleep(_LOOK_S)
    for process in ranks:
        _send(process, signal.SIGKILL)
    until = time.monotonic() + SHUTDOWN_S
    for rank, process in enumerate(ranks):
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            text = f"rank {rank} (process {process.pid}) does not end even when it is killed"
            print(text, file=sys.stderr, flush=True)


def _send(process: Process, number: int) -> None:
    """To the rank's whole group, of which some may live when it does not."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _raise_first(deaths: Mapping[int, Death], log_dir: Path) -> NoReturn:
    """Turn what was seen of dead processes, and the ranks' own accounts, into one error."""
    # A rank that failed first may have been seen only after the others: read all.
    failures = read_failures(log_dir)
    told = {failure.rank for failure in failures}
    for rank, (code, seen) in deaths.items():
        if rank in told:
            continue
        if code < 0:
            text = f"was killed by {signal_name(-code)}"
            # Ranks end each other with SIGTERM, too, once one has failed.
            failures.append(RankFailure(rank, seen, text, echo=code == -signal.SIGTERM))
        else:
            failures.append(RankFailure(rank, seen, f"ended with exit code {code}"))
    raise_first(failures, log_dir)


def _drop_empty(log_dir: Path, rank: int) -> None:
    for path in _logs(log_dir, rank):
        with suppress(OSError):
            if not path.read_bytes().strip():
                path.unlink()
