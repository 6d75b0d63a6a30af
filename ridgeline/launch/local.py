"""N ranks on this machine, under torch's elastic agent.

The agent starts the processes, watches them, and ends all when one fails. This file adds what a
person at a terminal needs: rank 0 owns the terminal while the others write to `logs/`, the error shown
is the one of the rank that failed first, and Ctrl-C ends every rank at once. Called by `ridgeline train`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import RunError, UsageError, WouldRepeat
from ridgeline.launch.env import LAUNCHER, RANK_VARIABLES
from ridgeline.launch.ranks import RANKS

SHUTDOWN_S = 5
"""Seconds that ranks get to end after SIGTERM before they are killed."""

_ECHO = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket Timeout|\bpeer\b|\bNCCL\b|\bgloo\b",
    re.IGNORECASE,
)
"""What a rank says whose neighbour died: the consequence of a failure, not its cause."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended badly: its own account, or the signal that ended it."""

    rank: int
    time: float
    message: str
    usage: bool = False
    echo: bool = False
    traceback: str = ""
    step: int | None = None
    """The last step that the rank had done; None: none since it was started."""
    decisive: bool = False
    """Found by looking at all ranks, so it is the cause whatever else was said."""
    would_repeat: bool = False
    """Whether the same start would meet it again."""


class RankError(RunError):
    """The failure of a rank, as one error; what the launcher decides on a restart from."""

    def __init__(self, text: str, failure: RankFailure, step: int | None) -> None:
        super().__init__(text)
        self.failure = failure
        self.step = step
        """The last step that any rank had done; None when none could say."""


def failure_file(directory: Path, rank: int) -> Path:
    """Where a rank leaves the account of its failure for the launcher."""
    return directory / f"failure-{rank}.json"


def write_failure(
    directory: Path,
    rank: int,
    time: float,
    error: BaseException,
    trace: str,
    step: int | None = None,
    decisive: bool = False,
) -> None:
    """Called by a failing rank as the last thing it does."""
    known = isinstance(error, (UsageError, RunError))
    text = str(error) if known else f"{type(error).__name__}: {error}"
    value = {
        "rank": rank,
        "time": time,
        "message": text,
        "usage": isinstance(error, UsageError),
        "echo": isinstance(error, (RuntimeError, OSError)) and bool(_ECHO.search(str(error))),
        "traceback": "" if known else trace,
        "step": step,
        "decisive": decisive,
        "would_repeat": isinstance(error, WouldRepeat),
    }
    if _is_decided(failure_file(directory, rank)):
        return  # whoever looked at all ranks knows more than this one
    aside = failure_file(directory, rank).with_suffix(".part")
    aside.write_text(json.dumps(value), encoding="utf-8")
    aside.replace(failure_file(directory, rank))


def _is_decided(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8"))["decisive"])
    except (OSError, ValueError, KeyError):
        return False


def read_failures(log_dir: Path) -> list[RankFailure]:
    """Every rank's own account."""
    paths = sorted(log_dir.glob("failure-*.json"))
    return [RankFailure(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def first_failure(failures: list[RankFailure]) -> RankFailure:
    """The cause: the earliest failure that is not merely the echo of another rank's death."""
    decisive = [failure for failure in failures if failure.decisive]
    causes = decisive or [failure for failure in failures if not failure.echo]
    # Among echoes a rank's own account says more than the signal that ended another.
    told = [failure for failure in failures if failure.traceback]
    return min(causes or told or failures, key=lambda failure: failure.time)


def clear_accounts(log_dir: Path) -> None:
    """Before ranks start: what is left from those before says nothing of these."""
    for pattern in ("failure-*.json", f"{RANKS}/rank-*.json", "hang/rank-*.json"):
        for path in log_dir.glob(pattern):
            path.unlink(missing_ok=True)


def run_ranks(
    command: list[str],
    num_processes: int,
    log_dir: Path,
    threads: int,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run `command` on every rank and wait; raises the first failure, or KeyboardInterrupt.

    SIGTERM and SIGUSR1 stay the caller's: torch's agent would end the ranks.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_agent()
    with tempfile.TemporaryDirectory(prefix="agent-", dir=log_dir) as scratch:
        environment = {
            # With gloo, restarted ranks would otherwise read stale addresses from the agent's store.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": str(threads),
            LAUNCHER: str(os.getpid()),
            **RANK_VARIABLES,
            **(variables or {}),
        }
        redirects = dict.fromkeys(range(1, num_processes), Std.ALL)
        options: dict[str, Any] = {
            "min_nodes": 1,
            "max_nodes": 1,
            "nproc_per_node": num_processes,
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "127.0.0.1:0",
            "run_id": f"ridgeline-{os.getpid()}",
            "max_restarts": 0,
            "monitor_interval": 0.1,
            "local_addr": "127.0.0.1",
            "signals_to_handle": "SIGINT,SIGHUP,SIGQUIT",
            "logs_specs": DefaultLogsSpecs(log_dir=scratch, redirects=redirects),
        }
        if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:
            options["shutdown_timeout"] = SHUTDOWN_S
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            elastic_launch(LaunchConfig(**options), sys.executable)(*command)
        except ChildFailedError as error:
            _raise_first(error, log_dir)
        except SignalException as error:
            raise KeyboardInterrupt(str(error)) from None
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
            _keep_logs(Path(scratch), log_dir)


def _quiet_agent() -> None:
    """The agent reports failures in many lines; the one this file makes of them is enough.

    Its loggers have levels of their own, so each has to be told, after torch made them.
    """
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _raise_first(error: Any, log_dir: Path) -> None:
    """Turn the agent's account of dead processes, and the ranks' own, into one error."""
    # A rank that failed first may have been counted by the agent only after the others: read all.
    failures = read_failures(log_dir)
    told = {failure.rank for failure in failures}
    for rank, failure in error.failures.items():
        if rank in told:
            continue
        if failure.exitcode < 0:
            text = f"was killed by {failure.signal_name()}"
            # The agent itself ends the others with SIGTERM once one has failed.
            echo = failure.exitcode == -signal.SIGTERM
            failures.append(RankFailure(rank, failure.timestamp, text, echo=echo))
        else:
            text = f"ended with exit code {failure.exitcode}"
            failures.append(RankFailure(rank, failure.timestamp, text))
    cause = first_failure(failures)
    step = max((f.step for f in failures if f.step is not None), default=None)
    if cause.usage:
        raise UsageError(cause.message)
    if cause.decisive:
        raise RankError(cause.message, cause, step)
    if cause.traceback:
        (log_dir / f"traceback-{cause.rank}.txt").write_text(cause.traceback, encoding="utf-8")
        raise RankError(
            f"rank {cause.rank}: {cause.message}\n"
            f"  traceback: {log_dir / f'traceback-{cause.rank}.txt'}",
            cause,
            step,
        )
    text = f"rank {cause.rank}: {cause.message}; logs of every rank: {log_dir}"
    raise RankError(text, cause, step)


def _keep_logs(scratch: Path, log_dir: Path) -> None:
    """The agent nests its logs by attempt; keep one file a rank and stream, and no empty ones."""
    for path in scratch.rglob("std*.log"):
        text = path.read_bytes()
        if text.strip():
            target = log_dir / f"rank{path.parent.name}.{path.stem}.log"
            target.write_bytes(text)
