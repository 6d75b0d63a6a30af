"""What the batch in a loop's hands counts for, and which samples it has.

`Job`'s loaders write it, the engine reads it. A loader of the user's own leaves it as it is: then every
batch counts alike, and samples are known by their place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ridgeline.parallel.share import Share


@dataclass
class Dealt(Share):
    """Mutable on purpose: one object a job."""

    samples: np.ndarray | None = None
    """Their numbers in the data set; None for a loader of the user's own."""
    key: int = 0
    """A number of its own for each step."""

    @property
    def is_ours(self) -> bool:
        return self.samples is not None

    def copy(self) -> Dealt:
        return replace(self)

    def take(self, other: Dealt) -> None:
        for name, value in vars(other).items():
            setattr(self, name, value)


class Microbatches:
    """Those of one step through a pipeline."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.targets: list[Any] = []
        self.counts: tuple[int, ...] = ()
        self.scales: list[float] = []
        self.dealt: list[Dealt] = []
