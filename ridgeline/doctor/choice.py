"""What a climb tries next: the remedies that apply to the step as it is now, the most promising first.

A device computes while the host reads, so that the slower of the two hides the other: a remedy that makes
the device faster may show no gain because the step then waits for data, and one that feeds it none
because nothing waited. Such a remedy is tried once more together with what would feed it. Once only small
gains are left, those that promise them are tried together, and one by one where that is dropped. What was
no faster in one step may be in another: once the step has become a good deal shorter, it is tried again.
What would come after the one that is tried, were it kept or dropped, can be asked before that is known.
Called by `climb.py`; imports without torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ridgeline.config import RunConfig
from ridgeline.doctor.combined import SMALL, can_join, change_config, pair, together
from ridgeline.doctor.ladder import FOR_GPUS, NO_TIME, NOTHING_TO_DO, TOO_LITTLE, Rung, Untried
from ridgeline.doctor.remedies.contract import (
    ATTENTION,
    CONVOLUTION,
    ELEMENTWISE,
    LOSS,
    MATRIX,
    OPTIMIZER,
    Parts,
    Remedy,
    Step,
    exchange_s,
    seconds,
)
from ridgeline.errors import UsageError, unknown_word

LEAST_PREDICTED = 1.001
"""A remedy that does not promise this much is not worth a process."""
WAITS_MORE = 0.03
"""Share of the step by which a state has to wait longer for data to have been held back by them."""
SLOW_TIMES = 3.0
"""A remedy that takes minutes to start is taken to cost so many times what the others did."""
NOT_SLOWER = 0.97
"""A state that is slower than this is so by itself."""
NOT_HOPELESS = 0.9
"""One that was slower than this is not tried once more."""
SHORTER = 1.1
"""How many times as short the step has to be by then as the one that it was slower in."""


@dataclass(frozen=True)
class Promise:
    """A remedy that applies: the gain it expects, and why it may help."""

    gain: float
    remedy: Remedy
    reason: str
    shorter: float = 0.0
    """For one that was dropped before: how many times as short the step is as it was then."""


class Waiting:
    """The remedies that are still to be tried."""

    def __init__(self, remedies: Iterable[Remedy]) -> None:
        self._remedies = {remedy.name: remedy for remedy in remedies}
        self._feeding = {name: r for name, r in self._remedies.items() if r.feeds}
        self._firsts: dict[str, Remedy] = {}
        """Of each pair that waits, by its name, the remedy that was dropped by itself."""
        self._joined: set[str] = set()
        """Names of those that were tried together with others."""
        self._num_groups = 0
        self._parts: list[tuple[str, ...]] = []
        """Halves of groups that failed, to be tried together once more."""
        self._no_faster: dict[str, tuple[Remedy, float]] = {}
        """What was dropped for that, and the step it was dropped in, in seconds."""
        self._tried_again: set[str] = set()

    def rank(self, step: Step, config: RunConfig) -> list[Promise]:
        """Those that apply, the most promising first; after those that start soon what was dropped before,
        what takes minutes to start, and last what promises nothing. Where all are small, many of them
        together come first."""
        found = self._rank_each(step, config)
        if not found or found[0].remedy.slow or found[0].gain >= SMALL:
            return found
        name = f"together, {self._num_groups + 1}" if self._num_groups else "together"
        free = [p.remedy for p in found if self._joins(p)]
        parts = [
            [p.remedy for p in found if p.remedy.name in part and not p.shorter]
            for part in self._parts
        ]
        for members in (*parts, free):
            many = together(name, members, step, config)
            if many is not None:
                return [*_promises([many], step, config), *found]
        return found

    def _joins(self, promise: Promise) -> bool:
        is_new = promise.remedy.name not in self._joined and not promise.shorter
        return is_new and can_join(promise.remedy, promise.gain)

    def _rank_each(self, step: Step, config: RunConfig) -> list[Promise]:
        found = _promises(self._remedies.values(), step, config)
        for remedy, before_s in self._no_faster.values():
            shorter = before_s / step.step_s if step.step_s > 0 else 0.0
            if shorter >= SHORTER:
                again = _promises([remedy], step, config)
                found += [dataclasses.replace(p, shorter=shorter) for p in again]
        return sorted(
            found,
            key=lambda p: (p.gain < LEAST_PREDICTED, p.remedy.slow, p.shorter > 0, -p.gain),
        )

    def copy(self) -> Waiting:
        """To think further with, while nothing is taken from this one."""
        other = Waiting(())
        other._remedies, other._feeding = dict(self._remedies), dict(self._feeding)
        other._firsts = dict(self._firsts)
        other._joined, other._num_groups = set(self._joined), self._num_groups
        other._parts = list(self._parts)
        other._no_faster, other._tried_again = dict(self._no_faster), set(self._tried_again)
        return other

    def take(self, remedy: Remedy) -> None:
        if remedy.members:
            self._joined.update(remedy.members)
            self._parts = [part for part in self._parts if not {*part} & {*remedy.members}]
            self._num_groups += 1
            return
        if remedy.name in self._no_faster:
            del self._no_faster[remedy.name]
            self._tried_again.add(remedy.name)
            return
        del self._remedies[remedy.name]
        self._firsts.pop(remedy.name, None)

    def note_kept(self, remedy: Remedy) -> None:
        """Where it feeds the device, what waited for that can show its gain by itself."""
        for name in remedy.members:
            self.take(self._remedies[name])
        if remedy.repeats:
            self._remedies[remedy.name] = remedy
        if remedy.settles:
            self._remedies.pop(remedy.settles, None)
            self._no_faster.pop(remedy.settles, None)
        for both, first in list(self._firsts.items()) if remedy.feeds else ():
            self.take(self._remedies[both])
            self._remedies[first.name] = first

    def note_dropped(
        self, remedy: Remedy, rung: Rung, step: Parts, config: RunConfig
    ) -> Remedy | None:
        """The pair of it and what would feed it, which waits from now on, where its state was held back
        by data; None where it was dropped for another reason, or nothing would feed it. Where many
        together failed, each half of them waits."""
        if rung.gain is None:
            half, names = (len(remedy.members) + 1) // 2, remedy.members
            self._parts += [part for part in (names[:half], names[half:]) if len(part) > 1]
            self._feeding.pop(remedy.name, None)
            return None
        may_come_back = not remedy.members and not remedy.feeds and rung.gain >= NOT_HOPELESS
        if may_come_back and remedy.name not in self._tried_again:
            self._no_faster[remedy.name] = (remedy, step.step_s)
        if remedy.feeds and step.data_s > WAITS_MORE * step.step_s:
            self._feeding.pop(remedy.name, None)  # data were waited for, and it did not bring them
        alone = remedy.feeds or remedy.members  # of many, each can still be one of a pair
        if alone or rung.gain < NOT_SLOWER or rung.step_s is None or not rung.data_share:
            return None
        if rung.data_share - step.data_s / step.step_s < WAITS_MORE:
            return None
        waits_s = rung.data_share * rung.step_s
        held_back = dataclasses.replace(step, step_s=rung.step_s, data_s=waits_s)
        found = _promises(self._feeding.values(), held_back, config)
        if not found:
            return None
        best = max(found, key=lambda promise: promise.gain)
        both = pair(remedy, best.remedy, rung.gain * best.gain, best.reason)
        self._remedies[both.name], self._firsts[both.name] = both, remedy
        self._no_faster.pop(remedy.name, None)
        return both

    def untried(
        self, step: Parts, config: RunConfig, spent_s: float, cost_s: float
    ) -> list[Untried]:
        """What was not tried, in the order in which it would have been, with the budget that each needs if
        it takes `cost_s`; and what does not apply: because of the device, if it would on a GPU."""
        found, needed_s = [], spent_s
        ranked = self._rank_each(step, config)
        is_joined = False
        for promise in ranked:
            name, gain, reason = promise.remedy.name, promise.gain, promise.reason
            if gain < LEAST_PREDICTED:
                found.append(Untried(name, TOO_LITTLE, gain, reason))
                continue
            joins = self._joins(promise)
            if not (joins and is_joined):  # many together are one state
                needed_s += cost_s * (SLOW_TIMES if promise.remedy.slow else 1.0)
            is_joined = is_joined or joins
            budget_s = 10.0 * math.ceil(needed_s / 10.0)
            found.append(Untried(name, NO_TIME, gain, reason, budget_s))
        applying = {promise.remedy.name for promise in ranked}
        on_gpu = dataclasses.replace(step, device_kind="cuda")
        for name, remedy in self._remedies.items():
            if name not in applying:
                nowhere = remedy.applies(on_gpu, config) is None
                found.append(Untried(name, NOTHING_TO_DO if nowhere else FOR_GPUS))
        return found


def _promises(remedies: Iterable[Remedy], step: Step, config: RunConfig) -> list[Promise]:
    found = []
    for remedy in remedies:
        reason = remedy.applies(step, config)
        if reason is not None:
            found.append(Promise(remedy.predicted_gain(step, config), remedy, reason))
    return found


@dataclass(frozen=True)
class Foreseen:
    """A state that comes next if those before it go so."""

    name: str
    """Of the remedy."""
    config: RunConfig
    history: tuple[bool, ...]
    """Whether each that is tried before it is kept, the first one first."""


def foresee(waiting: Waiting, step: Parts, config: RunConfig, tried: Promise) -> Iterator[Foreseen]:
    """What may come after a remedy that is tried on a configuration, sooner states first: for the case that
    it is kept and gains what it promises, for the case that it is dropped, and so on. `waiting` is
    without it already. What takes minutes to start is left for its own turn."""
    cases: deque[tuple[Waiting, Parts, RunConfig, Promise, tuple[bool, ...]]] = deque()
    cases.extend((waiting, step, config, tried, (kept,)) for kept in (True, False))
    while cases:
        waiting, step, config, tried, history = cases.popleft()
        waiting = waiting.copy()
        if history[-1]:
            waiting.note_kept(tried.remedy)
            step = _expect(step, tried)
            config = change_config(config, tuple(tried.remedy.change(config)))
        found = waiting.rank(step, config)
        if not found or found[0].gain < LEAST_PREDICTED or found[0].remedy.slow:
            continue
        then = found[0]
        waiting.take(then.remedy)
        try:
            changed = change_config(config, tuple(then.remedy.change(config)))
        except UsageError:
            continue
        yield Foreseen(then.remedy.name, changed, history)
        cases.extend((waiting, step, config, then, (*history, kept)) for kept in (True, False))


def _expect(step: Parts, promise: Promise) -> Parts:
    """The step with a remedy that gains what it promises."""
    step_s = step.step_s / promise.gain
    saved_s = step.step_s - step_s if promise.remedy.feeds else 0.0
    data_s = min(max(step.data_s - saved_s, 0.0), step_s)
    less_s = step.step_s - step_s if promise.remedy.of_ranks else 0.0
    comm_s = min(max(step.comm_exposed_s - less_s, 0.0), step_s)
    after = dataclasses.replace(step, step_s=step_s, data_s=data_s, comm_exposed_s=comm_s)
    return carry(step, after, promise.remedy.of_ranks)


def check_names(without: Iterable[str], remedies: Iterable[str]) -> None:
    """A name that there is not would be one that is tried in silence."""
    known = list(remedies)
    for name in without:
        if name not in known:
            raise unknown_word("remedy", name, known, "--without")


def split_advice(remedies: Mapping[str, Remedy]) -> tuple[list[Remedy], list[Remedy]]:
    """Those that change a recipe, and those that say what to do by hand."""
    every = list(remedies.values())
    return [r for r in every if not r.advice], [r for r in every if r.advice]


def carry(step: Step, parts: Parts, of_ranks: bool = False) -> Parts:
    """A changed step's parts: its own clock's, and for the kernels the proportions that were measured.
    `of_ranks`: whether communication was what changed."""
    comm_s = parts.comm_exposed_s
    if not comm_s:  # a clock that does not tell it: what the remedy was for is what is less
        saved_s = step.step_s - parts.step_s if of_ranks else 0.0
        comm_s = min(max(exchange_s(step) - saved_s, 0.0), parts.step_s)
    before = step.step_s - step.data_s - step.comm_exposed_s
    now = max(parts.step_s - parts.data_s - comm_s, 0.0)
    shrunk = now / before if before > 0 else 1.0
    measured = {
        name: shrunk * seconds(step, name)
        for name in (MATRIX, ATTENTION, CONVOLUTION, ELEMENTWISE, LOSS)
    }
    classes = {name: value for name, value in measured.items() if value}
    return dataclasses.replace(
        parts,
        launch_s=shrunk * step.launch_s,
        comm_exposed_s=comm_s,
        classes={**classes, OPTIMIZER: seconds(parts, OPTIMIZER)},
    )
