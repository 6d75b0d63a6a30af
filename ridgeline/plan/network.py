"""Time of communication: rings, trees and levels over the links, or what was measured of them.

A group of ranks is described by how many there are and how many of them share a node, or a rack where the
devices' own links go further. There the ring runs over these links. Between nodes every node's NICs are
shared by the groups that cross it at the same time. Where the machine's own collectives were measured
(`tables.py`), those count. Called by `layer.py` and `time.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from ridgeline.plan.machine import Link, Machine
from ridgeline.plan.tables import TREE, measured_pair_s, measured_s

PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""How often each byte goes around a ring."""

PARTIAL = 0.3
"""What rings that have some but not all devices of a node get of their share of its NICs: such a ring
comes in by one NIC and goes out by another, so each works one way only, and the node's rings, started
together, choose theirs without regard to each other."""


@dataclass(frozen=True)
class Group:
    """Ranks that communicate together."""

    size: int
    per_node: int
    """Members that share a node, or a rack whose devices have links of their own."""
    stride: int = 1
    """How far apart members are."""

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


def group_of(machine: Machine, size: int, stride: int) -> Group:
    """The group of `size` ranks that are `stride` apart in the order of ranks."""
    stride = max(stride, 1)
    return Group(size, max(1, min(size, machine.reach_of(size * stride) // stride)), stride)


def collective_s(machine: Machine, kind: str, num_bytes: float, group: Group) -> float:
    """Seconds of a collective over tensors of so many bytes in all (of the result of a gather)."""
    if group.size <= 1 or num_bytes <= 0:
        return 0.0
    if machine.tables:
        sizes = (group.size, group.per_node)
        found = measured_s(machine.tables, machine.devices_per_node, kind, num_bytes, *sizes)
        if found is not None:
            return found
    return min(algorithms_s(machine, kind, num_bytes, group).values())


def algorithms_s(machine: Machine, kind: str, num_bytes: float, group: Group) -> dict[str, float]:
    """Seconds by each algorithm that a library has for it, of which it takes the best: rings for large
    messages, between nodes trees for small ones, and level by level for whole nodes.

    NCCL 2.28 chooses in the same way (`src/graph/tuning.cc`): a ring of n has 2 (n - 1) steps for an
    all-reduce, a tree twice the logarithm of the nodes and the devices of a node as a chain, at 0.92 of
    the ring's bus bandwidth.
    """
    if kind == "broadcast":
        return {"chain": _broadcast_s(machine, num_bytes, group)}
    found = {"ring": ring_s(machine, kind, num_bytes, group)}
    if group.nodes > 1 and kind == "all_reduce":
        found["tree"] = tree_s(machine, num_bytes, group)
    nodes, rest = divmod(group.per_node, machine.devices_per_node)
    whole = group.per_node > 1 and nodes and not rest and group.size % group.per_node == 0
    if group.nodes > 1 and whole:  # libraries build this for whole nodes only
        found["levels"] = levels_s(machine, kind, num_bytes, group)
    return found


def ring_s(machine: Machine, kind: str, num_bytes: float, group: Group) -> float:
    passes, n = PASSES[kind], group.size
    through = passes * num_bytes * (n - 1) / n / ring_bandwidth(machine, group)
    if group.nodes == 1:
        return through + _start_s(machine.intra, passes, n)
    return through + _start_s(machine.inter, passes, group.nodes)


def tree_s(machine: Machine, num_bytes: float, group: Group) -> float:
    """An all-reduce up a binary tree of nodes and down again; its two halves use links both ways."""
    through = 2.0 * num_bytes / (TREE * ring_bandwidth(machine, group))
    hops = ceil(log2(group.nodes)) * machine.inter.step_s
    chain = (group.per_node - 1) * machine.intra.step_s
    return through + machine.inter.latency_s + 2.0 * (hops + chain)


def levels_s(machine: Machine, kind: str, num_bytes: float, group: Group) -> float:
    """Inside the node, then each device with its peers of the other nodes, then inside again."""
    inner, outer = Group(group.per_node, group.per_node), Group(group.nodes, 1)
    across = collective_s(machine, kind, num_bytes / group.per_node, outer)
    if kind == "all_reduce":
        inside = 2.0 * collective_s(machine, "all_gather", num_bytes, inner)
    else:
        inside = collective_s(machine, kind, num_bytes, inner)
    return across + inside


def _broadcast_s(machine: Machine, num_bytes: float, group: Group) -> float:
    """Pieces go from rank to rank, so that the whole takes little longer than one hop."""
    link, members = (
        (machine.intra, group.size) if group.nodes == 1 else (machine.inter, group.nodes)
    )
    sent = point_to_point_s(machine, num_bytes, group.nodes > 1)
    return sent + link.latency_s + (members - 2) * link.step_s


def ring_bandwidth(machine: Machine, group: Group) -> float:
    """Bytes a second that pass each member of a ring: its own link's, that between boards of its node, or
    its node's NICs' where the ring crosses nodes, of which a group has the share of its members there."""
    intra = machine.intra
    bandwidth = intra.bandwidth
    if 1 < machine.devices_per_board <= (group.per_node - 1) * group.stride:
        bandwidth = machine.board_bandwidth
    inside = bandwidth * (intra.efficiency if group.size > 2 else intra.pair_efficiency)
    if group.nodes == 1:
        return inside
    share = group.per_node / machine.devices_per_node
    across = machine.inter.bandwidth * machine.inter.efficiency * share
    if 1 < group.per_node < machine.devices_per_node == machine.reach:
        across *= PARTIAL
    return min(inside, across) if group.per_node > 1 else across


def _start_s(link: Link, passes: float, members: int) -> float:
    return link.latency_s + passes * (members - 1) * link.step_s


def point_to_point_s(machine: Machine, num_bytes: float, crosses_nodes: bool) -> float:
    """Seconds for one device to send to another; between nodes it has its share of the NICs."""
    if machine.tables:
        devices = machine.devices_per_node
        found = measured_pair_s(machine.tables, devices, num_bytes, crosses_nodes)
        if found is not None:
            return found
    if not crosses_nodes:
        link = machine.intra
        return num_bytes / (link.bandwidth * link.pair_efficiency) + link.step_s
    link = machine.inter
    share = link.bandwidth / machine.devices_per_node
    return num_bytes / (share * link.pair_efficiency) + link.step_s


def flat_ring_s(machine: Machine, kind: str, num_bytes: float, group: Group) -> float:
    """A ring in which every member sends through its own NIC, whether or not its neighbour shares the
    node: what software gets that gathers each tensor's pieces rank by rank."""
    if group.nodes == 1:
        return collective_s(machine, kind, num_bytes, group)
    passes, n = PASSES[kind], group.size
    own = machine.inter.bandwidth / machine.devices_per_node * machine.inter.efficiency
    return passes * num_bytes * (n - 1) / n / own + _start_s(machine.inter, passes, group.nodes)


def exposed_s(machine: Machine, communication_s: float, room_s: float) -> float:
    """What communication adds to so many seconds of computing beside it.

    It takes a share of the device from what computes (`overlap_cost`), for as long as it lasts, and is not
    itself slower for it: the network is what it waits for.

    >>> from ridgeline.plan.machine import load_machine
    >>> machine = load_machine("selene").replace(overlap_cost=0.25)
    >>> exposed_s(machine, 4.0, 10.0), exposed_s(machine, 4.0, 3.5), exposed_s(machine, 4.0, 1.0)
    (1.0, 1.0, 3.0)
    """
    return max(communication_s - room_s, machine.overlap_cost * communication_s)


def ring_attention_s(
    machine: Machine, kv_bytes: float, cp: int, tp: int, attention_s: float
) -> float:
    """Keys and values going around `cp` ranks while blocks are computed: what is not hidden."""
    if cp == 1:
        return 0.0
    step = point_to_point_s(machine, kv_bytes, cp * tp > machine.reach)
    return exposed_s(machine, step, attention_s / cp) * (cp - 1)
