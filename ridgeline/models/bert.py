"""BERT (Devlin et al. 2018): a post-norm encoder trained to fill in masked tokens.

The defaults are bert-base-uncased, parameter for parameter. Built by `build_model("bert")`; the
loss over the masked positions is the trainer's. Dropout acts on the embeddings and on each
sublayer's output but not on the attention probabilities: fused attention kernels draw those by
themselves, out of reach of whoever wants dropout to be the same in every run.

Shapes: B batch, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import UsageError, unknown_word
from ridgeline.models.encoder import FeedForward, SelfAttention
from ridgeline.models.init import init_transformer

HEADS = ("mlm", "pooler")
NORM_EPS = 1e-12


class Block(nn.Module):
    """Attention and feed-forward, each followed by a residual and a norm."""

    def __init__(self, width: int, heads: int, ffn: int, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads)
        self.attention_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.feed_forward = FeedForward(width, ffn)
        self.ffn_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, mask: Tensor | None = None) -> Tensor:
        x_BTD = self.attention_norm(x_BTD + self.dropout(self.attention(x_BTD, mask)))
        out_BTD: Tensor = self.ffn_norm(x_BTD + self.dropout(self.feed_forward(x_BTD)))
        return out_BTD


class Bert(nn.Module):
    """Tokens in, logits (B, T, V) out; with `head="pooler"`, the pooled first token (B, D).

    `types_BT` are BERT's sentence numbers, all zero when left out. `padding_mask` (B, T) is true
    (or 1) at real tokens. The masked-LM head shares its matrix with the token embedding.
    """

    def __init__(
        self,
        vocab: int = 30522,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        ffn: int | None = None,
        max_seq: int = 512,
        num_types: int = 2,
        dropout: float = 0.1,
        head: str = "mlm",
    ) -> None:
        super().__init__()
        if head not in HEADS:
            raise unknown_word("head", head, HEADS, "Bert(head=)")
        self.max_seq = max_seq
        self.embed = nn.Embedding(vocab, width)
        self.position_embed = nn.Embedding(max_seq, width)
        self.type_embed = nn.Embedding(num_types, width)
        self.embed_norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)
        ffn = 4 * width if ffn is None else ffn
        self.layers = nn.ModuleList(Block(width, heads, ffn, dropout) for _ in range(depth))
        self.head: MaskedLMHead | Pooler
        self.head = MaskedLMHead(width, vocab) if head == "mlm" else Pooler(width)
        self.tie_weights()
        self.init_weights()

    def init_weights(self) -> None:
        init_transformer(self)

    def tie_weights(self) -> None:
        if isinstance(self.head, MaskedLMHead):
            self.head.decoder.weight = self.embed.weight

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Bert:
        # Moving off the meta device makes new parameters, one for each place a shared one is held.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.tie_weights()
        return self

    def forward(
        self, tokens_BT: Tensor, types_BT: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        seq_len = tokens_BT.shape[1]
        if seq_len > self.max_seq:
            raise UsageError(f"{seq_len} tokens do not fit Bert(max_seq={self.max_seq})")
        positions_T = torch.arange(seq_len, device=tokens_BT.device)
        if types_BT is None:
            types_BT = torch.zeros_like(tokens_BT)
        x_BTD = self.embed(tokens_BT) + self.type_embed(types_BT) + self.position_embed(positions_T)
        x_BTD = self.dropout(self.embed_norm(x_BTD))
        mask = None if padding_mask is None else padding_mask.bool()[:, None, None, :]
        for layer in self.layers:
            x_BTD = layer(x_BTD, mask)
        out: Tensor = self.head(x_BTD)
        return out


class MaskedLMHead(nn.Module):
    """Linear, GELU, norm, then the (shared) embedding matrix with a bias of its own."""

    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.act = nn.GELU()
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.decoder = nn.Linear(width, vocab)

    def forward(self, x_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self.decoder(self.norm(self.act(self.dense(x_BTD))))
        return logits_BTV


class Pooler(nn.Module):
    """The first token's state through a linear layer and tanh."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return torch.tanh(self.dense(x_BTD[:, 0]))
