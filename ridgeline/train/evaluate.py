"""Metrics over the whole evaluation split, exact whatever the number of ranks.

Each rank sums over its own samples, the sums are added over the ranks, and only then is anything
divided; a sample that a rank borrowed to keep in step counts for nothing. Called by `run.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.data.batch import Batch
from ridgeline.data.loader import Loader
from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.precision import Precision
from ridgeline.rundir import EvalRecord
from ridgeline.train.tasks import Task

_SAMPLES = "samples seen"
"""Stands among the sums, so that one exchange is enough."""


@torch.no_grad()
def evaluate(
    arranged: Arranged,
    task: Task,
    loader: Loader,
    precision: Precision,
    to_device: Callable[[Batch], Batch],
    step: int,
    epoch: int,
) -> EvalRecord:
    """One pass in evaluation mode; leaves the model in the mode it had. `arranged.averaged()` around it
    makes it one of the averaged weights."""
    start = time.perf_counter()
    was_training = arranged.model.training
    arranged.train(False)
    arranged.prepare_evaluation()
    sums: dict[str, Tensor] = {}
    for batch in loader.epoch(0):
        batch = to_device(batch)
        parts = zip(batch.inputs, batch.targets, batch.counts, batch.units, strict=True)
        for inputs, targets, count, units in parts:
            # A borrowed sample is run as well, because other ranks may wait for this one in it.
            with precision.autocast(), arranged.inside():
                outputs = arranged.predict(inputs)
                if count and outputs is not None:
                    loss = task.loss(outputs, targets)
                    pairs = task.sums(outputs, targets)
                    weighed = loss.double() * units
                    pairs["loss"] = (weighed, torch.full_like(weighed, units))
                    pairs[_SAMPLES] = (torch.full_like(weighed, count), torch.ones_like(weighed))
                    _add(sums, arranged.plain(pairs))
    arranged.train(was_training)
    means, num_samples = _means(sums, arranged)
    seconds = time.perf_counter() - start
    averaged = arranged.average is not None and arranged.average.is_in_place
    metrics = task.finish(means)
    return EvalRecord(step, epoch, time.time(), num_samples, seconds, metrics, averaged)


def _add(sums: dict[str, Tensor], pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, pair in pairs.items():
        value = torch.stack([part.double() for part in pair])
        sums[name] = sums[name] + value if name in sums else value


def _means(sums: dict[str, Tensor], arranged: Arranged) -> tuple[dict[str, float], int]:
    """Add over ranks in one exchange. A rank without samples does not know the names: ask the first
    data rank of the last stage, which always has some, because batches are dealt out from it on."""
    mesh = arranged.mesh
    names = sorted({_SAMPLES, "loss", *sums})
    for axes, last in ((("pp",), True), (("copies", "shard"), False)):
        group = mesh.group(*axes)
        if group is not None:
            box = [names]
            first = torch.distributed.get_world_size(group) - 1 if last else 0
            torch.distributed.broadcast_object_list(box, group_src=first, group=group)
            names = box[0]
    zero = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    table = torch.stack([sums.get(name, zero) for name in names])
    stages = mesh.group("pp")
    if stages is not None:  # only the last stage has sums, the others add zeros
        torch.distributed.all_reduce(table, group=stages)
    totals = mesh.sum_over_data(table).tolist()
    found = dict(zip(names, totals, strict=True))
    num_samples = int(found.pop(_SAMPLES)[0])
    means = {name: found[name][0] / max(found[name][1], 1) for name in ("loss", *found)}
    return means, num_samples
