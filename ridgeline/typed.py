"""Frozen dataclasses from plain mappings, and back: the machinery under `config.py`.

Values come from YAML and from a command line, so they are brought to the type their field declares,
and what does not fit is an error that names the dotted key, the value and what was expected.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from ridgeline.errors import UsageError, nearest_word


def build_typed(cls: type[Any], values: Any, prefix: str, all_keys: list[str]) -> Any:
    """A dataclass from a mapping, each value brought to its field's type."""
    if not isinstance(values, Mapping):
        name = prefix.rstrip(".")
        raise UsageError(f"{name} is a section of keys, not {values!r}", key=name)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            raise _unknown_key(str(key), prefix, fields, all_keys)
    built: dict[str, Any] = {}
    for name in fields:
        if name not in values:
            continue
        hint, dotted = hints[name], f"{prefix}{name}"
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            below = values[name]
            section = {} if below is None else below
            built[name] = build_typed(hint, section, f"{dotted}.", all_keys)
        else:
            built[name] = _coerce(values[name], hint, dotted)
    return cls(**built)


def _unknown_key(
    key: str, prefix: str, fields: Mapping[str, Any], all_keys: list[str]
) -> UsageError:
    """A key of exactly that name in another section is likelier than a similar one in this."""
    elsewhere = [leaf for leaf in all_keys if leaf.split(".")[-1] == key]
    similar = nearest_word(key, fields)
    guess = elsewhere[0] if elsewhere else f"{prefix}{similar}" if similar else ""
    hint = f"did you mean {guess}? " if guess else ""
    text = f"unknown key {prefix}{key}; {hint}(known here: {', '.join(fields)})"
    return UsageError(text, key=f"{prefix}{key}")


def _coerce(value: Any, hint: Any, place: str) -> Any:
    """Bring a YAML value to the type of a field, or say what was expected."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None:
        if type(None) in options:
            return None
        if typing.get_origin(hint) is dict:
            return {}
        raise UsageError(f"{place} needs a value ({_expected(hint)})", key=place)
    for option in options:
        if option is type(None):
            continue
        fitted, ok = _fit(value, option)
        if ok:
            return fitted
    raise UsageError(f"{place}={value!r} is not {_expected(hint)}", key=place)


def _fit(value: Any, hint: Any) -> tuple[Any, bool]:
    origin = typing.get_origin(hint)
    if origin is dict:
        if not isinstance(value, Mapping):
            return None, False
        _, item = typing.get_args(hint)
        if item is Any:
            return dict(value), True
        pairs = {key: _fit(below, item) for key, below in value.items()}
        return {k: v for k, (v, _) in pairs.items()}, all(ok for _, ok in pairs.values())
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return None, False
        args = typing.get_args(hint)
        item = args[0]
        if args[-1] is not Ellipsis and len(value) != len(args):
            return None, False
        fitted = [_fit(below, item) for below in value]
        return tuple(v for v, _ in fitted), all(ok for _, ok in fitted)
    if hint is bool:
        return value, isinstance(value, bool)
    if hint is int:
        return _fit_int(value)
    if hint is float:
        return _fit_float(value)
    if hint is str:
        # YAML reads yes, no and 1 as something else; where text is wanted, text was meant.
        if isinstance(value, bool):
            return ("yes" if value else "no"), True
        return str(value), isinstance(value, (str, int, float))
    return value, True


def _fit_int(value: Any) -> tuple[Any, bool]:
    if isinstance(value, bool):
        return None, False
    if isinstance(value, float) and value.is_integer():
        return int(value), True
    if isinstance(value, str):
        try:
            return int(value), True
        except ValueError:
            return None, False
    return value, isinstance(value, int)


def _fit_float(value: Any) -> tuple[Any, bool]:
    if isinstance(value, bool):
        return None, False
    if isinstance(value, str):  # YAML 1.1 reads 1e-3 as text
        try:
            return float(value), True
        except ValueError:
            return None, False
    return (float(value), True) if isinstance(value, (int, float)) else (None, False)


def _expected(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_expected(option) for option in typing.get_args(hint))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is dict:
        _, item = typing.get_args(hint)
        return "a mapping" if item is Any else "a mapping of names to numbers"
    if typing.get_origin(hint) is tuple:
        return "a list of numbers"
    return names.get(hint, str(hint))


def to_plain(value: Any) -> Any:
    """Dataclasses and tuples as dicts and lists, for YAML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def leaf_items(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            items.extend(leaf_items(value, f"{dotted}."))
        else:
            items.append((dotted, value))
    return items


def leaves(values: Mapping[str, Any]) -> list[str]:
    return [key for key, _ in leaf_items(values)]
