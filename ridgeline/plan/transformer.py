"""A decoder transformer in numbers: its sizes, its parameters, and its FLOPs as people count them.

Everything that the planner knows of such a model follows from the sizes here; `layer.py` turns them into
kernels and `memory.py` into bytes. `rows.py` builds one from a published row, `models.py` from a recipe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Transformer:
    """Sizes of a decoder. Lengths are in elements; `seq` is the length it is trained at."""

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    seq: int
    vocab: int
    kv_heads: int = 0
    """0: as many as `heads`."""
    head_width: int = 0
    """0: `hidden` / `heads`."""
    gated: bool = False
    """A second matrix beside the first of the feed-forward, multiplied in (SwiGLU)."""
    tied: bool = True
    """The output projection is the embedding."""
    learned_positions: bool = True
    """Else there are none that are parameters."""
    rotary: bool = False
    """Queries and keys are turned by their positions."""
    rms_norm: bool = False
    bias: bool = True
    dropout: bool = True
    causal: bool = True
    experts: int = 0
    """Feed-forwards of each layer, of which a token goes through `top_k`; 0: one, for all tokens."""
    top_k: int = 1
    expert_ffn: int = 0
    """Inner width of one expert; 0: `ffn`."""
    shared_ffn: int = 0
    """Inner width of the expert that every token goes through besides; 0: there is none."""
    frozen: bool = False
    """Its matrices are not trained; next to nothing beside them is (LoRA)."""
    optimizer_slots: int = 2
    """Tensors of the optimizer's state a parameter, where this library trains it: Adam's two."""
    query_parts: float = 0.0
    """What a rank's queries are that share of, with what they write into; 0: one of as many parts as
    there are tensor-parallel ranks. See `spread_heads`."""
    kv_parts: float = 0.0
    """The same of keys and values."""

    def __post_init__(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.head_width:
            object.__setattr__(self, "head_width", max(self.hidden // max(self.heads, 1), 1))

    @property
    def query_width(self) -> int:
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    def query_split(self, tp: int) -> float:
        """Parts that queries come in over so many tensor-parallel ranks."""
        return self.query_parts if self.query_parts and tp > 1 else float(tp)

    def kv_split(self, tp: int) -> float:
        """The same of keys and values."""
        return self.kv_parts if self.kv_parts and tp > 1 else float(tp)

    @property
    def ffn_in(self) -> int:
        """Columns of the first feed-forward product."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def one_expert(self) -> int:
        """Weights of one expert's two products."""
        inner = self.expert_ffn or self.ffn
        return self.hidden * inner * (3 if self.gated else 2)

    @property
    def active(self) -> Transformer:
        """The decoder without experts whose feed-forward has as many columns as a token passes."""
        if not self.experts:
            return self
        inner = self.top_k * (self.expert_ffn or self.ffn) + self.shared_ffn
        return replace(self, ffn=inner, experts=0)

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (1 if self.rms_norm else 2)

    def padded_vocab(self, multiple: int) -> int:
        """Rows of the embedding once padded so that every tensor-parallel rank has as many."""
        return math.ceil(self.vocab / multiple) * multiple

    def layer_matrices(self, tp: int = 1) -> int:
        """Weights of one layer's four products on one tensor-parallel rank."""
        query, kv = self.query_width / self.query_split(tp), self.kv_width / self.kv_split(tp)
        qkv, out = self.hidden * (query + 2 * kv), query * self.hidden
        inner = self.shared_ffn if self.experts else self.ffn
        return round(qkv + out + (3 if self.gated else 2) * self.hidden * inner / tp)

    def layer_parameters(self, tp: int = 1) -> int:
        """Without experts, which are spread in their own way (`expert_parameters`); with their router."""
        biases = 0.0
        if self.bias:
            query, kv = self.query_width / self.query_split(tp), self.kv_width / self.kv_split(tp)
            inner = 0.0 if self.experts else self.ffn_in / tp
            biases = query + 2 * kv + inner + (1 if self.experts else 2) * self.hidden
        router = self.hidden * self.experts
        return round(self.layer_matrices(tp) + biases + router + 2 * self.norm_parameters)

    def expert_parameters(self, ep: int = 1, tp: int = 1) -> int:
        """Of one layer's experts on one of `ep` ranks, each split over `tp`."""
        return round(self.experts / ep * self.one_expert / tp)

    def embedding_parameters(self, tp: int = 1, multiple: int = 1) -> int:
        """Of the tokens, and of the positions where those are learned."""
        tokens = self.padded_vocab(multiple * tp) // tp * self.hidden
        return tokens + (self.seq * self.hidden if self.learned_positions else 0)

    def head_parameters(self, tp: int = 1, multiple: int = 1) -> int:
        """The output projection where it is not the embedding, without the last norm."""
        return self.padded_vocab(multiple * tp) // tp * self.hidden

    @property
    def num_parameters(self) -> int:
        """All of them, each counted once."""
        layer = self.layer_parameters() + self.expert_parameters()
        count = self.layers * layer + self.embedding_parameters()
        return count + self.norm_parameters + (0 if self.tied else self.head_parameters())

    def layer_flops(self, tokens: float) -> float:
        """Forward, full (not halved for a causal mask) attention."""
        products = 2.0 * tokens * self.active.layer_matrices()
        return products + 4.0 * tokens * self.seq * self.query_width

    def attention_flops(self, tokens: float) -> float:
        """The two products of attention itself, forward, for all layers."""
        return 4.0 * tokens * self.seq * self.query_width * self.layers

    def head_flops(self, tokens: float) -> float:
        return 2.0 * tokens * self.hidden * self.vocab

    def step_flops(self, tokens: float, kind: str) -> float:
        """FLOPs of a step by a published definition.

        `hardware`: Narayanan et al. 2021, with one more forward pass of the layers for recompute.
        `model`: the same without it. `6n`: six a parameter and token, and the attention's own.
        `6n causal`: the attention counted once, as a causal mask needs.
        """
        if self.frozen:
            # No gradients of matrices: one product of the three less.
            matrices = self.layers * 2.0 * tokens * self.active.layer_matrices()
            trained = replace(self, frozen=False).step_flops(tokens, kind)
            return trained - matrices - self.head_flops(tokens)
        layers = self.layers * self.layer_flops(tokens)
        if kind == "hardware":
            return 4.0 * layers + 3.0 * self.head_flops(tokens)
        if kind == "hardware x4":
            return 4.0 * (layers + self.head_flops(tokens))
        if kind == "model":
            return 3.0 * layers + 3.0 * self.head_flops(tokens)
        attention = 3.0 * self.attention_flops(tokens)
        if kind == "model causal":
            return 3.0 * layers + 3.0 * self.head_flops(tokens) - attention / 2.0
        weights = 6.0 * tokens * self.num_parameters
        return weights + (attention / 2.0 if kind == "6n causal" else attention)


def spread_heads(model: Transformer, tp: int) -> Transformer:
    """The model as this library spreads its attention over ranks that do not divide the heads:
    `parallel/tensor/plan.py` fills up heads with ones of zeros where there are as many of keys and values,
    leaves keys and values whole where only they do not divide, and else the attention.

    >>> spread_heads(Transformer("t", 1, 48, 3, 96, 16, 64), 2).query_parts  # two of four
    1.5
    """
    if tp == 1 or (model.heads % tp == 0 and model.kv_heads % tp == 0):
        return model
    if model.heads % tp == 0:
        return replace(model, kv_parts=1.0)
    parts = model.heads / math.ceil(model.heads / tp) if model.kv_heads == model.heads else 1.0
    return replace(model, query_parts=parts, kv_parts=parts)


def tell_heads(model: Transformer, tp: int) -> list[str]:
    """What becomes of heads that do not divide, in a sentence."""
    if tp == 1 or not (model.query_parts or model.kv_parts):
        return []
    if not model.query_parts:
        return [
            f"the {model.kv_heads} heads of keys and values do not divide over tp={tp}: every rank has all "
            "of them, as in training"
        ]
    if model.kv_heads == model.heads:
        return [
            f"the {model.heads} heads do not divide over tp={tp}: they are filled up to "
            f"{tp * math.ceil(model.heads / tp)} with heads of zeros, as in training"
        ]
    return [
        f"the {model.heads} heads do not divide over tp={tp}: every rank computes all of the attention, as "
        "in training, and the rest is split"
    ]
