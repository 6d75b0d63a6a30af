"""How much of the global batch the samples in hand are.

Batches are not padded: the last of an epoch can give one rank fewer samples than another, or none.
The loss of the global batch is then a weighted mean over ranks, and a rank without samples still has
to take part in every collective. It runs one borrowed sample with weight 0, which is what `num_real=0`
says. The loader side writes this value, gradient scaling and batch norm read it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Share:
    """Mutable on purpose: one object per job, set before each forward pass."""

    num_real: int = 1
    """Samples of this rank in the part at hand; 0 when it only borrows one to keep in step."""
    scale: float = 1.0
    """What the mean loss of this part counts for: number of ranks x its share of the global batch."""

    def set(self, num_real: int, num_global: int, num_ranks: int) -> None:
        self.num_real = num_real
        self.scale = num_ranks * num_real / num_global
