"""Bounds in a low precision: how far rounding takes one device from the exact step, times a factor.

`measure` looks at one device in that precision beside float64 and gives every loss, gradient and weight
a bound of its own; `compare_rounded` holds a layout to them. A gradient is measured twice: its distance
from the exact one relative to its norm, and how much too long it is. Rounding errors of many elements
point anywhere, so they hide a wrong factor far less than they hide a wrong element. Called by `run.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from ridgeline.verify.compare import (
    KINDS,
    Comparison,
    Difference,
    Sizes,
    relative,
    require_same_steps,
)
from ridgeline.verify.record import Recording, Tensors, is_common

FACTOR = 3.0
"""What a layout may add to one device's rounding: partial sums and activations rounded once more."""
EPS = {"fp32": 2.0**-21, "tf32": 2.0**-11, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-8}
"""Half a unit in the last place of what results are kept in, which for products in fp8 is bf16; no
measurement counts for less, because one can be small by luck. In float32, where sums themselves are
rounded, a few units: still a thousand times below any mistake."""
_WEIGHT_EPS = 2.0**-22
"""Weights are kept in float32 in every precision."""
_TELLING = 0.05
"""A gradient that is wrong by this much has to show, in one tensor at least."""
_BLIND = 0.5
"""A tensor whose factor may be wrong by this much is not looked at really ..."""
_BLIND_SHARE = 0.01
"""... and such tensors may have no more than this share of the gradient's squared norm."""


@dataclass
class Rounding:
    """The largest of each over the steps and ways that were measured, relative."""

    loss: float
    distances: dict[str, float] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    evaluation: float = 0.0
    """Of the evaluation's loss; other metrics, like accuracy, jump."""


def measure(
    exact: Recording,
    rounded: list[Recording],
    precision: str,
    compress: str = "none",
    before: Rounding | None = None,
) -> Rounding:
    """How far `rounded` trainings of one device are from `exact`; `before` was measured already.

    Gradients that replicas `compress` to 16 bits are kept in those, whatever they were computed in.
    """
    eps = EPS[precision]
    kept = max(eps, EPS.get(compress, 0.0))
    found = Rounding(loss=eps, evaluation=eps) if before is None else copy.deepcopy(before)
    for other in rounded:
        for step, loss in enumerate(exact.losses):
            found.loss = _larger(found.loss, relative(loss, other.losses[step]))
            for name, distance, factor in _gradients(exact, other, step):
                least = distance / math.sqrt(max(exact.gradients[step][name].size, 1))
                _raise(found.distances, name, max(distance, kept))
                _raise(found.factors, name, max(factor, least, kept))
            for name, distance in _distances(exact.weights[step], other.weights[step]):
                _raise(found.weights, name, max(distance, _WEIGHT_EPS))
        for name, distance in _distances(exact.averages, other.averages):
            _raise(found.weights, name, max(distance, _WEIGHT_EPS))
        found.evaluation = _larger(found.evaluation, _evaluations(exact, other))
    return found


def compare_rounded(
    exact: Recording, other: Recording, rounding: Rounding, lost: Collection[int] = ()
) -> Comparison:
    """`other` is a layout's training; in the order of computation: loss, gradients, weights, evaluation.

    The gradients of steps that are `lost` are not looked at; where all are, their size is not a number.
    """
    require_same_steps(exact, other)
    nearest = dict.fromkeys(KINDS, (0.0, 0.0, 0.0))
    if len(lost) == len(exact.losses):
        nearest["gradient"] = (0.0, math.nan, math.nan)
    first: Difference | None = None
    for step in range(len(exact.losses)):
        found = [("loss", "", relative(exact.losses[step], other.losses[step]), rounding.loss)]
        for name, distance, factor in (
            _gradients(exact, other, step) if step + 1 not in lost else ()
        ):
            found.append(("gradient", name, distance, rounding.distances.get(name, 0.0)))
            found.append(("gradient", name, factor, rounding.factors.get(name, 0.0)))
        for name, distance in _distances(exact.weights[step], other.weights[step]):
            found.append(("weight", name, distance, rounding.weights.get(name, 0.0)))
        if step + 1 == len(exact.losses):
            for name, distance in _distances(exact.averages, other.averages):
                found.append(("weight", name, distance, rounding.weights.get(name, 0.0)))
            found.append(("metric", "loss", _evaluations(exact, other), rounding.evaluation))
        for kind, name, size, measured in found:
            bound = FACTOR * measured
            nearness = size / bound if bound else math.inf
            if not nearness <= nearest[kind][0]:
                nearest[kind] = (nearness, size, bound)
            if first is None and not nearness <= 1.0:
                first = Difference(kind, name, step + 1, size)
    sizes = Sizes(**{kind: size for kind, (_, size, _) in nearest.items()})
    bounds = Sizes(**{kind: bound for kind, (_, _, bound) in nearest.items()})
    return Comparison(sizes, bounds, first, _why_unclear(exact, rounding))


def _why_unclear(exact: Recording, rounding: Rounding) -> str:
    """What a mistake could hide behind, as a clause; empty when it could not."""
    bounds = {
        name: FACTOR * min(rounding.distances[name], factor)
        for name, factor in rounding.factors.items()
        if is_common(name)
    }
    if FACTOR * rounding.loss > _TELLING:
        return f"rounding alone moves the loss by {rounding.loss:.0%} on one device"
    if not bounds or min(bounds.values()) > _TELLING:
        least = min(bounds.values(), default=math.inf) / FACTOR
        return f"rounding alone moves every gradient by {least:.0%} or more on one device"
    squares = {
        name: sum(
            float(np.square(s[name], dtype=np.float64).sum())
            for s in exact.gradients
            if name in s  # an expert may have no part in some steps
        )
        for name in bounds
    }
    blind = {name: squares[name] for name, bound in bounds.items() if bound > _BLIND}
    if sum(blind.values()) > _BLIND_SHARE * sum(squares.values()):
        name = max(blind, key=lambda name: blind[name])
        return f"rounding alone moves gradient {name} by {bounds[name] / FACTOR:.0%} on one device"
    return ""


def _evaluations(exact: Recording, other: Recording) -> float:
    if "loss" not in exact.metrics:
        return 0.0
    return relative(exact.metrics["loss"], other.metrics.get("loss", math.nan))


def _gradients(exact: Recording, other: Recording, step: int) -> list[tuple[str, float, float]]:
    """Name, distance and error of the factor of each gradient; infinite where one is missing."""
    one, two = exact.gradients[step], other.gradients[step]
    largest = max((_norm(value) for value in one.values()), default=0.0)
    found = []
    for name in [*one, *(n for n in two if n not in one)]:
        if name not in one or name not in two or one[name].shape != two[name].shape:
            found.append((name, math.inf, math.inf))
            continue
        true = one[name].astype(np.float64).ravel()
        gap = two[name].astype(np.float64).ravel() - true
        # The gradient of a bias before a norm is zero but for rounding: it has no length of its own.
        length = max(_norm(true), 1e-6 * largest)
        if not length:
            found.append((name, *[0.0 if not gap.any() else math.inf] * 2))
            continue
        along = abs(float(gap @ true)) / length**2
        found.append((name, _or_inf(_norm(gap) / length), _or_inf(along)))
    return found


def _distances(one: Tensors, two: Tensors) -> list[tuple[str, float]]:
    found = []
    for name in [*one, *(n for n in two if n not in one)]:
        distance = math.inf
        if name in one and name in two and one[name].shape == two[name].shape:
            gap = _norm(one[name].astype(np.float64) - two[name])
            length = _norm(one[name])
            distance = _or_inf(gap / length) if length else (math.inf if gap else 0.0)
        found.append((name, distance))
    return found


def _norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(value.astype(np.float64).ravel()))


def _or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _larger(one: float, other: float) -> float:
    return max(one, other) if math.isfinite(other) else one


def _raise(largest: dict[str, float], name: str, value: float) -> None:
    """An overflow on one device is no measure of rounding."""
    largest[name] = _larger(largest.get(name, 0.0), value)
