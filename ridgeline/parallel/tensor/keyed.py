"""Keyed dropout (`parallel/random.py`) of tensors that the global view has cut.

Dropout is caught before the view sees it, so that it has to be told how the view's tensors lie, and that
attention with dropout may go around a ring. Called by `parallel/apply.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from ridgeline.parallel import random
from ridgeline.parallel.random import Place, Randomness, attention_keep, keyed_attention
from ridgeline.parallel.tensor.attention import attend, attention
from ridgeline.parallel.tensor.runs import part_indices
from ridgeline.parallel.tensor.view import GlobalView


def use_randomness(view: GlobalView, randomness: Randomness) -> None:
    """Have dropout inside `view` drop what it drops on one device."""

    def place_of(x: Tensor) -> Place | None:
        if not isinstance(x, DTensor):
            return None
        found = part_indices(x.shape, view.mesh, x.placements, view.runs(x))
        return tuple(x.shape), [i.start if isinstance(i, range) else i for i in found]

    def cut_like(part: Tensor, x: DTensor) -> DTensor:
        return view.mark_runs(random.cut_like(part, x), view.runs(x))

    randomness.offsets_of, randomness.cut_like = place_of, cut_like
    randomness.attention = functools.partial(_attention, view)


def _attention(
    view: GlobalView,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    p: float,
    randomness: Randomness,
    site: int,
    **options: Any,
) -> Tensor:
    """Attention with dropout: each rank draws for its own heads, and on a ring for its own queries."""

    def draw(shape: tuple[int, ...], offsets: tuple[int, ...], num_local: tuple[int, ...]) -> Any:
        dtype = torch.promote_types(query.dtype, torch.float32)
        return attention_keep(p, randomness, site, shape, dtype, offsets, num_local)

    def keyed(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        return keyed_attention(q, k, v, p, randomness, site, **given)

    # The dropout's mode called, and the view is still on: it would take the parts for whole tensors.
    with torch._C.DisableTorchFunction():
        query, key, value = (view.in_order(x) for x in (query, key, value))
        options = {name: view.in_order(option) for name, option in options.items()}
        own = {"keyed": keyed} if view.attention is attend else {"draw": draw}
        function, given = F.scaled_dot_product_attention, {**options, **own}
        result = attention(view, function, (query, key, value), given)
        if result is not NotImplemented:
            return result
        whole = [view.plain(x) for x in (query, key, value)]
        given = {name: view.plain(option) for name, option in options.items()}
        return view.wrap(keyed(*whole, **given))
