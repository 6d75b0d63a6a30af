"""Which dim of what a model drops holds the samples: learnt by watching it at two batch sizes.

A size alone does not tell: with the sequence first, a length that is a multiple of the batch looks like
samples, and masks would depend on how many a rank has. The dim that grows with the batch does tell. The
runs are on fake tensors; a small model that looks at its values runs for real on a copy. Called by
`apply.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ridgeline.models.inputs import call_arguments
from ridgeline.parallel.dropout import seems_to_drop, watch_shapes
from ridgeline.parallel.pipeline.record import BATCHES, fake_copy, resize, without_memory
from ridgeline.parallel.random import Randomness

_Shapes = dict[tuple[str, int, int], list[Sequence[int]]]


def learn_sample_dims(
    model: nn.Module, example: Any, may_copy: bool
) -> dict[str, dict[tuple[int, int], int]]:
    """What `Randomness.sample_dims` is to be; nothing where nothing is dropped or can be watched."""
    if not seems_to_drop(model):
        return {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with without_memory():
            small, large = (_watch(fake_copy(model, device), example, n, True) for n in BATCHES)
    except Exception:
        if not may_copy or device.type == "meta":
            return {}
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                small, large = (_watch(copy.deepcopy(model), example, n, False) for n in BATCHES)
        except Exception:
            return {}  # one that takes no other batch; what is wrong with it is said where it matters
    found: dict[str, dict[tuple[int, int], int]] = {}
    for place in small.keys() & large.keys():
        dims = {_growing(a, b) for a, b in zip(small[place], large[place], strict=False)}
        if len(dims) == 1 and (dim := dims.pop()):  # neither the first, which is known, nor unclear
            found.setdefault(place[0], {})[place[1:]] = dim
    return found


def _watch(model: nn.Module, example: Any, size: int, is_fake: bool) -> _Shapes:
    randomness = Randomness(0)
    watch_shapes(model, randomness)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    args, kwargs = call_arguments(resize(example, size, device, is_fake))
    with torch.no_grad():
        model(*args, **kwargs)
    assert randomness.shapes is not None
    return randomness.shapes


def _growing(small: Sequence[int], large: Sequence[int]) -> int | None:
    """The dim that grows as the batch does; -1 where none does, None where that is not clear."""
    changed = [dim for dim, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
    if not changed:
        return -1
    dim = changed[0]
    grows = small[dim] * BATCHES[1] == large[dim] * BATCHES[0]
    return dim if len(changed) == 1 and grows else None
