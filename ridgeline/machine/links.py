"""What ranks reach between them, as plain numbers: collectives and pairs by size, and what follows.

`Timing` is one collective of one size on one kind of group; bus bandwidth is what nccl-tests calls so: the
rate at which each rank's link would have to carry bytes, which does not change with the number of ranks.
Made by `collectives.py`, kept in `machine.json` by `record.py`, read by the planner; imports without torch.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

NETWORK: Final = "network"
ALL_REDUCE, HIERARCHICAL = "all_reduce", "all_reduce_by_levels"
PAIR, PAIRS = "pair", "pairs_at_once"
COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
KINDS: Final = (*COLLECTIVES, HIERARCHICAL, PAIR, PAIRS)

ALL, NODE, ACROSS, ACROSS_AT_ONCE = "all", "node", "across", "across_at_once"
INSIDE, BETWEEN, TWOS = "inside", "between", "twos_at_once"
LEVELS: Final = {
    ALL: "all ranks",
    NODE: "the ranks of a node",
    TWOS: "twos of a node, all at once",
    ACROSS: "one rank of each node",
    ACROSS_AT_ONCE: "one rank of each node, all such groups at once",
    INSIDE: "inside a node",
    BETWEEN: "between nodes",
}
"""Kinds of groups, and what people call them."""

TOP_SHARE: Final = 0.9
"""Of the top bus bandwidth: where a message counts as large enough."""
LEVEL: Final = 1.2
"""A largest size that gains more than this on the one before is not near the top. Of a start and a rate,
and sizes that grow fourfold, one that gains less is at 93 % or more."""
SLOW_RANK: Final = 1.25
"""A rank that takes so many times as long as the others do for the same work is named."""
SLOW_PAIR: Final = 1.5
"""The same for a pair, compared with pairs of its level."""
_MIB: Final = 2**20


def bus_factor(collective: str, size: int) -> float:
    """What algorithm bandwidth is multiplied by, as nccl-tests has it.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if size < 2:
        return 1.0
    if collective in (ALL_REDUCE, HIERARCHICAL):
        return 2.0 * (size - 1) / size
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (size - 1) / size
    return 1.0


@dataclass(frozen=True)
class Timing:
    """One collective of one size, as it was measured."""

    collective: str
    """One of `KINDS`."""
    level: str
    """One of `LEVELS`."""
    size: int
    """Ranks of a group."""
    per_node: int
    """Of them, those that share a node."""
    num_groups: int
    """Groups of a node that did the same at the same time."""
    num_bytes: int
    """Of the whole: what is reduced, the result of a gather, what each rank hands out to all, or what one
    rank sends."""
    seconds: float
    """Of the slowest rank; the median of the repetitions."""
    spread: float = 0.0
    """Half the distance between the quartiles, as a share of the median."""
    repeats: int = 1

    @property
    def algorithm_bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def bus_bytes_per_s(self) -> float:
        return self.algorithm_bytes_per_s * bus_factor(self.collective, self.size)


@dataclass(frozen=True)
class PairFacts:
    """One way from one rank to another."""

    source: int
    target: int
    crosses: bool
    """Whether it leaves the node."""
    num_bytes: int
    seconds: float
    """The shortest of the repetitions: a slow link has no short ones."""

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class RankFacts:
    """One rank: where it is, and how long the same work takes it."""

    rank: int
    node: int
    host: str
    local_rank: int
    work_s: float = 0.0
    """Of some arithmetic that is the same on all ranks, before they meet; the median."""
    best_work_s: float = 0.0
    """The shortest: a neighbour's work makes some times longer, a slow rank has no short ones."""
    wait_s: float = 0.0
    """For the last of them to come; the median."""


@dataclass(frozen=True)
class NetworkFacts:
    """Some ranks, measured together."""

    hosts: tuple[str, ...]
    """By node."""
    backend: str
    device_kind: str
    device_name: str
    ranks_per_node: tuple[int, ...]
    time: float
    timings: tuple[Timing, ...] = ()
    pairs: tuple[PairFacts, ...] = ()
    ranks: tuple[RankFacts, ...] = ()
    measured_s: float = 0.0
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_per_node)

    @property
    def num_nodes(self) -> int:
        return len(self.ranks_per_node)

    def of(self, collective: str, level: str) -> list[Timing]:
        """By size."""
        found = [t for t in self.timings if (t.collective, t.level) == (collective, level)]
        return sorted(found, key=lambda t: t.num_bytes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def network_from_dict(values: Mapping[str, Any]) -> NetworkFacts:
    """Back from JSON; keys of a newer version are passed over."""
    kept = _known(NetworkFacts, values)
    for key, kind in (("timings", Timing), ("pairs", PairFacts), ("ranks", RankFacts)):
        kept[key] = tuple(kind(**_known(kind, row)) for row in kept.get(key, ()))
    for key in ("hosts", "ranks_per_node", "notes"):
        kept[key] = tuple(kept.get(key, ()))
    return NetworkFacts(**kept)


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(kind)}
    return {key: value for key, value in values.items() if key in names}


def top_bus(timings: Iterable[Timing]) -> float:
    return max((t.bus_bytes_per_s for t in timings), default=0.0)


def enough_bytes(timings: Sequence[Timing], share: float = TOP_SHARE) -> float | None:
    """The smallest message that reaches `share` of the top bus bandwidth, between the sizes that were
    measured; None where fewer than two were, or where the largest still gains. One size that is out of
    line with those beside it is not believed."""
    timings = sorted(timings, key=lambda t: t.num_bytes)
    rates = [t.bus_bytes_per_s for t in timings]
    if len(rates) < 2 or rates[-1] > LEVEL * rates[-2]:
        return None
    middles = [statistics.median(rates[i - 1 : i + 2]) for i in range(1, len(rates) - 1)]
    smooth = [min(rates[:2]), *middles, rates[-1]]
    wanted = share * max(smooth)
    first = next(i for i, rate in enumerate(smooth) if rate >= wanted)
    if first == 0:
        return float(timings[0].num_bytes)
    low, high = timings[first - 1].num_bytes, timings[first].num_bytes
    way = math.log(wanted / smooth[first - 1]) / math.log(smooth[first] / smooth[first - 1])
    return float(low * (high / low) ** way)


def bucket_mb(facts: NetworkFacts) -> float | None:
    """What `ddp.bucket_mb` should be for all ranks as replicas: `enough_bytes`, rounded up to half a
    digit (4, 4.5, 5, ..., 10, 15, 20). Larger ones reduce no faster, and the last of a backward is waited
    for longer."""
    enough = enough_bytes(facts.of(ALL_REDUCE, ALL))
    if enough is None:
        return None
    mb = max(enough / _MIB, 0.001)
    step = 10.0 ** math.floor(math.log10(mb)) / 2
    return math.ceil(mb / step - 1e-9) * step


def wins_from(facts: NetworkFacts) -> int | None:
    """The smallest measured size from which on reducing level by level is faster than flat at all sizes."""
    flat = {t.num_bytes: t.seconds for t in facts.of(ALL_REDUCE, ALL)}
    found: int | None = None
    for timing in reversed(facts.of(HIERARCHICAL, ALL)):
        if timing.num_bytes not in flat:
            continue
        if timing.seconds >= flat[timing.num_bytes]:
            break
        found = timing.num_bytes
    return found


def contention(facts: NetworkFacts) -> float | None:
    """How much less each group across nodes gets when all of them communicate: 1 where links are not
    shared, the number of groups where all share one."""
    alone = {t.num_bytes: t.seconds for t in facts.of(ALL_REDUCE, ACROSS)}
    both = [t for t in facts.of(ALL_REDUCE, ACROSS_AT_ONCE) if alone.get(t.num_bytes)]
    return both[-1].seconds / alone[both[-1].num_bytes] if both else None


def slow_ranks(facts: NetworkFacts, limit: float = SLOW_RANK) -> list[tuple[RankFacts, float]]:
    """Ranks that always take longer than the others for the same work, and how many times, worst first."""
    found = []
    for rank in facts.ranks:
        others = [other for other in facts.ranks if other.rank != rank.rank]
        usual = statistics.median([o.work_s for o in others] or [0.0])
        best = statistics.median([o.best_work_s for o in others] or [0.0])
        if min(usual, best) > 0 and min(rank.work_s / usual, rank.best_work_s / best) > limit:
            found.append((rank, rank.best_work_s / best))
    return sorted(found, key=lambda pair: -pair[1])


def slowest_pair(facts: NetworkFacts) -> tuple[PairFacts, float] | None:
    """The pair that is farthest behind the others of its level, and how many times as long it takes."""
    worst: tuple[PairFacts, float] | None = None
    for crosses in (False, True):
        pairs = [p for p in facts.pairs if p.crosses == crosses and p.seconds > 0]
        for pair in pairs if len(pairs) > 2 else ():
            usual = statistics.median(p.seconds for p in pairs if p is not pair)
            if worst is None or pair.seconds / usual > worst[1]:
                worst = (pair, pair.seconds / usual)
    return worst


def most_lopsided(facts: NetworkFacts) -> tuple[PairFacts, float] | None:
    """The way that is farthest behind the way back, and how many times as long it takes."""
    there = {(p.source, p.target): p for p in facts.pairs if p.seconds > 0}
    found = [
        (pair, pair.seconds / there[(pair.target, pair.source)].seconds)
        for pair in there.values()
        if (pair.target, pair.source) in there
    ]
    return max(found, key=lambda pair: pair[1], default=None)


def slow_links(facts: NetworkFacts, limit: float = SLOW_PAIR) -> list[tuple[int, float]]:
    """Ranks all of whose pairs are slower than what is usual at their level, and how many times."""
    usual = {
        crosses: statistics.median(found)
        for crosses in (False, True)
        if (found := [p.seconds for p in facts.pairs if p.crosses == crosses])
    }
    slow = []
    for rank in sorted({p.source for p in facts.pairs} | {p.target for p in facts.pairs}):
        own = [p.seconds / usual[p.crosses] for p in facts.pairs if rank in (p.source, p.target)]
        others = {p.source + p.target - rank for p in facts.pairs if rank in (p.source, p.target)}
        if len(others) > 1 and min(own) > 1.0 and statistics.median(own) > limit:
            slow.append((rank, statistics.median(own)))
    return slow


def show_bytes(count: float) -> str:
    """A size as people write it; those that were cut a little to be divided keep their name.

    >>> show_bytes(4096), show_bytes(1048572), show_bytes(12)
    ('4 KiB', '1 MiB', '12 B')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= 0.9995 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def sizes_between(first: int, last: int, factor: int = 4) -> tuple[int, ...]:
    """`first`, and each `factor` times the one before it, up to `last`, which is always there.

    >>> sizes_between(1024, 65536), sizes_between(1000, 10_000)
    ((1024, 4096, 16384, 65536), (1000, 4000, 10000))
    """
    found = [first]
    while found[-1] * factor < last:
        found.append(found[-1] * factor)
    return (*found, last) if last > first else (first,)
