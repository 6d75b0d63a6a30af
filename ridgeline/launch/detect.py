"""Who this process is, from the variables that whatever started it has left: one reader a launcher.

Launchers nest (mpirun in a Slurm job, torchrun in either), and the outer one's variables are still there:
the inner one is asked first. Inside `sbatch`, before any `srun`, Slurm already says rank 0 of n; that is
the script, not a rank. Every value is kept with the variable it came from, which is what
`ridgeline launch env` prints. Called by `env.py`, which holds the rule that nobody else reads the
environment.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.errors import UsageError
from ridgeline.launch.hostlist import (
    expand_counts,
    expand_hosts,
    read_host_lines,
    read_host_pairs,
)

Env = Mapping[str, str]

# Slurm's names for what is no step of tasks: the batch script and the shell of salloc.
_SLURM_NO_STEP = ("4294967290", "4294967291", "4294967292")
_FIRST_PORT, _NUM_PORTS = 20_000, 20_000
_LOOPBACK = "127.0.0.1"
# What tells one job from another on the same nodes, the same on every rank.
_JOB_NAMES = (
    "SLURM_JOB_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "FLUX_JOB_ID",
    "PALS_APID",
    "PBS_JOBID",
    "LSB_JOBID",
    "PMI_JOBID",
)


@dataclass(frozen=True)
class Found:
    """What a launcher said, and in which variables."""

    source: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    nodes: tuple[str, ...] = ()
    """Hosts of the ranks in order; empty where nobody says."""
    said: Mapping[str, str] = field(default_factory=dict)
    """By field, the variable that it was read from."""


class _Reading:
    """Variables of one launcher, with a memory for where each value came from."""

    def __init__(self, env: Env, launcher: str) -> None:
        self.env, self.launcher = env, launcher
        self.said: dict[str, str] = {}

    def number(self, name: str, *variables: str, default: int | None = None) -> int:
        """The first of these variables that is set."""
        for variable in variables:
            if variable in self.env:
                self.said[name] = variable
                return whole_number(self.env, variable)
        if default is not None:
            self.said[name] = "-"
            return default
        raise UsageError(
            f"the environment has variables of {self.launcher} but not {' or '.join(variables)}, so the "
            f"{name.replace('_', ' ')} is not known; start the script with torchrun or `ridgeline train`"
        )

    def found(
        self,
        rank: int,
        world: int,
        local: int,
        local_world: int,
        node: int = 0,
        nodes: tuple[str, ...] = (),
    ) -> Found:
        if not 0 <= rank < world or not 0 <= local < max(local_world, 1):
            values = [f"{v}={self.env[v]}" for v in self.said.values() if v in self.env]
            raise UsageError(
                f"{self.launcher} says rank {rank} of {world}, and {local} of {local_world} on its node "
                f"({', '.join(values)}); that cannot be: start again, with torchrun or `ridgeline train`"
            )
        return Found(self.launcher, rank, world, local, local_world, node, nodes, self.said)


def whole_number(env: Env, name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise UsageError(f"{name}={env[name]!r} in the environment is not a whole number") from None


def _torchrun(env: Env) -> Found | None:
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return None
    read = _Reading(env, "torchrun")
    rank = read.number("rank", "RANK")
    world = read.number("world_size", "WORLD_SIZE")
    # A pod of Kubernetes' PyTorchJob is one process and one node, and has no variable for it.
    in_pod = "KUBERNETES_SERVICE_HOST" in env and "LOCAL_RANK" not in env
    local = read.number("local_rank", "LOCAL_RANK", default=0 if in_pod else rank)
    local_world = read.number(
        "local_world_size", "LOCAL_WORLD_SIZE", default=1 if in_pod else world
    )
    node = read.number("node_rank", "GROUP_RANK", default=rank if in_pod else 0)
    return read.found(rank, world, local, local_world, node)


@dataclass(frozen=True)
class _Names:
    """The variables of a launcher that says it plainly, each the first of these that is set."""

    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    node_rank: tuple[str, ...] = ()
    """Else ranks are taken to fill one node after the other."""
    alone: bool = False
    """Whether older versions leave out what stands for the node, and all ranks are on one then."""


_PLAIN = {
    "jsrun": _Names(
        ("JSM_NAMESPACE_RANK",),
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    "Open MPI": _Names(
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    "Cray PALS": _Names(
        ("PALS_RANKID",),
        ("PMI_SIZE", "PALS_NRANKS"),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
        ("PALS_NODEID",),
    ),
    "MPICH": _Names(
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        alone=True,
    ),
}


def _plain(launcher: str) -> Callable[[Env], Found | None]:
    names = _PLAIN[launcher]

    def reader(env: Env) -> Found | None:
        if names.rank[0] not in env or (names.alone and names.world_size[0] not in env):
            return None
        read = _Reading(env, launcher)
        rank = read.number("rank", *names.rank)
        world = read.number("world_size", *names.world_size)
        local = read.number("local_rank", *names.local_rank, default=rank if names.alone else None)
        local_world = read.number(
            "local_world_size", *names.local_world_size, default=world if names.alone else None
        )
        node = rank // max(local_world, 1)
        if names.node_rank:
            node = read.number("node_rank", *names.node_rank, default=node)
        nodes = _lsf_nodes(env) if launcher == "jsrun" else _nodes(env)
        return read.found(rank, world, local, local_world, node, nodes)

    return reader


def _flux(env: Env) -> Found | None:
    if "FLUX_TASK_RANK" not in env:
        return None
    read = _Reading(env, "Flux")
    rank = read.number("rank", "FLUX_TASK_RANK")
    world = read.number("world_size", "FLUX_JOB_SIZE")
    local = read.number("local_rank", "FLUX_TASK_LOCAL_ID")
    num_nodes = read.number("nodes", "FLUX_JOB_NNODES", default=1)
    # Flux spreads tasks evenly, the first nodes having one more.
    least, more = divmod(world, num_nodes)
    node = rank // (least + 1) if rank < more * (least + 1) else (rank - more) // max(least, 1)
    return read.found(rank, world, local, least + (node < more), node, _nodes(env))


def _slurm(env: Env) -> Found | None:
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    if "SLURM_PROCID" not in env or step is None or step in _SLURM_NO_STEP:
        return None
    read = _Reading(env, "Slurm")
    rank = read.number("rank", "SLURM_PROCID")
    world = read.number("world_size", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    local = read.number("local_rank", "SLURM_LOCALID")
    node = read.number("node_rank", "SLURM_NODEID", default=0)
    counts = None
    for variable in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if variable in env:
            counts = expand_counts(env[variable], variable)
            read.said["local_world_size"] = variable
            break
    if counts is None:
        local_world = read.number("local_world_size", "SLURM_NTASKS_PER_NODE", default=world)
    elif node < len(counts):
        local_world = counts[node]
    else:
        raise UsageError(
            f"Slurm says node {node} (SLURM_NODEID), and {read.said['local_world_size']} counts tasks of "
            f"{len(counts)} nodes"
        )
    return read.found(rank, world, local, local_world, node, _slurm_nodes(env))


def _pmix(env: Env) -> Found | None:
    if "PMIX_RANK" not in env:
        return None
    raise UsageError(
        f"PMIX_RANK={env['PMIX_RANK']} is set, but nothing says how many ranks there are; start with "
        "srun, mpirun or torchrun, or set RANK and WORLD_SIZE"
    )


READERS: dict[str, Callable[[Env], Found | None]] = {
    "torchrun": _torchrun,
    "jsrun": _plain("jsrun"),
    "Open MPI": _plain("Open MPI"),
    "Cray PALS": _plain("Cray PALS"),
    "Flux": _flux,
    "MPICH": _plain("MPICH"),
    "Slurm": _slurm,
    "PMIx": _pmix,
}
"""Inner launchers before outer ones; the first that answers is believed."""


def detect(env: Env) -> Found:
    """Who this process is; one alone where nobody says anything."""
    for reader in READERS.values():
        found = reader(env)
        if found is not None:
            return found
    return Found("single process", 0, 1, 0, 1)


def choose_master(found: Found, env: Env) -> tuple[str, int, dict[str, str]]:
    """Address and port at which rank 0 is met, the same on every rank, and where they are from."""
    if found.world_size == 1 and found.source == "single process":
        return _LOOPBACK, 0, {"master_addr": "one process", "master_port": "-"}
    address, said = env.get("MASTER_ADDR", ""), {"master_addr": "MASTER_ADDR", "master_port": "-"}
    if not address and found.nodes:
        address, said["master_addr"] = found.nodes[0], "the first node"
    elif not address and found.local_world_size >= found.world_size:
        address, said["master_addr"] = _LOOPBACK, "one node"
    elif not address:
        raise UsageError(
            f"{found.source} runs {found.world_size} ranks on several nodes and does not say which; set "
            "MASTER_ADDR to the host of rank 0, or start with `ridgeline launch`"
        )
    if "MASTER_PORT" in env:
        said["master_port"] = "MASTER_PORT"
        return address, whole_number(env, "MASTER_PORT"), said
    if found.source == "torchrun":
        return address, 0, said
    said["master_port"] = f"from {_job_variable(env) or 'the parent process'}"
    return address, _FIRST_PORT + zlib.crc32(name_job(env).encode()) % _NUM_PORTS, said


def name_job(env: Env) -> str:
    """What tells this job from others, the same on every rank."""
    variable = _job_variable(env)
    if variable is None:
        return f"parent {os.getppid()}"  # the ranks of one node were started by one process
    step = env.get("SLURM_STEP_ID")
    return f"{env[variable]}.{step}" if variable == "SLURM_JOB_ID" and step else env[variable]


def _job_variable(env: Env) -> str | None:
    return next((name for name in _JOB_NAMES if env.get(name)), None)


def _nodes(env: Env) -> tuple[str, ...]:
    """Hosts of the job that a launcher runs in, which does not list them itself."""
    for reader in (_slurm_nodes, _lsf_nodes, _pbs_nodes):
        nodes = reader(env)
        if nodes:
            return nodes
    return ()


def _slurm_nodes(env: Env) -> tuple[str, ...]:
    for variable in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(variable):
            return tuple(expand_hosts(env[variable], variable))
    return ()


def _pbs_nodes(env: Env) -> tuple[str, ...]:
    return _hosts_of_file(env, "PBS_NODEFILE")


def _lsf_nodes(env: Env) -> tuple[str, ...]:
    """LSF lists the node that the script runs on first, with one slot; ranks are on the others."""
    hosts = [(host, 1) for host in _hosts_of_file(env, "LSB_DJOB_HOSTFILE")]
    if not hosts and env.get("LSB_MCPU_HOSTS"):
        hosts = read_host_pairs(env["LSB_MCPU_HOSTS"], "LSB_MCPU_HOSTS")
    names = [host for host, _ in hosts]
    launches = len(hosts) > 1 and "JSM_NAMESPACE_RANK" in env
    return tuple(names[1:] if launches else names)


def _hosts_of_file(env: Env, variable: str) -> tuple[str, ...]:
    if not env.get(variable):
        return ()
    try:
        text = Path(env[variable]).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read {variable}={env[variable]!r}, the list of nodes: {error.strerror}"
        ) from error
    return tuple(host for host, _ in read_host_lines(text, variable))
