"""What a model is called with: one tensor, several by position, or several by name.

The data set decides: the inputs of its items are a tensor, a tuple of them, or a dictionary. A batch keeps
that structure on its way to the model, which is called `model(x)`, `model(x, y)` or
`model(input_ids=x, attention_mask=y)`. Called by everything that carries a batch or runs a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


@dataclass(frozen=True)
class Argument:
    """One of several inputs of a sample, without the batch dimension."""

    name: str
    """Empty where it goes by its position."""
    shape: tuple[int, ...]
    dtype: torch.dtype


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called on `inputs`: one tensor, a tuple of arguments, or keywords."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    return (inputs,), {}


def num_samples(inputs: Any) -> int:
    """The first dim of the first tensor that has one."""
    sizes = [x.shape[0] for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.dim()]
    return sizes[0] if sizes else 1


def tensors_of(inputs: Inputs) -> tuple[Tensor, ...]:
    """The tensors of a microbatch, the first first."""
    if isinstance(inputs, Tensor):
        return (inputs,)
    return tuple(inputs.values()) if isinstance(inputs, dict) else inputs


def first_of(inputs: Inputs) -> Tensor:
    return tensors_of(inputs)[0]


def change_each(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The same structure with every tensor changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, dict):
        return {name: change(value) for name, value in inputs.items()}
    return tuple(change(value) for value in inputs)


def read_inputs(collated: Any) -> Inputs | None:
    """What a collated item has as its inputs; None where they are none of the three."""
    if isinstance(collated, Tensor):
        return collated
    if isinstance(collated, Mapping):
        named = dict(collated)
        is_named = named and all(isinstance(key, str) for key in named)
        return named if is_named and _are_tensors(named.values()) else None
    if isinstance(collated, tuple | list) and collated and _are_tensors(collated):
        return tuple(collated)
    return None


def _are_tensors(values: Any) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def arguments_of(inputs: Inputs) -> tuple[Argument, ...]:
    """What each of several inputs is; empty for one tensor, which needs no name."""
    if isinstance(inputs, Tensor):
        return ()
    names = inputs if isinstance(inputs, dict) else [""] * len(inputs)
    return tuple(
        Argument(name, tuple(value.shape[1:]), value.dtype)
        for name, value in zip(names, tensors_of(inputs), strict=True)
    )


def zeros_like_arguments(
    arguments: tuple[Argument, ...], count: int, device: torch.device | str | None
) -> Inputs:
    """As many samples of zeros."""
    made = [torch.zeros((count, *a.shape), dtype=a.dtype, device=device) for a in arguments]
    if arguments[0].name:
        return {a.name: value for a, value in zip(arguments, made, strict=True)}
    return tuple(made)
