"""Ranks that no agent has brought together find each other, also where others sit on their ports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest

from ridgeline.errors import RunError
from ridgeline.launch.env import RankEnv
from ridgeline.parallel.rendezvous import candidate_ports, join_store

RANK = """
import torch, torch.distributed as dist
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.parallel.mesh import build_mesh, close_mesh
env = read_rank_env()
mesh = build_mesh(env, Layout.parse("dp=3"), torch.device("cpu"))
total = torch.tensor([float(env.rank + 1)])
dist.all_reduce(total)
print(env.source, env.rank, total.item(), flush=True)
close_mesh(mesh)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def env_of(rank: int, port: int, job: str = "mine") -> RankEnv:
    return RankEnv(rank, 2, rank, 2, "127.0.0.1", port, "Slurm", job=job)


@pytest.fixture
def taken() -> Iterator[int]:
    """A first port with somebody on it who says nothing, and a second with the board of another job."""
    port = free_port()
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", candidate_ports(port)[0]))
        stranger.listen()
        store = join_store(env_of(0, port, "theirs"), timedelta(seconds=30))
        yield port
        del store  # with it goes the port that its board names


def test_ports_that_are_taken_are_passed_over(taken: int) -> None:
    first = join_store(env_of(0, taken), timedelta(seconds=30))
    second = join_store(env_of(1, taken), timedelta(seconds=30))
    first.set("word", "hello")
    assert second.get("word") == b"hello"
    theirs = join_store(env_of(1, taken, "theirs"), timedelta(seconds=30))
    assert not theirs.check(["word"])


def test_a_rank_zero_that_never_comes_is_told() -> None:
    with pytest.raises(
        RunError, match=r"rank 1 did not find rank 0 of Slurm job mine at 127\.0\.0\.1"
    ):
        join_store(env_of(1, free_port()), timedelta(seconds=1))


def test_candidates_are_ports() -> None:
    for first in (1024, 20_000, 65_535):
        ports = candidate_ports(first)
        assert len(set(ports)) == len(ports) == 8
        assert all(1024 <= port <= 65_535 for port in ports)


@pytest.mark.slow
def test_ranks_of_mpiexec_train_together() -> None:
    """Three processes with the variables that MPICH sets, and nothing else."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    processes = []
    for rank in range(3):
        variables = {"PMI_RANK": rank, "PMI_SIZE": 3, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": 3}
        environment = {name: str(value) for name, value in variables.items()}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK],
                env={**kept, "OMP_NUM_THREADS": "1", **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=480)
        assert process.returncode == 0, err
        assert out.split() == ["MPICH", str(rank), "6.0"]
