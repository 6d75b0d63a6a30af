"""Says once where ignored targets make a divided batch another training than the whole one.

A loss that is a mean over the targets that count needs `count_targets` of its source: without it parts of a
batch count for their samples, and those with few targets for too much. Nothing fails then, so it is looked
for. Called by `setup.py` for each batch and by `run.py` after each step.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ridgeline.data.batch import Batch
from ridgeline.train.tasks import IGNORED, Task

_LOOKS = 100
"""Batches that are looked at: where targets are ignored at all, few have none."""


class IgnoredTargets:
    """Looks at batches on the host, before they are copied."""

    def __init__(self, task: Task, source: str) -> None:
        self._task, self._source = task, source
        self._looks = _LOOKS if task.skips_ignored else 0
        self._said = ""

    def watching(self, to_device: Callable[[Batch], Batch]) -> Callable[[Batch], Batch]:
        def watched(batch: Batch) -> Batch:
            if self._looks:
                self._look(batch)
            return to_device(batch)

        return watched

    def take(self) -> str:
        """What there is to say, the first time; else nothing."""
        said, self._said = self._said, ""
        return said

    def _look(self, batch: Batch) -> None:
        self._looks -= 1
        is_divided = len(batch.inputs) > 1 or sum(batch.counts) < batch.num_global
        if not is_divided or batch.num_targets is not None:
            return
        counts = {count for targets in batch.targets for count in _num_ignored(targets)}
        if len(counts) > 1:
            self._looks = 0
            self._said = (
                f"data.source={self._source} gives targets of {IGNORED}, not as many in each sample, and "
                f"task {self._task.name} is a mean over the others: a batch in parts (dp, accumulate, pp)"
                " is not weighed as it is whole; give the source count_targets(indices), see docs/train.md"
            )


def _num_ignored(targets: Tensor) -> list[int]:
    if targets.device.type != "cpu" or targets.is_floating_point():
        return []
    found: list[int] = (targets.flatten(1) == IGNORED).sum(1).tolist() if targets.dim() > 1 else []
    return found or (targets == IGNORED).int().tolist()
