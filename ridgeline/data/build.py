"""From a source's name and arguments to its two halves, training and held-out.

A name is one of `SOURCES` or the user's own `module:function_or_Class`, which is called once with
`split='train'` and once with `split='eval'`; where nothing is held out, that half is a source of no
samples, and nothing is evaluated. Called by `train/setup.py`, `verify` and `doctor`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.data.arguments import check_keys
from ridgeline.data.source import DatasetSource, NoSamples, Source
from ridgeline.data.sources.digits import build_digits
from ridgeline.data.sources.fields import build_fields
from ridgeline.data.sources.images import build_images
from ridgeline.data.sources.packed import build_packed
from ridgeline.data.sources.synthetic import build_synthetic
from ridgeline.data.sources.text import build_text
from ridgeline.errors import UsageError, unknown_word
from ridgeline.named import import_named

# Called as builder(seed, **args) -> (training source, held-out source).
SOURCES: dict[str, Callable[..., tuple[Source, Source]]] = {
    "digits": build_digits,
    "fields": build_fields,
    "images": build_images,
    "packed": build_packed,
    "synthetic": build_synthetic,
    "text": build_text,
}


def build_sources(name: str, args: Mapping[str, Any], seed: int) -> tuple[Source, Source]:
    """The training and the held-out source that `data.source` and `data.args` ask for."""
    if ":" not in name and name not in SOURCES:
        raise unknown_word("source", name, SOURCES, "data.source")
    try:
        return _build_own(name, args, seed) if ":" in name else _build_shipped(name, args, seed)
    except UsageError as error:
        error.key = error.key or _key_in(str(error), args)
        raise


def _key_in(text: str, args: Mapping[str, Any]) -> str:
    """The argument that a sentence of a source's is about: one whose value stands in it, else all where it
    names them. What is not installed is no matter of the recipe's."""
    named = [key for key, value in args.items() if isinstance(value, str) and repr(value) in text]
    if len(named) == 1:
        return f"data.args.{named[0]}"
    return "data.args" if "data.args" in text else ""


def _build_shipped(name: str, args: Mapping[str, Any], seed: int) -> tuple[Source, Source]:
    builder = SOURCES[name]
    check_keys(name, args, [key for key in inspect.signature(builder).parameters if key != "seed"])
    return builder(seed, **args)


def _build_own(name: str, args: Mapping[str, Any], seed: int) -> tuple[Source, Source]:
    maker = import_named(name, "data.source")
    if not callable(maker):
        raise UsageError(
            f"data.source {name!r} is a {type(maker).__name__}, not a function or class",
            key="data.source",
        )
    parameters = inspect.signature(maker).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "split" not in parameters and not open_ended:
        raise UsageError(
            f"source {name!r} in data.source takes no argument 'split'; it is called once with "
            "split='train' and once with split='eval', for which None means that there is no such split",
            key="data.source",
        )
    if not open_ended:
        check_keys(name, args, [key for key in parameters if key not in ("split", "self")])
    for key, parameter in parameters.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        required = named and parameter.default is parameter.empty
        if required and key not in args and key not in ("split", "seed"):
            raise UsageError(f"source {name!r} needs the argument {key!r}; give it in data.args")
    extra = {"seed": seed} if "seed" in parameters and "seed" not in args else {}
    train = maker(split="train", **extra, **args)
    held_out = maker(split="eval", **extra, **args)
    made = as_source(train, seed, name)
    return made, NoSamples(made) if _is_nothing(held_out) else as_source(held_out, seed, name)


def _is_nothing(held_out: Any) -> bool:
    """A function says so with None, a class by a length of 0."""
    return held_out is None or (hasattr(held_out, "__len__") and len(held_out) == 0)


def as_source(made: Any, seed: int, name: str) -> Source:
    """The thing itself where it already is a source, else a `DatasetSource` around it."""
    if isinstance(made, Source):
        return made
    return DatasetSource(made, seed=seed, name=name)
