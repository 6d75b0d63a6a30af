"""Which rank this is, in Horovod's words. Its interface has one job a process, so this keeps one."""

from __future__ import annotations

import atexit
import sys
from typing import Any

import torch
import torch.distributed as dist

from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.parallel.mesh import Mesh, build_mesh, choose_device, close_mesh
from ridgeline.train.uncaught import install_sentences

_job: list[Mesh] = []
"""The mesh of `init`; empty before it and after `shutdown`."""


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the ranks that a launcher has started; a second call does nothing."""
    if comm is not None or process_sets is not None:
        raise UsageError(
            "hvd.init(comm=..., process_sets=...) is not in ridgeline.compat.horovod; call hvd.init(), and "
            "torch.distributed.new_group for groups of ranks"
        )
    if _job:
        return
    sentences = install_sentences()
    env = read_rank_env()
    mesh = build_mesh(env, Layout(dp=env.world_size), choose_device("auto", env))
    sentences.come_first()
    _job.append(mesh)
    atexit.register(_leave)


def _leave() -> None:
    """After a failure the others are past waiting."""
    if getattr(sys, "last_value", None) is None:
        shutdown()


def shutdown() -> None:
    while _job:
        close_mesh(_job.pop())


def is_initialized() -> bool:
    return bool(_job)


def the_mesh() -> Mesh:
    if not _job:
        raise UsageError(
            "a function of horovod was called before hvd.init(); call hvd.init() first"
        )
    return _job[0]


def the_group() -> dist.ProcessGroup | None:
    """All ranks; None for one."""
    return the_mesh().world_group


def rank() -> int:
    return the_mesh().env.rank


def size() -> int:
    return the_mesh().env.world_size


def local_rank() -> int:
    return the_mesh().env.local_rank


def local_size() -> int:
    return the_mesh().env.local_world_size


def cross_rank() -> int:
    """This node's number."""
    return the_mesh().env.node_rank


def cross_size() -> int:
    nodes = the_mesh().env.nodes
    return len(set(nodes)) if nodes else -(-size() // local_size())


def is_homogeneous() -> bool:
    return size() % local_size() == 0


def nccl_built() -> bool:
    return dist.is_nccl_available()


def gloo_built() -> bool:
    return dist.is_gloo_available()


gloo_enabled = gloo_built


def mpi_built() -> bool:
    return False  # mpirun can start the ranks; what they send does not go through MPI


mpi_enabled = mpi_built
mpi_threads_supported = mpi_built


def cuda_built() -> bool:
    return torch.version.cuda is not None


def rocm_built() -> bool:
    return torch.version.hip is not None
