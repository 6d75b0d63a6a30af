"""What a model is made of, as far as remedies ask.

A recipe's is looked up on the meta device, once; a script's was seen by `script_candidate.py` and stands
where a recipe has its arguments. Called by `remedies/`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from ridgeline.config import RunConfig

if TYPE_CHECKING:
    from torch import nn

SCRIPT = "script"
"""The model's name where it is that of a user's own script."""
STREAMS = "streams"
"""In `data.args` of a script whose data set only iterates."""
MANY_CONVOLUTIONS = 4
"""A model with so many is a convolutional one; one that cuts an image into patches has one or two."""


@dataclass(frozen=True)
class Look:
    num_parameters: int = 0
    num_conv2d: int = 0
    num_other_conv: int = 0
    """Convolutions of one and three dimensions."""
    num_blocks: int = 0
    num_block_linears: int = 0
    """Linear layers of the repeated blocks whose sides are multiples of 16."""
    block_side: float = 0.0
    """Of them, inputs times outputs over inputs plus outputs, by FLOPs: what a product computes for
    each number that goes into it or comes out; 0 where it is not known."""
    num_odd_linears: int = 0
    """Large linear layers with a side that is no multiple of 64."""
    odd_share: float = 1.0
    """Theirs of all linear layers' products."""
    num_outputs: int = 0
    """Of the last linear layer."""
    num_norms: int = 0
    """RMS norms, of torch's, ours and the kind that `transformers` has."""
    num_batch_norms: int = 0
    num_conv_kernels: int = 0
    """Batch norms and max pools that `tune.conv_kernels` changes."""
    num_siblings: int = 0
    """Linear layers of the repeated blocks beside which stands one with as many inputs."""


def look_at(config: RunConfig) -> Look:
    """Nothing where the model cannot be built on the meta device, or there is no torch."""
    if config.model.name == SCRIPT:
        return Look(**config.model.args)
    return _look(config.model.name, json.dumps(config.model.args, sort_keys=True, default=str))


@lru_cache(maxsize=16)
def _look(name: str, args: str) -> Look:
    try:
        import torch

        from ridgeline.models.build import build_model

        with torch.device("meta"):
            model = build_model(name, **json.loads(args))
    except Exception:
        return Look()
    return look_of(model)


def look_of(model: nn.Module) -> Look:
    from torch import nn

    from ridgeline.parallel.blocks import find_blocks
    from ridgeline.parallel.conv_layers import has_conv_kernel

    modules = list(model.modules())
    blocks = find_blocks(model).values()
    linears = [m for m in modules if type(m) is nn.Linear]
    odd = [m for m in linears if _is_odd(m)]
    inside = [m for block in blocks for m in block.modules() if type(m) is nn.Linear]
    return Look(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_conv2d=sum(isinstance(m, nn.Conv2d) for m in modules),
        num_other_conv=sum(isinstance(m, (nn.Conv1d, nn.Conv3d)) for m in modules),
        num_blocks=len(blocks),
        num_block_linears=sum(not (m.in_features % 16 or m.out_features % 16) for m in inside),
        block_side=_mean_side(inside),
        num_odd_linears=len(odd),
        odd_share=sum(m.weight.numel() for m in odd)
        / max(sum(m.weight.numel() for m in linears), 1),
        num_outputs=linears[-1].out_features if linears else 0,
        num_norms=sum(type(m).__name__.endswith("RMSNorm") for m in modules),
        num_batch_norms=sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules),
        num_conv_kernels=sum(has_conv_kernel(m) for m in modules),
        num_siblings=sum(_num_siblings(m) for block in blocks for m in block.modules()),
    )


def _is_odd(linear: nn.Linear) -> bool:
    sides = (linear.in_features, linear.out_features)
    return min(sides) >= 64 and any(side % 64 for side in sides)


def _mean_side(linears: list[nn.Linear]) -> float:
    sides = [(m.in_features, m.out_features) for m in linears]
    total = sum(a * b for a, b in sides)
    return sum((a * b) ** 2 / (a + b) for a, b in sides) / total if total else 0.0


def _num_siblings(module: nn.Module) -> int:
    from torch import nn

    inputs = Counter(c.in_features for c in module.children() if type(c) is nn.Linear)
    return sum(num for num in inputs.values() if num > 1)
