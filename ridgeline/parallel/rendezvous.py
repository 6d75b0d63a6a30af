"""Where ranks find each other when no agent has made a place for it: under srun, mpirun and the like.

Every rank derives the same few ports from the name of the job. Rank 0 opens a store at the first that is
free and leaves the job's name in it; the others knock at one port after another until a store answers with
that name, so that two jobs on one node, or a service that happens to sit there, do no harm. Called by
`mesh.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from ridgeline.errors import RunError
from ridgeline.launch.env import RankEnv

_NAME = "ridgeline-job"
_NUM_PORTS = 8
_STRIDE = 101
_LOWEST, _HIGHEST = 1024, 65535
# For one knock; a port with nobody behind it refuses at once.
_KNOCK = timedelta(seconds=5)
_PAUSE_S = 0.2


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
    problem: Exception | None = None
    for port in candidate_ports(env.master_port):
        try:
            store = dist.TCPStore(
                env.master_addr, port, is_master=True, timeout=timeout, wait_for_workers=False
            )
        except (RuntimeError, OSError) as error:  # torch's network errors are RuntimeErrors
            problem = error
            continue
        store.set(_NAME, env.job)
        return store
    ports = ", ".join(map(str, candidate_ports(env.master_port)))
    raise RunError(
        f"rank 0 could open none of the ports {ports} on {env.master_addr}: {_line(problem)}; set "
        "MASTER_PORT to a free one, the same for every rank"
    )


def _find(env: RankEnv, timeout: timedelta) -> dist.Store:
    until = time.monotonic() + timeout.total_seconds()
    heard: dict[int, str] = {}
    for port in _in_turn(candidate_ports(env.master_port)):
        store, answer = _knock(env, port)
        if store is not None:
            store.set_timeout(timeout)
            return store
        heard[port] = answer
        if time.monotonic() > until:
            break
        time.sleep(_PAUSE_S)
    told = "; ".join(f"{port}: {answer}" for port, answer in heard.items())
    raise RunError(
        f"rank {env.rank} did not find rank 0 of {env.source} job {env.job} at {env.master_addr} within "
        f"{timeout.total_seconds():.0f} s ({told}); check that the name leads to rank 0's host and that "
        "the nodes reach each other, or set MASTER_ADDR and MASTER_PORT"
    )


def _knock(env: RankEnv, port: int) -> tuple[dist.Store | None, str]:
    try:
        store = dist.TCPStore(
            env.master_addr, port, is_master=False, timeout=_KNOCK, wait_for_workers=False
        )
        if not store.check([_NAME]):
            return None, "another's store, or not ready yet"
        name = store.get(_NAME).decode()
    except (RuntimeError, OSError) as error:
        return None, _line(error)
    return (store, "") if name == env.job else (None, f"the store of job {name}")


def _in_turn(ports: list[int]) -> Iterator[int]:
    while True:
        yield from ports


def _line(error: Exception | None) -> str:
    return str(error).strip().splitlines()[0][:120] if error else "no answer"
