"""A rank's share of a global batch, and how one is read from a source.

Called by every way of reading ahead: in line, in threads, in processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.data.memory import pinned
from ridgeline.data.order import BatchPlan
from ridgeline.data.source import Source
from ridgeline.errors import RunError, UsageError, UserCodeFailed
from ridgeline.models.inputs import Inputs, change_each, tensors_of

_MAX_INDICES_SHOWN = 16


@dataclass(frozen=True)
class Rows:
    """What was fetched for one part: its own samples, and mates of theirs that are not among them."""

    indices: np.ndarray
    own: np.ndarray
    """Rows of the part's samples."""
    mate: np.ndarray
    """For each of those, the row of the sample it is paired with."""


Change = Callable[["Batch"], "Batch"]
"""What is done to a batch that was read: augmentation."""


@dataclass
class Batch:
    """This rank's share of one global batch, on the host or on a device."""

    inputs: list[Inputs]
    """What the model is called with for each microbatch; likewise `targets`, `counts` and `indices`."""
    targets: list[Tensor]
    counts: tuple[int, ...]
    """Real samples in each part; 0 where the part is a filler that must not count."""
    num_global: int
    step: int
    epoch: int
    indices: tuple[np.ndarray, ...]
    num_targets: tuple[int, ...] | None = None
    """Counted targets in each part, where samples have different numbers; see `units`."""
    num_global_targets: int = 0
    rows: tuple[Rows, ...] = ()
    """What lies in each input, until the batch is augmented."""
    pending: Change | None = None
    """What is still to be done to it, once it is on the device."""
    skipped: tuple[str, ...] = ()
    """Sentences on samples that could not be read and were passed over."""

    @property
    def units(self) -> tuple[int, ...]:
        """What each part counts by in the mean loss: its samples, or its counted targets."""
        return self.counts if self.num_targets is None else self.num_targets

    @property
    def num_global_units(self) -> int:
        """The same of the global batch; at least 1, also where it has no target that counts."""
        return max(self.num_global if self.num_targets is None else self.num_global_targets, 1)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`; from pinned memory the copy does not block the host."""
        return replace(
            self,
            inputs=[
                change_each(part, lambda x: x.to(device, non_blocking=True)) for part in self.inputs
            ],
            targets=[part.to(device, non_blocking=True) for part in self.targets],
        )

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds."""
        for part in self.inputs:
            yield from tensors_of(part)
        yield from self.targets

    def settle(self) -> Batch:
        """The same batch with what was pending done."""
        return self if self.pending is None else replace(self.pending(self), pending=None)

    def pin_memory(self) -> Batch:
        # The name is torch's: DataLoader's pinning thread looks for it.
        return replace(
            self,
            inputs=[change_each(part, Tensor.pin_memory) for part in self.inputs],
            targets=[part.pin_memory() for part in self.targets],
        )


@dataclass(frozen=True)
class Failure:
    """An error on its way from a thread or process to the loop."""

    error: UsageError | RunError
    trace: str = ""


def read_batch(source: Source, plan: BatchPlan, change: Change | None = None) -> Batch:
    """Fetch the parts of one plan; an error names the samples that were being read."""
    inputs, targets, rows = [], [], []
    for number, part in enumerate(plan.parts):
        wanted = _rows(part, plan.mates[number] if plan.mates else part)
        try:
            fetched = source.fetch(wanted.indices, plan.epoch)
        except Exception as error:
            raise _named(error, plan, part) from error
        if len(fetched) != 2:
            raise UsageError(
                f"source {type(source).__name__} gives {len(fetched)} tensors for a batch; a "
                "Loader needs two, (inputs, targets)"
            )
        inputs.append(fetched[0])
        targets.append(fetched[1])
        rows.append(wanted)
    take_skipped = getattr(source, "take_skipped", None)
    batch = make_batch(plan, inputs, targets)
    batch.rows = tuple(rows)
    batch.skipped = tuple(take_skipped()) if take_skipped is not None else ()
    return batch if change is None else change(batch)


def read_pinned(source: Source, plan: BatchPlan, change: Change | None, pin: bool) -> Batch:
    """The same, in memory from which a device copies by itself where `pin`. What a source reads straight
    into a batch is there from the beginning; the rest is copied."""
    with pinned(pin):
        batch = read_batch(source, plan, change)
    return batch.pin_memory() if pin else batch


def _rows(part: np.ndarray, mates: np.ndarray) -> Rows:
    own = np.arange(len(part))
    if mates is part:
        return Rows(part, own, own)
    missing = np.setdiff1d(mates, part)
    indices = np.concatenate([part, missing])
    place = {index: row for row, index in enumerate(indices.tolist())}
    return Rows(indices, own, np.array([place[mate] for mate in mates.tolist()]))


def make_batch(plan: BatchPlan, inputs: list[Inputs], targets: list[Tensor]) -> Batch:
    counts = tuple(int(weight) for weight in plan.weights)
    return Batch(
        inputs,
        targets,
        counts,
        plan.num_global,
        plan.step,
        plan.epoch,
        plan.parts,
        plan.targets,
        plan.num_global_targets,
    )


def _named(error: Exception, plan: BatchPlan, part: np.ndarray) -> UsageError | RunError:
    shown = ", ".join(str(index) for index in part[:_MAX_INDICES_SHOWN].tolist())
    if len(part) > _MAX_INDICES_SHOWN:
        shown += f", ... ({len(part)} in all)"
    where = f"while reading samples [{shown}] of epoch {plan.epoch}, batch {plan.step}"
    if isinstance(error, UsageError):
        return UsageError(f"{error} ({where})")
    if isinstance(error, RunError):
        return RunError(f"{error} ({where})")
    notes = getattr(error, "__notes__", [])
    sample = f" at {notes[-1]}" if notes else ""
    return UserCodeFailed(f"{type(error).__name__}: {error}{sample} ({where})")
