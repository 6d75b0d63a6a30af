"""The same weights and the same optimizer on all ranks, before training begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ridgeline.compat.horovod.collectives import broadcast_async_, broadcast_object
from ridgeline.compat.horovod.job import rank
from ridgeline.errors import UsageError


@torch.no_grad()
def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Of a `state_dict()` or `named_parameters()`; what is no tensor is left alone."""
    if isinstance(params, Mapping):
        named: Iterable[Any] = sorted(params.items())
    elif isinstance(params, Iterable):
        named = [p if isinstance(p, tuple) else ("", p) for p in params]
    else:
        raise UsageError(
            f"broadcast_parameters was given a {type(params).__name__}; give model.state_dict() or "
            "model.named_parameters()"
        )
    handles = [broadcast_async_(p, root_rank) for _, p in named if isinstance(p, Tensor)]
    for handle in handles:
        handle.wait()


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int) -> None:
    """Rates, momenta and all else, also where only `root_rank` has any yet."""
    # From the host: unpickled as it was, all of it would be on the root's device, once for each rank.
    mine = tree_map(_on_host, optimizer.state_dict()) if rank() == root_rank else None
    state = broadcast_object(mine, root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
