"""`deepspeed.comm`: torch.distributed under another name, which one process may ask as well."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.parallel.mesh import build_mesh, choose_device


def init_distributed(dist_backend: str | None = None, *args: Any, **options: Any) -> None:
    """Join the ranks that a launcher has started; the backend is that of their device. Once."""
    if dist.is_initialized():
        return
    env = read_rank_env()
    if env.world_size > 1:
        build_mesh(env, Layout(dp=env.world_size), choose_device("auto", env))


def is_initialized() -> bool:
    return dist.is_initialized()


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else read_rank_env().rank


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else read_rank_env().world_size


def get_local_rank() -> int:
    return read_rank_env().local_rank


def barrier(group: Any = None, **options: Any) -> None:
    if dist.is_initialized():
        dist.barrier(group)


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
