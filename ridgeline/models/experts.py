"""Experts whose weights lie side by side in one module, told by its weights and by how it is called.

`experts(x, index, weight)` gives for each row of `x` the sum over its `index` of what these experts make
of it, times `weight`: how `transformers` writes every mixture of experts, and torchtitan. `ep` spreads
such a module over ranks (`parallel/expert/`), and the planner says what that would cost
(`trace_record.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Place = int | str
"""An argument: its number, or its name."""


@dataclass(frozen=True)
class ExpertCall:
    """Which arguments are which."""

    rows: Place
    index: Place
    weight: Place


def is_stack(module: nn.Module) -> bool:
    """All its weights, none of them a module's inside of it, have one length, and one is a stack."""
    own = list(module.parameters(recurse=False))
    lengths = {len(p) for p in own if p.dim()}
    return (
        len(lengths) == 1
        and min(lengths) > 1
        and any(p.dim() >= 3 for p in own)
        and all(p.dim() >= 2 for p in own)
        and len(own) == len(list(module.parameters()))
        and not isinstance(module, nn.modules.conv._ConvNd)
    )


def why_whole(module: nn.Module) -> str:
    """What keeps a stack from being cut, whatever it is called with; empty where nothing does."""
    num = len(next(module.parameters()))
    if any(buffer.dim() and len(buffer) == num for buffer in module.buffers()):
        return "it has a buffer of its experts, which would have to be cut as its weights are"
    return ""


def read_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExpertCall | str:
    """How a stack is called, or why that is not understood."""
    places: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
    tensors = [(place, x) for place, x in places if isinstance(x, Tensor)]
    numbers = [(p, x) for p, x in tensors if x.dim() == 2 and _is_whole(x.dtype)]
    if len(numbers) != 1:
        return "it is not called with the numbers of each token's experts"
    index, chosen = numbers[0]
    weights = [p for p, x in tensors if x.is_floating_point() and x.shape == chosen.shape]
    rows = [
        p
        for p, x in tensors
        if x.is_floating_point()
        and x.dim() >= 2
        and p not in weights
        and x[..., 0].numel() == len(chosen)
    ]
    if len(weights) != 1 or len(rows) != 1 or len(tensors) != 3:
        return "it is not called with tokens, the numbers of their experts and their weights alone"
    return ExpertCall(rows[0], index, weights[0])


def _is_whole(dtype: torch.dtype) -> bool:
    return dtype in (torch.int64, torch.int32)


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: Place) -> Any:
    return args[place] if isinstance(place, int) else kwargs[place]
