"""Metrics over the whole evaluation split, exact whatever the number of ranks.

Each rank sums over its own samples, the sums are added over the ranks, and only then is anything
divided; a sample that a rank borrowed to keep in step counts for nothing. Called by `run.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ridgeline.data.loader import Batch, Loader
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.precision import Precision
from ridgeline.rundir import EvalRecord
from ridgeline.train.tasks import Task


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    loader: Loader,
    mesh: Mesh,
    precision: Precision,
    to_device: Callable[[Batch], Batch],
    step: int,
    epoch: int,
) -> EvalRecord:
    """One pass in evaluation mode; leaves the model in the mode it had."""
    start = time.perf_counter()
    was_training = model.training
    model.eval()
    _same_buffers(model, mesh)
    sums: dict[str, Tensor] = {}
    for batch in loader.epoch(0):
        batch = to_device(batch)
        for inputs, targets, count in zip(batch.inputs, batch.targets, batch.counts, strict=True):
            if count:
                with precision.autocast():
                    outputs = model(inputs)
                    loss = task.loss(outputs, targets)
                    pairs = task.sums(outputs, targets)
                weighed = loss.double() * count
                pairs["loss"] = (weighed, torch.full_like(weighed, count))
                _add(sums, pairs)
    model.train(was_training)
    means, num_samples = _means(sums, task, mesh)
    seconds = time.perf_counter() - start
    return EvalRecord(step, epoch, time.time(), num_samples, seconds, task.finish(means))


def _add(sums: dict[str, Tensor], pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
    for name, pair in pairs.items():
        value = torch.stack([part.double() for part in pair])
        sums[name] = sums[name] + value if name in sums else value


def _means(sums: dict[str, Tensor], task: Task, mesh: Mesh) -> tuple[dict[str, float], int]:
    """Add over ranks in one exchange. A rank without samples does not know the names: ask rank 0,
    which always has some, because batches are dealt out from rank 0 on."""
    names = ["loss", *sorted(name for name in sums if name != "loss")]
    if mesh.data_group is not None:
        box = [names]
        torch.distributed.broadcast_object_list(box, src=0, group=mesh.data_group)
        names = box[0]
    zero = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    table = torch.stack([sums.get(name, zero) for name in names])
    totals = mesh.sum_over_data(table).tolist()
    means = {
        name: total / max(count, 1) for name, (total, count) in zip(names, totals, strict=True)
    }
    return means, int(totals[0][1])


def _same_buffers(model: nn.Module, mesh: Mesh) -> None:
    """Running statistics differ between ranks when batch norm is not synchronised: take rank 0's."""
    if mesh.data_group is not None:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0, group=mesh.data_group)
