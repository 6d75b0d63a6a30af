"""Why a data set is not staged: the run then reads the shared path, so this ends no run by itself.

Raised everywhere in this folder and caught in `run.py`, which falls back or, where the copy is required,
turns it into an error of the run.
"""

from __future__ import annotations

import errno


class StageProblem(Exception):
    """One sentence for the user."""


class NoRoom(StageProblem):
    """The data do not fit."""


class SourceChanged(StageProblem):
    """The source is no longer what was listed, so nothing copied from it is of use."""


def is_useless(error: BaseException) -> bool:
    """Whether what was copied so far is in the way, rather than something to go on with."""
    return isinstance(error, NoRoom | SourceChanged) or is_full(error)


def is_full(error: BaseException) -> bool:
    """Whether the disk, or the user's share of it, has no room left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def sentence(error: BaseException) -> str:
    """What went wrong, for the user."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror.lower()}{where}"
    return str(error)
