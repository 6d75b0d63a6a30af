"""N ranks on this machine, under torch's elastic agent.

The agent starts the processes, watches them, and ends all when one fails. This file adds what a
person at a terminal needs: rank 0 owns the terminal while the others write to `logs/`, the error shown
is the one of the rank that failed first, and Ctrl-C ends every rank at once. Called by `ridgeline train`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ridgeline.launch.env import LAUNCHER, RANK_VARIABLES
from ridgeline.launch.failures import RankFailure, raise_first, read_failures

SHUTDOWN_S = 5
"""Seconds that ranks get to end after SIGTERM before they are killed."""


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


def _raise_first(error: Any, log_dir: Path) -> NoReturn:
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
    raise_first(failures, log_dir)


def _keep_logs(scratch: Path, log_dir: Path) -> None:
    """The agent nests its logs by attempt; keep one file a rank and stream, and no empty ones."""
    for path in scratch.rglob("std*.log"):
        text = path.read_bytes()
        if text.strip():
            target = log_dir / f"rank{path.parent.name}.{path.stem}.log"
            target.write_bytes(text)
