"""Horovod's interface for PyTorch: `import ridgeline.compat.horovod as hvd`, and the script runs on.

Horovod is not released any more and does not build against current torch; scripts written for it are still
everywhere. What they call is here under the same names, over torch's process groups: Horovod's own launcher
and its negotiation among ranks are not needed, since any launcher of ours starts the ranks
(`ridgeline launch`, torchrun, srun, mpirun) and gradients are reduced in an order that all ranks share.
What is not here says so when it is asked for. Called by scripts alone.
"""

from __future__ import annotations

from typing import Any

from ridgeline.compat.horovod.collectives import (
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    reducescatter,
    reducescatter_async,
)
from ridgeline.compat.horovod.job import (
    cross_rank,
    cross_size,
    cuda_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from ridgeline.compat.horovod.ops import (
    Average,
    Compression,
    Handle,
    Max,
    Min,
    Product,
    Sum,
    global_process_set,
    poll,
    synchronize,
)
from ridgeline.compat.horovod.optimizer import DistributedOptimizer
from ridgeline.compat.horovod.state import broadcast_optimizer_state, broadcast_parameters
from ridgeline.errors import UsageError

_ELSEWHERE = {
    "elastic": "`ridgeline launch --restarts` or `ridgeline train` start ranks again, from a checkpoint",
    "join": "deal samples with job.loader of ridgeline.start(), which weighs uneven batches",
    "Adasum": "use hvd.Average and a learning rate by the linear rule",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm, which works on the same ranks",
    "ProcessSet": "use torch.distributed.new_group",
    "add_process_set": "use torch.distributed.new_group",
    "remove_process_set": "use torch.distributed.new_group",
    "sparse_allreduce_async": "make the gradient dense, and use hvd.allreduce_async",
    "start_timeline": "use `ridgeline doctor train.py --trace`",
    "stop_timeline": "use `ridgeline doctor train.py --trace`",
    "run": "start the script with `ridgeline launch -n 4 -- python script.py`",
}


class Missing(UsageError, AttributeError):
    """What Horovod has and this has not; `hasattr` is told so."""


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        raise Missing(f"horovod's {name} is not in ridgeline.compat.horovod; {_ELSEWHERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
]
