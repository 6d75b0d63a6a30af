"""Which checkpoints a path on the command line means. Imports without torch."""

from __future__ import annotations

from pathlib import Path

from ridgeline.checkpoint.manifest import MANIFEST, list_checkpoints
from ridgeline.errors import UsageError
from ridgeline.rundir import CHECKPOINTS


def find_all(path: Path) -> list[Path]:
    """The checkpoint itself, or all of a run or of a directory of checkpoints, oldest first."""
    if not path.is_dir():
        raise UsageError(
            f"no directory at {path}; give a run directory, or a checkpoint such as "
            f"RUN/{CHECKPOINTS}/step-00000100"
        )
    found = list_checkpoints(path / CHECKPOINTS) or list_checkpoints(path)
    if not found and ((path / MANIFEST).exists() or path in list_checkpoints(path.parent)):
        return [path]
    if not found:
        raise UsageError(
            f"{path} holds no checkpoint: neither {MANIFEST}, nor {CHECKPOINTS}/step-N, nor step-N"
        )
    return found


def find_one(path: Path) -> Path:
    """The checkpoint itself, or the newest of a run or of a directory of checkpoints."""
    return find_all(path)[-1]
