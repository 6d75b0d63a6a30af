"""A rank that has done its work ends, even when its last collective is still being cleared away."""

from __future__ import annotations

import socket
import subprocess
import sys

# Without switches between threads, the one that clears away never gets ahead of the one that leaves.
PROGRAM = """
import os, sys, torch, torch.distributed as dist
from ridgeline.launch.env import RankEnv
from ridgeline.layout import Layout
from ridgeline.parallel.apply import parallelize
from ridgeline.parallel.mesh import build_mesh, close_mesh
rank, ports = int(sys.argv[1]), sys.argv[2:]
torch.set_num_threads(1)
sys.setswitchinterval(100)
def once(port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    env = RankEnv(rank, 2, rank, 2, "127.0.0.1", int(port), "torchrun")
    mesh = build_mesh(env, Layout(dp=2), torch.device("cpu"))
    model = parallelize(torch.nn.Linear(2, 2), mesh.layout, mesh=mesh)
    model(torch.ones(1, 2)).sum().backward()
    dist.all_gather_object([None, None], "seen", group=mesh.data_group)
    close_mesh(mesh)
for port in ports:
    once(port)
os._exit(7)
"""


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(held.getsockname()[1]) for held in sockets]
    for held in sockets:
        held.close()
    return ports


def test_leaving_right_after_a_collective_never_hangs() -> None:
    ports = free_ports(12)
    command = [sys.executable, "-c", PROGRAM]
    ranks = [subprocess.Popen([*command, str(rank), *ports]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=360) for rank in ranks] == [7, 7]
    finally:
        for rank in ranks:
            rank.kill()
