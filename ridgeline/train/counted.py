"""What a sample costs, for a module that cannot run where nothing is computed.

A model whose control flow depends on values (a mixture of experts sends each token where its router says)
or whose kernels refuse the meta device has its parameters counted there, but not its FLOPs; and six times
all parameters is several times too much where a token meets two experts of eight. So one forward of a few
samples is counted where the model will train, before anything is arranged. Called by `train/setup.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

from ridgeline.facts import ModelFacts
from ridgeline.models.grouped import grouped_flops
from ridgeline.models.inputs import Inputs, call_arguments, first_of
from ridgeline.parallel.dry_run import unchanged_attributes

COUNTED = "forward counted"
"""As `ModelFacts.flops_source`."""


def count_forward(facts: ModelFacts, model: nn.Module, example: Inputs) -> ModelFacts:
    """The facts with the FLOPs of a forward of `example`, and twice that for backward; as they are where
    the model does not run on it, or multiplies weights in an operator of its own, which nobody
    counts. The model, its buffers and the generators are as before."""
    device = first_of(example).device
    held = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    args, kwargs = call_arguments(example)
    kernels = _kernels()
    counter = FlopCounterMode(display=False, custom_mapping=kernels)
    strangers = _Strangers(model, kernels)
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            unchanged_attributes(model),
            torch.no_grad(),
            strangers,
            counter,
        ):
            functional_call(model, held, args, kwargs)
    except Exception:
        return facts  # what is wrong with it is said where it trains
    forward = float(counter.get_total_flops()) / len(first_of(example))
    if not forward or strangers.found:
        return facts
    return dataclasses.replace(
        facts,
        forward_flops_per_sample=forward,
        train_flops_per_sample=3.0 * forward,
        flops_source=COUNTED,
    )


class _Strangers(TorchDispatchMode):
    """Notes operators that are not torch's own, that no formula is known of, and that read a weight."""

    def __init__(self, model: nn.Module, kernels: Mapping[Any, Any]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._kernels = kernels
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters() if p.dim() > 1}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        if (
            func.namespace not in _OWN
            and packet not in flop_registry
            and packet not in self._kernels
        ):
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if any(x.untyped_storage().data_ptr() in self._weights for x in tensors):
                self.found.add(str(packet))
        return func(*args, **(kwargs or {}))


_OWN = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional")


def _kernels() -> dict[Any, Any]:
    """Products that torch's counter does not know: of experts side by side, and of attention on a CPU."""
    found = {}
    aten = torch.ops.aten
    for name, flops in (
        ("_grouped_mm", _grouped_flops),
        ("_scaled_grouped_mm", _grouped_flops),
        ("_scaled_dot_product_flash_attention_for_cpu", _attention_flops),
    ):
        if hasattr(aten, name):
            found[getattr(aten, name)] = flops
    return found


def _grouped_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    return grouped_flops(a, b)


def _attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))
