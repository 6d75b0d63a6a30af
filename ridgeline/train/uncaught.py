"""What is left of an error of ours that a loop of the user's own does not catch: a sentence, an exit code.

The same that `cli.py` does for its commands, for scripts that call `ridgeline.start`: nobody has to read
through our frames to find out that a batch does not divide. Everything else keeps its traceback, and so
does everything in an interactive session, which has to go on. Called by `train/job.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from ridgeline.errors import OURS, RunError, UsageError, UserCodeFailed
from ridgeline.launch.env import is_told, tell_torchrun, wants_traceback
from ridgeline.launch.failures import tell_once
from ridgeline.train.said import is_said


class Sentences:
    """An excepthook around the one that was there, which is still called: a user's own for every error,
    Python's for those that are not ours."""

    def __init__(self, before: Callable[..., Any], users: Callable[..., Any]) -> None:
        self._before, self._users = before, users
        self._passes = False

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._passes or not _is_ours(error) or _is_interactive():
            self._before(kind, error, trace)
            return
        assert isinstance(error, (UsageError, RunError))
        if wants_traceback():
            self._before(kind, error, trace)
        elif self._users is not sys.__excepthook__:
            self._users(kind, error, trace)
        is_known = is_told(str(error)) or is_said(str(error))
        code = error.exit_code if is_known else tell_once(error)
        tell_torchrun(f"{OURS}{error}", time.time())
        raise SystemExit(code)  # which the interpreter heeds in a hook as anywhere

    def come_first(self) -> None:
        """When ranks join, torch puts a hook of its own around: what is written under that one is lost when
        the process is ended under it. So there is one more around torch's, and this one stands back."""
        if sys.excepthook is not self:
            self._passes = True
            sys.excepthook = Sentences(sys.excepthook, self._users)


def install_sentences() -> Sentences:
    """From now on; once."""
    if not isinstance(sys.excepthook, Sentences):
        sys.excepthook = Sentences(sys.excepthook, sys.excepthook)
    return sys.excepthook


def _is_ours(error: BaseException) -> bool:
    """Of a failure in the user's own code the traceback says more."""
    return isinstance(error, (UsageError, RunError)) and not isinstance(error, UserCodeFailed)


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
