"""What a climb tries next: the remedies that apply to the step as it is now, the most promising first.

A device computes while the host reads, so that the slower of the two hides the other: a remedy that makes
the device faster may show no gain because the step then waits for data, and one that feeds it none
because nothing waited. Such a remedy is tried once more together with what would feed it. What would come
after the one that is tried, were it kept or dropped, can be asked before that is known. Called by
`climb.py`; imports without torch.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.config import RunConfig, dump_config, load_config
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
    seconds,
)
from ridgeline.errors import UsageError
from ridgeline.layout import Layout, check_available, check_layout

LEAST_PREDICTED = 1.001
"""A remedy that does not promise this much is not worth a process."""
WAITS_MORE = 0.03
"""Share of the step by which a state has to wait longer for data to have been held back by them."""
NOT_SLOWER = 0.97
"""A state that is slower than this is so by itself."""


@dataclass(frozen=True)
class Promise:
    """A remedy that applies: the gain it expects, and why it may help."""

    gain: float
    remedy: Remedy
    reason: str


class Waiting:
    """The remedies that are still to be tried."""

    def __init__(self, remedies: Iterable[Remedy]) -> None:
        self._remedies = {remedy.name: remedy for remedy in remedies}
        self._feeding = {name: r for name, r in self._remedies.items() if r.feeds}
        self._firsts: dict[str, Remedy] = {}
        """Of each pair that waits, by its name, the remedy that was dropped by itself."""

    def rank(self, step: Step, config: RunConfig) -> list[Promise]:
        """Those that apply, the most promising first; after those that start soon the others, and last
        what promises nothing."""
        found = _promises(self._remedies.values(), step, config)
        return sorted(found, key=lambda p: (p.gain < LEAST_PREDICTED, p.remedy.slow, -p.gain))

    def copy(self) -> Waiting:
        """To think further with, while nothing is taken from this one."""
        other = Waiting(())
        other._remedies, other._feeding = dict(self._remedies), dict(self._feeding)
        other._firsts = dict(self._firsts)
        return other

    def take(self, remedy: Remedy) -> None:
        del self._remedies[remedy.name]
        self._firsts.pop(remedy.name, None)

    def note_kept(self, remedy: Remedy) -> None:
        """Where it feeds the device, what waited for that can show its gain by itself."""
        if remedy.repeats:
            self._remedies[remedy.name] = remedy
        for pair, first in list(self._firsts.items()) if remedy.feeds else ():
            self.take(self._remedies[pair])
            self._remedies[first.name] = first

    def note_dropped(
        self, remedy: Remedy, rung: Rung, step: Parts, config: RunConfig
    ) -> Remedy | None:
        """The pair of it and what would feed it, which waits from now on, where its state was held back
        by data; None where it was dropped for another reason, or nothing would feed it."""
        if rung.gain is None:
            self._feeding.pop(remedy.name, None)
            return None
        if remedy.feeds or rung.gain < NOT_SLOWER or rung.step_s is None or not rung.data_share:
            return None
        if rung.data_share - step.data_s / step.step_s < WAITS_MORE:
            return None
        waits_s = rung.data_share * rung.step_s
        held_back = dataclasses.replace(step, step_s=rung.step_s, data_s=waits_s)
        found = _promises(self._feeding.values(), held_back, config)
        if not found:
            return None
        best = max(found, key=lambda promise: promise.gain)
        pair = _pair(remedy, best.remedy, rung.gain * best.gain, best.reason)
        self._remedies[pair.name], self._firsts[pair.name] = pair, remedy
        return pair

    def untried(
        self, step: Parts, config: RunConfig, spent_s: float, cost_s: float
    ) -> list[Untried]:
        """What was not tried, in the order in which it would have been, with the budget that each needs if
        it takes `cost_s`; and what does not apply: because of the device, if it would on a GPU."""
        found, needed_s = [], spent_s
        ranked = self.rank(step, config)
        for promise in ranked:
            name, gain, reason = promise.remedy.name, promise.gain, promise.reason
            if gain < LEAST_PREDICTED:
                found.append(Untried(name, TOO_LITTLE, gain, reason))
                continue
            needed_s += cost_s
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


def _pair(first: Remedy, feeding: Remedy, gain: float, reason: str) -> Remedy:
    return Remedy(
        name=f"{first.name}, {feeding.name}",
        applies=lambda step, config: first.applies(step, config) and f"with it, {reason}",
        predicted_gain=lambda step, config: gain,
        change=lambda config: [*first.change(config), *feeding.change(config)],
        risk=first.risk,
        slow=first.slow or feeding.slow,
        feeds=True,  # which also says that it is no half of another pair
    )


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
    return carry(step, dataclasses.replace(step, step_s=step_s, data_s=data_s))


def change_config(config: RunConfig, overrides: tuple[str, ...]) -> RunConfig:
    """A configuration with overrides, checked as a recipe is."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(dump_config(config))
        file.flush()
        changed = load_config(Path(file.name), overrides).config
    layout = Layout.parse(changed.layout)
    for finding in [*check_layout(layout), *check_available(layout)]:
        raise UsageError(finding.reason)
    return changed


def split_advice(remedies: Mapping[str, Remedy]) -> tuple[list[Remedy], list[Remedy]]:
    """Those that change a recipe, and those that say what to do by hand."""
    every = list(remedies.values())
    return [r for r in every if not r.advice], [r for r in every if r.advice]


def carry(step: Step, parts: Parts) -> Parts:
    """A changed step's parts: its own clock's, and for the kernels the proportions that were measured."""
    before, now = step.step_s - step.data_s, parts.step_s - parts.data_s
    shrunk = now / before if before > 0 else 1.0
    measured = {
        name: shrunk * seconds(step, name)
        for name in (MATRIX, ATTENTION, CONVOLUTION, ELEMENTWISE, LOSS)
    }
    classes = {name: value for name, value in measured.items() if value}
    return dataclasses.replace(
        parts,
        launch_s=shrunk * step.launch_s,
        classes={**classes, OPTIMIZER: seconds(parts, OPTIMIZER)},
    )
