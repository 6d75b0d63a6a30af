"""What ranks reach between them, for people: a table a kind of group, what follows from it, and a picture.

Called by `cli_machine.py` on rank 0; imports without torch.
"""

from __future__ import annotations

import itertools

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ridgeline.machine.links import (
    ALL,
    ALL_REDUCE,
    HIERARCHICAL,
    KINDS,
    LEVELS,
    PAIR,
    PAIRS,
    SLOW_PAIR,
    TOP_SHARE,
    NetworkFacts,
    Timing,
    bucket_mb,
    contention,
    enough_bytes,
    most_lopsided,
    show_bytes,
    slow_links,
    slow_ranks,
    slowest_pair,
    top_bus,
    wins_from,
)
from ridgeline.machine.picture import (
    COLOURS,
    PALE,
    LogScale,
    amount,
    dot,
    duration,
    label,
    line,
    svg,
    whole_powers,
)

WIDE = 1000
_TITLES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    HIERARCHICAL: "all-reduce by levels",
    PAIR: "one pair",
    PAIRS: "all pairs at once",
}


def show_network(facts: NetworkFacts, console: Console | None = None) -> None:
    """Print a table a kind of group: time, bus bandwidth and spread; below them what follows."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDE)
    nodes = f"{facts.num_nodes} nodes ({', '.join(map(str, facts.ranks_per_node))} ranks)"
    where = nodes if facts.num_nodes > 1 else "one node"
    console.print(Text(f"{facts.num_ranks} ranks on {where}, {facts.backend}, {facts.device_name}"))
    for level in LEVELS:
        if any(t.level == level for t in facts.timings):
            console.print(Text(_heading(facts, level), style="bold"))
            console.print(build_table(facts, level))
    for text in (*conclusions(facts), *facts.notes):
        console.print(Text(text))


def _heading(facts: NetworkFacts, level: str) -> str:
    first = next(t for t in facts.timings if t.level == level)
    if first.collective in (PAIR, PAIRS):
        return f"{LEVELS[level]}: from one rank to another"
    groups = f", {first.num_groups} groups a node" if first.num_groups > 1 else ""
    return f"{LEVELS[level]}: groups of {first.size}{groups}"


def build_table(facts: NetworkFacts, level: str) -> Table:
    """A row a size; in a cell the time, the bus bandwidth, and the spread in percent."""
    kinds = [kind for kind in KINDS if facts.of(kind, level)]
    table = Table()
    table.add_column("size", justify="right")
    for kind in kinds:
        table.add_column(_TITLES[kind], justify="right")
    # Sizes are cut to what ranks divide, so those of two kinds of groups differ by some bytes.
    rows: dict[str, dict[str, Timing]] = {}
    for kind in kinds:
        for timing in facts.of(kind, level):
            rows.setdefault(show_bytes(timing.num_bytes), {})[kind] = timing
    order = sorted(rows, key=lambda name: max(t.num_bytes for t in rows[name].values()))
    for name in order:
        table.add_row(name, *(_cell(rows[name].get(kind)) for kind in kinds))
    return table


def _cell(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    rate = amount(timing.bus_bytes_per_s, "B/s")
    return f"{duration(timing.seconds)}  {rate} ±{100 * timing.spread:.0f} %"


def conclusions(facts: NetworkFacts) -> list[str]:
    """One sentence each: the top, the bucket, levels against flat, what is shared, who is slow."""
    reduces = facts.of(ALL_REDUCE, ALL)
    found = []
    if reduces:
        found.append(
            f"all-reduce of all ranks: {amount(top_bus(reduces), 'B/s')} of bus bandwidth at most"
        )
        found.append(_about_buckets(facts, reduces))
    if facts.of(HIERARCHICAL, ALL):
        size = wins_from(facts)
        found.append(
            "reducing level by level is not faster than flat at the largest size"
            if size is None
            else f"reducing level by level is faster than flat from {show_bytes(size)} on"
        )
    shared = contention(facts)
    if shared is not None:
        found.append(
            f"when all groups across nodes communicate at once, each takes {shared:.2g} times as long as "
            "alone"
        )
    return [*found, *_about_ranks(facts), *_about_pairs(facts)]


def _about_buckets(facts: NetworkFacts, reduces: list[Timing]) -> str:
    enough, wanted = enough_bytes(reduces), bucket_mb(facts)
    share = f"{100 * TOP_SHARE:.0f} %"
    if enough is None or wanted is None:
        return f"no measured size is known to be enough for {share} of it: measure larger ones (--sizes)"
    return f"{share} of it from {show_bytes(enough)} on: ddp.bucket_mb={wanted:g} fits"


def _about_ranks(facts: NetworkFacts) -> list[str]:
    found = []
    for rank, times in slow_ranks(facts)[:3]:
        found.append(
            f"rank {rank.rank} on {rank.host} is slow: the same work takes it {times:.2g} times as long as "
            "the others"
        )
    for number, times in slow_links(facts)[:3]:
        host = next((r.host for r in facts.ranks if r.rank == number), "?")
        found.append(
            f"rank {number} on {host} has slow links: its messages take {times:.2g} times as long as usual"
        )
    if facts.ranks and not found:
        found.append("no rank is slower than the others")
    return found


def _about_pairs(facts: NetworkFacts) -> list[str]:
    found = []
    worst = slowest_pair(facts)
    if worst is not None:
        pair, times = worst
        said = "slow" if times > SLOW_PAIR else "not far behind"
        found.append(
            f"slowest pair: rank {pair.source} to rank {pair.target}, {amount(pair.bytes_per_s, 'B/s')}, "
            f"{times:.2g} times as long as the others of its level ({said})"
        )
    lopsided = most_lopsided(facts)
    if lopsided is not None and lopsided[1] > SLOW_PAIR:
        pair, times = lopsided
        found.append(
            f"from rank {pair.source} to rank {pair.target} a message takes {times:.2g} times as long as "
            "back"
        )
    return found


def draw_network(facts: NetworkFacts) -> str:
    """The picture: bus bandwidth against size, a chart a kind of group and a line a collective."""
    timings = [t for t in facts.timings if t.bus_bytes_per_s > 0]
    if not timings:
        return svg(640, 60, [label(20, 35, "nothing was measured to draw")], "network")
    levels = [level for level in LEVELS if any(t.level == level for t in timings)]
    width, tall = 860.0, 300.0
    sides = whole_powers([t.num_bytes for t in timings])
    rates = whole_powers([t.bus_bytes_per_s for t in timings])
    shapes = [
        label(
            80,
            22,
            f"bus bandwidth of {facts.num_ranks} ranks, {facts.backend}, {facts.device_name}",
        )
    ]
    for number, level in enumerate(levels):
        top = 40 + number * tall
        x = LogScale(*sides, 80, width - 190)
        y = LogScale(*rates, top + tall - 60, top + 24)
        shapes += [label(80, top + 14, _heading(facts, level)), label(12, top + 14, "B/s")]
        for tick in y.powers():
            shapes += [line(x.start, y(tick), x.stop, y(tick), PALE)]
            shapes += [label(x.start - 8, y(tick) + 4, amount(tick, ""), "end")]
        for tick in x.powers():
            shapes += [line(x(tick), y.start, x(tick), y.stop, PALE)]
            shapes += [label(x(tick), y.start + 18, amount(tick, "B"), "middle")]
        taken: list[float] = []
        for kind in KINDS:
            shapes += _curve(facts.of(kind, level), COLOURS[KINDS.index(kind)], x, y, taken)
    return svg(width, 40 + len(levels) * tall, shapes, "bus bandwidth against size")


def _curve(
    timings: list[Timing], colour: str, x: LogScale, y: LogScale, taken: list[float]
) -> list[str]:
    """Dots joined by lines, and the name where the last one is."""
    timings = [t for t in timings if t.bus_bytes_per_s > 0]
    if not timings:
        return []
    shapes = []
    for a, b in itertools.pairwise(timings):
        ends = (x(a.num_bytes), y(a.bus_bytes_per_s), x(b.num_bytes), y(b.bus_bytes_per_s))
        shapes.append(line(*ends, colour))
    for t in timings:
        rate = amount(t.bus_bytes_per_s, "B/s")
        hint = (
            f"{_TITLES[t.collective]}, {show_bytes(t.num_bytes)}: {rate} in {duration(t.seconds)}"
        )
        shapes.append(dot(x(t.num_bytes), y(t.bus_bytes_per_s), colour, hint, 3.0))
    at = y(timings[-1].bus_bytes_per_s)
    while any(abs(at - other) < 13 for other in taken):
        at += 13
    taken.append(at)
    name = f"{_TITLES[timings[-1].collective]} {amount(top_bus(timings), 'B/s')}"
    return [*shapes, label(x.stop + 8, at + 4, name, fill=colour)]
