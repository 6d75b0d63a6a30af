"""The module that is exported: tensors in, tensors out, each with a name.

A C++ program knows nothing of keyword arguments, dictionaries or dataclasses, so they end here: inputs go
by their place, outputs are laid out in a row under names made of the keys and places they had. What
evaluation does to inputs on their way to the model is done inside. Built by `package.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.models.inputs import Inputs, call_arguments, tensors_of

Prepare = Callable[[Inputs], Inputs]


class Deployed(nn.Module):
    """`model` behind `prepare`, called with the tensors of `like` one after the other."""

    def __init__(self, model: nn.Module, prepare: Prepare, like: Inputs, widen: bool) -> None:
        super().__init__()
        self.model = model
        self.prepare, self._widen = prepare, widen
        self._keys = tuple(like) if isinstance(like, dict) else None
        self._is_one = isinstance(like, Tensor)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.named(*tensors).values())

    def named(self, *tensors: Tensor) -> dict[str, Tensor]:
        """The outputs by name."""
        return self.look(*tensors)[0]

    def look(self, *tensors: Tensor) -> tuple[dict[str, Tensor], list[str]]:
        """The outputs by name, and what else the model returns that is no tensor and is left out."""
        args, kwargs = call_arguments(self.prepare(self._joined(tensors)))
        found, left_out = flatten_outputs(self.model(*args, **kwargs))
        if self._widen:  # C++ has no 16-bit floats to read them with
            found = {name: _at_least_single(value) for name, value in found.items()}
        return found, left_out

    def _joined(self, tensors: tuple[Tensor, ...]) -> Inputs:
        if self._keys is not None:
            return dict(zip(self._keys, tensors, strict=True))
        return tensors[0] if self._is_one else tensors


def _at_least_single(value: Tensor) -> Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def input_names(model: nn.Module, inputs: Inputs) -> list[str]:
    """Keys where the data has them, else what the model's forward calls its arguments."""
    if isinstance(inputs, dict):
        return list(inputs)
    count = len(tensors_of(inputs))
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [p.name for p in parameters if p.kind in kinds][:count]
    return known if len(known) == count else [f"input_{place}" for place in range(count)]


def flatten_outputs(outputs: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors by name, in order, and what was passed over.

    >>> found, rest = flatten_outputs({"a": torch.ones(1), "b": (torch.ones(2), None), "c": 3})
    >>> list(found), rest
    (['a', 'b.0'], ['c (int)'])
    """
    if isinstance(outputs, Tensor):
        return {"output": outputs}, []
    found: dict[str, Tensor] = {}
    left_out: list[str] = []
    for name, value in _leaves(outputs, ""):
        if isinstance(value, Tensor):
            found[f"output_{name}" if name.isdigit() else name] = value
        elif value is not None:
            left_out.append(f"{name or 'the output'} ({type(value).__name__})")
    if not found:
        raise UsageError(
            f"the model returns {type(outputs).__name__} with no tensor in it, so there is nothing to "
            "export; let forward return a tensor, or a tuple, dictionary or dataclass of them"
        )
    return found, left_out


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    for key, part in _parts(value):
        yield from _leaves(part, f"{name}.{key}" if name else key)
    if not _parts(value):
        yield name, value


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What it is made of: a dictionary (transformers' outputs are ones), a dataclass, a row of things."""
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return [(str(place), part) for place, part in enumerate(value)]
    return []
