"""How ranks that failed are told of: each one's own account in a file, and which of them is the cause.

A rank that fails writes why as the last thing it does; those that waited for it fail after it, and whoever
started them all chooses. Written by `train/worker.py` and `train/hang.py`, read by `local.py`, `start.py`
and `survive.py`.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ridgeline.errors import (
    RunError,
    UsageError,
    UserCodeFailed,
    WouldRepeat,
    complain,
    tell_where,
)
from ridgeline.launch.env import own_account
from ridgeline.launch.ranks import RANKS

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
    key: str = ""
    """The setting that a usage error is about."""
    node_gone: bool = False
    """Whether it is the rank's node that is gone, so that only other nodes would help."""


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
    when: float,
    error: BaseException,
    trace: str,
    step: int | None = None,
    decisive: bool = False,
) -> None:
    """Called by a failing rank as the last thing it does."""
    known = isinstance(error, (UsageError, RunError))
    text = str(error) if known else f"{type(error).__name__}: {error}{tell_where(error)}"
    value = {
        "rank": rank,
        "time": when,
        "message": text,
        "usage": isinstance(error, UsageError),
        "echo": isinstance(error, (RuntimeError, OSError)) and is_echo(str(error)),
        "traceback": "" if known and not isinstance(error, UserCodeFailed) else trace,
        "step": step,
        "decisive": decisive,
        "would_repeat": isinstance(error, WouldRepeat),
        "key": error.key if isinstance(error, UsageError) else "",
    }
    if _is_decided(failure_file(directory, rank)):
        return  # whoever looked at all ranks knows more than this one
    aside = failure_file(directory, rank).with_suffix(".part")
    try:
        aside.write_text(json.dumps(value), encoding="utf-8")
        aside.replace(failure_file(directory, rank))
    except OSError:
        # A full disk may be what the account is of; the launcher shows what a rank prints.
        print(text if known else trace or text, file=sys.stderr, flush=True)


def tell_once(error: UsageError | RunError) -> int:
    """The one sentence of an error that ends this process: said here, or left to whoever shows what this
    rank writes and says it of all of them. Its exit code."""
    account = own_account()
    if account:
        write_failure(Path(account).parent, 0, time.time(), error, "")
    if not account or not Path(account).is_file():
        complain(error)
    return error.exit_code


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


def raise_first(failures: list[RankFailure], log_dir: Path) -> NoReturn:
    """One error of all that was told."""
    cause = first_failure(failures)
    step = max((f.step for f in failures if f.step is not None), default=None)
    if cause.usage:
        raise UsageError(cause.message, key=cause.key)
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


def is_echo(text: str) -> bool:
    """Whether that is what a rank says whose neighbour has died."""
    return bool(_ECHO.search(text))


def signal_name(number: int) -> str:
    """
    >>> signal_name(9), signal_name(40)
    ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"
