"""Context parallelism: the sequence is cut over the ranks of an axis, and attention goes around a ring.

Everything but attention works position by position, and the global view (`tensor/view.py`) gives each
rank its part of it; this puts `ring.py` in the place of `scaled_dot_product_attention`. A model in which
nothing would be cut is refused, since its ranks would all compute the same. Called by `apply.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ridgeline.errors import UsageError
from ridgeline.parallel.ring import ring_attention
from ridgeline.parallel.tensor.view import is_sequence

if TYPE_CHECKING:
    from ridgeline.parallel.tensor import GlobalView, TensorPlan


def check_sequences(model: nn.Module, size: int, plan: TensorPlan, example: Any) -> list[str]:
    """What to say of a model that may not be cut over `size` ranks; one that cannot is an error.

    Sequences are cut as they come in, and where `scaled_dot_product_attention` is called.
    """
    if size == 1:
        return []
    if any(is_sequence(value) for value in tree_leaves(example)):
        return []
    if "scaled_dot_product_attention" in plan.attention:
        return []
    name = type(model).__name__
    if plan.attention:
        return [
            f"cp={size} cuts nothing of {name} where nn.MultiheadAttention works without dropout; have it "
            "call scaled_dot_product_attention, or use dp"
        ]
    raise UsageError(
        f"cp={size}: {name} has no sequence to cut, so that all ranks would compute the same: looked for "
        "inputs of tokens or of (batch, positions, features) and for calls of "
        "scaled_dot_product_attention; leave cp out, or use dp, or spatial for images"
    )


def use_ring(view: GlobalView, group: dist.ProcessGroup) -> None:
    """Have attention inside `view` computed over the ranks of `group`."""
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
