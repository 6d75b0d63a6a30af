"""What is searched: settings of a recipe, each with the values it may take.

`train.lr=1e-4..1e-1:log` is a range, `train.batch=32,64,128` a list. A point of the space is a number from
0 to 1 for each setting, so that whoever draws points needs to know nothing of what they stand for. Called
by `request.py`, `draw.py` and `schedules.py`; imports without torch.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import yaml

from ridgeline.errors import UsageError

Settings = dict[str, Any]
"""Values by dotted key."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?::(\w+))?")
_WHOLE = re.compile(r"[-+]?\d+")
_NUDGE, _LEAST = 0.2, 0.02
"""How far a value is nudged: a share of itself, and at least one of its range."""
_ANEW = 0.25
"""How often a setting that is nudged is drawn anew instead."""


@dataclass(frozen=True)
class Dimension:
    """One setting: a range of numbers, or a list of any values."""

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    choices: tuple[Any, ...] = ()

    def at(self, place: float) -> Any:
        """The value at a place from 0 to below 1.

        >>> Dimension("train.lr", 1e-4, 1e-2, log=True).at(0.5), Dimension("a", 1, 4, whole=True).at(0.99)
        (0.001, 4)
        """
        if self.choices:
            return self.choices[min(int(place * len(self.choices)), len(self.choices) - 1)]
        low, high = self.low, self.high + self.whole
        if self.log:
            value = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
        else:
            value = low + place * (high - low)
        return min(int(value), int(self.high)) if self.whole else self._tidy(value)

    def nudged(self, value: Any, dice: random.Random) -> Any:
        """A value nearby, or now and then any: how a population looks around."""
        if dice.random() < _ANEW:
            return self.at(dice.random())
        if self.choices:
            now = self.choices.index(value)
            ways = [i for i in (now - 1, now + 1) if 0 <= i < len(self.choices)]
            return self.choices[dice.choice(ways)]
        # At least a step of its range, so that nothing is stuck at 0 or between two whole numbers.
        least = 1.0 if self.whole else 0.0 if self.log else _LEAST * (self.high - self.low)
        by = max(abs(value) * _NUDGE, least)
        ways = [v for v in (value - by, value + by) if self.low <= v <= self.high]
        moved = dice.choice(ways) if ways else self.at(dice.random())
        return round(moved) if self.whole else self._tidy(moved)

    def _tidy(self, value: float) -> float:
        """With as few digits as its range allows, and never outside of it."""
        grain = (abs(value) if self.log else self.high - self.low) * 1e-3
        for digits in (4, 6, 9):
            short = float(f"{value:.{digits}g}")
            if abs(short - value) <= grain and self.low <= short <= self.high:
                return short
        return min(max(value, self.low), self.high)

    def text(self) -> str:
        """As it was written."""
        if self.choices:
            return f"{self.key}={','.join(value_text(value) for value in self.choices)}"
        ends = [str(int(end)) if self.whole else repr(float(end)) for end in (self.low, self.high)]
        return f"{self.key}={ends[0]}..{ends[1]}{':log' * self.log}"


Space = tuple[Dimension, ...]


def read_space(texts: Sequence[str]) -> Space:
    found = tuple(_read(text) for text in texts)
    if not found:
        raise UsageError(
            "nothing to search: name settings with --over, e.g. --over train.lr=1e-4..1e-1:log"
        )
    keys = [one.key for one in found]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"--over {key} is given twice; give all of its values in one")
    return found


def _read(text: str) -> Dimension:
    key, equals, said = (part.strip() for part in text.partition("="))
    if not equals or not key or not said:
        raise UsageError(
            f"--over {text!r} is not KEY=VALUES; write a range (train.lr=1e-4..1e-1:log) or a list "
            "(train.batch=32,64)"
        )
    match = _RANGE.fullmatch(said)
    if ".." in said and (match is None or "..." in said):
        raise UsageError(f"--over {text}: a range is LOW..HIGH or LOW..HIGH:log")
    if match is None:
        return Dimension(key, choices=_read_list(text, said))
    low, high, scale = float(match[1]), float(match[2]), match[3]
    if scale not in (None, "log"):
        raise UsageError(f"--over {text}: {scale!r} is no scale; write :log, or nothing")
    if not low < high:
        raise UsageError(f"--over {text}: {match[1]} is not below {match[2]}")
    if scale and low <= 0:
        raise UsageError(f"--over {text}: a range on a log scale begins above 0")
    whole = all(_WHOLE.fullmatch(end) for end in (match[1], match[2]))
    return Dimension(key, low, high, bool(scale), whole)


def _read_list(text: str, said: str) -> tuple[Any, ...]:
    from ridgeline.config import read_value

    try:
        values = read_value(said if said.startswith("[") else f"[{said}]")
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"--over {text}: the values are not valid YAML") from error
    if not isinstance(values, list) or len(values) < 2:
        raise UsageError(f"--over {text}: a list needs two values or more; one is an override")
    for value in values:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"--over {text}: {value} is no number, word or list; put it in quotes"
            ) from error
    if any(values.count(value) > 1 for value in values):
        raise UsageError(f"--over {text}: the list has a value twice")
    return tuple(values)


def value_text(value: Any) -> str:
    """As an override takes it.

    >>> value_text(0.001), value_text([0.9, 0.95]), value_text("sgd"), value_text(None)
    ('0.001', '[0.9, 0.95]', 'sgd', 'null')
    """
    from ridgeline.config import read_value

    if not isinstance(value, str):
        return json.dumps(value)
    with suppress(yaml.YAMLError, ValueError):
        if read_value(value) == value:
            return value
    return json.dumps(value)


def overrides_of(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value_text(value)}" for key, value in settings.items()]


def point(space: Space, places: Sequence[float]) -> Settings:
    return {one.key: one.at(place) for one, place in zip(space, places, strict=True)}


def nudge(space: Space, settings: Mapping[str, Any], dice: random.Random) -> Settings:
    """A neighbour of a point."""
    return {one.key: one.nudged(settings[one.key], dice) for one in space}


def near_end(one: Dimension, value: Any) -> bool:
    """Whether the best may lie outside: the value is in the last twentieth of its range."""
    if one.choices:
        return False
    low, high, at = one.low, one.high, float(value)
    if one.log:
        low, high, at = math.log(low), math.log(high), math.log(at)
    return not low + 0.05 * (high - low) < at < high - 0.05 * (high - low)


def fit_types(space: Space, now: Mapping[str, Any]) -> Space:
    """A range that was written with whole numbers, of a setting that is none, is one of any numbers."""
    return tuple(
        replace(one, whole=False) if one.whole and isinstance(now.get(one.key), float) else one
        for one in space
    )
