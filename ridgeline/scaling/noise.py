"""How large a batch is worth its samples: the gradient noise scale, from gradients of small batches.

A gradient of B samples is the true one plus noise of variance S / B. The noise scale S / |G|^2 (McCandlish,
Kaplan, Amodei 2018, "simple") is the batch at which both are as long: far below it a larger batch saves
about as many steps as it is larger, far above it nearly none. Products of the mean gradients of groups that
share no sample give |G|^2 without the noise, and leaving one group out at a time gives how sure the figure
is. Imports without torch; `noise_run.py` makes the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.plan.show import table

GROUPS = 6
_T = 2.015
"""Student's quantile for 90 % on both sides, at GROUPS - 1 degrees of freedom."""


@dataclass(frozen=True)
class Noise:
    """What was found at one place of a training."""

    step: int
    batch: int
    """Samples of one gradient."""
    gradients: int
    loss: float
    square: float
    """|G|^2 of the whole data's gradient; at or below 0 where the noise hides it."""
    variance: float
    """Of one sample's gradient, summed over the parameters."""
    low: float
    """The noise scale is larger, with 95 % confidence."""
    high: float | None
    """And smaller; None where too few samples were taken to say."""

    @property
    def scale(self) -> float | None:
        """In samples; None where noise hides the gradient."""
        return self.variance / self.square if self.square > 0 else None


@dataclass(frozen=True)
class Products:
    """Of gradients of `batch` samples each, in groups."""

    squares: Sequence[Sequence[float]]
    """|g|^2 of each gradient, group by group."""
    means: dict[tuple[int, int], float]
    """Products of the mean gradients of two groups, the first number below the second."""
    batch: int
    population: int
    """Samples that they were drawn from, none twice."""


def estimate(found: Products, step: int, loss: float) -> Noise:
    everyone = range(len(found.squares))
    square, variance = _both(found, everyone)
    without = [_both(found, [k for k in everyone if k != group]) for group in everyone]
    low = max(variance - _T * _error([v for _, v in without]), 0.0)
    high: float | None = None
    if square > 0 and all(s > 0 and v > 0 for s, v in without):
        away = _T * _error([math.log(v / s) for s, v in without])
        low, high = variance / square * math.exp(-away), variance / square * math.exp(away)
    else:
        low /= max(square, 0.0) + _T * _error([s for s, _ in without])
    count = sum(len(group) for group in found.squares)
    return Noise(step, found.batch, count, loss, square, variance, low, high)


def _both(found: Products, groups: Sequence[int]) -> tuple[float, float]:
    """|G|^2 and the variance of a sample's gradient, from some of the groups.

    What one group has drawn the other cannot: the product of two is S / N too small of N samples.
    """
    pairs = [found.means[a, b] for a in groups for b in groups if a < b]
    product = sum(pairs) / len(pairs)
    squares = [square for group in groups for square in found.squares[group]]
    variance = found.batch * (sum(squares) / len(squares) - product)
    return product + variance / found.population, variance


def _error(values: Sequence[float]) -> float:
    """The jackknife's standard error, from the value without each group."""
    mean = sum(values) / len(values)
    return math.sqrt((len(values) - 1) / len(values) * sum((v - mean) ** 2 for v in values))


def steps_factor(scale: float, batch: float) -> float:
    """Steps that a training takes, over those with endless samples in each."""
    return 1 + scale / batch


def samples_factor(scale: float, batch: float) -> float:
    """Samples that it takes, over those with few in each step."""
    return 1 + batch / scale


def show(found: Sequence[Noise], batch: int) -> list[str]:
    """Lines for people; `batch` is the training's own."""
    rows = [
        [
            f"{one.step:,}",
            f"{one.loss:.4g}",
            _round(one.scale) if one.scale is not None and one.high is not None else "",
            f"{_round(one.low)} to {_round(one.high)}" if one.high else f"above {_round(one.low)}",
        ]
        for one in found
    ]
    last = found[-1]
    taken = f"{last.gradients} gradients of {last.batch} samples each"
    lines = [f"gradient noise scale in samples, from {taken}", ""]
    lines += table(["step", "loss", "noise scale", "90 % sure"], rows)
    if last.scale is None or last.high is None:
        return [*lines, "", "noise hides the gradient: take more samples (--gradients, --batch)"]
    lines += ["", *_table(last.scale, batch), ""]
    if last.step == 0:
        return [
            *lines,
            "first weights: the scale grows as a training goes on, so ask a checkpoint too",
        ]
    said = _advice(last.scale, batch)
    if {_advice(last.low, batch), _advice(last.high, batch)} != {said}:
        said = "whether a larger one pays is not sure; take more samples (--gradients, --batch)"
    return [*lines, f"train.batch={batch}: {said}"]


def _table(scale: float, batch: int) -> list[str]:
    """What other batches would cost and save."""
    sizes = sorted({max(1, batch * factor // 4) for factor in (1, 2, 4, 8, 16, 32, 64)})
    here = steps_factor(scale, batch), samples_factor(scale, batch)
    rows = [
        [
            f"{size:,}" + (" (train.batch)" if size == batch else ""),
            f"{steps_factor(scale, size) / here[0]:.2f}",
            f"{samples_factor(scale, size) / here[1]:.2f}",
        ]
        for size in sizes
    ]
    return table(["batch", "x steps", "x samples"], rows)


def _advice(scale: float, batch: int) -> str:
    if batch < scale / 10:
        return "a larger one, with its learning rate, saves nearly as many steps as it is larger"
    if batch <= 3 * scale:
        return "a larger one saves steps and costs samples, as the table says"
    return "a larger one saves hardly any step, and a smaller one most of the samples"


def _round(value: float | None) -> str:
    """Two digits: no more is known."""
    if value is None or value <= 0:
        return "0"
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):,.{max(digits, 0)}f}"
