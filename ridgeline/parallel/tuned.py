"""Small changes to a module that make the same computation faster: the rest of section `tune`.

Which attention kernel is tried first, linear layers computed with rounded-up dimensions, and a narrow type
between the blocks. Called by `apply.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from ridgeline.errors import UsageError
from ridgeline.layout import Layout

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def prefer_attention(name: str) -> None:
    """Have this process try a back end first; the others follow, so that what one refuses still runs."""
    if name == "auto":
        return
    first = _BACKENDS[name]
    rest = [backend for backend in _BACKENDS.values() if backend is not first]
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch._C._set_sdp_priority_order([int(backend) for backend in (first, *rest)])


def compile_module(module: nn.Module, **options: Any) -> None:
    """`module.compile`, which silently does nothing for classes of torch's own: its tracer passes over
    their files. From a function of ours it goes into them."""
    if not type(module).__module__.startswith("torch.nn"):
        module.compile(**options)
        return

    def call(*args: Any, **given: Any) -> Any:
        return module._call_impl(*args, **given)

    module._compiled_call_impl = torch.compile(call, **options)  # type: ignore[assignment]


class PaddedLinear(nn.Linear):
    """A linear layer that is computed with more inputs and outputs than it has.

    The further inputs are zeros and the further outputs are cut off, so nothing else sees them.
    """

    multiple: int

    def forward(self, input: Tensor) -> Tensor:
        inputs = -self.in_features % self.multiple
        outputs = -self.out_features % self.multiple
        weight = F.pad(self.weight, (0, inputs, 0, outputs))
        bias = None if self.bias is None else F.pad(self.bias, (0, outputs))
        out = F.linear(F.pad(input, (0, inputs)) if inputs else input, weight, bias)
        return out[..., : self.out_features]


def apply_padding(module: nn.Module, multiple: int) -> list[str]:
    """Pad what is not a multiple and large enough to gain; returns the layers' paths."""
    changed = []
    for name, layer in module.named_modules():
        if type(layer) is not nn.Linear:
            continue
        sizes = (layer.in_features, layer.out_features)
        if min(sizes) >= multiple and any(size % multiple for size in sizes):
            layer.__class__ = PaddedLinear
            layer.multiple = multiple  # type: ignore[assignment]
            changed.append(name)
    return changed


def apply_narrow_residual(blocks: Iterable[nn.Module], layout: Layout) -> None:
    """What goes into each block is bf16, and so is what a block adds to it."""
    if layout.precision not in ("bf16", "fp8"):
        raise UsageError(
            f"tune.residual=bf16 goes with precision=bf16 or fp8, not {layout.precision}; leave it out"
        )
    if layout.pp > 1:
        raise UsageError(
            f"tune.residual=bf16 and pp={layout.pp} do not compose: stages were told the types they send; "
            "leave one of them out"
        )
    blocks = list(blocks)
    if not blocks:
        raise UsageError("tune.residual=bf16: the model has no repeated blocks; leave it out")
    for block in blocks:
        block.register_forward_pre_hook(_narrow_first)


def _narrow_first(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float32:
        return (args[0].to(torch.bfloat16), *args[1:])
    return args
