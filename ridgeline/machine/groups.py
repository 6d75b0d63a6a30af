"""Which groups of ranks are measured, from where the ranks are: the whole, each node, one rank a node.

A node is what the launcher says is one: several on one host can be tried by its variables alone. Called by
`collectives.py`; imports without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.machine.links import ACROSS, ACROSS_AT_ONCE, ALL, COLLECTIVES, NODE, TWOS

_FEW = ("all_reduce", "all_gather")


@dataclass(frozen=True)
class Groups:
    """Groups of one kind that act at the same time; ranks of none of them wait."""

    level: str
    lists: tuple[tuple[int, ...], ...]
    per_node: int
    num_groups: int
    """Of one node, at the same time."""
    collectives: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.lists[0])

    def of(self, rank: int) -> tuple[int, ...] | None:
        return next((ranks for ranks in self.lists if rank in ranks), None)


def number_nodes(places: Sequence[tuple[int, str]]) -> list[int]:
    """The node of each rank, numbered in the order of ranks. `places`: what the launcher calls the node,
    and its host; ranks on two hosts share no node, whatever the launcher says."""
    order = list(dict.fromkeys(places))
    return [order.index(place) for place in places]


def plan_groups(nodes: Sequence[int], collectives: Sequence[str] = COLLECTIVES) -> list[Groups]:
    """The kinds of groups there are among ranks on these nodes, none of them twice."""
    by_node = [[r for r, n in enumerate(nodes) if n == node] for node in range(max(nodes) + 1)]
    most = max(map(len, by_node))
    wanted, few = tuple(collectives), tuple(c for c in collectives if c in _FEW)
    found = [Groups(ALL, (tuple(range(len(nodes))),), most, 1, wanted)]
    if len(by_node) > 1 and most > 1:
        # Nodes with fewer ranks would finish sooner, and what they did would be another group's time.
        full = tuple(tuple(ranks) for ranks in by_node if len(ranks) == most)
        found.append(Groups(NODE, full, most, 1, wanted))
    if most >= 4:
        twos = tuple(
            (ranks[i], ranks[i + 1]) for ranks in by_node for i in range(0, len(ranks) - 1, 2)
        )
        found.append(Groups(TWOS, twos, 2, most // 2, few))
    least = min(map(len, by_node))
    if len(by_node) > 1 and most > 1:
        rows = tuple(tuple(ranks[i] for ranks in by_node) for i in range(least))
        found.append(Groups(ACROSS, rows[:1], 1, 1, wanted if least == 1 else few))
        if least > 1:
            found.append(Groups(ACROSS_AT_ONCE, rows, 1, least, wanted))
    return found


def is_even(nodes: Sequence[int]) -> bool:
    """Whether there are several nodes with equally many ranks, and more than one each."""
    counts = [list(nodes).count(node) for node in range(max(nodes) + 1)]
    return len(counts) > 1 and len(set(counts)) == 1 and counts[0] > 1


def rounds_of_pairs(num_ranks: int, most: int) -> list[list[tuple[int, int]]]:
    """Rounds in which every rank has at most one partner. All pairs where there are at most `most` ranks;
    else each rank with those 1, 2, 4, 8, ... after it.

    >>> rounds_of_pairs(4, 16)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    if num_ranks < 2:
        return []
    if num_ranks <= most:
        return _everyone(num_ranks)
    found, step = [], 1
    while step < num_ranks:
        for part in (0, 1):
            pairs = [
                (rank, rank + step)
                for rank in range(num_ranks - step)
                if rank // step % 2 == part and rank + step < num_ranks
            ]
            if pairs:
                found.append(pairs)
        step *= 2
    return found


def _everyone(num_ranks: int) -> list[list[tuple[int, int]]]:
    """A tournament: the first stays, the others go round."""
    places: list[int | None] = [*range(num_ranks), *([None] if num_ranks % 2 else [])]
    half, found = len(places) // 2, []
    for _ in range(len(places) - 1):
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found
