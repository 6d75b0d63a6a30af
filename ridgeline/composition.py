"""What composes: every technique by name, which this release has, and which pairs are refused, and why.

The one list of its kind. `layout.py` checks layouts by it, and through that so do the configuration,
the planner, the documentation's matrix and the parity tests; none of them keeps a list of its own.
Imports nothing but the standard library.
"""

from __future__ import annotations

from typing import Final

AVAILABLE: Final = frozenset(
    {
        *("dp", "zero=1", "zero=2", "zero=3", "shard", "tp", "sp", "cp", "pp", "spatial", "ep"),
        *("schedule=gpipe", "schedule=interleaved", "schedule=zerobubble"),
        *("recompute=selective", "recompute=full"),
        *("offload=optimizer", "offload=params", "offload=activations"),
        *("accumulate", "compress", "sync=local", "compile", "graphs"),
        *("precision=tf32", "precision=bf16", "precision=fp16", "precision=fp8"),
    }
)
"""The techniques that this release can run; a technique is finished when its name stands here."""

TECHNIQUES: Final[dict[str, str]] = {
    "dp": "data parallelism",
    "zero=1": "sharding of optimizer state",
    "zero=2": "sharding of optimizer state and gradients",
    "zero=3": "sharding of optimizer state, gradients and weights",
    "shard": "hybrid sharding",
    "tp": "tensor parallelism",
    "sp": "sequence parallelism",
    "cp": "context parallelism",
    "pp": "pipeline parallelism",
    "schedule=gpipe": "the GPipe schedule",
    "schedule=interleaved": "the interleaved schedule",
    "schedule=zerobubble": "the zero-bubble schedule",
    "spatial": "domain decomposition",
    "ep": "expert parallelism",
    "recompute=selective": "selective activation checkpointing",
    "recompute=full": "full activation checkpointing",
    "offload=optimizer": "keeping optimizer state on the host",
    "offload=params": "keeping parameters on the host",
    "offload=activations": "keeping activations on the host",
    "precision=tf32": "tf32 arithmetic",
    "precision=bf16": "bf16 arithmetic",
    "precision=fp16": "fp16 arithmetic with loss scaling",
    "precision=fp8": "fp8 arithmetic",
    "compile": "the compiler",
    "graphs": "CUDA graph capture",
    "accumulate": "gradient accumulation",
    "compress": "gradient compression",
    "sync=local": "synchronising every k steps only",
    "sync=async": "asynchronous updating",
}
"""Every technique by the text that switches it on, in the order of `Layout`'s fields."""

_ZERO = ("zero=1", "zero=2", "zero=3")
_OFFLOAD = ("offload=optimizer", "offload=params", "offload=activations")

APART: Final[tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...]] = (
    # Each on the left with each on the right: refused. The right one is given up first when the
    # nearest layout that works is looked for. Everything that is not here composes.
    (
        ("spatial",),
        ("tp", "sp", "cp", "ep"),
        "spatial tiles an image while the other splits matrices, sequences or experts, "
        "and no model has layers for both",
    ),
    (
        ("tp", "sp", "cp"),
        ("ep",),
        "the model runs on tensors of global shape, and tokens on their way to experts are plain ones",
    ),
    (("spatial",), ("precision=fp8",), "fp8 covers matrix products, not convolutions"),
    (
        ("tp", "sp", "cp"),
        ("precision=fp8",),
        "the model runs on tensors of global shape, and products in fp8 take plain ones",
    ),
    (
        ("schedule=zerobubble",),
        ("precision=fp8",),
        "a layer in fp8 computes both of its gradients at once, which cannot be split into input and "
        "weight parts",
    ),
    (
        ("schedule=zerobubble",),
        ("zero=3",),
        "weight gradients run after the block's weights were resharded, "
        "which gives wrong gradients without an error",
    ),
    (
        ("schedule=zerobubble",),
        ("compile",),
        "a compiled stage has one fused backward that cannot be split into input and weight parts",
    ),
    (
        ("schedule=zerobubble",),
        ("recompute=selective", "recompute=full"),
        "the split backward would recompute every block twice",
    ),
    (
        ("spatial",),
        ("pp",),
        "a tile's extent changes from layer to layer, and the next stage would have to be told",
    ),
    (
        ("spatial",),
        ("zero=3",),
        "weights are gathered by hooks on a block's inputs, and they do not know tiles",
    ),
    (
        ("cp", "spatial"),
        ("compile",),
        "every function is looked at as it is called, and attention around a ring or the borders of tiles "
        "are exchanged by the host, which a compiled graph would not do",
    ),
    (
        ("tp", "sp"),
        ("graphs",),
        "blocks are compiled one by one, with collectives and other code between them",
    ),
    (
        ("zero=3",),
        ("offload=optimizer",),
        "optimizer state goes where the shards are; offload=params takes both to the host",
    ),
    (
        ("recompute=selective", "recompute=full"),
        ("offload=activations",),
        "what is computed again in backward is not kept, so there is nothing to take to the host",
    ),
    (("pp",), ("accumulate",), "a pipeline accumulates over its microbatches; raise those instead"),
    (
        ("pp", "ep"),
        ("graphs",),
        "the host decides what is sent in each step, and a captured graph would freeze it",
    ),
    (
        ("zero=2", "zero=3", *_OFFLOAD),
        ("graphs",),
        "tensors move to other addresses in every step, and a captured graph has fixed ones",
    ),
    (
        ("dp", "accumulate"),
        ("graphs",),
        "gradients of a captured backward live where the next replay writes, "
        "so they cannot be added up or reduced while it runs",
    ),
    (
        ("graphs",),
        ("compress",),
        "a compression hook decides in Python on each step, and a captured graph would freeze it",
    ),
    (
        _ZERO,
        ("compress",),
        "compression works on whole reduced gradients, and sharded replicas never hold those",
    ),
    (
        ("tp", "sp", "ep", "cp", "spatial"),
        ("compress",),
        "compression works on plain gradients that all ranks reduce together, "
        "and these are split, parts of a sum, or belong to some ranks only",
    ),
    (
        ("pp", "offload=optimizer"),
        ("compress",),
        "gradients are added up in one buffer and reduced once a step, "
        "without the hook that compresses them bucket by bucket",
    ),
    (
        ("sync=local", "sync=async"),
        ("offload=optimizer",),
        "replicas average the weights on the device, and the host's copy would not hear of it",
    ),
    (
        _ZERO,
        ("sync=local", "sync=async"),
        "replicas drift apart between synchronisations, so they cannot own shards of one state",
    ),
    (
        ("ep",),
        ("sync=local", "sync=async"),
        "replicas share experts and must exchange tokens in every step",
    ),
    (
        ("sync=local", "sync=async"),
        ("compress",),
        "weights are exchanged, not gradients, so there is nothing to compress",
    ),
    (
        ("tp", "sp", "cp", "pp", "spatial"),
        ("sync=async",),
        "asynchronous replicas exchange whole models with a server, one process each",
    ),
)
