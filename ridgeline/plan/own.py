"""This library's own step, kernel by kernel: what its Llama does under autocast, in 16 bits and sharded.

`layer.py` and `memory.py` describe what Megatron-like software does; our eager modules cast more and
fuse less. What is counted here was read off the code and checked against `benchmarks/gpu_plan_runs.py` on
one H200. Two modes: float32 weights under autocast, where the residual stream is float32 and every product
casts its input, and `half` (`zero` of 1 and more), where weights and residual stream have 16 bits. Called
by `time.py` and `memory.py` for software named `ridgeline`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Final

from ridgeline.plan.kernels import element_bytes, flash_s, gemm_s, moved_s
from ridgeline.plan.layer import Cost, EndCost, LayerCost, Slice
from ridgeline.plan.machine import Machine
from ridgeline.plan.network import Group, collective_s, ring_attention_s
from ridgeline.plan.transformer import Transformer

UPCAST: Final = 2.1
"""How much longer a cast to a wider type takes than its bytes would (1.9 of 4.2 TB/s on an H200)."""
STRIDED: Final = {2.0: 3.7, 4.0: 2.1}
"""The same for products with rotary tables, which broadcast over halves of heads and load one element at a
time: by the bytes of one."""
MIXED: Final = 1.6
"""The same for sums of a float32 and a 16-bit tensor."""
FORWARD_KERNELS: Final = 45
BACKWARD_KERNELS: Final = 85
DTENSOR: Final = 3.7
"""Host time of a kernel under tensor and context parallelism, where every function dispatches on global
shapes; read off runs with `tp`, and taken to be the same with `cp`, which goes the same way."""
SEQUENCE: Final = 0.6
"""What cutting the residual stream along the sequence adds to that."""
FULL_KERNELS: Final = 3.0
"""Host time of a layer's recomputation compared with its forward."""
SELECTIVE_KERNELS: Final = 7.5
"""The same for selective recompute, which looks at every operation."""
GATHER_KERNELS: Final = 40
"""Host time of gathering a block's sharded weights and freeing them again, in kernels."""
REDUCE_KERNELS: Final = 50
"""The same for scattering its gradients. Both are `fully_shard`'s own Python, compiled or not."""


def is_half(zero: int, precision: str) -> bool:
    """Whether weights and the residual stream are in 16 bits."""
    return zero >= 1 and precision in ("bf16", "fp16", "fp8")


def _around(precision: str) -> str:
    """Of all that is no product of a block's linear layer: fp8 is for those alone."""
    return "bf16" if precision == "fp8" else precision


@lru_cache(maxsize=4096)
def own_layer(
    machine: Machine, model: Transformer, part: Slice, half: bool, sharded: bool, tp_group: Group
) -> LayerCost:
    """Forward and backward of one layer on one rank; `sharded`: its weights are gathered first."""
    device, t, precision = machine.device, part.tp, part.precision
    around = _around(precision)
    tokens = part.samples * model.seq // part.cp
    n = float(tokens) * model.hidden
    here = n / (t if part.sp else 1)
    """Elements of the residual stream on this rank."""
    low = element_bytes(around)
    wide = low if half or low == 4 else 4.0
    casts = 0.0 if wide == low else 1.0
    q, kv = model.query_width / model.query_split(t), model.kv_width / model.kv_split(t)
    f = float(tokens) * model.ffn / t
    turned = float(tokens) * (q + kv)
    weights = float(model.layer_matrices(t))

    h, inner = model.hidden, model.ffn // t
    products = [(int(q), h), (int(kv), h), (int(kv), h), (h, int(q)), (inner, h), (h, inner)]
    if model.gated:
        products.append((inner, h))
    forward_products = sum(gemm_s(device, tokens, a, b, 1, precision) for a, b in products)
    backward_products = sum(
        gemm_s(device, tokens, b, a, 1, precision)
        + gemm_s(device, a, b, tokens, 1, precision, True)
        for a, b in products
    )

    inputs = 5 if model.gated else 4
    """Products that cast an input of the residual stream's width."""
    moved = 2 * 2 * wide * here + casts * inputs * (wide + low) * n
    moved += 2 * (2 * wide + low) * here * (MIXED if casts else 1.0)
    rotary = turned * low * (4 * STRIDED[low] + 3 + 2) if model.rotary else 0.0
    gate = low * f * (5 if model.gated else 2)
    forward_moved = moved + rotary + gate + casts * (4 + low) * weights

    back = casts * UPCAST * inputs * (wide + low) * n + (inputs - 2) * 3 * wide * n
    back += 2 * 3 * wide * here + casts * 2 * (wide + low) * n + 2 * 6.9 * wide * here
    back += low * turned * (4 * STRIDED[low] + 5 + 2) if model.rotary else 0.0
    back += low * f * (9 if model.gated else 3)
    back += casts * UPCAST * (4 + low) * weights

    if precision == "fp8":
        # Every product's inputs are read in 16 bits and written in 8, for backward transposed as well.
        forward_moved += 4.0 * (tokens * float(sum(b for _, b in products)) + weights)
        back += 4.0 * tokens * float(sum(a for a, _ in products))
    if sharded:
        # Gathered pieces are copied into weights, twice; gradients into pieces of float32.
        forward_moved += 4 * weights
        back += (4 + 6 * UPCAST) * weights

    num_heads = max(round(model.heads / model.query_split(t)), 1)
    args = (device, part.samples, num_heads, model.seq // part.cp, model.seq)
    kind = around if around in ("bf16", "fp16") else "fp32"
    attention = (*args, model.head_width, model.causal, kind)
    comm, comm_back, last_comm = 0.0, 0.0, 0.0
    if t > 1:
        sums = 1 if model.query_split(t) == 1.0 else 2  # an attention left whole has none
        if part.sp:
            gather = collective_s(machine, "all_gather", low * n, tp_group)
            last_comm = collective_s(machine, "reduce_scatter", low * n, tp_group)
            comm = comm_back = sums * (gather + last_comm)
        else:
            last_comm = collective_s(machine, "all_reduce", low * n, tp_group)
            comm = comm_back = sums * last_comm
    attend, attend_back = flash_s(*attention, False), flash_s(*attention, True)
    if part.cp > 1:
        ring = (machine, 2 * low * tokens * kv, part.cp, t)
        comm += ring_attention_s(*ring, attend)
        comm_back += 2 * ring_attention_s(*ring, attend_back / 2)
    factor = (DTENSOR + (SEQUENCE if part.sp else 0.0)) if t > 1 or part.cp > 1 else 1.0
    forward = Cost(
        forward_products, attend,
        moved_s(device, forward_moved, FORWARD_KERNELS - 8), comm,
        round(factor * FORWARD_KERNELS),
    )  # fmt: skip
    backward = Cost(
        backward_products, attend_back,
        moved_s(device, back, BACKWARD_KERNELS - 16), comm_back,
        round(factor * BACKWARD_KERNELS),
    )  # fmt: skip
    added = (2 * wide + low) * here * (MIXED if casts else 1.0)
    # A product in 8 bits keeps its inputs after it has computed, and is done again.
    product = 0.0 if precision == "fp8" else gemm_s(device, tokens, h, inner, 1, precision)
    last = Cost(
        product,
        elementwise=moved_s(device, added, 0),
        communication=last_comm,
    )
    return LayerCost(forward, backward, Cost(), last)


def own_sharding(pp: int, microbatches: int) -> tuple[Cost, Cost]:
    """What the host does more, forward and backward of a microbatch, for a block whose weights are
    gathered. In a pipeline that is once a step."""
    if pp > 1:
        return Cost(), Cost(kernels=round((GATHER_KERNELS + REDUCE_KERNELS) / microbatches))
    return Cost(kernels=GATHER_KERNELS), Cost(kernels=GATHER_KERNELS + REDUCE_KERNELS)


def own_wire(zero: int, precision: str) -> tuple[float, float]:
    """Bytes of a parameter as it is gathered, and of its gradient as it is scattered: `fully_shard` adds
    gradients up in float32, ZeRO-1 and 2 in the weights' own numbers."""
    low = element_bytes(_around(precision))
    return low, 4.0 if zero == 3 else low


def own_recompute(recompute: str, layer: LayerCost, compiled: bool) -> Cost:
    """What backward does again of a layer: torch stops at the last tensor that backward needs, before the
    last product. Compiled, it is a part of the graph, and the host does nothing but start it."""
    forward = layer.forward
    if recompute == "full":
        kernels = round((1.0 if compiled else FULL_KERNELS) * forward.kernels)
        return replace(forward + layer.last.times(-1.0), kernels=kernels)
    if recompute == "selective":
        kernels = round((1.0 if compiled else SELECTIVE_KERNELS) * forward.kernels)
        return Cost(elementwise=forward.elementwise, kernels=kernels)
    return Cost()


@lru_cache(maxsize=4096)
def own_ends(
    machine: Machine, model: Transformer, part: Slice, half: bool, tp_group: Group
) -> EndCost:
    """Embedding, output projection and loss."""
    device, t, precision = machine.device, part.tp, _around(part.precision)
    tokens = part.samples * model.seq // part.cp
    n, low = float(tokens) * model.hidden, element_bytes(precision)
    wide = low if half or low == 4 else 4.0
    vocab = -(-model.vocab // t)
    logits, head = float(tokens) * vocab, float(vocab) * model.hidden
    product = gemm_s(device, tokens, vocab, model.hidden, 1, precision)
    back = gemm_s(device, tokens, model.hidden, vocab, 1, precision)
    back += gemm_s(device, vocab, model.hidden, tokens, 1, precision, True)
    cast = 0.0 if wide == low else (4 + low) * head
    loss, loss_back = (low + 4) * logits, (4 + 4 + low) * logits
    reduce = collective_s(machine, "all_reduce", low * n, tp_group) if t > 1 else 0.0
    # A sort of the tokens, then sums by row; the gradient of every row is written.
    embed_back = moved_s(device, 3 * wide * n + 2 * wide * head, 20)
    return EndCost(
        Cost(elementwise=moved_s(device, 2 * wide * n, 1), communication=reduce, kernels=3),
        Cost(elementwise=embed_back, kernels=22),
        Cost(product, 0.0, moved_s(device, loss + cast + 3 * wide * n, 6), 0.0, 12),
        Cost(back, 0.0, moved_s(device, loss_back + UPCAST * cast + 8 * wide * n, 8), reduce, 14),
    )


def own_activations(model: Transformer, part: Slice, half: bool) -> tuple[float, float, float]:
    """Bytes that one layer keeps for one microbatch with no recompute, with selective, with full."""
    tokens = part.samples * model.seq / part.cp
    n, low, t = tokens * model.hidden, element_bytes(_around(part.precision)), part.tp
    wide = low if half or low == 4 else 4.0
    here = n / (t if part.sp else 1)
    q, kv = model.query_width / model.query_split(t), model.kv_width / model.kv_split(t)
    f = model.ffn / t
    # Inputs of both norms; what products read: one tensor for all that share it, or a cast for each.
    shared = low * n * (2 if wide == low else (5 if model.gated else 4))
    core = low * tokens * (2 * q + 2 * kv)
    inner = low * tokens * f * (4 if model.gated else 2)
    everything = (
        2 * wide * here + shared + core + inner + 4.0 * tokens * model.heads / model.query_split(t)
    )
    products = low * tokens * (2 * q + 2 * kv + (2 if model.gated else 1) * f)
    products += 2 * low * here
    return everything, wide * here + products, wide * here


def own_logits(model: Transformer, part: Slice, zero: int) -> tuple[float, float]:
    """Bytes at the loss, forward and backward, at their peaks."""
    elements = part.samples * model.seq / part.cp * -(-model.vocab // part.tp)
    low = element_bytes(_around(part.precision))
    if part.tp > 1:
        # The loss of split classes makes float32 logits where they are not that already, those less their
        # maximum, their exponentials and their shares, and holds them all when the last is written.
        forward = 16.0 if low == 4 else 18.0
    else:
        forward = 8.0
    if low == 4:
        return forward * elements, 12.0 * elements
    # Sharded modules hand out float32 logits; else the loss reads 16 bits and writes float32.
    return forward * elements, (12.0 if zero == 3 else 10.0) * elements
