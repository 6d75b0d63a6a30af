"""Why a data set is not staged: the run then reads the shared path, so this ends no run by itself.

Raised everywhere in this folder and caught in `run.py`, which falls back or, where the copy is required,
turns it into an error of the run.
"""

from __future__ import annotations

import errno


class StageProblem(Exception):
    """One sentence for the user."""


def is_full(error: BaseException) -> bool:
    """Whether the disk, or the user's share of it, has no room left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def sentence(error: BaseException) -> str:
    """What went wrong, for the user."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror.lower()}{where}"
    return str(error)
