"""One layer of a transformer as kernels: forward and backward times on a device, part by part.

The list of kernels is the one that Megatron-style software launches for a pre-norm decoder layer on one
tensor-parallel rank; sequence parallelism, recompute, fused attention and compilers change it. Called by
`time.py`, which puts layers into stages and stages into a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from ridgeline.plan.kernels import element_bytes, flash_s, gemm_s, moved_s
from ridgeline.plan.machine import Machine
from ridgeline.plan.network import Group, collective_s, exposed_s, ring_attention_s
from ridgeline.plan.software import Software
from ridgeline.plan.transformer import Transformer

ALIGNED: Final = 8
"""Numbers of 16 bits that a row of a matrix has to be a multiple of for tensor cores to be fed as fast as
they compute."""
UNALIGNED: Final = 9.0
"""How much longer products of heads take whose width is no such multiple: runs of BLOOM with heads of 108
numbers, some 10 TFLOP/s of an A100."""


@dataclass(frozen=True)
class Cost:
    """Seconds on one rank, by what they are spent on, and kernels that the host issues."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    communication: float = 0.0
    """Exposed: nothing else runs meanwhile."""
    kernels: int = 0

    @property
    def device_s(self) -> float:
        return self.products + self.attention + self.elementwise + self.communication

    @property
    def computing_s(self) -> float:
        return self.products + self.attention + self.elementwise

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.products + other.products,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
            self.communication + other.communication,
            self.kernels + other.kernels,
        )

    def times(self, count: float) -> Cost:
        return Cost(
            self.products * count, self.attention * count, self.elementwise * count,
            self.communication * count, round(self.kernels * count),
        )  # fmt: skip

    def seconds(self, host_kernel_s: float, sharpness: float) -> float:
        """The device works behind the host, or waits for it; where both take as long, each waits for
        the other now and then, the less so the sharper."""
        longer = max(self.device_s, host_s := self.kernels * host_kernel_s)
        ratio = min(self.device_s, host_s) / longer if longer > 0 else 0.0
        return float(longer * (1.0 + ratio**sharpness) ** (1.0 / sharpness))


@dataclass(frozen=True)
class LayerCost:
    forward: Cost
    backward: Cost
    """Without recompute."""
    core_forward: Cost
    """Attention's own part of `forward`, which selective recompute does again."""
    last: Cost = Cost()
    """The last product and what follows it, where nothing of that is kept for backward."""


@dataclass(frozen=True)
class Slice:
    """What of a layer one rank computes for one microbatch."""

    samples: int
    tp: int = 1
    cp: int = 1
    sp: bool = False
    precision: str = "bf16"


@lru_cache(maxsize=4096)
def layer_cost(
    machine: Machine, model: Transformer, part: Slice, software: Software, tp_group: Group
) -> LayerCost:
    """Forward and backward of one layer on one rank."""
    device, t = machine.device, part.tp
    size = element_bytes("bf16" if part.precision == "fp8" else part.precision)
    seq = model.seq // part.cp
    tokens = part.samples * seq
    h, precision = model.hidden, part.precision
    stream = size * tokens * h / (t if part.sp else 1)
    """Bytes of the residual stream as this rank holds it."""
    qkv, inner = (model.query_width + 2 * model.kv_width) // t, max(model.ffn // t, 1)
    ffn_in = max(model.ffn_in // t, 1)

    shapes = ((qkv, h), (h, model.query_width // t), (ffn_in, h), (h, inner))
    forward_products = sum(gemm_s(device, tokens, n, k, 1, precision) for n, k in shapes)
    backward_products = 0.0
    weight_gradients = []
    for n, k in shapes:
        backward_products += gemm_s(device, tokens, k, n, 1, precision)
        gradient = 0.0 if model.frozen else gemm_s(device, n, k, tokens, 1, precision, True)
        weight_gradients.append(gradient)
    backward_products += sum(weight_gradients)

    core_forward, core_backward = _attention(machine, model, part, software)

    # Norm reads and writes; dropout and the residual's sum read two and write one and a mask; the
    # activation function reads what the first product wrote (twice as wide when gated) and writes.
    mask = tokens * h / (t if part.sp else 1) if model.dropout else 0.0
    inner_bytes, in_bytes = size * tokens * inner, size * tokens * ffn_in
    copied = size * tokens * model.query_width / t
    passes = 2.0 if software.compiled else software.rotary_passes
    rotary = size * tokens * passes * (model.query_width + model.kv_width) / t
    if model.learned_positions or not model.rotary:
        rotary = 0.0
    fused = 0.7 if software.compiled else software.element_passes
    forward_moved = 2 * (2 * stream) + 2 * (3 * stream + mask) + in_bytes + inner_bytes
    forward_moved += (2 * copied if software.attention != "flash" else 0.0) + rotary
    backward_moved = 2 * (5 * stream) + 2 * (2 * stream + mask) + 2 * (3 * stream)
    backward_moved += 2 * in_bytes + inner_bytes + 2 * copied + rotary
    if model.bias:
        backward_moved += 2 * stream + in_bytes + size * tokens * qkv
    if precision == "fp8":
        # Every product's inputs are read in 16 bits and written in 8, for backward transposed as well.
        inputs, outputs = sum(k for _, k in shapes), sum(n for n, _ in shapes)
        weights = float(model.layer_matrices(t))
        forward_moved += software.fp8_casts * 4.0 * (tokens * inputs + weights)
        backward_moved += software.fp8_casts * 4.0 * tokens * outputs
    forward_kernels = 8 if not software.compiled else 4
    backward_kernels = 16 if not software.compiled else 6
    elementwise = moved_s(device, fused * forward_moved, forward_kernels)
    elementwise_back = moved_s(device, fused * backward_moved, backward_kernels)

    forward_comm, backward_comm, hidden = _tensor_parallel(
        machine, software, part, tp_group, size * tokens * h
    )
    if software.overlap_tp:
        forward_comm = exposed_s(machine, forward_comm, forward_products)
        backward_comm = exposed_s(machine, backward_comm + hidden, backward_products)
    elif hidden:
        # Beside the weight gradients of the two column-split products.
        room = weight_gradients[0] + weight_gradients[2]
        backward_comm += exposed_s(machine, hidden, room)
    if part.cp > 1:
        kv = 2 * size * tokens * model.kv_width / t
        ring = (machine, kv, part.cp, t)
        forward_comm += ring_attention_s(*ring, core_forward.attention)
        backward_comm += 2 * ring_attention_s(*ring, core_backward.attention / 2)
    collectives = 2 if t > 1 else 0
    forward = Cost(
        forward_products, core_forward.attention, elementwise, forward_comm,
        4 + forward_kernels + core_forward.kernels + collectives,
    )  # fmt: skip
    backward = Cost(
        backward_products, core_backward.attention, elementwise_back, backward_comm,
        (4 if model.frozen else 8) + backward_kernels + core_backward.kernels + collectives,
    )  # fmt: skip
    last = Cost(
        gemm_s(device, tokens, h, inner, 1, precision),
        elementwise=moved_s(device, fused * (3 * stream + mask), 0),
        communication=_last_sum(machine, part, tp_group, size * tokens * h),
    )
    return LayerCost(forward, backward, core_forward, last)


def _last_sum(machine: Machine, part: Slice, group: Group, num_bytes: float) -> float:
    """Of the last product's results over the ranks that have shares of it."""
    if part.tp == 1:
        return 0.0
    return collective_s(machine, "reduce_scatter" if part.sp else "all_reduce", num_bytes, group)


def _tensor_parallel(
    machine: Machine, software: Software, part: Slice, group: Group, num_bytes: float
) -> tuple[float, float, float]:
    """Exposed communication forward and backward, and what backward can hide."""
    if part.tp == 1:
        return 0.0, 0.0, 0.0
    if part.sp:
        gather = collective_s(machine, "all_gather", num_bytes, group)
        scatter = collective_s(machine, "reduce_scatter", num_bytes, group)
        forward, exposed = 2 * (gather + scatter), 2 * gather
        hidden = 2 * scatter + 2 * gather
    else:
        reduce = collective_s(machine, "all_reduce", num_bytes, group)
        forward, exposed, hidden = 2 * reduce, 0.0, 2 * reduce
    if not software.overlap_tp_backward:
        return forward, exposed + hidden, 0.0
    return forward, exposed, hidden


def _attention(
    machine: Machine, model: Transformer, part: Slice, software: Software
) -> tuple[Cost, Cost]:
    """Scores, softmax, dropout and the weighted sum."""
    device, precision = machine.device, part.precision if part.precision != "fp8" else "bf16"
    heads = max(model.heads // part.tp, 1)
    seq = model.seq // part.cp
    if software.attention == "flash":
        causal = model.causal
        args = (device, part.samples, heads, seq, model.seq, model.head_width, causal, precision)
        share = software.flash_share if element_bytes(precision) == 2 else 1.0
        return (
            Cost(attention=flash_s(*args, False, software.narrow_heads) / share, kernels=1),
            Cost(attention=flash_s(*args, True, software.narrow_heads) / share, kernels=3),
        )
    size = element_bytes(precision)
    count = part.samples * heads
    scores = size * count * float(seq) * seq
    mask = scores / size if model.dropout else 0.0
    width = model.head_width
    products = gemm_s(device, seq, seq, width, count, precision)
    products += gemm_s(device, seq, width, seq, count, precision)
    if size == 2 and width % ALIGNED:
        products *= UNALIGNED
    if count % software.softmax_batch == 0 and model.seq <= 2048:
        softmax, kernels = (1.5 if model.causal else 2.0) * scores, 1
    else:  # scale, mask, softmax, each on its own
        softmax, kernels = 6.5 * scores, 4
    dropped = 2 * scores + mask if model.dropout else 0.0
    forward = products * software.narrow_products + moved_s(
        device, software.score_passes * (softmax + dropped), kernels + 1
    )
    back = 2 * products
    softmax_back = (3 if kernels == 1 else 7) * scores
    backward = back * software.narrow_products + moved_s(
        device, software.score_passes * (softmax_back + dropped), kernels + 1
    )
    return (
        Cost(attention=forward, kernels=3 + kernels),
        Cost(attention=backward, kernels=5 + kernels),
    )


@dataclass(frozen=True)
class EndCost:
    """What the first and the last stage do besides layers, for one microbatch."""

    embed_forward: Cost
    embed_backward: Cost
    head_forward: Cost
    head_backward: Cost


@lru_cache(maxsize=4096)
def end_cost(
    machine: Machine, model: Transformer, part: Slice, software: Software, tp_group: Group,
    vocab_multiple: int = 1,
) -> EndCost:  # fmt: skip
    """Embedding, and output projection with the loss; logits stay split by vocabulary."""
    device, t, precision = machine.device, part.tp, part.precision
    seq = model.seq // part.cp
    tokens = part.samples * seq
    if precision == "fp8":
        precision = "bf16"
    size = element_bytes(precision)
    stream = size * tokens * model.hidden
    multiple = vocab_multiple if software.pads_vocab else 1
    vocab = model.padded_vocab(multiple * t) // t
    reduce = collective_s(machine, "all_reduce", stream, tp_group) if t > 1 else 0.0
    embed = Cost(elementwise=moved_s(device, 7 * stream, 6), communication=reduce, kernels=8)
    embed_back = Cost(elementwise=moved_s(device, 5 * stream, 5), kernels=6)
    if model.frozen:
        embed_back = Cost()
    product = gemm_s(device, tokens, vocab, model.hidden, 1, precision)
    product_back = gemm_s(device, tokens, model.hidden, vocab, 1, precision)
    if not model.frozen:
        product_back += gemm_s(device, vocab, model.hidden, tokens, 1, precision, True)
    logits = float(tokens) * vocab
    # To float32, its maximum, the difference, exponent, sum and quotient; then their gradients.
    fused = software.compiled and not software.plain_loss
    loss = moved_s(device, (22.0 if fused else 38.0) * logits, 8)
    loss_back = moved_s(device, (10.0 if fused else 20.0) * logits, 5)
    small = 3 * collective_s(machine, "all_reduce", 4.0 * tokens, tp_group) if t > 1 else 0.0
    return EndCost(
        embed, embed_back,
        Cost(product, 0.0, loss + moved_s(device, 2 * stream, 1), small, 14),
        Cost(product_back, 0.0, loss_back + moved_s(device, 5 * stream, 2), reduce, 10),
    )  # fmt: skip
