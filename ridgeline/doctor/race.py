"""Two states in turns: how much faster the second is, how sure that is, and how it is said.

A machine has slow minutes, so that two figures that were not found side by side say little of each other.
Every factor of a climb is therefore the middle one of some ratios, each of two turns that followed one
another; the times that are shown beside it are those of these two turns, so that they agree. Used by
`climb.py`; imports without torch.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ridgeline.doctor.ladder import Rung
from ridgeline.doctor.states import Candidate, Effort
from ridgeline.errors import RunError

QUIET, QUIET_TURNS = 0.003, 3.0
"""A gain on an idle device is at least so much, since two processes of one state may differ a little in all
of their turns; and so many times as large as the turns' gains are apart."""


OBVIOUS = 2.0
"""Two turns are enough where one of the two states is so many times as fast in both."""


class BeforeFailed(RunError):
    """The state that was there fails in its turn; the one that is tried has no part in it."""


class Runner(Protocol):
    """A state that can be run; `states.Candidate` is one."""

    def turn(self) -> float: ...


@dataclass(frozen=True)
class Race:
    """Seconds a step, turn by turn, of the state that was there and of the one that is tried."""

    before_s: tuple[float, ...]
    after_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        return [before / after for before, after in zip(self.before_s, self.after_s, strict=True)]

    @property
    def gain(self) -> float:
        """The middle one of the ratios; of two in the middle the lesser."""
        return statistics.median_low(self.ratios)

    @property
    def middle_s(self) -> tuple[float, float]:
        """Of the two turns that the gain is the ratio of: before, after."""
        turn = self.ratios.index(self.gain)
        return self.before_s[turn], self.after_s[turn]

    def noise(self, least_gain: float, quiet: float = QUIET) -> float:
        """What the gain has to exceed. Only how far it falls counts: one that is sometimes larger is no
        less sure. `least_gain` is for turns that are alike by chance; where they are as alike as those of
        an idle device, `quiet` is enough.

        >>> Race((1.0, 1.0005, 1.0), (0.99, 0.99, 0.99)).noise(0.01)
        0.003
        >>> Race((1.0, 1.01, 1.0), (0.99, 0.99, 0.99)).noise(0.01)
        0.01
        """
        ratios = self.ratios
        if len(ratios) < 3:
            # Both being far on one side leaves open how much it is, not whether.
            apart = max(ratios) - min(ratios)
            return max(least_gain, min(apart, (self.gain - 1) / 2) if self.gain > 1 else apart)
        low = statistics.quantiles(ratios, n=4)[0]
        apart = max(ratios) - min(ratios)
        return max(self.gain - low, min(least_gain, max(quiet, QUIET_TURNS * apart)))


def race(before: Runner, after: Runner, effort: Effort, fewest: int = 2) -> Race:
    """As many turns of each as the effort says, one after the other, in changing order; three, or
    two, where they leave no doubt."""
    spent: tuple[list[float], list[float]] = ([], [])
    for number in range(effort.rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            spent[which].append(after.turn() if which else _turn_of(before))
        ratios = [a / b for a, b in zip(*spent, strict=True)]
        if len(ratios) >= fewest and _leaves_no_doubt(ratios, effort):
            break
    return Race(tuple(spent[0]), tuple(spent[1]))


def _leaves_no_doubt(ratios: list[float], effort: Effort) -> bool:
    """Three turns that say the same clearly, or two that say it more than clearly."""
    far = effort.clear if len(ratios) >= 3 else max(effort.clear, OBVIOUS)
    return min(ratios) > far or max(ratios) < 1 / far


def _turn_of(before: Runner) -> float:
    try:
        return before.turn()
    except RunError as error:
        raise BeforeFailed(f"the state that was kept failed in its turn: {error}") from error


def spread_of(turns: Sequence[float]) -> float | None:
    """Half the distance from the fastest turn to the slowest, as a share of the median; None for one."""
    if len(turns) < 2:
        return None
    return (max(turns) - min(turns)) / 2 / statistics.median(turns)


def tell_gain(gain: float, noise: float) -> str:
    """In words: only a gain can be within the noise, what is slower is slower.

    >>> tell_gain(1.9, 0.01), tell_gain(1.004, 0.01), tell_gain(0.52, 0.01)
    ('faster by 90.0%, noise 1.0%', '+0.4% is not above the noise of 1.0%', 'slower by 48.0%')
    """
    change = f"{abs(gain - 1):.1%}"
    if change == "0.0%":
        return "as fast as before"
    if gain < 1:
        return f"slower by {change}"
    return (
        f"faster by {change}, noise {noise:.1%}"
        if gain > 1 + noise
        else f"+{change} is not above the noise of {noise:.1%}"
    )


def build_rung(
    tried: Rung,
    state: Candidate,
    kept: bool,
    why: str,
    loss_difference: float | None = None,
    raced: Race | None = None,
    losses: Sequence[float] = (),
) -> Rung:
    """What was tried, with what the state's own process says of it, and its race where it had one."""
    before_s, step_s = raced.middle_s if raced is not None else (None, None)
    if step_s is None and state.turns:
        step_s = statistics.median_low(state.turns)
    # A curve that is not finite is told in words; JSON has no number for it.
    is_number = loss_difference is not None and math.isfinite(loss_difference)
    return dataclasses.replace(
        tried,
        kept=kept,
        why=why,
        gain=raced.gain if raced is not None else None,
        step_s=step_s,
        peak_bytes=state.peak_bytes or None,
        loss_difference=loss_difference if is_number else None,
        tenth_step_s=state.tenth_step_s,
        turns_s=tuple(state.turns),
        before_turns_s=raced.before_s if raced is not None else (),
        spread=spread_of(state.turns),
        before_s=before_s,
        data_share=statistics.median(state.waits) if state.waits else None,
        beside=state.beside,
        losses=tuple(losses) if all(map(math.isfinite, losses)) else (),
    )
