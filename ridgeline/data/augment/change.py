"""Augmentation of a whole batch, part by part: what a loader or the way to the device does to it."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.data.augment.apply import Augment
from ridgeline.data.batch import Batch


class AugmentBatch:
    """`Augment` for batches, on whatever device they are; travels to worker processes."""

    def __init__(self, augment: Augment) -> None:
        self.augment = augment

    def __call__(self, batch: Batch) -> Batch:
        inputs, targets = [], []
        parts = zip(batch.inputs, batch.targets, batch.rows, strict=True)
        for part_inputs, part_targets, rows in parts:
            changed = self.augment(
                part_inputs, part_targets, rows.indices, batch.epoch, rows.own, rows.mate
            )
            inputs.append(changed[0])
            targets.append(changed[1])
        return replace(batch, inputs=inputs, targets=targets, rows=())
