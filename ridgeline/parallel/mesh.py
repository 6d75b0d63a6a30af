"""Who talks to whom: the device of this rank and the process groups, made in this one place.

`build_mesh` joins the job and returns a `Mesh`; every technique is handed that value, and nothing in
the package asks torch for a global group. Called by `train/setup.py` and by `ridgeline.start`.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ridgeline.errors import UsageError
from ridgeline.launch.env import RankEnv
from ridgeline.layout import Layout

JOIN_TIMEOUT = timedelta(minutes=10)
_DRAIN_S = 0.25


@dataclass(frozen=True)
class Mesh:
    """This rank's device and the group it averages gradients with."""

    env: RankEnv
    layout: Layout
    device: torch.device
    data_group: dist.ProcessGroup | None
    """Ranks that hold the same weights and see different samples; None when this rank is alone."""
    owns_group: bool = False
    """Whether `build_mesh` made torch's default group, so that closing the mesh has to end it."""

    @property
    def data_rank(self) -> int:
        return dist.get_rank(self.data_group) if self.data_group is not None else 0

    @property
    def data_size(self) -> int:
        return dist.get_world_size(self.data_group) if self.data_group is not None else 1

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the job: writes records, owns the terminal."""
        return self.env.rank == 0

    def sum_over_data(self, value: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the data ranks, in place; the tensor itself when there is one."""
        if self.data_group is not None:
            dist.all_reduce(value, group=self.data_group)
        return value


def choose_device(choice: str, env: RankEnv) -> torch.device:
    """The device of this rank for `device: auto|cpu|cuda`."""
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if choice not in ("auto", "cuda"):
        raise UsageError(f"device={choice!r} is not one of auto, cpu, cuda")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0:
        raise UsageError("device=cuda but torch sees no CUDA device here; use device=cpu")
    if env.local_world_size > num_devices:
        raise UsageError(
            f"{env.local_world_size} processes on a node with {num_devices} CUDA device(s); "
            f"use -n {num_devices} or device=cpu"
        )
    return torch.device("cuda", env.local_rank)


def build_mesh(env: RankEnv, layout: Layout, device: torch.device) -> Mesh:
    """Join the other ranks. Every rank calls this once, before anything else distributed."""
    if layout.world_size != env.world_size:
        raise UsageError(
            f"layout {layout} is for {layout.world_size} processes but {env.world_size} were started"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if env.world_size == 1:
        return Mesh(env, layout, device, None)
    joined = dist.is_initialized()
    if not joined:
        cuda = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            rank=env.rank,
            world_size=env.world_size,
            timeout=JOIN_TIMEOUT,
            device_id=device if cuda else None,
        )
    return Mesh(env, layout, device, dist.group.WORLD, owns_group=not joined)


def close_mesh(mesh: Mesh) -> None:
    """Leave the job in order; every rank calls it when its work is done.

    A group that was there before the mesh is the caller's, and stays.
    """
    if mesh.owns_group and dist.is_initialized():
        # A communication thread may still have to clear the last collective's tensors away, for
        # which it needs Python's lock; past the end of the interpreter, asking for it is an abort.
        time.sleep(_DRAIN_S)
        _never_free(mesh.data_group)
        dist.destroy_process_group()


def _never_free(group: dist.ProcessGroup | None) -> None:
    """Keep a group that was left from ever being destroyed, also when the interpreter ends.

    Torch's reducer, when it is the last to hold a group, joins the group's threads without letting
    go of Python's lock, and a thread that still has a finished collective to clear away waits for
    that lock: the rank would hang. Freed at the end of the process, the group can abort it instead.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
