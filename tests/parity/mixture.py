"""Language models with experts as people write them, with no word on who runs them.

`stacked=false`: a list of feed-forward modules and a loop over them. `stacked=true`: one module with the
weights of all. Both leave experts without tokens alone, or not, as such code does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Looped(nn.Module):
    """A list, and a loop over those that have tokens."""

    def __init__(self, width: int, hidden: int, experts: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, index = self.gate(flat).softmax(-1).topk(self.top, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slot = (index == number).nonzero(as_tuple=True)
            if len(rows):
                done = expert(flat[rows]) * weight[rows, slot, None]
                out = out.index_add(0, rows, done.to(out.dtype))
        return out.view_as(x)


class Stack(nn.Module):
    """All experts in two parameters and their biases."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.up_bias = nn.Parameter(torch.zeros(experts, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in range(self.num_experts):
            rows, slot = (index == number).nonzero(as_tuple=True)
            hidden = F.gelu(x[rows] @ self.up[number] + self.up_bias[number])
            done = hidden @ self.down[number] * weight[rows, slot, None]
            out = out.index_add(0, rows, done.to(out.dtype))
        return out


class Stacked(nn.Module):
    def __init__(self, width: int, hidden: int, experts: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = Stack(width, hidden, experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weight, index = self.gate(flat).softmax(-1).topk(self.top, dim=-1)
        return self.experts(flat, index, weight).view_as(x)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, mixture: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mixture(self.norm(x))


class Mixture(nn.Module):
    """Tokens (B, T) in, logits (B, T, V) out."""

    def __init__(
        self,
        vocab: int = 256,
        width: int = 32,
        depth: int = 4,
        heads: int = 4,
        experts: int = 4,
        top: int = 2,
        longest: int = 64,
        stacked: bool = False,
    ) -> None:
        super().__init__()
        kind = Stacked if stacked else Looped
        self.embed, self.place = nn.Embedding(vocab, width), nn.Embedding(longest, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, kind(width, 2 * width, experts, top)) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
