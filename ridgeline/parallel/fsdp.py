"""ZeRO stage 3 and hybrid sharding: weights, gradients and optimizer state are all in shards.

torch's `fully_shard` does it: 16/d bytes a parameter with Adam, in mixed precision too (the shards stay
float32, what is gathered for a block is of the computing type). This puts it on a module that has
never heard of it: which blocks are gathered on their own, what stays together because weights are
tied, and the cases that torch refuses. Parameters without dimensions (a learned temperature, a gate) have
nothing to cut: every rank keeps them whole, and `idle.py` averages their gradients. Called by `apply.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from ridgeline.errors import UsageError
from ridgeline.parallel.flat import broadcast_module
from ridgeline.parallel.idle import IdleParameters


def apply_fsdp(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype | None,
    reshard: bool = True,
    offload_params: bool = False,
    *,
    wide_outputs: bool = True,
    spared: frozenset[str] = frozenset(),
) -> nn.Module:
    """Shard `model`, whose weights every rank has in full, over `mesh`; those of rank 0 count.

    `mesh` has the axis "shard", or ("copies", "shard") for hybrid sharding. Each of `blocks` is gathered
    when it runs, the rest of the model together; with `reshard` a block's weights are freed between
    forward and backward. `offload_params` keeps the shards, and so the optimizer, on the host.
    `wide_outputs` makes the outputs of `model` float32; not for a stage, which sends what the next
    expects. Parameters that are `spared` stay as they are, and others look after them.
    """
    _check_parameters(model, spared)
    axes = range(mesh.ndim)
    broadcast_module(model, [mesh.get_group(axis) for axis in reversed(axes)], spared)
    left = {p for name, p in model.named_parameters() if name in spared}
    for parameter in model.parameters():
        if not parameter.is_contiguous():  # torch shards no others; only the memory order is lost
            parameter.data = parameter.data.contiguous()
    whole = [p for p in model.parameters() if p.dim() == 0 and p not in left]
    offload: OffloadPolicy = OffloadPolicy()
    if offload_params:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")

    def shard(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            # None: not for the root, whose weights backward wants at once.
            reshard_after_forward=None if reshard else False,
            ignored_params={*whole, *left},
        )

    inner = MixedPrecisionPolicy()
    outer = MixedPrecisionPolicy()
    if compute_dtype is not None:
        inner = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        outer = MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=torch.float32,
            output_dtype=torch.float32 if wide_outputs else None,
        )
        for norm in _trainable_batch_norms(model):
            # In their own type, which is that of their running statistics.
            shard(norm, MixedPrecisionPolicy(cast_forward_inputs=False))
    for block in _separable(model, blocks):
        shard(block, inner)
    shard(model, outer)
    IdleParameters(model, [mesh.get_group(axis) for axis in axes], whole)
    return model


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Averaged gradients in full by parameter name, without those of parameters that have none; every
    rank has to call it."""
    free_gathered(model)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: _full(gradient) for name, gradient in found.items()}


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Weights in full by parameter name, as the optimizer has them; every rank has to call it."""
    free_gathered(model)
    return {name: _full(parameter) for name, parameter in model.named_parameters()}


def free_gathered(model: nn.Module) -> None:
    """After a forward without a backward, gathered weights are in the place of the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def _full(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value.detach().clone()
    # Shards on the host are gathered over the device's network.
    return value.detach().to(value.device_mesh.device_type).full_tensor()


def _separable(root: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The blocks that share no weight with the rest; the others are gathered with the root.

    A weight that is in two groups would be two weights after the first step.
    """
    places: Counter[int] = Counter()
    for module in root.modules():
        places.update(id(p) for p in module.parameters(recurse=False))
    # A module that stands in several places counts once above, and is left to the root as well.
    stands: Counter[int] = Counter(id(m) for _, m in root.named_modules(remove_duplicate=False))
    found: list[nn.Module] = []
    for block in blocks:
        inside: Counter[int] = Counter()
        for module in block.modules():
            inside.update(id(p) for p in module.parameters(recurse=False))
        alone = all(places[key] == count for key, count in inside.items())
        if alone and inside and block is not root and stands[id(block)] == 1:
            found.append(block)
    return found


def _trainable_batch_norms(root: nn.Module) -> list[nn.Module]:
    norms = [m for m in root.modules() if isinstance(m, _BatchNorm) and m.affine]
    return [norm for norm in norms if norm is not root]


def _check_parameters(root: nn.Module, spared: frozenset[str]) -> None:
    dtypes: dict[torch.dtype, str] = {}
    for name, parameter in root.named_parameters():
        if name in spared:
            continue
        if parameter.is_complex():
            raise UsageError(f"{name} is complex, which zero=3 cannot shard; use zero=2")
        if parameter.requires_grad and parameter.dim():
            dtypes.setdefault(parameter.dtype, name)
    if len(dtypes) > 1:
        listed = " and ".join(f"{name} {dtype}" for dtype, name in dtypes.items())
        raise UsageError(
            f"the model has trainable parameters of several types, {listed}, which zero=3 cannot "
            "shard together; give them one type, or use zero=2"
        )
