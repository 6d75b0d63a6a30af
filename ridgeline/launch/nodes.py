"""How ranks are started here: the starter for what was asked and for the nodes that there are.

`KINDS` are the words of `--scheduler` and `--on`. Those with a queue take a script (`request.py`); in a job
of theirs, and for those without a queue, this file gives the starter. Called by `ridgeline launch` and
`ridgeline train`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.errors import UsageError, unknown_word
from ridgeline.launch.containers import wrap
from ridgeline.launch.env import ARRAY_INDEX
from ridgeline.launch.hosts import SSH, Host, place_ranks, read_hosts, start_on
from ridgeline.launch.job import Container, Step
from ridgeline.launch.schedulers.contract import Allocation
from ridgeline.launch.schedulers.mpi import step as mpi_step
from ridgeline.launch.schedulers.table import SCHEDULERS, detect_scheduler
from ridgeline.launch.start import LauncherProcess, Spread

WITHOUT_QUEUE = {
    "local": "this machine",
    "mpi": "mpirun or mpiexec, whichever is installed",
    "ssh": "hosts that answer to ssh",
    "ray": "a Ray cluster that is running",
}
KINDS = (*SCHEDULERS, *WITHOUT_QUEUE)


@dataclass(frozen=True)
class Place:
    """What was said about where ranks go."""

    nodes: int | None = None
    per_node: int | None = None
    hosts: str | None = None
    ssh: str | None = None
    bind: str = "auto"
    container: Container | None = None
    cpus_per_rank: int | None = None
    gpus_per_node: int | None = None


def resolve_kind(said: str, place: str, environ: Mapping[str, str] | None = None) -> str:
    """`auto` as what is here; any other word as itself, if it is one."""
    if said == "auto":
        return detect_scheduler(os.environ if environ is None else environ)
    if said not in KINDS:
        raise unknown_word("scheduler", said, ("auto", *KINDS), place)
    return said


def allocation_of(kind: str, environ: Mapping[str, str] | None = None) -> Allocation | None:
    """The nodes of the job around this process, if it is one of this scheduler."""
    if kind not in SCHEDULERS:
        return None
    return SCHEDULERS[kind].inside(os.environ if environ is None else environ)


def job_around(environ: Mapping[str, str] | None = None) -> tuple[str, Allocation]:
    """The scheduler and the nodes of the job that this process runs in."""
    env = os.environ if environ is None else environ
    kind = detect_scheduler(env, which=lambda program: None)
    given = allocation_of(kind, env)
    if given is None:
        raise UsageError(
            "--on nodes is for the nodes of a job, and this is none; start the search in one (sbatch, "
            "salloc, bsub, qsub), or make each trial a job with --on slurm"
        )
    return kind, given


def build_spread(kind: str, place: Place) -> Spread:
    """A starter for any command on these nodes."""
    prefix = wrap(place.container, [], bool(place.gpus_per_node)) if place.container else []
    options: dict[str, Any] = {
        "bind": place.bind,
        "prefix": prefix,
        "cpus_per_rank": place.cpus_per_rank,
        "gpus_per_node": place.gpus_per_node,
    }
    if kind in ("local", "ssh"):
        hosts = _hosts(kind, place)
        ssh = None if kind == "local" else place.ssh or SSH
        per_node = max(host.slots or 1 for host in hosts)
        return Spread(
            kind,
            start_on(hosts, ssh),
            len(hosts),
            per_node,
            [host.name for host in hosts],
            num_ranks=sum(host.slots or 1 for host in hosts),
            **options,
        )
    nodes, per_node = place.nodes or 1, place.per_node or 1
    if kind == "ray":
        from ridgeline.launch.on_ray import start_on_ray

        return Spread(kind, start_on_ray, nodes, per_node, **options)
    names: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()
    index: dict[str, str] = {}
    if kind == "mpi":
        line: Callable[[Step], list[str]] = mpi_step
        if place.hosts:
            hosts = _hosts(kind, place)
            names, nodes = tuple(host.name for host in hosts), len(hosts)
            per_node = _even_slots(hosts)
    else:
        line = SCHEDULERS[kind].step
        given = allocation_of(kind)
        if given is not None:
            _check_room(kind, given, place)
            nodes = place.nodes or given.num_nodes
            expected = given.nodes if nodes == len(given.nodes) else ()
            index = {ARRAY_INDEX: given.array_index} if given.array_index else {}

    def start(step: Step) -> LauncherProcess:
        step = replace(step, variables={**index, **step.variables})
        return LauncherProcess(line(step), step.variables)

    return Spread(kind, start, nodes, per_node, names, expected=expected, **options)


def _hosts(kind: str, place: Place) -> list[Host]:
    if kind == "local":
        if (place.nodes or 1) > 1:
            raise UsageError(
                f"-N {place.nodes} on this machine alone; name others with --scheduler ssh --hosts"
            )
        return [Host(socket.gethostname(), place.per_node or 1)]
    if not place.hosts:
        raise UsageError(
            f"--scheduler {kind} needs --hosts, e.g. --hosts node1,node2 or a file with a host a line"
        )
    return place_ranks(read_hosts(place.hosts, "--hosts"), place.nodes, place.per_node)


def _even_slots(hosts: list[Host]) -> int:
    """Launchers of MPI are told one number of ranks for all hosts."""
    slots = {host.slots or 1 for host in hosts}
    if len(slots) > 1:
        shown = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UsageError(
            f"--hosts {shown} has other numbers of ranks on each, and mpi takes one; write -n "
            f"{min(slots)}, or use --scheduler ssh"
        )
    return slots.pop()


def _check_room(kind: str, given: Allocation, place: Place) -> None:
    if place.nodes is not None and place.nodes > given.num_nodes:
        raise UsageError(
            f"-N {place.nodes} asks for more nodes than the {given.num_nodes} of {kind} job {given.job_id}"
        )
