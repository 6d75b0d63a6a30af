"""The forwards of layers whose weights are cut: by columns, by rows, by rows of a vocabulary.

Each reads its parameters when it is called, because other techniques may have put others in their
place, and computes on plain local tensors. A column layer takes its input whole and leaves its output
cut by features; a row layer takes an input cut by features and sums its output over the ranks.
`cut_layers` puts them on the instances that the plan names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ridgeline.parallel.tensor.move import Placements, enter, leave
from ridgeline.parallel.tensor.rules import elementwise
from ridgeline.parallel.tensor.runs import Runs
from ridgeline.parallel.tensor.split import Split, chunk_sizes
from ridgeline.parallel.tensor.view import GlobalView

_T = TypeVar("_T")


@dataclass(frozen=True)
class Layer:
    """How one module is split: `column`, `row` or `vocabulary`, and its parameters' splits by name."""

    style: str
    splits: dict[str, Split]
    parts: int = 1
    """Of a fused projection: how many outputs of equal width it holds side by side."""


def is_transposed(module: nn.Module) -> bool:
    """Whether it is `transformers`' Conv1D: a linear layer with its weight as (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer that does nothing but multiply and add."""
    plain = type(module).forward is nn.Linear.forward or is_transposed(module)
    return plain and "forward" not in module.__dict__


def is_embedding(module: nn.Module) -> bool:
    return type(module).forward is nn.Embedding.forward and "forward" not in module.__dict__


def split_forward(view: GlobalView, module: nn.Module, layer: Layer) -> Callable[..., Any]:
    """The forward that stands in for the module's own."""
    inner = {"column": _column, "row": _row, "vocabulary": _vocabulary}[layer.style]

    def forward(*args: Any, **kwargs: Any) -> Any:
        (x,) = (*args, *kwargs.values())  # by whatever name the layer has for it
        return view.run(compute, x)

    def compute(x: Tensor) -> DTensor:
        with torch._C.DisableTorchFunction():  # what a layer does inside is its own affair
            return inner(view, module, layer, view.wrap(x))

    return forward


def _column(view: GlobalView, module: Any, layer: Layer, x: DTensor) -> DTensor:
    split = layer.splits["weight"]
    last = x.dim() - 1
    places, runs = _lead(view, x, last)
    local = view.local(x, places, _with_tp(view, places, Partial()), runs)
    weight = _weight(view, module.weight, split, places)
    bias = module.bias
    if bias is not None:
        bias = _weight(view, bias, layer.splits["bias"], places)
    out = _multiply(module, local, weight, bias)
    shape = (*x.shape[:-1], split.padded_shape[split.dim])
    result = enter(out, view.mesh, _with_tp(view, places, Shard(last)), shape)
    return view.mark_runs(result, _with_tp(view, runs, layer.parts))


def _row(view: GlobalView, module: Any, layer: Layer, x: DTensor) -> DTensor:
    split = layer.splits["weight"]
    last = x.dim() - 1
    lead, runs = _lead(view, x, last)
    places = _with_tp(view, lead, Shard(last))
    local = view.local(x, places, places, runs)
    out = _multiply(module, local, _weight(view, module.weight, split, places), None)
    features = split.global_shape[1 - split.dim]
    shape = (*x.shape[:-1], features)
    sums = enter(out, view.mesh, _with_tp(view, places, Partial()), shape)
    result = view.stream(view.mark_runs(sums, runs))
    if module.bias is None:
        return result
    return elementwise(view, torch.add, (result, module.bias), {})  # type: ignore[no-any-return]


def _vocabulary(view: GlobalView, module: Any, layer: Layer, index: DTensor) -> DTensor:
    split = layer.splits["weight"]
    places = _with_tp(view, index.placements, Replicate())
    runs = _with_tp(view, view.runs(index), 1)
    local = view.local(index, places, places, runs)
    weight = _weight(view, module.weight, split, places)
    assert view.tp is not None
    rank, size = view.mesh.get_local_rank(view.tp), view.mesh.size(view.tp)
    lengths = chunk_sizes(split.global_shape[0], size)
    first, here = sum(lengths[:rank]), lengths[rank]
    mine = (local >= first) & (local < first + here)
    if here:
        pad = module.padding_idx
        pad = pad - first if pad is not None and first <= pad < first + here else None
        rows = F.embedding(torch.where(mine, local - first, 0), weight, pad)
        out = torch.where(mine.unsqueeze(-1), rows, 0)
    else:
        out = weight.sum() + weight.new_zeros((*local.shape, split.global_shape[1]))
    shape = (*index.shape, split.global_shape[1])
    sums = enter(out, view.mesh, _with_tp(view, places, Partial()), shape)
    return view.stream(view.mark_runs(sums, runs))


def _multiply(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if is_transposed(module):
        return F.linear(x, weight.t(), bias)
    return F.linear(x, weight, bias)


def _lead(view: GlobalView, x: DTensor, last: int) -> tuple[Placements, Runs]:
    """How `x` is cut if it is whole on the tensor axis and by features."""
    places: list[Placement] = []
    for axis, place in enumerate(x.placements):
        keep = axis != view.tp and isinstance(place, Shard) and place.dim != last
        places.append(place if keep else Replicate())
    pairs = zip(places, view.runs(x), strict=True)
    return tuple(places), tuple(num if place.is_shard() else 1 for place, num in pairs)


def _with_tp(view: GlobalView, values: tuple[_T, ...], value: _T) -> tuple[_T, ...]:
    assert view.tp is not None
    return (*values[: view.tp], value, *values[view.tp + 1 :])


def _weight(view: GlobalView, weight: Tensor, split: Split, places: Placements) -> Tensor:
    """The local weight; where the context ranks all compute the same, its gradient is one's share."""
    if view.cp is None or places[view.cp] != Replicate():
        return weight
    cut = Shard(split.dim)
    placements = view.placements(tp=cut)
    grads = view.placements(cp=Partial(), tp=cut)
    whole = enter(weight, view.mesh, placements, split.padded_shape, grads)
    return leave(whole, placements, placements)
