"""Settings that change how fast a step is and not what it computes, but for rounding: section `tune`;
and what the planner is told where it chooses the layout: section `plan`.

Each is off by default and is switched on by a recipe, an override (`tune.attention=cudnn`) or the
doctor's climb, which measures it first. They hold for any module. Read by `config.py`; carried out by
`parallel/apply.py` and `train/setup.py`. Imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class TuneConfig:
    compile_mode: str = "default"
    """default; autotune: measure matrix kernels while compiling; regional: one block at a time, which
    starts sooner. With layout compile=true."""
    attention: str = "auto"
    """Back end of scaled_dot_product_attention that is tried first: flash, cudnn, efficient or math."""
    residual: str = "wide"
    """Type between repeated blocks: wide leaves it to the model (under autocast often float32), bf16
    halves the bytes that norms and residual sums move."""
    weights: str = "wide"
    """bf16 keeps matrices in bf16 for the model and in float32 for AdamW, cast in the update's own pass;
    stochastic keeps them in bf16 alone, rounded up or down by chance so that nothing is lost on average."""
    norms: str = "own"
    """fused makes RMS norms and rotary positions one kernel each, in a model that is not compiled."""
    loss: str = "full"
    """chunked: the output layer and its cross-entropy together, some tokens at a time, so that the
    logits never exist in full."""
    loss_chunk: int = 4096
    """Tokens at a time (loss=chunked)."""
    pad: int = 0
    """Compute linear layers with dimensions rounded up to a multiple of this (64 is good); 0 does not."""
    merge: bool = False
    """Linear layers of a block that read the same input (queries, keys and values; the two sides of a gated
    feed-forward) are computed as one product; their weights stay what they are."""
    fused_optimizer: bool = True
    """The optimizer's own kernel for all parameters, where the device has one."""
    search_convolutions: bool = True
    """Time the library's kernels for each new shape of convolution and keep the fastest (CUDA)."""
    search_tiles: bool = False
    """Time tile sizes for each fused kernel while compiling and keep the fastest (compile=true, CUDA)."""
    conv_kernels: bool = False
    """Kernels of our own for the statistics of 2-D batch norms and for 2-D max pools, where channels come
    last in memory (compile=true, CUDA)."""
    fp8_scaling: str = "mixed"
    """Scales of precision=fp8: row: one a row or column in each product; mixed: the same, but one a tensor
    for weight gradients; tensor: one a tensor; careful: row, with weight gradients in bf16."""
    fp8_gradients: str = "e5m2"
    """Type of gradients in fp8 products: e5m2 has range, e4m3 a digit more."""
    fp8_fast_accumulate: bool = True
    """Add products up in the short register, which is faster; weight gradients never do."""
    fp8_keep: tuple[str, ...] = ()
    """Linear layers left in bf16, by a part of their path (e.g. wo, or layers.0.)."""
    fp8_keep_first: int = 0
    """Blocks at the start that stay in bf16."""
    fp8_keep_last: int = 0
    """Blocks at the end that stay in bf16."""


@dataclass(frozen=True)
class PlanConfig:
    machine: str = ""
    """The machine that `layout: auto` is planned for and steps are predicted on: a profile's name, a YAML
    file, or measured rates as JSON; empty: found by the device's name."""


CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "tune.compile_mode": ("default", "autotune", "regional"),
    "tune.attention": ("auto", "flash", "cudnn", "efficient", "math"),
    "tune.residual": ("wide", "bf16"),
    "tune.weights": ("wide", "bf16", "stochastic"),
    "tune.norms": ("own", "fused"),
    "tune.loss": ("full", "chunked"),
    "tune.fp8_scaling": ("row", "mixed", "tensor", "careful"),
    "tune.fp8_gradients": ("e5m2", "e4m3"),
}

AT_LEAST: Final[dict[str, float]] = {
    "tune.loss_chunk": 1,
    "tune.pad": 0,
    "tune.fp8_keep_first": 0,
    "tune.fp8_keep_last": 0,
}
