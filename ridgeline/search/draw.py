"""Which points of the space are tried: trial by trial, a function of the seed and the trial's number.

`spread` fills the space evenly however many trials there will be (an additive recurrence: multiples of
powers of a generalised golden ratio, modulo 1), which covers each setting better than chance; `tpe` asks
Optuna, which looks at what was found so far. Called by `schedules.py`; imports without torch.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ridgeline.errors import UsageError, unknown_word
from ridgeline.search.space import Settings, Space, point
from ridgeline.search.trials import Trial

Draw = Callable[[int, Sequence[Trial], bool], Settings]
"""The settings of a trial, by its number, what is known of those before it, and whether more is better."""


def build_draw(name: str, space: Space, seed: int) -> Draw:
    if name not in DRAWS:
        raise unknown_word("way", name, DRAWS, "--draw")
    return DRAWS[name](space, seed)


def count_grid(space: Space) -> int:
    """Points of the grid; ranges have no end of them."""
    for one in space:
        if not one.choices:
            raise UsageError(
                f"--draw grid tries every value, and --over {one.text()} is a range; write a list of values"
            )
    return math.prod(len(one.choices) for one in space)


def _grid(space: Space, seed: int) -> Draw:
    count = count_grid(space)
    points = itertools.product(*(one.choices for one in space))
    found = [dict(zip([one.key for one in space], values, strict=True)) for values in points]
    # A search that is cut off has seen a bit of everything.
    random.Random(seed).shuffle(found)
    return lambda number, _, __: found[number % count]


def _random(space: Space, seed: int) -> Draw:
    def draw(number: int, _: Sequence[Trial], __: bool) -> Settings:
        dice = random.Random(f"{seed} {number}")
        return point(space, [dice.random() for _ in space])

    return draw


def _spread(space: Space, seed: int) -> Draw:
    ratio = golden(len(space))
    dice = random.Random(seed)
    begin = [dice.random() for _ in space]

    def draw(number: int, _: Sequence[Trial], __: bool) -> Settings:
        places = [(b + (number + 1) / ratio ** (i + 1)) % 1.0 for i, b in enumerate(begin)]
        return point(space, places)

    return draw


def golden(dimensions: int) -> float:
    """The root of x^(d+1) = x + 1: for one dimension the golden ratio.

    >>> round(golden(1), 6), round(golden(2), 6)
    (1.618034, 1.324718)
    """
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (dimensions + 1))
    return root


def _tpe(space: Space, seed: int) -> Draw:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise UsageError("--draw tpe needs optuna; pip install 'ridgeline[search]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    known = {one.key: _distribution(optuna, one) for one in space}

    def draw(number: int, trials: Sequence[Trial], higher: bool) -> Settings:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of choices that are lists
            sampler = optuna.samplers.TPESampler(seed=seed + number, multivariate=True)
            study = optuna.create_study(
                direction="maximize" if higher else "minimize", sampler=sampler
            )
            study.add_trials([_known(optuna, one, known) for one in trials if one.has_finite_score])
            asked = study.ask(known)
        return {one.key: asked.params[one.key] for one in space}

    return draw


def _distribution(optuna: Any, one: Any) -> Any:
    kinds = optuna.distributions
    if one.choices:
        return kinds.CategoricalDistribution(one.choices)
    if one.whole:
        return kinds.IntDistribution(int(one.low), int(one.high), log=one.log)
    return kinds.FloatDistribution(one.low, one.high, log=one.log)


def _known(optuna: Any, trial: Trial, known: dict[str, Any]) -> Any:
    """A trial as Optuna has it; one that was not trained to its end counts with what it last had."""
    value = trial.last_score
    assert value is not None
    return optuna.trial.create_trial(
        params={key: trial.settings[key] for key in known}, distributions=known, value=value
    )


DRAWS: dict[str, Callable[[Space, int], Draw]] = {
    "spread": _spread,
    "random": _random,
    "grid": _grid,
    "tpe": _tpe,
}
