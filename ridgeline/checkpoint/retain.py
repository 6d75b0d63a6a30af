"""Which checkpoints of a run are kept. No torch. Called by `save.py` on rank 0 after each save."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ridgeline.checkpoint.manifest import Damaged, list_checkpoints, read_manifest
from ridgeline.errors import UsageError


@dataclass(frozen=True)
class Keep:
    """The newest `last`; every one whose step is a multiple of `every`; the best by a metric."""

    last: int = 2
    every: int = 0
    best: str = ""
    """A metric's name; empty keeps none for being best."""
    higher_is_better: bool = False


def _delete(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def remove_old(
    directory: Path, keep: Keep, delete: Callable[[Path], object] = _delete
) -> list[str]:
    """Remove what the policy does not keep; never the newest. Returns the names."""
    paths = list_checkpoints(directory)
    kept = set(paths[-max(keep.last, 1) :])
    for path in paths:
        if keep.every and _step(path) % keep.every == 0:
            kept.add(path)
    best = find_best(paths, keep)
    if best is not None:
        kept.add(best)
    removed = []
    for path in paths:
        if path not in kept:
            # Out of sight first: half a directory must not look like a checkpoint.
            hidden = path.with_name(f".{path.name}.gone")
            shutil.rmtree(hidden, ignore_errors=True)  # of an earlier try that was cut off
            path.rename(hidden)
            delete(hidden)
            removed.append(path.name)
    return removed


def find_best(paths: list[Path], keep: Keep) -> Path | None:
    """The checkpoint with the best value of the metric; the first that has it, because those after it carry
    the same evaluation until there is another."""
    found: list[tuple[float, int, Path]] = []
    for path in paths if keep.best else ():
        try:
            value = read_manifest(path).metrics.get(keep.best)
        except (Damaged, UsageError):
            continue
        if value is not None and value == value:
            found.append((value if keep.higher_is_better else -value, -_step(path), path))
    return max(found)[2] if found else None


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
