"""What a data source is: random access by index, a batch at a time, with a description of a sample.

Everything downstream (order, loader, doctor, verify) relies on one promise: sample i is a function
of (source seed, epoch, i) alone. A layout change then cannot change the experiment, because
no rank, worker or neighbour in the batch has a say in the value. `DatasetSource` extends the
promise to ordinary torch data sets, whose augmentations draw from the global generators.
Implemented by `sources/`, built by `build.py`, read by `loader.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from ridgeline.data.keyed import keyed_bits
from ridgeline.errors import UsageError
from ridgeline.models.inputs import (
    Argument,
    Inputs,
    arguments_of,
    first_of,
    read_inputs,
    zeros_like_arguments,
)


@dataclass(frozen=True)
class SourceInfo:
    """The shape and meaning of one sample, without the batch dimension."""

    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    target_shape: tuple[int, ...]
    target_dtype: torch.dtype
    num_classes: int | None
    """Classes, or the size of the vocabulary; None where the target is not a choice among n."""
    task: str
    """The natural task: 'classify', 'causal_lm', 'masked_lm', 'forecast' or 'segment'."""
    unit: str = "samples"
    """What throughput is counted in: 'samples' or 'tokens'."""
    units_per_sample: int = 1
    arguments: tuple[Argument, ...] = ()
    """Where a model takes several inputs: each of them, the first as above."""

    def zeros(self, count: int, device: torch.device | str | None = None) -> Inputs:
        """So many inputs of zeros, as the model is called with them."""
        if self.arguments:
            return zeros_like_arguments(self.arguments, count, device)
        return torch.zeros((count, *self.input_shape), dtype=self.input_dtype, device=device)


@runtime_checkable
class Source(Protocol):
    """A data set with random access by index, fetched a batch at a time."""

    info: SourceInfo

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Any, ...]:
        """Stacked CPU tensors (inputs, targets) of these samples, in this order; for a model that takes
        several, `inputs` is a tuple of them or a dictionary by name.

        A source may also have `device_fetch(indices, device)`, which makes the batch on the device
        itself; the loader then needs no thread and no copy. One whose samples have different numbers
        of targets that count has `count_targets(indices)`, how many each has, from an index and
        without reading data: the loss is then the mean over those of the whole global batch. Sentences
        for the user, such as how full its sequences are, may stand in `notes`.
        """
        ...


class NoSamples:
    """The held-out half of a source that holds nothing out; its samples would look like the others."""

    def __init__(self, like: Source) -> None:
        self.info = like.info

    def __len__(self) -> int:
        return 0

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Any, ...]:
        raise IndexError(f"there is no sample {indices[0]}: nothing is held out")


class DatasetSource:
    """Any map-style data set (`__len__`, `__getitem__`) as a source.

    An item is (inputs, targets) of things `default_collate` can stack, where inputs may also be a tuple or
    a dictionary of them; or `collate` makes such a pair from a list of items. Torch's, numpy's and Python's
    global generators are seeded with (seed, epoch, index) before each item and put back afterwards: a
    random crop is then the same on any rank and in any worker, and reading data does not disturb the
    dropout of the training loop.
    """

    # The global generators belong to the training thread: the loader must not read this source
    # from a thread of its own.
    uses_global_rng = True

    def __init__(
        self,
        dataset: Any,
        seed: int = 0,
        info: SourceInfo | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        name: str = "",
    ) -> None:
        self.name = name or type(dataset).__name__
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UsageError(
                f"data set {self.name!r} has no __len__ and __getitem__; Ridgeline needs random "
                "access by index (a map-style torch Dataset), not an iterable one"
            )
        if len(dataset) == 0:
            raise UsageError(f"data set {self.name!r} holds no samples")
        self.dataset = dataset
        self.seed = seed
        self._collate = collate or default_collate
        if hasattr(dataset, "count_targets"):
            self.count_targets = dataset.count_targets
        own = getattr(dataset, "info", None)
        self.info: SourceInfo = (
            info or (own if isinstance(own, SourceInfo) else None) or self._infer_info()
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Any, ...]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        seeds = keyed_bits((self.seed, epoch), indices, 1)[:, 0]
        with _global_rng_kept():
            items = []
            for index, item_seed in zip(indices.tolist(), seeds.tolist(), strict=True):
                _seed_global_rng(item_seed)
                try:
                    items.append(self.dataset[index])
                except Exception as error:
                    error.add_note(f"sample {index}")
                    raise
            batch = self._collate(items)
        return self._as_pair(batch)

    def _as_pair(self, batch: Any) -> tuple[Inputs, Tensor]:
        if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
            inputs = read_inputs(batch[0])
            if inputs is not None:
                return inputs, batch[1]
        raise UsageError(
            f"data set {self.name!r} gives items that collate to {_describe(batch)}; each item "
            "must be (inputs, targets), where inputs may be a tuple or a dictionary of the model's "
            "arguments, as in ({'input_ids': ..., 'attention_mask': ...}, targets)"
        )

    def _infer_info(self) -> SourceInfo:
        given, stacked = self.fetch(np.zeros(1, dtype=np.int64), epoch=0)
        inputs, targets = first_of(given)[0], stacked[0]
        integral = not (targets.is_floating_point() or targets.is_complex())
        if not integral:
            task = "forecast"
        elif targets.ndim == 0:
            task = "classify"
        elif inputs.shape == targets.shape and not inputs.is_floating_point():
            task = "causal_lm"
        else:
            task = "segment"
        tokens = task == "causal_lm"
        return SourceInfo(
            input_shape=tuple(inputs.shape),
            input_dtype=inputs.dtype,
            target_shape=tuple(targets.shape),
            target_dtype=targets.dtype,
            num_classes=self._num_classes() if integral else None,
            task=task,
            unit="tokens" if tokens else "samples",
            units_per_sample=inputs.numel() if tokens else 1,
            arguments=arguments_of(given),
        )

    def _num_classes(self) -> int | None:
        """What the data set itself says, in the two spellings torchvision's data sets use."""
        stated = getattr(self.dataset, "num_classes", None)
        if isinstance(stated, int):
            return stated
        names = getattr(self.dataset, "classes", None)
        return len(names) if isinstance(names, list | tuple) else None


def _describe(batch: Any) -> str:
    if isinstance(batch, tuple | list):
        return f"{type(batch).__name__}({', '.join(type(part).__name__ for part in batch)})"
    return type(batch).__name__


def _seed_global_rng(seed: int) -> None:
    # Not torch.manual_seed: that one seeds the devices too, which are not ours to touch.
    torch.default_generator.manual_seed(seed & (2**63 - 1))
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


@contextmanager
def _global_rng_kept() -> Iterator[None]:
    torch_state = torch.default_generator.get_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
