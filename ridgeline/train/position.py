"""Where a run is: optimizer steps done, and how far into which epoch. No torch. Used by loop and resume."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    step: int = 0
    """Steps done since the beginning of the run."""
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""

    def after(self, per_epoch: int) -> Position:
        """One step on, into the next epoch at the end of this one."""
        if self.batch + 1 >= per_epoch:
            return Position(self.step + 1, self.epoch + 1, 0)
        return Position(self.step + 1, self.epoch, self.batch + 1)
