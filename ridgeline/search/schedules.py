"""What is trained next, and how far: decided from what is known of the trials, and from nothing else.

A schedule is asked whenever there is room for a run. All trials to their end (`full`); a short beginning
for all, and more of their runs for those that did best there (`halving`: successive halving, promoted one
by one as soon as enough of a rung are known, as ASHA does it; what waits goes on from its checkpoint); or
a population that is trained in rounds, after each of which the worst quarter goes on from the weights of
the best with settings nearby (`population`: PBT). Imports without torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ridgeline.errors import UsageError, unknown_word
from ridgeline.search.draw import Draw
from ridgeline.search.space import Settings, Space, nudge
from ridgeline.search.trials import Request, Trial, best_first

QUARTER = 4
"""The worst and the best of a population: this part of it."""
_MAY_CHANGE = ("train.lr", "train.clip", "optim.", "schedule.", "data.augment.", "guard.")
_MAY_NOT = ("optim.name",)
NEW = -1
"""The number of a trial that is to be begun."""


@dataclass(frozen=True)
class Work:
    """Train a trial up to a share of its run; a new one where it has no number yet."""

    share: float
    number: int | None = None
    settings: Settings | None = None
    parent: int | None = None
    begins: float = 0.0


class Schedule(Protocol):
    shares: tuple[float, ...]
    """Where trials are judged."""

    def next(self, trials: Sequence[Trial], higher: bool) -> Work | None:
        """What to start now; None: nothing before another has ended, or nothing at all."""


def build_schedule(request: Request, space: Space, draw: Draw) -> Schedule:
    if request.schedule not in SCHEDULES:
        raise unknown_word("schedule", request.schedule, SCHEDULES, "--schedule")
    return SCHEDULES[request.schedule](request, space, draw)


def _new(trials: Sequence[Trial], share: float, draw: Draw, higher: bool) -> Work:
    return Work(share, settings=draw(len(trials), trials, higher))


def _cut_off(trials: Sequence[Trial], shares: Sequence[float]) -> Work | None:
    """One that was begun and has not come to the first share where it is judged: a search that goes on
    finishes it first."""
    for one in trials:
        if not one.scores and not one.running and not one.failed:
            return Work(next(s for s in shares if s > one.begins), one.number)
    return None


class Full:
    """Every trial to its end."""

    shares: tuple[float, ...] = (1.0,)

    def __init__(self, request: Request, space: Space, draw: Draw) -> None:
        self._draw, self._count = draw, request.trials

    def next(self, trials: Sequence[Trial], higher: bool) -> Work | None:
        if found := _cut_off(trials, self.shares):
            return found
        return _new(trials, 1.0, self._draw, higher) if len(trials) < self._count else None


class Halving:
    """Rungs of 1/factor of the run each, up to the whole of it; of a rung the best 1/factor go on."""

    def __init__(self, request: Request, space: Space, draw: Draw) -> None:
        self._draw, self._count, self._factor = draw, request.trials, request.factor
        self.shares = rungs(request.first, request.factor)

    def next(self, trials: Sequence[Trial], higher: bool) -> Work | None:
        if found := _cut_off(trials, self.shares):
            return found
        for below, above in reversed(list(zip(self.shares, self.shares[1:], strict=False))):
            known = best_first(trials, below, higher)
            best = known[: len(known) // self._factor]
            for one in best:
                if one.share == below and not one.running and not one.failed:
                    return Work(above, one.number)
        if len(trials) < self._count:
            return _new(trials, self.shares[0], self._draw, higher)
        return self._last(trials, higher)

    def _last(self, trials: Sequence[Trial], higher: bool) -> Work | None:
        """Where fewer trials than it takes have come so far, the best of them goes on to the end."""
        if any(one.running for one in trials):
            return None
        alive = [one for one in trials if one.scores and not one.failed]
        furthest = max((one.share for one in alive), default=1.0)
        if furthest == 1.0:
            return None
        best = best_first(alive, furthest, higher)[0]
        return Work(self.shares[self.shares.index(furthest) + 1], best.number)


def rungs(first: float, factor: int) -> tuple[float, ...]:
    """Shares of the run, each `factor` times the one before it, down to `first`.

    >>> [round(share, 3) for share in rungs(0.1, 3)]
    [0.111, 0.333, 1.0]
    """
    found = [1.0]
    while found[0] / factor >= first - 1e-9:
        found.insert(0, found[0] / factor)
    return tuple(found)


class Population:
    """All members train a round, then the worst quarter begins anew from the best quarter."""

    def __init__(self, request: Request, space: Space, draw: Draw) -> None:
        for one in space:
            if not one.key.startswith(_MAY_CHANGE) or one.key in _MAY_NOT:
                raise UsageError(
                    f"--over {one.key} cannot change in the middle of a run, as --schedule population has "
                    f"it; it can search {', '.join(_MAY_CHANGE)}; for others use --schedule halving"
                )
        if request.trials < 2:
            raise UsageError(f"--trials {request.trials} is no population; it takes 2 or more")
        self._space, self._draw, self._seed = space, draw, request.seed
        self._count = request.trials
        self.shares = tuple((i + 1) / request.rounds for i in range(request.rounds))

    def next(self, trials: Sequence[Trial], higher: bool) -> Work | None:
        if found := _cut_off(trials, self.shares):
            return found
        if len(trials) < self._count:
            return _new(trials, self.shares[0], self._draw, higher)
        members = list(trials[: self._count])
        for number, (now, then) in enumerate(zip(self.shares, self.shares[1:], strict=False)):
            if any(now not in one.scores and not one.failed for one in members):
                return None  # all are judged at once, so that chance alone decides nothing
            ranked = best_first(members, now, higher)
            if not ranked:
                return None
            members = self._after(members, ranked, now, number, trials)
            for one in members:  # before those go on whose weights they begin with
                if one.number == NEW:
                    return Work(then, None, one.settings, one.parent, now)
            for one in members:
                if one.share == now and not one.running and not one.failed:
                    return Work(then, one.number)
        return None

    def _after(
        self,
        members: list[Trial],
        ranked: list[Trial],
        share: float,
        number: int,
        trials: Sequence[Trial],
    ) -> list[Trial]:
        """The members of the next round: those that failed or did worst are replaced, in their places."""
        part = max(1, len(members) // QUARTER)
        failed = [one for one in members if share not in one.scores]
        worst = (failed + ranked[::-1])[: max(part, len(failed))]
        best = [one for one in ranked[:part] if one not in worst] or ranked[:1]
        found = []
        for place, one in enumerate(members):
            if one not in worst or one in best:
                found.append(one)
                continue
            dice = random.Random(f"{self._seed} {number} {place}")
            parent = dice.choice(best)
            settings = nudge(self._space, parent.settings, dice)
            begun = [t for t in trials if t.parent == parent.number and t.begins == share]
            same = [t for t in begun if t.settings == settings and t not in found]
            found.append(same[0] if same else Trial(NEW, settings, parent.number, share))
        return found


SCHEDULES: dict[str, Callable[[Request, Space, Draw], Schedule]] = {
    "full": Full,
    "halving": Halving,
    "population": Population,
}
