"""Whether a batch taken in parts is the same training as the whole batch, and if not, whose doing that is.

`accumulate` and `pp` take a batch in microbatches. That they add up to the whole is a promise of its own:
the reference of such a layout takes the same microbatches, so comparing with it does not show it. They do
not where the loss is no mean over what the parts are weighed by (a mean over targets of which some are
ignored), and that is a mistake; or where the model looks at its whole batch (batch norm), and then one
device that takes the same parts is what a layout can be the same as. Called by `run.py` on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ridgeline.config import RunConfig
from ridgeline.data.batch import Batch
from ridgeline.launch.env import RankEnv
from ridgeline.train.objective import name_samples
from ridgeline.train.setup import Training
from ridgeline.verify.compare import Comparison
from ridgeline.verify.record import batches, build_short

_SAME = 1e-6
"""Relative: what a model or a loss that computes in float32 by itself may be off by."""


@dataclass(frozen=True)
class Parts:
    """How far parts of a batch are from the whole, relative; infinite where they cannot be put together."""

    loss: float
    """The parts' own losses, weighed, from the loss of all their outputs."""
    outputs: float
    """The model's outputs for the parts from those for the whole batch."""


def compare_parts(config: RunConfig, env: RankEnv) -> Parts:
    """On one device, for the batches of an epoch; `config` says in how many parts they are taken."""
    training = build_short(config, env)
    training.arranged.train()
    loss = outputs = 0.0
    try:
        with torch.no_grad():
            for batch in batches(training):
                one, other = _gaps(training, training.to_device(batch))
                loss, outputs = max(loss, one), max(outputs, other)
    finally:
        training.close_loaders()
    return Parts(loss, outputs)


def judge(layout_found: Comparison, divided: Comparison, parts: Parts) -> Comparison:
    """The verdict on a layout that is the same as one device which takes the same microbatches, where
    that is not the same as one which takes the whole batch: `divided` says by how much."""
    if parts.loss > _SAME:
        said = (
            f"{divided.first} from a batch that is not divided: the loss is no mean over samples (targets "
            "are ignored, or samples compared with each other), so that its parts do not add up; a source "
            "whose samples have different numbers of targets needs count_targets (docs/train.md)"
        )
        return replace(divided, note=said)
    if parts.outputs > _SAME:
        said = (
            "as one device that takes the same microbatches; the model looks at its whole batch (as batch "
            f"norm does), and from a batch that is not divided it is off: {divided.first}"
        )
        return replace(layout_found, note=said)
    said = f"{divided.first} from a batch that is not divided, on one device already"
    return replace(divided, note=said)


def _gaps(training: Training, batch: Batch) -> tuple[float, float]:
    arranged = training.arranged
    assert arranged.loss is not None
    found, total = [], 0.0
    for index, (inputs, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
        if batch.counts[index]:
            arranged.share.num_real = batch.counts[index]
            name_samples(arranged, batch, index)
            found.append(arranged.predict(inputs))
            share = batch.units[index] / batch.num_global_units
            total += float(arranged.loss(found[-1], targets)) * share
    whole = _whole(batch)
    if whole is None or (joined := _joined(found, batch.counts)) is None:
        return math.inf, math.inf
    loss = float(arranged.loss(joined, whole.targets[0]))
    arranged.share.num_real = whole.counts[0]
    name_samples(arranged, whole, 0)
    undivided = arranged.predict(whole.inputs[0])
    pairs = zip(_floats(joined), _floats(undivided), strict=True)
    gaps = [_gap(one, other) for one, other in pairs if one.shape == other.shape and one.dim()]
    return abs(loss - total) / max(abs(loss), 1e-30), max(gaps, default=math.inf)


def _whole(batch: Batch) -> Batch | None:
    """All parts as one; None where they have different shapes."""
    used = [index for index, count in enumerate(batch.counts) if count]
    try:
        inputs = tree_map(lambda *parts: torch.cat(parts), *(batch.inputs[i] for i in used))
        targets = torch.cat([batch.targets[index] for index in used])
    except RuntimeError:
        return None
    return replace(
        batch,
        inputs=[inputs],
        targets=[targets],
        counts=(sum(batch.counts),),
        indices=(np.concatenate([batch.indices[index] for index in used]),),
        num_targets=None if batch.num_targets is None else (sum(batch.num_targets),),
    )


def _joined(outputs: list[Any], counts: tuple[int, ...]) -> Any:
    """Outputs of parts as outputs of the whole: tensors with a sample in each row are put together."""
    sizes = [count for count in counts if count]
    leaves, spec = zip(*(tree_flatten(one) for one in outputs), strict=True)
    joined = []
    for same in zip(*leaves, strict=True):
        if all(
            isinstance(v, Tensor) and v.dim() and len(v) == n
            for v, n in zip(same, sizes, strict=True)
        ):
            if len({tuple(value.shape[1:]) for value in same}) > 1:
                return None
            joined.append(torch.cat(same))
        else:
            joined.append(same[0])
    return tree_unflatten(joined, spec[0])


def _floats(outputs: Any) -> Iterator[Tensor]:
    leaves = tree_flatten(outputs)[0]
    return (one for one in leaves if isinstance(one, Tensor) and one.is_floating_point())


def _gap(one: Tensor, other: Tensor) -> float:
    largest = float(other.abs().max()) if other.numel() else 0.0
    return float((one - other).abs().max()) / largest if largest else 0.0
