"""Fewer samples than there are: the first of a source, for an evaluation that need not see all, or some of
those to be packed, for a measurement. Called by `train/`."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ridgeline.data.formats.contract import Sample
from ridgeline.data.pack import Samples
from ridgeline.data.source import Source


class FirstSamples:
    """A source that ends early and is the same otherwise."""

    def __init__(self, source: Source, num_samples: int) -> None:
        self._source = source
        self._length = min(num_samples, len(source))
        self.info = source.info
        # What the loader looks for on a source has to show through.
        self.uses_global_rng = getattr(source, "uses_global_rng", False)
        for name in ("device_fetch", "count_targets", "take_skipped", "ask", "ahead"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, ...]:
        return self._source.fetch(indices, epoch)


class SomeSamples:
    """Samples to be packed, of which `numbers` are taken, in this order."""

    def __init__(self, samples: Samples, numbers: np.ndarray) -> None:
        self._samples, self._numbers = samples, numbers
        self.schema, self.classes, self.origin = samples.schema, samples.classes, samples.origin

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, index: int) -> Sample:
        return self._samples.read(int(self._numbers[index]))

    def key(self, index: int) -> str:
        return self._samples.key(int(self._numbers[index]))
