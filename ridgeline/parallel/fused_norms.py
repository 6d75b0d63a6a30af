"""RMS norms and rotary positions as one kernel each, in a model that otherwise runs op by op: `tune.norms`.

In eager mode a norm of a bf16 input with float32 weights is half a dozen kernels, each of which reads and
writes all activations, and turning queries and keys is as many again. They are compiled alone here: seconds
instead of the minutes that a whole model takes, and nothing else of the model has to be compilable.
The arithmetic is the module's own, so that forward and backward are the same to rounding. Instances of one
class share their code. Where the layout compiles the model these kernels are fused anyway. Called by
`apply.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.parallel.derived import derive_class

ROTARY_FUNCTION = "apply_rotary_pos_emb"
"""What models of `transformers` call from their attention; a function of the model's file."""


def is_norm(module: nn.Module) -> bool:
    """torch's and ours, and the many of `transformers` that are named after it."""
    return isinstance(module, nn.RMSNorm) or type(module).__name__.endswith("RMSNorm")


def is_rotary(module: nn.Module) -> bool:
    """One that is given queries or keys; those of `transformers` make tables of angles, once a step."""
    from ridgeline.models.llama import Rotary

    return isinstance(module, Rotary)


def apply_fused_norms(model: nn.Module, layout: Layout, backend: str = "inductor") -> str:
    """Compile the small modules in place; says what was found, as a note of the run."""
    if layout.compile:
        raise UsageError(
            "tune.norms=fused is for a model that is not compiled, and layout compile=true fuses norms "
            "anyway; leave one of them out"
        )
    if layout.tp > 1 or layout.cp > 1:
        raise UsageError(
            f"tune.norms=fused and {layout} do not compose: tp and cp run the layers on tensors of global "
            "shape; leave one of them out"
        )
    small = {id(m): m for m in model.modules() if is_norm(m) or is_rotary(m)}
    files = list(_files_with_rotary(model))
    if not small and not files:
        raise UsageError(
            f"tune.norms=fused: {type(model).__name__} has no RMS norm and no rotary positions; leave it "
            "out"
        )
    for module in small.values():
        module.__class__ = _compiled(type(module), backend)
    for names in files:
        function = names[ROTARY_FUNCTION]
        if not hasattr(function, "_torchdynamo_orig_callable"):
            names[ROTARY_FUNCTION] = torch.compile(function, dynamic=False, backend=backend)
    rotary = f", and {ROTARY_FUNCTION} of {len(files)} files" if files else ""
    return f"{len(small)} norms and rotary modules are one kernel each{rotary}"


@lru_cache(maxsize=64)
def _compiled(base: type[nn.Module], backend: str) -> type[nn.Module]:
    """The same class with its forward compiled. `Module.compile` silently does nothing for classes of
    torch's own, whose files its tracer passes over; a function of theirs that is handed over it takes."""
    forward = torch.compile(base.forward, dynamic=False, backend=backend)
    return derive_class(base, forward, _compiled, backend)


def _files_with_rotary(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The names of every file whose attention is used here and calls the function."""
    seen: set[int] = set()
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        names = getattr(forward, "__globals__", {})
        code = getattr(forward, "__code__", None)
        uses = code is not None and ROTARY_FUNCTION in code.co_names
        if uses and callable(names.get(ROTARY_FUNCTION)) and id(names) not in seen:
            seen.add(id(names))
            yield names
