"""The ways a command ends before its work is done, how an unknown word is reported, and a line for a
terminal that may be gone.

Every room raises one of these for anything the user can cause; `cli.py`, and `train/uncaught.py` in a
script of the user's, turn them into one line on standard error and an exit code. Anything else that escapes
is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

OURS = "ridgeline: "
"""How the one line begins."""


class UsageError(Exception):
    """What was asked cannot be done as asked: a wrong word, value or combination. Exit code 2."""

    exit_code = 2

    def __init__(self, *args: object, key: str = "") -> None:
        super().__init__(*args)
        self.key = key
        """The setting it is about, e.g. data.args.size, for whoever knows where that was written."""

    def at(self, place: str) -> UsageError:
        """The same with the line that is to be changed, where there is one."""
        return UsageError(f"{self} ({place})") if place else self


class RunError(Exception):
    """What was asked is fine but went wrong while it ran. Exit code 1."""

    exit_code = 1


class UserCodeFailed(RunError):
    """A failure inside the user's own code, which its traceback says more of than one sentence."""


class WouldRepeat(RunError):
    """A failure that the same start would meet again: the loss is no number, memory is too small."""


class Requeue(RunError):
    """A run that was asked to stop and can go on. Exit code 75, which asks for it to be started again:
    `EX_TEMPFAIL` of sysexits.h, free of meaning for shells, Python and schedulers."""

    exit_code = 75

    def __init__(self, text: str, signal: str = "") -> None:
        super().__init__(text)
        self.signal = signal
        """What it was asked by; empty where it was no signal."""


def tell_where(error: BaseException) -> str:
    """The line of the user's own code that raised, in brackets; empty where it was none of theirs."""
    own, torchs = Path(__file__).parent, {"site-packages", "dist-packages"}
    pythons = Path(os.__file__).parent
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if frame.filename.startswith("<") or {own, pythons} & set(path.parents):
            continue
        if torchs & set(path.parts):
            continue
        place = f" ({os.path.relpath(path)}:{frame.lineno})"
    return place


def complain(error: UsageError | RunError) -> int:
    """The one line on standard error that is all a user sees of it; the exit code that goes with it. In one
    piece, because several ranks may write to the same terminal."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{OURS}{error}\n")
        sys.stderr.flush()
    return error.exit_code


def nearest_word(word: str, known: Iterable[str]) -> str | None:
    """The known word that looks most like `word`, or None when none looks like it at all.

    >>> nearest_word("H100-PCIE", ["a100-40g", "h100", "h200"]), nearest_word("zzz", ["h100"])
    ('h100', None)
    >>> nearest_word("ema_warmp", ["ema", "ema_warmup"]), nearest_word("h100-80gb", ["h100", "a100-80gb"])
    ('ema_warmup', 'h100')
    """
    known = list(known)
    begun = [k for k in known if len(k) > 2 and word.lower().startswith(k.lower())]
    if begun:
        start = max(begun, key=len)
        longer = [k for k in known if k.lower().startswith(start.lower())]
        return next(iter(difflib.get_close_matches(word, longer, n=1, cutoff=0.8)), start)
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return matches[0] if matches else None


def unknown_word(kind: str, word: str, known: Iterable[str], place: str) -> UsageError:
    """The error for a name that is not in a table: the value, where it stood, what would be right.

    >>> str(unknown_word("optimizer", "adamv", ["adam", "adamw", "sgd"], "optim.name"))
    "unknown optimizer 'adamv' in optim.name; did you mean 'adam'? (known: adam, adamw, sgd)"
    """
    names = sorted(known)
    guess = nearest_word(word, names)
    hint = f"did you mean {guess!r}? " if guess else ""
    text = f"unknown {kind} {word!r} in {place}; {hint}(known: {', '.join(names)})"
    return UsageError(text, key=place)


def say(text: str) -> None:
    """A line for whoever looks on. Where nobody does any more, a terminal that was closed or a pipe that
    ended, the rest goes nowhere: no training ends for it."""
    try:
        print(text, flush=True)
    except (OSError, ValueError):
        # Not closed: what still waits in it would raise once more.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
