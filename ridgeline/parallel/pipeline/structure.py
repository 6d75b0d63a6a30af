"""Tensors inside nested values: what a module takes and returns, taken apart and put together again.

Arguments and outputs of modules that nobody described are tuples, lists, dictionaries and dataclasses
(`transformers` returns ones that are both); anything else is opaque. Written by hand because torch's
own pytree opens registered classes only, and opens caches, which are state and not output. Used by
all of `pipeline/`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Where = tuple[Any, ...]
"""The keys that lead from a nested value to one tensor in it."""

_CONSTANTS = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.Size)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The shape of a tensor as a function of the batch size, and its type."""

    dims: tuple[tuple[int, int], ...]
    """Per dim (a, b): its size is a * batch + b."""
    dtype: torch.dtype

    def shape(self, batch: int) -> tuple[int, ...]:
        return tuple(slope * batch + fixed for slope, fixed in self.dims)

    def zeros(self, batch: int, device: torch.device) -> Tensor:
        return torch.zeros(self.shape(batch), dtype=self.dtype, device=device)


def spec_of(first: Tensor, second: Tensor, batches: tuple[int, int]) -> TensorSpec:
    """The spec of a tensor that was seen at two batch sizes."""
    dims = []
    for small, large in zip(first.shape, second.shape, strict=True):
        slope = (large - small) // (batches[1] - batches[0])
        dims.append((slope, small - slope * batches[0]))
    return TensorSpec(tuple(dims), first.dtype)


def parts(value: Any) -> list[tuple[Any, Any]] | None:
    """The (key, value) pairs of a container, or None for a leaf."""
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | TensorSpec):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
    if isinstance(value, Mapping):
        return list(value.items())
    return None


def tensors_in(value: Any, where: Where = ()) -> Iterator[tuple[Where, Tensor]]:
    """Every tensor in a nested value, with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield where, value
        return
    for key, part in parts(value) or []:
        yield from tensors_in(part, (*where, key))


def map_leaves(value: Any, change: Callable[[Where, Any], Any], where: Where = ()) -> Any:
    """The same nested value with every leaf replaced by `change(where, leaf)`."""
    inside = parts(value)
    if inside is None:
        return change(where, value)
    changed = {key: map_leaves(part, change, (*where, key)) for key, part in inside}
    if all(changed[key] is part for key, part in inside):
        return value
    return _rebuild(value, changed)


def copy_containers(value: Any) -> Any:
    """The same leaves in containers of its own, which nobody else changes."""
    inside = parts(value)
    if inside is None:
        return value
    return _rebuild(value, {key: copy_containers(part) for key, part in inside})


def _rebuild(value: Any, changed: dict[Any, Any]) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**changed)
    if isinstance(value, Mapping):
        return type(value)(changed)  # type: ignore[call-arg]
    if hasattr(value, "_fields"):
        return type(value)(*changed.values())
    return type(value)(changed.values())


def replace_tensors(value: Any, new: Mapping[Where, Tensor]) -> Any:
    """The same nested value with the tensors at some places replaced."""
    return map_leaves(value, lambda where, leaf: new.get(where, leaf))


def is_transparent(value: Any) -> bool:
    """Whether the value is made of tensors and constants alone, so that a stand-in can be made."""
    inside = parts(value)
    if inside is None:
        return isinstance(value, (Tensor, *_CONSTANTS))
    return all(is_transparent(part) for _, part in inside)


def batch_size(inputs: Any) -> int:
    """Size of the first dim of the first tensor: the samples in `inputs`."""
    for _, tensor in tensors_in(inputs):
        if tensor.dim() > 0:
            return int(tensor.shape[0])
    raise ValueError("no tensor with a batch dim in the inputs")


def take_rows(value: Any, num_rows: int, batch: int) -> Any:
    """The first `num_rows` samples of every tensor in `value` that has `batch` of them."""
    if num_rows == batch:
        return value

    def cut(_: Where, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] % batch:
            return leaf
        # A model may return samples and positions as one dim.
        return leaf[: num_rows * (leaf.shape[0] // batch)]

    return map_leaves(value, cut)


def pad_rows(value: Any, batch: int, filler: Any = None) -> Any:
    """`value` with every tensor's first sample repeated at its end, up to `batch` samples.

    A tensor without any sample takes them from the same place in `filler`.
    """
    size = batch_size(value)
    if size == batch:
        return value
    spare = dict(tensors_in(filler)) if filler is not None else {}

    def grow(where: Where, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != size:
            return leaf
        first = leaf[:1] if size else spare[where][:1]
        return torch.cat([leaf, first.expand(batch - size, *leaf.shape[1:])])

    return map_leaves(value, grow)


def shared_copy(model: nn.Module) -> nn.Module:
    """The same parameters and buffers; what a forward pass leaves on modules is left on the copy."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
