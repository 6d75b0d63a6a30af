"""Collectives measured on this machine, against what the planner says from every second size of them.

    python benchmarks/network.py [--ranks 2,4] [--top 64MB] [--rounds 3] [--out FILE.json]

Sizes are powers of two. The even ones make the table that the planner gets, through a `machine.json`; the
odd ones are predicted from it and compared with what they took. Repetitions of all sizes are interleaved,
and rounds of the numbers of ranks as well; a figure is the median over rounds of medians. At the end each
number of ranks is predicted from the table of another, by the steps of a ring: on a CPU whose cores the
ranks share, that is not expected to hold.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from ridgeline.cli_machine import parse_size
from ridgeline.launch.env import RankEnv
from ridgeline.launch.forked import Ranks
from ridgeline.machine.collectives import Amounts, measure_network
from ridgeline.machine.links import NetworkFacts, show_bytes, sizes_between
from ridgeline.machine.picture import duration
from ridgeline.machine.record import add_network
from ridgeline.plan.machine import Machine
from ridgeline.plan.measured import load_measured
from ridgeline.plan.network import Group, collective_s

KINDS = ("all_reduce", "all_gather")
Times = dict[tuple[str, int, int], list[float]]


def measure(env: RankEnv, amounts: Amounts) -> NetworkFacts:
    assert dist.group.WORLD is not None
    return measure_network(env, dist.group.WORLD, torch.device("cpu"), amounts, KINDS)


def collect(
    counts: list[int], top: int, rounds: int, repeats: int
) -> tuple[Times, dict[int, NetworkFacts]]:
    """Medians of each round by collective, ranks and size."""
    amounts = Amounts(sizes_between(1 << 10, top, 2), repeats, 1.0, 1.0, 5e-3, 1 << 16)
    times: Times = {}
    last: dict[int, NetworkFacts] = {}
    for _ in range(rounds):
        for count in counts:
            ranks = Ranks(count)
            try:
                last[count] = ranks(measure, amounts)
            finally:
                ranks.close()
            for t in last[count].timings:
                if t.level == "all":
                    times.setdefault((t.collective, count, t.num_bytes), []).append(t.seconds)
    return times, last


def planned(facts: NetworkFacts, medians: dict[tuple[str, int, int], float]) -> Machine:
    """The machine of every second size."""
    rows = [
        {**vars(t), "seconds": medians[(t.collective, t.size, t.num_bytes)]}
        for t in facts.timings
        if t.level == "all" and math.log2(t.num_bytes) % 2 == 0
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        add_network(path, facts)
        content = json.loads(path.read_text())
        content["network"][0]["timings"] = rows
        path.write_text(json.dumps(content))
        return load_measured(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--top", default="64MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    counts = [int(word) for word in asked.ranks.split(",")]
    times, last = collect(counts, parse_size(asked.top, "--top"), asked.rounds, asked.repeats)
    medians = {key: statistics.median(row) for key, row in times.items()}
    machines = {count: planned(last[count], medians) for count in counts}
    print(f"{last[counts[0]].device_name}, {torch.get_num_threads()} thread a rank, gloo")
    records = []
    for count in counts:
        for kind in KINDS:
            print(f"\n{kind}, {count} ranks: between sizes that were measured")
            print(f"{'size':>10} {'measured':>10} {'rounds':>22} {'predicted':>10} {'ratio':>6}")
            errors = []
            for (name, size, num_bytes), seconds in sorted(medians.items()):
                if (name, size) != (kind, count) or math.log2(num_bytes) % 2 == 0:
                    continue
                said = collective_s(machines[count], kind, num_bytes, Group(count, count))
                row = times[(kind, count, num_bytes)]
                spread = f"{duration(min(row))} .. {duration(max(row))}"
                print(
                    f"{show_bytes(num_bytes):>10} {duration(seconds):>10} {spread:>22} "
                    f"{duration(said):>10} {said / seconds:6.2f}"
                )
                errors.append(abs(math.log(said / seconds)))
                records.append(
                    {
                        "kind": kind,
                        "ranks": count,
                        "bytes": num_bytes,
                        "measured_s": row,
                        "said_s": said,
                    }
                )
            off = 100 * (math.exp(statistics.median(errors)) - 1)
            print(f"half of them within {off:.0f} %")
    for count in counts:
        for other in counts:
            if other == count:
                continue
            ratios = {
                num_bytes: collective_s(
                    machines[other], "all_reduce", num_bytes, Group(count, count)
                )
                / seconds
                for (name, size, num_bytes), seconds in sorted(medians.items())
                if (name, size) == ("all_reduce", count)
            }
            said = ", ".join(f"{show_bytes(b)} {r:.2f}" for b, r in list(ratios.items())[::4])
            print(
                f"\nall_reduce of {count} ranks from the table of {other}, said over measured: {said}"
            )
    if asked.out is not None:
        asked.out.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
