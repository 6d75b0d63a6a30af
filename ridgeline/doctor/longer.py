"""The longer look: states that cost digits and begin too far from the others, over more steps.

What rounds as coarsely as fp8 learns a little less in a step, and where losses fall fast that is soon more
than any bound. So such a state runs on for three times as many steps, and may be a small share of them
behind. Used by `climb.py`; imports without torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ridgeline.doctor.ladder import Rung
from ridgeline.doctor.losses import LONGER, judge_longer, share_behind
from ridgeline.doctor.race import BeforeFailed
from ridgeline.doctor.states import Candidate, Effort
from ridgeline.errors import RunError


@dataclass(frozen=True)
class Look:
    """What was seen of one state."""

    problem: str
    """Empty when nothing is wrong."""
    behind: float
    """Share of the steps by which it is behind what it is held to."""
    more: float
    """Share by which it is further behind the baseline than the last kept state."""
    losses: list[float]

    def tell(self, outweighs: bool) -> str:
        num = len(self.losses)
        where = "behind" if self.behind > 0 else "ahead"
        told = (
            f", {self.more:.1%} of them more than before, which outweighs it" if outweighs else ""
        )
        return f"; its loss is {abs(self.behind) * num:.1f} steps {where} after {num}{told}"

    def put_on(self, rung: Rung) -> Rung:
        finite = all(map(math.isfinite, self.losses))
        return dataclasses.replace(
            rung,
            longer_losses=tuple(self.losses) if finite else (),
            behind=self.behind if finite else None,
        )


@dataclass
class Longer:
    """The looks of one climb."""

    behind: float = 0.0
    """Share of the steps by which the last kept state that costs digits is behind the baseline."""
    held: tuple[list[float], float] | None = None
    """Once a state was kept after such a look: the losses of the state before it, and that state's own
    share. Later ones are held to the same, so that what each look happens to find does not add up."""

    @property
    def is_apart(self) -> bool:
        """Whether a state was kept that began away from the baseline."""
        return self.held is not None

    def note_kept(self, losses: list[float], baseline: list[float]) -> None:
        """Of a state that costs digits and passed without such a look."""
        if not self.is_apart:
            self.behind = share_behind(losses, baseline)

    def look(self, kept: Candidate, candidate: Candidate, effort: Effort) -> Look:
        held_to, behind = self._held_to(kept, effort)
        _run_to(candidate, len(held_to))
        losses = candidate.losses[: len(held_to)]
        problem, share = judge_longer(losses, held_to, behind)
        return Look(problem, share, max(0.0, behind + share - self.behind), losses)

    def keep(self, look: Look, kept: Candidate, effort: Effort) -> None:
        self.held = self._held_to(kept, effort)
        self.behind = max(0.0, self.held[1] + look.behind)

    def _held_to(self, kept: Candidate, effort: Effort) -> tuple[list[float], float]:
        if self.held is not None:
            return self.held
        num = LONGER * effort.check_steps
        try:
            _run_to(kept, num)
        except RunError as error:
            raise BeforeFailed(f"the state that was kept failed: {error}") from error
        return kept.losses[:num], self.behind


def _run_to(state: Candidate, num: int) -> None:
    if (missing := num - len(state.losses)) > 0:
        state.run(missing, 0)
