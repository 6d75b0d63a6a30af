"""Two recordings in float64 side by side: the first tensor that differs, at which step, and by how much.

Differences are relative to the largest element of the tensor, because a single element near zero has no
digits left to agree in. Where a model computes in less than float64 by itself, one device shows how much
that moves its own steps (`measure_noise`). Other precisions: `rounding.py`. Called by `exact.py` and by the
parity tests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ridgeline.verify.record import Recording, Tensors

FLOAT64_BOUND = 1e-9
"""Relative; an error of a formula is many times larger, rounding in float64 a million times smaller."""
NOISE_FACTOR = 10.0
"""What a layout may be off by, of what one device's own steps are moved by: few of its digits are lost in
each of them, and never the same ones."""
_TELLING = 1e-4
"""Noise that hides an error of this size hides too much."""

KINDS = ("loss", "gradient", "weight", "metric")


@dataclass(frozen=True)
class Difference:
    """Where two trainings part."""

    kind: str
    """loss, gradient, weight or metric."""
    name: str
    step: int
    size: float
    """Relative; infinite where one side is not a number, or is missing."""

    def __str__(self) -> str:
        what = self.kind if self.kind == "loss" else f"{self.kind} {self.name}"
        return f"{what} at step {self.step} by {self.size:.1e}"


@dataclass(frozen=True)
class Sizes:
    """One number for each kind of thing that is compared."""

    loss: float
    gradient: float
    weight: float
    metric: float
    """Of an evaluation after the last step."""


@dataclass(frozen=True)
class Comparison:
    """How far apart two trainings are, and whether that is within the bounds."""

    sizes: Sizes
    """Largest relative differences over all steps and tensors."""
    bounds: Sizes
    """What each may be; where tensors have bounds of their own, that of the tensor nearest to its."""
    first: Difference | None
    """The first that is beyond its bound; None when the trainings are the same."""
    unclear: str = ""
    """Why the bounds would not show a mistake; empty when they would."""
    note: str = ""
    """What else there is to say, in place of the first difference where there is one."""

    @property
    def same(self) -> bool:
        return self.first is None


@dataclass(frozen=True)
class Noise:
    """How far one device's steps are apart that ought to be the same: the largest of each, relative."""

    sizes: dict[tuple[str, str], float] = field(default_factory=dict)
    """By kind and name."""

    @property
    def usual(self) -> float:
        """Of gradients, in half of the tensors."""
        found = [size for (kind, _), size in self.sizes.items() if kind == "gradient"]
        return statistics.median(found) if found else 0.0

    def bound(self, kind: str, name: str) -> float:
        """What a layout may be off by; never more for weights, which follow from the layout's gradients."""
        size = self.sizes.get(("loss", "") if kind == "metric" else (kind, name), 0.0)
        if kind == "gradient":
            size = max(size, self.usual)
        return max(FLOAT64_BOUND, NOISE_FACTOR * size)

    @property
    def unclear(self) -> str:
        largest = max(self.usual, self.sizes.get(("loss", ""), 0.0))
        if NOISE_FACTOR * largest <= _TELLING:
            return ""
        return f"rounding alone moves steps of one device by {largest:.1e}, in float64"


def measure_noise(exact: Recording, others: list[Recording]) -> Noise:
    """From steps of one device that only rounding tells from those of `exact`."""
    sizes: dict[tuple[str, str], float] = {}
    for other in others:
        for difference in _differences(exact, other):
            if math.isfinite(difference.size):
                key = difference.kind, difference.name
                sizes[key] = max(sizes.get(key, 0.0), difference.size)
    return Noise(sizes)


def compare(
    one: Recording, other: Recording, noise: Noise | None = None, is_divided: bool = False
) -> Comparison:
    """`one` is the reference. In the order of computation: loss, gradients, weights, at the end their
    moving averages, which count as weights, and evaluation.
    `is_divided`: `other` takes in several microbatches what `one` takes whole."""
    noise = noise or Noise()
    worst = dict.fromkeys(KINDS, 0.0)
    bounds = dict.fromkeys(KINDS, FLOAT64_BOUND)
    first: Difference | None = None
    counters, apart = _counters(one, other) if is_divided else {}, {}
    for difference in _differences(one, other):
        if difference.kind == "weight" and difference.size and difference.name in counters:
            apart[difference.name] = counters[difference.name]
            continue
        kind, bound = difference.kind, noise.bound(difference.kind, difference.name)
        worst[kind], bounds[kind] = max(worst[kind], difference.size), max(bounds[kind], bound)
        if first is None and not difference.size <= bound:
            first = difference
    note = "" if first is not None else "; ".join(apart.values())
    return Comparison(Sizes(**worst), Sizes(**bounds), first, noise.unclear, note)


def _differences(one: Recording, other: Recording) -> Iterator[Difference]:
    require_same_steps(one, other)
    for step in range(len(one.losses)):
        yield Difference("loss", "", step + 1, relative(one.losses[step], other.losses[step]))
        yield from _tensors("gradient", step + 1, one.gradients[step], other.gradients[step])
        yield from _tensors("weight", step + 1, one.weights[step], other.weights[step])
    yield from _tensors("weight", len(one.losses), one.averages, other.averages)
    yield from _metrics(len(one.losses), one.metrics, other.metrics)


def _counters(one: Recording, other: Recording) -> dict[str, str]:
    """Single integers that are no weight but count, as `num_batches_tracked` of a batch norm: they grow by
    as much in every step of each training. Where that is not the same in both they have counted calls of
    the module, of which a step makes one for each microbatch. What there is to say of each."""
    found: dict[str, str] = {}
    for name in one.weights[0] if one.weights else ():
        rows = [
            [step[name] for step in training.weights if name in step] for training in (one, other)
        ]
        values = [value for row in rows for value in row]
        if len(values) < 2 * len(one.weights):
            continue
        if any(value.size != 1 or value.dtype.kind not in "iu" for value in values):
            continue
        counts = [[int(value.item()) for value in row] for row in rows]
        if all(_is_even(row) for row in counts):
            found[name] = (
                f"{name} is {counts[1][-1]} and not {counts[0][-1]}: it counts calls of its module, of "
                "which a step has one for each microbatch"
            )
    return found


def _is_even(counts: list[int]) -> bool:
    """Whether they grow by the same in every step; of one step it is enough that something was counted."""
    steps = {after - before for before, after in pairwise(counts)} or {counts[0]}
    return len(steps) == 1 and min(steps) > 0


def require_same_steps(one: Recording, other: Recording) -> None:
    if len(one.losses) != len(other.losses):
        raise ValueError(f"{len(one.losses)} steps and {len(other.losses)} cannot be compared")


def _metrics(step: int, one: dict[str, float], other: dict[str, float]) -> list[Difference]:
    return [
        Difference("metric", n, step, relative(one.get(n, math.nan), other.get(n, math.nan)))
        for n in sorted({*one, *other})
    ]


def _tensors(kind: str, step: int, one: Tensors, other: Tensors) -> list[Difference]:
    found = []
    scale = max((float(np.abs(v).max()) for v in one.values() if v.size), default=0.0)
    for name in [*one, *(n for n in other if n not in one)]:
        size = math.inf
        if name in one and name in other and one[name].shape == other[name].shape:
            size = _gap(one[name], other[name], scale)
        found.append(Difference(kind, name, step, size))
    return found


def _gap(one: np.ndarray, other: np.ndarray, scale: float) -> float:
    if not one.size:
        return 0.0
    one, other = one.astype(np.float64), other.astype(np.float64)
    gap = float(np.abs(one - other).max())
    if math.isnan(gap):
        return math.inf
    # A tensor whose true value is zero (the gradient of a bias before a norm) is rounding alone:
    # it is measured against what the other tensors of the step are made of.
    largest = max(float(np.abs(one).max()), 1e-6 * scale)
    return gap / largest if largest else (0.0 if gap == 0.0 else math.inf)


def relative(one: float, other: float) -> float:
    """Difference of two numbers, relative to the first."""
    if math.isnan(one) or math.isnan(other):
        return math.inf
    return abs(one - other) / abs(one) if one else abs(other)
