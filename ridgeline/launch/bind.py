"""Which cores, memory, GPU and NIC each rank of a node has for itself, and how it is held to them.

A rank's GPU decides where it runs: on cores of the memory node that the GPU hangs on, with memory from
there. Affinity and memory policy pass on to every process that is started later, so the rank's data workers
are held as well. `plan_` functions are pure; `apply_binding` acts on the calling thread. Called by the
rank's wrapper before it starts the command. MPI launchers bind through hwloc, and `numactl` does by hand;
neither divides a node among its ranks by their GPUs, and many nodes have neither installed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ridgeline.errors import unknown_word
from ridgeline.launch.env import RankEnv, bind_mode, cuda_visible, keep_binding
from ridgeline.launch.topology import (
    UNKNOWN_NODE,
    Core,
    Gpu,
    Nic,
    Topology,
    View,
    read_topology,
    show_ranges,
)

MODES = {
    "auto": "bind where it can gain something: several memory nodes, or a GPU",
    "cores": "bind always",
    "none": "leave affinity and memory as they are",
}

# Best first. What comes later is not looked at while there is something better.
_KINDS = ("infiniband", "slingshot", "roce", "ethernet")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261, "s390x": 270}
_MPOL_PREFERRED, _MPOL_PREFERRED_MANY = 1, 5


@dataclass(frozen=True)
class Binding:
    """What one rank of a node is given."""

    local_rank: int
    cores: tuple[tuple[int, ...], ...] = ()
    """Physical cores, each with its hardware threads; empty: affinity is left alone."""
    memory_nodes: tuple[int, ...] = ()
    """Where memory is to come from as long as there is some; empty: left alone."""
    gpu: Gpu | None = None
    nic: Nic | None = None
    num_threads: int = 1
    """How many threads can run at once without getting in each other's way or in another rank's."""
    shared: bool = False
    """Whether other ranks have the same cores, because there are more ranks than cores."""
    ucx_device: str = ""

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core)

    def to_record(self) -> dict[str, Any]:
        """For `env.json`."""
        return {
            "local_rank": self.local_rank,
            "cores": show_ranges(self.cpus),
            "num_cores": len(self.cores),
            "memory_nodes": list(self.memory_nodes),
            "gpu": self.gpu.address or self.gpu.name if self.gpu else None,
            "nic": self.nic.name if self.nic else None,
            "num_threads": self.num_threads,
            "shared": self.shared,
        }


@dataclass(frozen=True)
class Applied:
    """What became of a binding: `set`, `left` (nothing was asked) or `refused: why`."""

    cores: str
    memory: str


def choose_bindings(
    topology: Topology, ranks: int | Sequence[View], mode: str = "auto"
) -> list[Binding]:
    """What each rank of this node gets, by local rank, in one of `MODES`.

    `ranks` is their number where all see the same cores and GPUs, else what each one sees.
    """
    if mode not in MODES:
        raise unknown_word("mode", mode, MODES, "--bind")
    views = _views(topology, ranks)
    if mode == "cores" or (mode == "auto" and _gains(topology, views)):
        return plan_binding(topology, views)
    return [
        Binding(rank, gpu=_gpu_of(topology, views, rank), num_threads=threads)
        for rank, threads in enumerate(_unbound_threads(topology, views))
    ]


def _gains(topology: Topology, views: Sequence[View]) -> bool:
    """The same answer on every rank of the node, so from what all of them see."""
    seen = {cpu for view in views for cpu in view.cpus}
    nodes = {core.node for core in topology.cores if seen & set(core.threads)}
    return len(nodes) > 1 or any(view.gpus for view in views)


def plan_binding(topology: Topology, ranks: int | Sequence[View]) -> list[Binding]:
    """Cores, memory, GPU and NIC of each rank of this node, by local rank.

    Ranks that see the same cores divide them; a rank that the scheduler gave cores of its own keeps all of
    those. No two ranks share a physical core while there are as many cores as ranks; where there are fewer,
    ranks are held to their memory node only.
    """
    views = _views(topology, ranks)
    gpus = [_gpu_of(topology, views, rank) for rank in range(len(views))]
    bindings = [Binding(rank, gpu=gpu) for rank, gpu in enumerate(gpus)]
    for cpus in dict.fromkeys(view.cpus for view in views):
        group = [rank for rank, view in enumerate(views) if view.cpus == cpus]
        cores = _cores_of(topology, cpus)
        if not cores:
            continue
        wanted = {rank: _node_of(gpus[rank]) for rank in group}
        if len(group) == 1 and len(views) > 1:
            bindings[group[0]] = _keep(topology, bindings[group[0]], cores)
            continue
        for rank, placed in _divide(topology, cores, wanted).items():
            bindings[rank] = replace(placed, local_rank=rank, gpu=gpus[rank])
    bindings = _limit_threads(topology, bindings)
    return _with_nics(topology, bindings)


def _views(topology: Topology, ranks: int | Sequence[View]) -> list[View]:
    return [topology.view()] * ranks if isinstance(ranks, int) else list(ranks)


def _gpu_of(topology: Topology, views: Sequence[View], rank: int) -> Gpu | None:
    """As training scripts choose: the device of the local rank, among those that are to be seen."""
    seen = views[rank].gpus
    if not seen:
        return None
    place = [other for other, view in enumerate(views) if view.gpus == seen].index(rank) % len(seen)
    if seen == tuple(gpu.address for gpu in topology.gpus):
        return topology.gpus[place]
    known = {gpu.address: gpu for gpu in topology.installed}
    return known.get(seen[place], Gpu(seen[place], seen[place]))


def _node_of(gpu: Gpu | None) -> int | None:
    return gpu.node if gpu is not None else None


def _cores_of(topology: Topology, cpus: tuple[int, ...]) -> list[Core]:
    """Physical cores for these hardware threads; ones that nothing is known of stand alone."""
    wanted = set(cpus)
    cores = []
    for core in topology.cores:
        threads = tuple(cpu for cpu in core.threads if cpu in wanted)
        if threads:
            cores.append(replace(core, threads=threads))
    missing = wanted - {cpu for core in cores for cpu in core.threads}
    node = topology.nodes[0].number
    return cores + [Core((cpu,), node, 0) for cpu in sorted(missing)]


def _keep(topology: Topology, binding: Binding, cores: list[Core]) -> Binding:
    """All cores that the scheduler gave to this rank alone, with memory near the GPU or else near them."""
    nodes = {core.node for core in cores}
    near = nodes & {_node_of(binding.gpu)} or nodes
    return replace(
        binding,
        cores=tuple(core.threads for core in cores),
        memory_nodes=_memory(topology, near),
        num_threads=len(cores),
    )


def _memory(topology: Topology, nodes: set[int]) -> tuple[int, ...]:
    """Those of the nodes that have memory this job may use."""
    usable = {node.number for node in topology.nodes if node.usable} - {UNKNOWN_NODE}
    return tuple(sorted(nodes & usable))


def _divide(
    topology: Topology, cores: list[Core], wanted: dict[int, int | None]
) -> dict[int, Binding]:
    """Cores that several ranks have together, divided among them; `wanted`: the node of each rank's GPU."""
    by_node: dict[int, list[Core]] = {}
    for core in cores:
        by_node.setdefault(core.node, []).append(core)
    homes = _place(topology, by_node, wanted)
    lent = _lend_idle(topology, by_node, homes, wanted)
    planned = {}
    for node, members in homes.items():
        near_shares = split_evenly(by_node[node], len(members))
        # Whoever got less of the near ones gets more of the others.
        far_shares = split_evenly(lent[node], len(members))[::-1]
        shares = [a + b for a, b in zip(near_shares, far_shares, strict=True)]
        shared = not all(shares)
        for rank, share in zip(members, shares, strict=True):
            mine = by_node[node] + lent[node] if shared else share
            near = {node} if wanted[rank] is not None else {core.node for core in mine}
            planned[rank] = Binding(
                rank,
                cores=tuple(core.threads for core in mine),
                memory_nodes=_memory(topology, near),
                num_threads=max(1, len(mine) // len(members)) if shared else len(mine),
                shared=shared,
            )
    return planned


def split_evenly(things: list[Core], parts: int) -> list[list[Core]]:
    """In order, the first ones with one more: 7 for 3 are 3, 2, 2."""
    least, more = divmod(len(things), parts)
    shares, start = [], 0
    for part in range(parts):
        end = start + least + (part < more)
        shares.append(things[start:end])
        start = end
    return shares


def _place(
    topology: Topology, by_node: dict[int, list[Core]], wanted: dict[int, int | None]
) -> dict[int, list[int]]:
    """The memory node of each rank: that of its GPU, or the nearest one with cores left for it."""
    homes: dict[int, list[int]] = {node: [] for node in by_node}
    enough = sum(len(cores) for cores in by_node.values()) >= len(wanted)
    for rank, goal in wanted.items():
        if goal is None:
            continue
        room = [
            node for node, cores in by_node.items() if not enough or len(homes[node]) < len(cores)
        ]
        homes[min(room, key=lambda node: (_distance(topology, goal, node), node))].append(rank)
    free = [rank for rank, goal in wanted.items() if goal is None]
    added = Counter[int]()
    for _ in free:
        added[_roomiest(by_node, homes, added)] += 1
    # Neighbours stay together: node by node, in order of rank.
    for node in sorted(added):
        homes[node] += free[: added[node]]
        free = free[added[node] :]
    return {node: sorted(ranks) for node, ranks in homes.items() if ranks}


def _roomiest(
    by_node: dict[int, list[Core]], homes: dict[int, list[int]], added: Counter[int]
) -> int:
    """Where one more rank would have most cores: which socket first, then which node of it."""
    cores_of, ranks_of = Counter[int](), Counter[int]()
    for node, cores in by_node.items():
        cores_of[cores[0].socket] += len(cores)
        ranks_of[cores[0].socket] += len(homes[node]) + added[node]

    def room(node: int) -> tuple[Fraction, Fraction, int]:
        socket = by_node[node][0].socket
        num_ranks = len(homes[node]) + added[node]
        return (
            Fraction(cores_of[socket], ranks_of[socket] + 1),
            Fraction(len(by_node[node]), num_ranks + 1),
            -node,
        )

    return max(by_node, key=room)


def _lend_idle(
    topology: Topology,
    by_node: dict[int, list[Core]],
    homes: dict[int, list[int]],
    wanted: dict[int, int | None],
) -> dict[int, list[Core]]:
    """Cores of nodes where no rank lives, for the ranks nearest to them.

    Within a socket always. From another socket to ranks without a GPU, which need cores more than
    nearness, and to ranks that would otherwise have less than half of an even share.
    """
    lent: dict[int, list[Core]] = {node: [] for node in homes}
    even = Fraction(sum(len(cores) for cores in by_node.values()), len(wanted))

    def share(node: int) -> Fraction:
        return Fraction(len(by_node[node]) + len(lent[node]), len(homes[node]))

    def socket(node: int) -> int:
        return by_node[node][0].socket

    def may_cross(node: int) -> bool:
        return share(node) < even / 2 or all(wanted[rank] is None for rank in homes[node])

    idle = [node for node in sorted(by_node) if node not in homes]
    same = [node for node in idle if any(socket(home) == socket(node) for home in homes)]
    for node in same + [node for node in idle if node not in same]:
        takers = [home for home in homes if socket(home) == socket(node)]
        takers = takers or [home for home in homes if may_cross(home)]
        if takers:
            near = min(
                takers, key=lambda home: (_distance(topology, node, home), share(home), home)
            )
            lent[near] += by_node[node]
    return lent


def _distance(topology: Topology, start: int, end: int) -> int:
    """Between memory nodes; unknown ones are far."""
    if start == end:
        return 0
    for node in topology.nodes:
        if node.number == start:
            return dict(node.distances).get(end, 1000)
    return 1000


def _unbound_threads(topology: Topology, views: Sequence[View]) -> list[int]:
    """Cores for each rank where nobody is bound: an even part of those it sees with others."""
    sharing = Counter(view.cpus for view in views)
    threads = []
    for view in views:
        num = len(_cores_of(topology, view.cpus)) // sharing[view.cpus]
        threads.append(_within_quota(topology, num, len(views)))
    return threads


def _limit_threads(topology: Topology, bindings: list[Binding]) -> list[Binding]:
    return [
        replace(binding, num_threads=_within_quota(topology, binding.num_threads, len(bindings)))
        for binding in bindings
    ]


def _within_quota(topology: Topology, num_threads: int, num_ranks: int) -> int:
    """A cgroup may grant less time than there are cores; threads beyond that would only be stopped."""
    if topology.quota is not None:
        num_threads = min(num_threads, int(topology.quota / num_ranks))
    return max(1, num_threads)


def _with_nics(topology: Topology, bindings: list[Binding]) -> list[Binding]:
    """Each rank with the NIC nearest to it; ranks that have several equally near take turns."""
    kinds = {nic.kind for nic in topology.nics}
    best = next((kind for kind in _KINDS if kind in kinds), "")
    nics = [nic for nic in topology.nics if nic.kind == best]
    fastest = max((nic.gbit_per_s or 0 for nic in nics), default=0)
    nics = [nic for nic in nics if (nic.gbit_per_s or 0) * 2 >= fastest]
    one_subnet = len({nic.subnet for nic in nics}) == 1
    turns = Counter[tuple[str, ...]]()
    placed = []
    for binding in bindings:
        nearness = [_nearness(binding, nic) for nic in nics]
        near = [nic for nic, value in zip(nics, nearness, strict=True) if value == max(nearness)]
        if not near:
            placed.append(binding)
            continue
        names = tuple(nic.name for nic in near)
        nic = near[turns[names] % len(near)]
        turns[names] += 1
        ucx = f"{nic.name}:{nic.port}" if nic.kind == "infiniband" and one_subnet else ""
        placed.append(replace(binding, nic=nic, ucx_device=ucx))
    return placed


def _nearness(binding: Binding, nic: Nic) -> tuple[int, bool]:
    """How far down the PCI tree the way to the NIC is that to the GPU; then whether memory is common."""
    gpu = binding.gpu
    depth = 0
    for ours, theirs in zip(gpu.path if gpu else (), nic.path, strict=False):
        if ours != theirs:
            break
        depth += 1
    node = _node_of(gpu)
    homes = binding.memory_nodes if node is None else (node,)
    return depth, nic.node in homes


def apply_binding(binding: Binding) -> Applied:
    """Hold the calling thread, and every process it starts from now on, to a binding.

    What the system refuses (a sandbox, a kernel without memory nodes) is told and no error: the rank then
    runs as it would have run without.
    """
    cores, memory = "left", "left"
    if binding.cores:
        try:
            os.sched_setaffinity(0, binding.cpus)
            cores = "set"
        except (OSError, AttributeError) as error:
            cores = f"refused: {_why(error)}"
    if binding.memory_nodes:
        try:
            _prefer_memory(binding.memory_nodes)
            memory = "set"
        except OSError as error:
            memory = f"refused: {_why(error)}"
    return Applied(cores, memory)


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "not on this system"


def _prefer_memory(nodes: Sequence[int]) -> None:
    """Preferred, not bound: a node that is full is no reason for a process to be killed."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None or platform.system() != "Linux":
        raise OSError(errno.ENOSYS, f"no memory policy on {platform.system()} {platform.machine()}")
    try:
        _set_mempolicy(number, _MPOL_PREFERRED_MANY, nodes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _set_mempolicy(number, _MPOL_PREFERRED, nodes[:1])  # before Linux 5.15


def _set_mempolicy(number: int, mode: int, nodes: Sequence[int]) -> None:
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    words = max(nodes) // bits + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // bits] |= 1 << (node % bits)
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel counts one bit less than it is told.
    size = ctypes.c_ulong(words * bits + 1)
    if libc.syscall(ctypes.c_long(number), ctypes.c_int(mode), ctypes.byref(mask), size) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def binding_variables(binding: Binding, environ_has: Container[str] = ()) -> dict[str, str]:
    """What libraries in the rank have to be told, less what the user has set already.

    - `OMP_NUM_THREADS`: the rank's physical cores. Without it every rank starts a thread for each core of
      the node.
    - `UCX_NET_DEVICES`: the nearest InfiniBand port, where all ports are in one subnet and so reach each
      other. UCX (in MPI) chooses by speed and may take a port at the other socket. With RoCE, and with
      subnets apart, a port may not reach the peer's: nothing is said.
    - Nothing for NCCL: it reads the PCI tree itself and takes the nearest NIC, and wants every rank of a
      node to see all of them, for rings that enter by one and leave by another; `NCCL_IB_HCA` that differs
      from rank to rank makes its search fail (its maintainers, NVIDIA/nccl issue 1478). It keeps its own
      threads inside the affinity that is set here.
    - Nothing for gloo: it takes the interface that the host's name resolves to, which is not a matter of
      what is near.
    """
    wanted = {"OMP_NUM_THREADS": str(binding.num_threads)}
    if binding.ucx_device:
        wanted["UCX_NET_DEVICES"] = binding.ucx_device
    return {name: value for name, value in wanted.items() if name not in environ_has}


def show_bindings(bindings: Sequence[Binding]) -> str:
    """The map of a node as a table.

    >>> print(show_bindings([Binding(0, ((0, 4), (1, 5)), (0,), num_threads=2)]))
    rank  cores  hardware threads  memory  GPU  NIC  threads
       0      2           0-1,4-5       0    -    -        2
    """
    rows = [["rank", "cores", "hardware threads", "memory", "GPU", "NIC", "threads"]]
    for binding in bindings:
        gpu = binding.gpu
        place = f" {gpu.address}" if gpu is not None and gpu.address not in ("", gpu.name) else ""
        rows.append(
            [
                str(binding.local_rank),
                f"{len(binding.cores)}{' shared' if binding.shared else ''}"
                if binding.cores
                else "any",
                show_ranges(binding.cpus) or "any",
                show_ranges(binding.memory_nodes) or "any",
                f"{gpu.name}{place}" if gpu is not None else "-",
                binding.nic.name if binding.nic is not None else "-",
                str(binding.num_threads),
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Bound:
    """What became of one rank's place on its node, and the map of all of them."""

    mine: Binding
    node: tuple[Binding, ...]
    applied: Applied

    @property
    def held(self) -> bool:
        return self.applied.cores == "set" or self.applied.memory == "set"

    def to_record(self) -> dict[str, Any]:
        """For `env.json`."""
        return {
            "cores": self.applied.cores,
            "memory": self.applied.memory,
            "map": [binding.to_record() for binding in self.node],
        }


def bind_as_told(env: RankEnv) -> Bound | None:
    """As whoever started this rank has asked for, before torch counts the cores; in a job the rank's
    wrapper has done it."""
    mode = bind_mode()
    if mode is None:
        return None
    topology = read_topology(visible=cuda_visible())
    bound = bind_rank(mode, topology, env.local_rank, env.local_world_size)
    keep_binding(bound.to_record())
    return bound


def bind_rank(mode: str, topology: Topology, local_rank: int, ranks: int | Sequence[View]) -> Bound:
    """Hold this process to its share of the node; `ranks` as in `choose_bindings`."""
    bindings = choose_bindings(topology, ranks, mode)
    mine = bindings[local_rank]
    return Bound(mine, tuple(bindings), apply_binding(mine))
