"""The Llama decoder: RMS norm, rotary positions, grouped-query attention, gated feed-forward.

The language model of every example and measurement here. Weights have the layout of `transformers`
(rotary pairs are the two halves of a head), so its checkpoints can be copied over name by name. A
layer takes the residual stream and returns it, with nothing else to carry from one to the next.
Built by `build_model("llama")`; sizes with a name are in `llama_sizes.py`.

Shapes: B batch, T tokens, D width, H heads, G key/value heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.errors import UsageError, unknown_word
from ridgeline.models.init import init_transformer
from ridgeline.models.llama_sizes import SIZES, LlamaConfig

INIT_STD = 0.02


class Rotary(nn.Module):
    """Turns queries and keys by angles that grow with their position.

    The tables are a buffer because a compiled kernel that reads them is much cheaper than one that
    computes sines for every element. They are a pure function of the module's device and type, and
    are computed anew whenever either changes: so they are right after `double()`, and after
    `to_empty()` of a model that was built on the meta device.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, max_seq: int, theta: float) -> None:
        super().__init__()
        self.head_width, self.max_seq, self.theta = head_width, max_seq, theta
        table = torch.empty(max_seq, head_width // 2)
        self.register_buffer("cos", table, persistent=False)
        self.register_buffer("sin", torch.empty_like(table), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables, in float64 whatever they are stored in."""
        device = self.cos.device
        pairs = torch.arange(0, self.head_width, 2, dtype=torch.float64, device=device)
        positions = torch.arange(self.max_seq, dtype=torch.float64, device=device)
        angles = positions[:, None] * self.theta ** (-pairs / self.head_width)
        with torch.no_grad():
            self.cos.copy_(angles.cos())
            self.sin.copy_(angles.sin())

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.reset_parameters()
        return self

    def tables(self, seq_len: int, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines, shaped to broadcast over (B, T, heads, K/2)."""
        if seq_len > self.max_seq:
            raise UsageError(f"{seq_len} tokens do not fit Llama(max_seq={self.max_seq})")
        if positions is None:
            return self.cos[:seq_len, None], self.sin[:seq_len, None]
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)

    def forward(self, x_BTHK: Tensor, positions: Tensor | None = None) -> Tensor:
        cos, sin = self.tables(x_BTHK.shape[1], positions)
        cos, sin = cos.to(x_BTHK.dtype), sin.to(x_BTHK.dtype)
        a, b = x_BTHK.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Causal attention in which groups of query heads share a key and value head."""

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        super().__init__()
        width, self.head_width = config.width, config.head_width
        self.grouped = config.num_kv_heads != config.heads
        self.wq = nn.Linear(width, config.heads * self.head_width, bias=False)
        self.wk = nn.Linear(width, config.num_kv_heads * self.head_width, bias=False)
        self.wv = nn.Linear(width, config.num_kv_heads * self.head_width, bias=False)
        self.wo = nn.Linear(config.heads * self.head_width, width, bias=False)
        self.rotary = rotary

    def forward(
        self, x_BTD: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        # The number of heads is read off the projections' output, so a slice of them works too.
        heads = (-1, self.head_width)
        q_BTHK = self.rotary(self.wq(x_BTD).unflatten(-1, heads), positions)
        k_BTGK = self.rotary(self.wk(x_BTD).unflatten(-1, heads), positions)
        v_BTGK = self.wv(x_BTD).unflatten(-1, heads)
        out_BHTK = F.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2),
            k_BTGK.transpose(1, 2),
            v_BTGK.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.grouped,
        )
        out_BTD: Tensor = self.wo(out_BHTK.transpose(1, 2).flatten(2))
        return out_BTD


class FeedForward(nn.Module):
    """SwiGLU: one projection gates another."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each around a residual."""

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config, rotary)
        self.ffn_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.width, config.ffn_width)

    def forward(
        self, x_BTD: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), positions, mask)
        out_BTD: Tensor = x_BTD + self.feed_forward(self.ffn_norm(x_BTD))
        return out_BTD


class Llama(nn.Module):
    """Tokens (B, T) in, logits (B, T, V) out.

    `size` is a name from `SIZES` or a `LlamaConfig`; the other arguments override its fields.
    `positions`, (T,) or (B, T), says where each token stands when the tokens given are not simply
    the first T of a sequence; attention itself stays causal in the order given. `separator` is the
    token that begins a document: with it no token sees another document of its sequence, and positions
    begin anew with each, so that documents packed together are computed as each would be alone.
    """

    def __init__(
        self,
        size: str | LlamaConfig = "1m",
        *,
        vocab: int | None = None,
        width: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        ffn: int | None = None,
        rope_theta: float | None = None,
        tie_embeddings: bool | None = None,
        norm_eps: float | None = None,
        max_seq: int | None = None,
        separator: int | None = None,
    ) -> None:
        super().__init__()
        overrides = {
            "vocab": vocab,
            "width": width,
            "depth": depth,
            "heads": heads,
            "kv_heads": kv_heads,
            "ffn": ffn,
            "rope_theta": rope_theta,
            "tie_embeddings": tie_embeddings,
            "norm_eps": norm_eps,
            "max_seq": max_seq,
        }
        config = _config(size, {k: v for k, v in overrides.items() if v is not None})
        if separator is not None and not 0 <= separator < config.vocab:
            raise UsageError(
                f"Llama(separator={separator}) is no token of vocab={config.vocab}; give one from 0 to "
                f"{config.vocab - 1}, or a larger vocab"
            )
        self.config, self.separator = config, separator
        self.embed = nn.Embedding(config.vocab, config.width)
        rotary = Rotary(config.head_width, config.max_seq, config.rope_theta)
        self.layers = nn.ModuleList(Block(config, rotary) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.tie_weights()
        self.init_weights()

    def init_weights(self) -> None:
        """Normal weights; those that write into the residual stream shrink with its length."""
        init_transformer(self, INIT_STD)
        residual_std = INIT_STD / math.sqrt(2 * self.config.depth)
        for module in self.modules():
            if isinstance(module, Block):
                nn.init.normal_(module.attention.wo.weight, std=residual_std)
                nn.init.normal_(module.feed_forward.w2.weight, std=residual_std)

    def tie_weights(self) -> None:
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Llama:
        # Moving off the meta device makes new parameters, one for each place a shared one is held.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie_weights()
        return self

    def forward(self, tokens_BT: Tensor, positions: Tensor | None = None) -> Tensor:
        mask = None
        if self.separator is not None:
            mask = document_mask(tokens_BT, self.separator)
            if positions is None:  # as many tokens of its own document stand before each
                positions = mask[:, 0].sum(-1) - 1
        x_BTD = self.embed(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, positions, mask)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def document_mask(tokens_BT: Tensor, separator: int) -> Tensor:
    """Which tokens (columns) each token (row) sees, (B, 1, T, T): its own document's up to itself."""
    documents_BT = (tokens_BT == separator).cumsum(1)
    length = tokens_BT.shape[1]
    earlier_TT = torch.ones(length, length, dtype=torch.bool, device=tokens_BT.device).tril()
    same_BTT = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
    return (same_BTT & earlier_TT).unsqueeze(1)


def _config(size: str | LlamaConfig, overrides: dict[str, Any]) -> LlamaConfig:
    """The named size with its overrides; a new width or head count resets what derives from it."""
    if isinstance(size, str):
        if size not in SIZES:
            raise unknown_word("size", size, SIZES, "Llama(size=)")
        size = SIZES[size]
    derived: dict[str, Any] = {}
    if "width" in overrides:
        derived["ffn"] = None
    if "heads" in overrides:
        derived["kv_heads"] = None
    config = replace(size, **(derived | overrides))
    if findings := config.check_shape():
        raise UsageError("Llama: " + "; ".join(findings))
    return config
