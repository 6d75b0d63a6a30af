"""Collectives as they were measured, and what follows for sizes and groups that were not.

Between two measured sizes the logarithm of the time is linear in that of the size. To a group of another
size a time is carried over by the algorithm's steps: a ring of n sends n - 1 pieces of an n-th each, so a
piece that takes as long there takes as long here. Inside a node and between nodes have tables of their own;
groups that span both are composed of them, level by level, where they were not measured themselves. Made by
`own_machine.py`, used by `network.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PAIR: Final = "pair"
PAIRS: Final = "pairs_at_once"
TREE: Final = 0.92
"""What a double binary tree reaches of a ring's bus bandwidth: what NCCL's own tuning reckons with."""


@dataclass(frozen=True)
class Table:
    """Seconds by size of one collective on one kind of group."""

    kind: str
    size: int
    """Ranks of a group."""
    per_node: int
    """Of them, those that share a node."""
    num_groups: int
    """Groups of a node that did the same at the same time."""
    points: tuple[tuple[float, float], ...]
    """Bytes and seconds, by size."""
    backend: str = "nccl"

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)

    def seconds(self, num_bytes: float) -> float:
        """Below the smallest measured size, what that takes: the start; above the largest, the rate of
        the last bytes."""
        points = self.points
        if num_bytes <= points[0][0] or len(points) == 1:
            # One size says nothing of the start, and is taken for all rate above it.
            return points[0][1] * max(1.0, num_bytes / points[0][0])
        if num_bytes >= points[-1][0]:
            (b0, t0), (b1, t1) = points[-2:]
            rate = max((t1 - t0) / (b1 - b0), 0.5 * t1 / b1)
            return t1 + (num_bytes - b1) * rate
        place = next(i for i in range(1, len(points)) if points[i][0] >= num_bytes)
        (b0, t0), (b1, t1) = points[place - 1 : place + 1]
        way = math.log(num_bytes / b0) / math.log(b1 / b0)
        return float(math.exp((1 - way) * math.log(t0) + way * math.log(t1)))


def carried_s(table: Table, num_bytes: float, size: int) -> float:
    """The same collective on a group of another size, with as many members a node."""
    if size == table.size:
        return table.seconds(num_bytes)
    if table.kind == "broadcast":
        if table.backend == "gloo":  # a tree in which each hop has all bytes
            hops = math.ceil(math.log2(size)) / math.ceil(math.log2(table.size))
            return table.seconds(num_bytes) * hops
        start = table.seconds(0.0) / max(table.size - 1, 1)
        return max(table.seconds(0.0), table.seconds(num_bytes) + (size - table.size) * start)
    ring = (size - 1) / (table.size - 1) * table.seconds(num_bytes * table.size / size)
    if table.kind != "all_reduce" or table.nodes < 2 or table.backend == "gloo":
        return ring
    # Between nodes libraries change to a tree where a ring has too many steps.
    nodes = -(-size // table.per_node)
    step = table.seconds(0.0) / (2 * (table.nodes - 1))
    more = max(0.0, math.log2(nodes) - math.log2(table.nodes))
    tree = table.seconds(num_bytes) * table.size / (table.size - 1) / TREE + 2 * more * step
    return min(ring, tree)


def measured_s(
    tables: Sequence[Table],
    devices: int,
    kind: str,
    num_bytes: float,
    size: int,
    per_node: int,
) -> float | None:
    """Seconds of a collective as the tables have it; None where they say nothing of its level. `devices`
    of a node take part in as many groups as they can make, all at once."""
    nodes = -(-size // per_node)
    if nodes == 1:
        found = [t for t in tables if t.kind == kind and t.nodes == 1]
        table = _nearest(found, size, max(1, devices // size))
        return None if table is None else carried_s(table, num_bytes, size)
    if per_node == 1:
        found = [t for t in tables if t.kind == kind and t.per_node == 1]
        table = _nearest(found, size, devices)
        if table is None:
            return None
        # Fewer groups were measured at once than there will be: their links carry that much more.
        return carried_s(table, num_bytes * max(1.0, devices / table.num_groups), size)
    at_once = max(1, devices // per_node)
    found = [t for t in tables if t.kind == kind and t.nodes > 1 and t.per_node == per_node]
    table = _nearest(found, size, at_once)
    if table is not None:
        return carried_s(table, num_bytes * max(1.0, at_once / table.num_groups), size)
    return _by_levels(tables, devices, kind, num_bytes, per_node, nodes)


def _by_levels(
    tables: Sequence[Table], devices: int, kind: str, num_bytes: float, per_node: int, nodes: int
) -> float | None:
    """Inside the node, then each member with its peers of the other nodes, then inside again."""
    inside = ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)
    parts = [measured_s(tables, devices, k, num_bytes, per_node, per_node) for k in inside]
    across = num_bytes if kind == "broadcast" else num_bytes / per_node
    parts.append(measured_s(tables, devices, kind, across, nodes, 1))
    found = [part for part in parts if part is not None]
    return sum(found) if len(found) == len(parts) else None


def measured_pair_s(
    tables: Sequence[Table], devices: int, num_bytes: float, crosses_nodes: bool
) -> float | None:
    """One device sends to another while the others of its node do the same."""
    here = [t for t in tables if (t.per_node == 1) == crosses_nodes]
    for kind in (PAIRS, PAIR):
        table = _nearest([t for t in here if t.kind == kind], 2, devices)
        if table is not None:
            share = max(1.0, devices / table.num_groups) if crosses_nodes else 1.0
            return table.seconds(num_bytes * share)
    return None


def _nearest(tables: Sequence[Table], size: int, num_groups: int) -> Table | None:
    """The table of the size that is closest, then of the number of groups at once that is."""
    return min(
        (t for t in tables if t.size > 1 and t.points),
        key=lambda t: (
            round(abs(math.log(t.size / size)), 6),
            abs(math.log(t.num_groups / num_groups)),
        ),
        default=None,
    )
