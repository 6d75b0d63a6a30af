"""Checks of a source's arguments, which come from YAML or the command line and may be anything.

Each function returns the value as the type the source wants, or raises a UsageError that names the
value, the argument, the source and what would be right. Called by the builders in `sources/` and by
`build.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.errors import UsageError, nearest_word


def wrong_value(source: str, key: str, value: Any, wanted: str) -> UsageError:
    text = f"source {source!r}: argument {key}={value!r} in data.args must be {wanted}"
    return UsageError(text, key=f"data.args.{key}")


def check_keys(source: str, args: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise for the first argument the source does not take, naming the nearest it does."""
    for key in args:
        if key in known:
            continue
        guess = nearest_word(str(key), known)
        hint = f"did you mean {guess!r}? " if guess else ""
        names = ", ".join(known) or "none"
        raise UsageError(
            f"source {source!r} has no argument {key!r} (data.args); {hint}(known: {names})",
            key=f"data.args.{key}",
        )


def whole(source: str, key: str, value: Any, minimum: int = 1) -> int:
    # 8e6 is how people write eight million in YAML, and it parses as a float.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise wrong_value(source, key, value, f"a whole number of at least {minimum}")
    return value


def flag(source: str, key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong_value(source, key, value, "true or false")
    return value


def number(
    source: str, key: str, value: Any, low: float, high: float, or_zero: bool = False
) -> float:
    """A number with low < value <= high, or 0 where that stands for none."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (low < value <= high or (or_zero and value == 0)):
        wanted = f"{'0, or ' if or_zero else ''}a number above {low:g} and at most {high:g}"
        raise wrong_value(source, key, value, wanted)
    return float(value)


def choice(source: str, key: str, value: Any, allowed: Sequence[Any]) -> Any:
    # `True in (1, 3)` holds in Python; a flag is not a number of channels.
    if isinstance(value, bool) or value not in allowed:
        words = ", ".join(str(word) for word in allowed)
        guess = nearest_word(str(value), [str(word) for word in allowed])
        hint = f"; did you mean {guess!r}?" if guess and isinstance(value, str) else ""
        raise wrong_value(source, key, value, f"one of {words}{hint}")
    return value


def shape(source: str, key: str, value: Any) -> tuple[int, ...]:
    sizes = [value] if isinstance(value, int) else value
    if not isinstance(sizes, list | tuple) or not sizes:
        raise wrong_value(source, key, value, "a list of sizes, e.g. [3, 224, 224]")
    return tuple(whole(source, f"{key}[{dim}]", size) for dim, size in enumerate(sizes))
