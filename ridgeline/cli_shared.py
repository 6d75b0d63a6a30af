"""What the commands have in common: how one ends when it is asked to, and what it says without torch.

Needs no torch. Called by `cli.py` and the `cli_*.py` beside it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from ridgeline.errors import UsageError


def has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def require_torch(what: str) -> None:
    """Most commands work without torch; `what` does not, and says so before it begins."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{what} needs torch, which is not installed here; pip install 'torch>=2.11,<2.14'"
        ) from error


def num_cores() -> int:
    """Cores this process may use, which a scheduler can have made fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Ctrl-C, a scheduler's SIGTERM and a lost terminal end the measuring, not its cleaning up: the
    first one raises, those after it are passed over."""
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Under `nohup` a lost terminal is to be passed over, and stays so.
    known = [number for number in asked if signal.getsignal(number) is not signal.SIG_IGN]

    def end(_number: int, _frame: object) -> None:
        for number in known:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(number, end) for number in known]
    try:
        yield
    finally:
        for number, handler in zip(known, before, strict=True):
            signal.signal(number, handler)
