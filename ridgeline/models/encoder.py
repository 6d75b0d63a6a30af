"""Attention and feed-forward as encoders have them, with biases and no mask but padding.

`vit.py` puts them in pre-norm blocks and `bert.py` in post-norm ones. The projections are separate
linear layers with the names that `llama.py` uses.

Shapes: B batch, T tokens, D width, H heads, K width of a head.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.errors import UsageError


class SelfAttention(nn.Module):
    """Multi-head attention of every token to every token."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise UsageError(f"width {width} does not divide into {heads} attention heads")
        self.head_width = width // heads
        self.wq = nn.Linear(width, width)
        self.wk = nn.Linear(width, width)
        self.wv = nn.Linear(width, width)
        self.wo = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None) -> Tensor:
        # The number of heads is read off the projections' output, so a slice of them works too.
        heads = (-1, self.head_width)
        q_BHTK = self.wq(x_BTD).unflatten(-1, heads).transpose(1, 2)
        k_BHTK = self.wk(x_BTD).unflatten(-1, heads).transpose(1, 2)
        v_BHTK = self.wv(x_BTD).unflatten(-1, heads).transpose(1, 2)
        out_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=mask)
        out_BTD: Tensor = self.wo(out_BHTK.transpose(1, 2).flatten(2))
        return out_BTD


class FeedForward(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.w2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(self.act(self.w1(x)))
        return out
