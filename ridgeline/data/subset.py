"""The first so many samples of a source, for an evaluation that need not see all. Called by `train/`."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ridgeline.data.source import Source


class FirstSamples:
    """A source that ends early and is the same otherwise."""

    def __init__(self, source: Source, num_samples: int) -> None:
        self._source = source
        self._length = min(num_samples, len(source))
        self.info = source.info
        # What the loader looks for on a source has to show through.
        self.uses_global_rng = getattr(source, "uses_global_rng", False)
        if hasattr(source, "device_fetch"):
            self.device_fetch = source.device_fetch
        if hasattr(source, "count_targets"):
            self.count_targets = source.count_targets
        if hasattr(source, "take_skipped"):
            self.take_skipped = source.take_skipped

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, ...]:
        return self._source.fetch(indices, epoch)
