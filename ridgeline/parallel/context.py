"""Context parallelism: the sequence is cut over the ranks of an axis, and attention goes around a ring.

Everything but attention works position by position, and the global view (`tensor/view.py`) gives each
rank its part of it; this puts `ring.py` in the place of `scaled_dot_product_attention`, with keyed
dropout where the model drops weights of attention. Called by `apply.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.parallel.random import Randomness, attention_keep, keyed_attention
from ridgeline.parallel.ring import ring_attention
from ridgeline.parallel.tensor.attention import attention as attention_by_heads

if TYPE_CHECKING:
    from ridgeline.parallel.tensor.view import GlobalView


def use_ring(view: GlobalView, group: dist.ProcessGroup, randomness: Randomness | None) -> None:
    """Have attention inside `view` computed over the ranks of `group`; its dropout by `randomness`."""
    rank = dist.get_rank(group)

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        lengths: list[int],
        kv_lengths: list[int],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        **options: Any,
    ) -> Tensor:
        if dropout_p:
            raise UsageError(
                f"attention with dropout_p={dropout_p} in a context-parallel model outside a recipe: the "
                "ring has dropout by sample and position alone; set it to 0, or leave cp out"
            )
        if attn_mask is not None and attn_mask.dim() >= 2 and attn_mask.shape[-2] == sum(lengths):
            start = sum(lengths[:rank])
            attn_mask = attn_mask.narrow(-2, start, lengths[rank])
        return ring_attention(
            query,
            key,
            value,
            group,
            is_causal=is_causal,
            attn_mask=attn_mask,
            lengths=lengths,
            kv_lengths=kv_lengths,
            **options,
        )

    view.attention = attention
    if randomness is not None:
        randomness.attention = functools.partial(_dropped, view)


def _dropped(
    view: GlobalView,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    p: float,
    randomness: Randomness,
    site: int,
    **options: Any,
) -> Tensor:
    """Attention with dropout, each rank drawing for its own heads and queries."""

    def draw(shape: tuple[int, ...], offsets: tuple[int, ...], num_local: tuple[int, ...]) -> Any:
        dtype = torch.promote_types(query.dtype, torch.float32)
        return attention_keep(p, randomness, site, shape, dtype, offsets, num_local)

    # The dropout's mode called, and the view is still on: it would take the parts for whole tensors.
    with torch._C.DisableTorchFunction():
        given = {**options, "draw": draw}
        function = F.scaled_dot_product_attention
        result = attention_by_heads(view, function, (query, key, value), given)
        if result is not NotImplemented:
            return result
        whole = [view.plain(x) for x in (query, key, value)]
        given = {name: view.plain(option) for name, option in options.items()}
        return view.wrap(keyed_attention(*whole, p, randomness, site, **given))
