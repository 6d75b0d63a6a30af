"""What the training software does, apart from the layout: which kernels are fused, what is overlapped,
how many bytes a parameter it keeps. Facts about programs, not about rows: the same program has the same
facts whatever it trains. `rows.py` picks one by the program that a row names; our own is `RIDGELINE`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ridgeline.errors import UsageError
from ridgeline.plan.kernels import NARROW_HEADS
from ridgeline.plan.machine import Machine


@dataclass(frozen=True)
class Software:
    """One program."""

    name: str
    attention: str = "flash"
    """`flash`: never stores scores; `fused`: one softmax kernel over stored scores."""
    overlap_tp_backward: bool = False
    """All-reduces of input gradients run beside the weight gradients' products."""
    overlap_tp: bool = False
    """Products and the communication of what they split go on beside each other, piece by piece."""
    always_sp: bool = False
    """The sequence is split wherever layers are, unless it is said that it is not."""
    usual_zero: int = 0
    """What of a replica's state is sharded where nothing is said about it."""
    keeps_gathered: bool = False
    """Where layers and sequence are split, what was gathered for a product is kept whole for backward."""
    keeps_narrow: bool = False
    """What products in 8 bits were given is kept for backward in 8 bits."""
    overlap_dp: bool = False
    """Gradients are reduced while the last backward runs."""
    overlap_pp: bool = False
    """Stages compute while activations are on their way."""
    scatter_pp: bool = True
    """Tensor-parallel ranks each send their part of an activation and gather it on the other side."""
    gradient_bytes: int = 4
    """A parameter, kept over microbatches."""
    reduce_bytes: int = 2
    """A parameter, on the wire."""
    master_bytes: int = 4
    """A parameter: the float32 copy that the optimizer updates; 0 where the weights are float32."""
    weight_bytes: int = 2
    fused_gradient_sum: bool = False
    """Weight gradients are added up by the product that makes them."""
    optimizer_bytes_moved: float = 62.0
    """A parameter: unscale 8, norm 4, clip 8, copies 12, Adam 28, clear 2."""
    flat_zero: bool = False
    """ZeRO's gathers use one ring through every device's own NIC."""
    zero_sums_whole: bool = False
    """ZeRO sums whole gradients (an all-reduce) before each rank keeps its part."""
    softmax_batch: int = 4
    """The fused softmax needs a multiple of so many (samples x heads); else it is several kernels."""
    pads_vocab: bool = False
    """The vocabulary's rows are padded to a multiple of 128 and of the tensor-parallel ranks."""
    score_passes: float = 1.4
    """How much longer softmax and dropout over stored scores take than their bytes would: two-byte
    elements, reductions and random numbers leave them at some six tenths of the memory's rate."""
    narrow_products: float = 1.2
    """The same for the two products of attention, whose tiles are no deeper or wider than a head."""
    flash_share: float = 1.0
    """What its fused attention reaches of the device's `flash_efficiency`, which is FlashAttention 2's."""
    narrow_heads: float = NARROW_HEADS
    """What its fused attention keeps of its rate with heads of 64 instead of 128."""
    pressure: float = 1.0
    """How much a nearly full device costs it, compared with an allocator that has to ask for and give back
    its blocks every step."""
    fp8_casts: float = 1.0
    """Bytes of casts to 8 bits that are moved for it; 0 where norms and activations write 8 bits."""
    selective_products: float = 0.0
    """Share of the products that selective recompute does again where attention is fused."""
    element_passes: float = 1.0
    """Bytes that element-wise work moves, compared with fused kernels."""
    rotary_passes: float = 2.0
    """Reads and writes of queries and keys for rotary positions."""
    compiled: bool = False
    """Element-wise work is fused into few kernels, which costs the host little."""
    plain_loss: bool = False
    """The loss is not compiled where the model is."""
    logit_bytes: float = 6.0
    """A logit at the loss's peak: as the product wrote it, and in float32."""
    dummy_gradients: bool = False
    """An empty gradient of each shape of weight is kept for fused sums of gradients."""
    buffer_bytes: float = 12e6
    """Generator states, masks, scalars."""
    rotary_kept: float = 0.0
    """Copies of queries and keys that rotary positions leave behind for backward."""
    extra_kept: float = 1.0
    """What a layer keeps compared with the products' own inputs."""
    fragmentation: float = 0.05
    """What the allocator holds beyond what is allocated, as a share of what comes and goes."""
    sharpness: float = 4.0
    """How sharply the slower of host and device wins; low where the host often waits for the device."""
    host_share: float = 1.0
    """Host time of a kernel compared with Megatron's of 2021."""


MEGATRON_2021: Final = Software(
    "megatron-2021", attention="fused", gradient_bytes=2, pads_vocab=True
)
"""Megatron-LM as of Narayanan et al. 2021."""
MEGATRON_2022: Final = Software(
    "megatron-2022", attention="fused", gradient_bytes=4, overlap_tp_backward=True,
    fused_gradient_sum=True, pads_vocab=True,
)  # fmt: skip
"""Megatron-LM as of Korthikanti et al. 2022."""
MEGATRON_DEEPSPEED: Final = replace(
    MEGATRON_2021, name="megatron-deepspeed", master_bytes=8, buffer_bytes=4e9, logit_bytes=14.0,
    fragmentation=0.12,
)  # fmt: skip
"""The fork for DeepSpeed's pipeline."""
DEEPSPEED_ZERO3: Final = replace(
    MEGATRON_2021, name="deepspeed-zero3", flat_zero=True, zero_sums_whole=True
)
"""ZeRO-3 as compared with in Narayanan et al. 2021."""
MEGATRON_CORE: Final = Software(
    "megatron-core", overlap_tp_backward=True, overlap_dp=True, overlap_pp=True,
    fused_gradient_sum=True, optimizer_bytes_moved=50.0, host_share=1.8, dummy_gradients=True,
    flash_share=1.45, pads_vocab=True, fp8_casts=0.0, keeps_narrow=True,
)  # fmt: skip
MEGATRON_BRIDGE: Final = replace(
    MEGATRON_CORE, name="megatron-bridge", overlap_tp=True, always_sp=True, usual_zero=1
)
"""Megatron-Core as the recipes of Megatron-Bridge set it."""
FSDP: Final = Software(
    "fsdp", overlap_dp=True, weight_bytes=4, master_bytes=0, reduce_bytes=4,
    optimizer_bytes_moved=36.0, fused_gradient_sum=True, host_share=0.6, element_passes=1.4,
    rotary_passes=10.0,
)  # fmt: skip
"""torch's fully_shard with bf16 arithmetic (torchtitan, llm-foundry)."""
TORCHTITAN: Final = replace(
    FSDP, name="torchtitan", selective_products=0.5, element_passes=3.0, plain_loss=True, logit_bytes=12.0,
    keeps_gathered=True,
)  # fmt: skip
"""As of 2024. Its selective recompute keeps every other product, or recomputes every other layer; norms are
written out in float32, several kernels each. The loss is never compiled (a comment in `train.py` says why):
its backward has three float32 copies of the logits at once."""
LLM_FOUNDRY: Final = replace(FSDP, name="llm-foundry", flash_share=0.6, narrow_heads=1.0)
"""Attention is the Triton kernel of 2023, on A100 and H100 alike; heads of 64 take it no longer."""
RIDGELINE: Final = replace(
    FSDP, name="ridgeline", reduce_bytes=2, host_share=0.92, optimizer_bytes_moved=45.0,
    sharpness=10.0,
)  # fmt: skip
"""This library; `own.py` has its kernels."""

SOFTWARE: Final = {
    s.name: s
    for s in (
        MEGATRON_2021, MEGATRON_2022, MEGATRON_DEEPSPEED, DEEPSPEED_ZERO3, MEGATRON_CORE,
        MEGATRON_BRIDGE, FSDP, TORCHTITAN, LLM_FOUNDRY, RIDGELINE,
    )
}  # fmt: skip


def own_program(machine: Machine) -> Software:
    """This library with what the machine's profile has of it; the facts of other programs are theirs."""
    fitted = machine.programs.get(RIDGELINE.name, {})
    try:
        return replace(RIDGELINE, **fitted)  # type: ignore[arg-type]
    except TypeError as error:
        raise UsageError(
            f"programs.{RIDGELINE.name} of the profile {machine.name} is wrong ({error}); leave it out"
        ) from error
