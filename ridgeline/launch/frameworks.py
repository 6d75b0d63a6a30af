"""The variables by which a rank of any framework knows who it is: torch, TensorFlow, JAX and Horovod.

`ridgeline launch` gathers the ranks once; each framework has words of its own for the same table, and a
rank gets them all, so that one command starts a script of any of them. Pure: the rank's wrapper has the
table from the hub and adds the result to the command's environment. What is left out, and what Horovod
needs beyond variables, is for `framework_notes` to say, once a job.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from ridgeline.errors import UsageError

MAX_VARIABLE_BYTES = 131_072
"""Longer than this, name and end included, the kernel starts no process with it (MAX_ARG_STRLEN)."""

PORTS_A_RANK = 3
"""How many free ports each rank should report: of rank 0's, one is torch's, one TensorFlow's, one JAX's."""


class Member(Protocol):
    """What has to be known of a rank."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def address(self) -> str:
        """By which the other nodes reach it: an IP address, or a name that resolves everywhere."""

    @property
    def ports(self) -> tuple[int, ...]:
        """Free on its node when it looked, and no other rank's."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """In the order in which it counts them."""


@dataclass(frozen=True)
class World:
    """Every rank of the job, in order, and where they meet."""

    members: Sequence[Member]
    horovod_server: tuple[str, int] | None = None
    """Address and port of a rendezvous server of Horovod's, where somebody runs one."""

    def __post_init__(self) -> None:
        ranks = [member.rank for member in self.members]
        if not ranks or ranks != list(range(len(ranks))):
            raise UsageError(f"a job's ranks should be 0 to n - 1 in order, not {_shorten(ranks)}")
        seen: set[tuple[int, int]] = set()
        for member in self.members:
            place = (member.node_rank, member.local_rank)
            if place in seen:
                raise UsageError(
                    f"rank {member.rank} says that it is local rank {member.local_rank} of node "
                    f"{member.node_rank}, and so does another"
                )
            seen.add(place)
        if not self.members[0].ports:
            raise UsageError(
                f"rank 0 on {self.members[0].host} found no free port to be met at; see "
                "`ss -tan` there for what holds them"
            )

    @property
    def master_addr(self) -> str:
        return self.members[0].address

    @property
    def master_port(self) -> int:
        return self.members[0].ports[0]

    @cached_property
    def local_world_sizes(self) -> Mapping[int, int]:
        """Ranks on each node, by the node's number."""
        return Counter(member.node_rank for member in self.members)

    @cached_property
    def tensorflow_workers(self) -> list[str] | None:
        """Where each rank's server is to listen; None when one has no port for it."""
        free = [self.free_ports(member) for member in self.members]
        if not all(free):
            return None
        return [
            endpoint(member.address, ports[0])
            for member, ports in zip(self.members, free, strict=True)
        ]

    def free_ports(self, member: Member) -> list[int]:
        """Those that are not torch's."""
        return [port for port in member.ports if port != self.master_port]

    def devices(self, member: Member) -> list[int]:
        """The GPUs of a rank, by its own count: one, in turn with the ranks of its node that see the same
        ones; all where it is alone on its node."""
        if self.local_world_sizes[member.node_rank] == 1:
            return list(range(len(member.gpus)))
        same = sorted(
            other.local_rank
            for other in self.members
            if other.node_rank == member.node_rank and other.gpus == member.gpus
        )
        return [same.index(member.local_rank) % len(member.gpus)] if member.gpus else []


def endpoint(address: str, port: int) -> str:
    """
    >>> endpoint("node1", 2000), endpoint("fd00::2", 2000)
    ('node1:2000', '[fd00::2]:2000')
    """
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def framework_variables(
    members: Sequence[Member],
    rank: int,
    environ: Mapping[str, str] | None = None,
    *,
    horovod_server: tuple[str, int] | None = None,
) -> dict[str, str]:
    """What to add to the environment of one rank's command.

    Who a rank is (`RANK`, `TF_CONFIG`, `HOROVOD_RANK` and their like) is always set: what is in `environ`
    of these is another launcher's word for another process. What a user may want otherwise
    (`JAX_COORDINATOR_ADDRESS`, `JAX_LOCAL_DEVICE_IDS`, `HOROVOD_CONTROLLER` ...) is left when it is there.
    """
    world = World(members, horovod_server)
    if not 0 <= rank < len(members):
        raise UsageError(f"there is no rank {rank} among {len(members)} ranks")
    here = environ or {}
    member = members[rank]
    identity = {
        **torch_variables(world, member),
        **tensorflow_variables(world, member),
        **jax_identity(world, member),
        **horovod_identity(world, member),
    }
    choices = {**jax_choices(world, member), **horovod_choices(world)}
    return identity | {name: value for name, value in choices.items() if not here.get(name)}


def torch_variables(world: World, member: Member) -> dict[str, str]:
    """As `torchrun` names them; a group is a node."""
    return {
        "RANK": str(member.rank),
        "WORLD_SIZE": str(len(world.members)),
        "LOCAL_RANK": str(member.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_world_sizes[member.node_rank]),
        "GROUP_RANK": str(member.node_rank),
        "GROUP_WORLD_SIZE": str(len(world.local_world_sizes)),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
    }


def tensorflow_variables(world: World, member: Member) -> dict[str, str]:
    """`TF_CONFIG` for `MultiWorkerMirroredStrategy`: a worker a rank, the first one the chief.

    Every rank carries the whole list, so it grows with the job; where it is too long for a variable it is
    left out. TensorFlow takes all GPUs that it sees: a script with several ranks on a node chooses its own
    with `tf.config.set_visible_devices(gpus[int(os.environ["LOCAL_RANK"])], "GPU")`.
    """
    if world.tensorflow_workers is None:
        return {}
    config = {
        "cluster": {"worker": world.tensorflow_workers},
        "task": {"type": "worker", "index": member.rank},
    }
    text = json.dumps(config, separators=(",", ":"))
    return {"TF_CONFIG": text} if _fits("TF_CONFIG", text) else {}


def _fits(name: str, value: str) -> bool:
    return len(f"{name}={value}".encode()) + 1 <= MAX_VARIABLE_BYTES


def jax_identity(world: World, member: Member) -> dict[str, str]:
    """By which `jax.distributed.initialize()` without arguments finds out who it is.

    JAX has variables for the coordinator and the devices, but none for the number and index of a process
    (0.10.2): these it takes from launchers that it knows, Open MPI before Slurm. So a rank looks to it like
    one of Open MPI's, to which `OMPI_MCA_orte_hnp_uri` belongs as well; that it is there is enough, as the
    address in it is not read while `JAX_COORDINATOR_ADDRESS` is set. MPI itself goes by other variables:
    with these set, a process alone was seen to start MPI, and mpirun to work (Open MPI 4.1.4). Inside a
    shell of `srun --pty`, where Slurm says "process 0 of 1" to every rank, they keep JAX from believing it.
    """
    if jax_coordinator(world) is None:
        return {}
    return {
        "OMPI_COMM_WORLD_RANK": str(member.rank),
        "OMPI_COMM_WORLD_SIZE": str(len(world.members)),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(member.local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(world.local_world_sizes[member.node_rank]),
    }


def jax_coordinator(world: World) -> str | None:
    """Where rank 0 is to run JAX's service: next to torch's, at a port of its own."""
    first = world.members[0]
    ports = world.free_ports(first)
    return endpoint(first.address, ports[1]) if len(ports) > 1 else None


def jax_choices(world: World, member: Member) -> dict[str, str]:
    """The coordinator and the rank's GPUs. These are named also where a rank has all: of a rank of Open MPI
    JAX thinks that it has one."""
    coordinator = jax_coordinator(world)
    if coordinator is None:
        return {}
    # The last is what JAX knows Open MPI's ranks by; mpirun's own value stays, where there is one.
    chosen = {"JAX_COORDINATOR_ADDRESS": coordinator, "OMPI_MCA_orte_hnp_uri": ""}
    devices = world.devices(member)
    if devices:
        chosen["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, devices))
    return chosen


def horovod_identity(world: World, member: Member) -> dict[str, str]:
    """Also where no server is known: without them every rank would take itself for a job of one, and
    train alone without a word."""
    # The ranks that have the same place on their nodes; where nodes differ, not all have one.
    across = [other.node_rank for other in world.members if other.local_rank == member.local_rank]
    return {
        "HOROVOD_RANK": str(member.rank),
        "HOROVOD_SIZE": str(len(world.members)),
        "HOROVOD_LOCAL_RANK": str(member.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_world_sizes[member.node_rank]),
        "HOROVOD_CROSS_RANK": str(sorted(across).index(member.node_rank)),
        "HOROVOD_CROSS_SIZE": str(len(across)),
        "HOROVOD_HOSTNAME": member.host,
    }


def horovod_choices(world: World) -> dict[str, str]:
    """How the ranks meet: by gloo at a rendezvous server, if there is one; alone, gloo needs none. Else it
    is left to Horovod, which means MPI, and works where ranks are started by mpirun or by srun with PMI."""
    if world.horovod_server is None and len(world.members) > 1:
        return {}
    chosen = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    if world.horovod_server is not None:
        address, port = world.horovod_server
        chosen["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = address
        chosen["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
    return chosen


def framework_notes(
    members: Sequence[Member], *, horovod_server: tuple[str, int] | None = None
) -> list[str]:
    """What ranks of this job do not get and why, in a sentence each."""
    world = World(members, horovod_server)
    notes = []
    last = world.members[-1]
    if world.tensorflow_workers is None:
        rank = next(m.rank for m in world.members if not world.free_ports(m))
        notes.append(f"no TF_CONFIG: rank {rank} has no free port for a TensorFlow worker")
    elif not tensorflow_variables(world, last):
        notes.append(
            f"no TF_CONFIG: the list of {len(world.members)} workers is longer than the "
            f"{MAX_VARIABLE_BYTES} bytes that a variable can hold; start TensorFlow with fewer ranks"
        )
    if jax_coordinator(world) is None:
        notes.append("no JAX_COORDINATOR_ADDRESS: rank 0 has no free port left for JAX's service")
    if world.horovod_server is None and len(world.members) > 1:
        notes.append(
            "no HOROVOD_GLOO_RENDEZVOUS_ADDR: there is no rendezvous server, so Horovod needs ranks that "
            "mpirun started, or srun with PMI"
        )
    return notes


def _shorten(numbers: Sequence[int]) -> str:
    text = ", ".join(map(str, numbers[:8]))
    return f"{text} ..." if len(numbers) > 8 else text or "none"
