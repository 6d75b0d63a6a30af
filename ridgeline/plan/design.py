"""Which runs to measure: those whose times say most about all the others.

Before anything has run, the model says how much each parameter of the machine matters in each run (its
slopes), and each parameter has a width (`calibrate.py`). From both follows how uncertain every run's time
is, and how much less it would be once some of the runs were measured; runs are chosen one by one for the
largest fall of that, summed over all runs. No measured time has a part in it. Called by `validate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ridgeline.plan.calibrate import NOISES, Misfits, clear_caches, parameter_of
from ridgeline.plan.job import Job

NOISE: Final = NOISES[-1]
"""Of a measured time and of what the model lacks, as where the parameters are fitted."""


def most_telling(jobs: Sequence[Job], count: int) -> list[int]:
    """Places in `jobs` of `count` of them, in the order in which they were chosen."""
    slopes = _slopes(jobs)
    size = len(slopes[0])
    spread = [[float(i == j) for j in range(size)] for i in range(size)]
    every = [[sum(row[i] * row[j] for row in slopes) for j in range(size)] for i in range(size)]
    """Sum of the slopes' outer products: what a direction of the parameters means for all runs."""
    chosen: list[int] = []
    while len(chosen) < min(count, len(jobs)):
        best, best_fall, best_pull = -1, -1.0, list[float]()
        for place, row in enumerate(slopes):
            if place in chosen:
                continue
            pull = [_dot(line, row) for line in spread]
            fall = _dot(pull, [_dot(line, pull) for line in every]) / (NOISE**2 + _dot(row, pull))
            if fall > best_fall:
                best, best_fall, best_pull = place, fall, pull
        chosen.append(best)
        known = NOISE**2 + _dot(slopes[best], best_pull)
        spread = [
            [spread[i][j] - best_pull[i] * best_pull[j] / known for j in range(size)]
            for i in range(size)
        ]
    return chosen


def _slopes(jobs: Sequence[Job]) -> list[list[float]]:
    """Of each job's logarithm of time, by each parameter counted in its widths."""
    misfits = Misfits(jobs, [1.0] * len(jobs), {})
    misfits.noise = 1.0
    start = [0.0] * len(misfits.names)
    misfits.at(start, True)
    by_name = misfits.slopes(start)
    clear_caches()
    widths = [parameter_of(name).width for name in misfits.names]
    return [
        [width * slope[place] for width, slope in zip(widths, by_name, strict=True)]
        for place in range(len(jobs))
    ]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
