"""Whether ranks were given the samples that they should have, where a loop deals them itself.

Ranks that hold parts of one model have to be given the same, replicas others: neither shows in a loss that
goes down. Called by `engine.py` before its first step.
"""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ridgeline.errors import UsageError
from ridgeline.parallel.mesh import Mesh


def compare_samples(mesh: Mesh, inputs: Any) -> None:
    """All ranks call it with their first batch."""
    if mesh.world_group is None:
        return
    mine = (mesh.data_rank, _digest(inputs))
    everyone: list[Any] = [None] * mesh.env.world_size
    dist.all_gather_object(everyone, mine, group=mesh.world_group)
    for rank, (place, digest) in enumerate(everyone):
        first = next(r for r, (other, _) in enumerate(everyone) if other == place)
        if digest != everyone[first][1]:
            raise UsageError(
                f"ranks {first} and {rank} hold parts of one model in {mesh.layout}, and were given "
                f"different samples; deal them with job.loader, or by job.data_rank ({place} for both) of "
                f"job.data_size ({mesh.data_size})"
            )
    if mesh.is_main and mesh.data_size > 1 and len({digest for _, digest in everyone}) == 1:
        warnings.warn(
            f"all {mesh.data_size} replicas were given the same first batch, so that they are worth one; "
            "deal samples with job.loader, or by job.data_rank of job.data_size",
            stacklevel=5,
        )


def _digest(inputs: Any) -> str:
    found = hashlib.sha256()
    for value in tree_leaves(inputs):
        if isinstance(value, Tensor):
            whole = value.detach().cpu().contiguous()
            found.update(f"{tuple(whole.shape)}{whole.dtype}".encode())
            found.update(whole.flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
