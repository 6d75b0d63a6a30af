"""Where ranks find each other when no agent has made a place for it: under srun, mpirun and the like.

Every rank derives the same few ports from the name of the job. At the first that is free rank 0 puts up a
board: whoever connects is told the job's name and the port of its store. The others knock at one port after
another until a board has their job's name on it, so that two jobs on one node, or a service that happens to
sit there, do no harm. Called by `mesh.py`.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from contextlib import closing
from datetime import timedelta

import torch.distributed as dist

from ridgeline.errors import RunError
from ridgeline.launch.env import RankEnv

_GREETING = "ridgeline"
_NUM_PORTS = 8
_STRIDE = 101
_LOWEST, _HIGHEST = 1024, 65535
# For one knock: somebody else's service may take the call and say nothing.
_KNOCK_S = 3.0
_PAUSE_S = 0.2
_MAX_LINE = 4096


def candidate_ports(first: int) -> list[int]:
    """The ports that ranks of a job try, in this order."""
    span = _HIGHEST - _LOWEST + 1
    return [_LOWEST + (first - _LOWEST + step * _STRIDE) % span for step in range(_NUM_PORTS)]


def join_store(env: RankEnv, timeout: timedelta) -> dist.Store:
    """The store of this job, opened by rank 0 and found by the others."""
    if env.rank == 0:
        return _open(env, timeout)
    return _find(env, timeout)


def _open(env: RankEnv, timeout: timedelta) -> dist.Store:
    store = dist.TCPStore(
        env.master_addr, 0, is_master=True, timeout=timeout, wait_for_workers=False
    )
    problem: OSError | None = None
    for port in candidate_ports(env.master_port):
        board = socket.socket(_family(env.master_addr))
        board.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            board.bind(("", port))
            board.listen()
        except OSError as error:
            problem = error
            board.close()
            continue
        words = f"{_GREETING} {store.port} {env.job}\n".encode()
        threading.Thread(
            target=_answer, args=(board, words), name="ridgeline-board", daemon=True
        ).start()
        return store
    ports = ", ".join(map(str, candidate_ports(env.master_port)))
    raise RunError(
        f"rank 0 could open none of the ports {ports}: {problem}; set MASTER_PORT to a free one, the "
        "same for every rank"
    )


def _family(address: str) -> socket.AddressFamily:
    """The kind of address a name stands for."""
    return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]


def _answer(board: socket.socket, words: bytes) -> None:
    """For as long as the process lives: a rank that was started late comes late."""
    while True:
        try:
            caller, _ = board.accept()
            with closing(caller):
                caller.settimeout(_KNOCK_S)
                caller.sendall(words)
        except OSError:
            time.sleep(_PAUSE_S)


def _find(env: RankEnv, timeout: timedelta) -> dist.Store:
    until = time.monotonic() + timeout.total_seconds()
    heard: dict[int, str] = {}
    for port in itertools.cycle(candidate_ports(env.master_port)):
        store_port, answer = _knock(env, port)
        if store_port is not None:
            return dist.TCPStore(
                env.master_addr,
                store_port,
                is_master=False,
                timeout=timeout,
                wait_for_workers=False,
            )
        heard[port] = answer
        if time.monotonic() > until:
            break
        if port == candidate_ports(env.master_port)[-1]:
            time.sleep(_PAUSE_S)
    told = "; ".join(f"{port}: {answer}" for port, answer in heard.items())
    raise RunError(
        f"rank {env.rank} did not find rank 0 of {env.source} job {env.job} at {env.master_addr} within "
        f"{timeout.total_seconds():.0f} s ({told}); check that the name leads to rank 0's host and that "
        "the nodes reach each other, or set MASTER_ADDR and MASTER_PORT"
    )


def _knock(env: RankEnv, port: int) -> tuple[int | None, str]:
    """The port of the store that the board at `port` names, or what was there instead."""
    try:
        with socket.create_connection((env.master_addr, port), timeout=_KNOCK_S) as call:
            call.settimeout(_KNOCK_S)
            line = call.makefile("rb").readline(_MAX_LINE).decode(errors="replace").rstrip("\n")
    except OSError as error:
        return None, str(error) or type(error).__name__
    greeting, _, rest = line.partition(" ")
    store_port, _, job = rest.partition(" ")
    if greeting != _GREETING or not store_port.isdigit():
        return None, "something else"
    return (int(store_port), "") if job == env.job else (None, f"job {job}")
