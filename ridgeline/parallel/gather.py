"""Full tensors of a model that no rank holds whole: weights and gradients by the model's own names.

Undoes, for looking at it, what techniques did: shards of ZeRO are gathered, pieces of tensor-parallel
parameters joined (without their padding), the stages of a pipeline put together. Every rank has to call
these; the result is complete on rank 0. What replicas have each for themselves is gathered apart from what
they have in common. Called by `train/run.py` for the final weights and by `verify/`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.compress import Memory
from ridgeline.parallel.expert import SpreadExperts
from ridgeline.parallel.pipeline.stage import stale_buffers


@torch.no_grad()
def full_gradients(built: Arranged) -> dict[str, Tensor]:
    """Gradients of the global batch, after `finish_gradients` and before the update."""
    found: dict[str, Tensor] = {}
    if built.is_fully_sharded:
        from ridgeline.parallel import fsdp

        for part in built.parts:
            found |= fsdp.full_gradients(part)
    if built.flats:
        for flat in built.flats:
            found |= flat.full_gradients()
    elif not built.is_fully_sharded:
        for part in built.parts:
            found |= {n: p.grad for n, p in part.named_parameters() if p.grad is not None}
    return _over_stages(built, _joined(built, found))


@torch.no_grad()
def full_state(built: Arranged) -> dict[str, Tensor]:
    """Weights as the optimizer has them and the buffers of the state dict, tied names included."""
    found = _state(built)
    return found if built.mesh.is_main else {}


@torch.no_grad()
def replica_gradients(built: Arranged) -> list[dict[str, Tensor]]:
    """The gradients of each replica where they are its own, on rank 0; empty elsewhere.

    Replicas that step by themselves (`sync=local:k`) have their own gradients. Those that compress with
    error feedback (`powersgd`) reduce what `given_to_compression` says.
    """
    if built.local_sync:
        return _over_replicas(built, full_gradients(built))
    if built.compression is not None:
        return _over_replicas(built, given_to_compression(built, built.compression.memory))
    return []


@torch.no_grad()
def replica_states(built: Arranged) -> list[dict[str, Tensor]]:
    """What `full_state` gives, of each replica, on rank 0; empty where all replicas are the same."""
    return _over_replicas(built, _state(built)) if built.local_sync else []


def given_to_compression(built: Arranged, memory: Memory) -> dict[str, Tensor]:
    """What a replica gave to be compressed in low rank, once that is done: what came out of it and what
    it left out, which `memory` has."""
    names = {id(parameter): name for name, parameter in built.model.named_parameters()}
    return {
        names[id(p)]: p.grad + memory.errors[name].view_as(p.grad)
        for name, p in built.objective.named_parameters()
        if p.grad is not None and name in memory.errors
    }


def _state(built: Arranged) -> dict[str, Tensor]:
    """On the ranks of the first stage, those of every replica."""
    found: dict[str, Tensor] = {}
    for part in built.parts:
        found |= _buffers(part)
        if built.is_fully_sharded:
            from ridgeline.parallel import fsdp

            found |= fsdp.full_parameters(part)
        else:
            found |= {name: p.detach() for name, p in part.named_parameters()}
    for flat in built.flats:
        found |= flat.full_weights()
    found = _over_stages(built, _joined(built, found))
    # In the order, and under all the names, that one device would have.
    return {name: found[source] for name, source in built.state_names.items() if source in found}


def _buffers(part: torch.nn.Module) -> dict[str, Tensor]:
    parameters = {name for name, _ in part.named_parameters(remove_duplicate=False)}
    kept = {n: v for n, v in part.named_buffers(remove_duplicate=False) if n not in parameters}
    saved = set(_persistent(part)) - stale_buffers(part)
    return {name: value for name, value in kept.items() if name in saved}


def _persistent(part: torch.nn.Module) -> list[str]:
    return [
        f"{path}.{name}" if path else name
        for path, module in part.named_modules(remove_duplicate=False)
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]


def _joined(built: Arranged, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pieces of split parameters put together over the tensor axis, and experts over their ranks."""
    if built.experts is not None:
        return _with_all_experts(built.experts, found)
    group = built.mesh.group("tp")
    if built.view is None or group is None:
        return found
    from ridgeline.parallel.tensor.split import gather_full

    splits = built.view.splits
    return {
        name: gather_full(name, value, splits[name], group) if name in splits else value
        for name, value in found.items()
    }


def _with_all_experts(experts: SpreadExperts, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of all ranks, on the first of each block; the others go without their own."""
    rest = {name: value for name, value in found.items() if name not in experts.names}
    mine = {name: value for name, value in found.items() if name in experts.names}
    for part in _to_first(mine, experts.groups.group):  # in the order of the experts
        for name, value in part.items():
            known = rest.get(name)
            rest[name] = value if known is None else torch.cat([known, value])
    return rest


def _over_stages(built: Arranged, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """What every stage has, on the rank of the first."""
    group = built.mesh.group("pp")
    if group is None:
        return found
    merged: dict[str, Tensor] = {}
    for part in _to_first(found, group):
        merged |= part
    return merged


def _over_replicas(built: Arranged, found: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What every replica has, on the rank of the first."""
    group = built.mesh.data_group
    return [found] if group is None else _to_first(found, group)


def _to_first(found: dict[str, Tensor], group: dist.ProcessGroup) -> list[dict[str, Tensor]]:
    """What the ranks of `group` have, in their order, on its first; nothing on the others."""
    here = {name: value.detach().cpu() for name, value in found.items()}
    everyone: list[dict[str, Tensor]] | None = None
    if dist.get_rank(group) == 0:
        everyone = [{} for _ in range(dist.get_world_size(group))]
    dist.gather_object(here, everyone, group_dst=0, group=group)
    return everyone or []
