"""How well the planner does on the rest of a set once calibrated on a few of its rows.

Of each set several random choices of 15 rows (of half the set where it has fewer than 30) are fitted, and
the errors on the set's other rows are printed: mean and 90th percentile, over choices and of each. The
choices follow from the seed alone. The rows are those of `ridgeline plan validate`.

    python benchmarks/plan_calibrate.py --rows FILE [--sets NAME ...] [--draws 5] [--seed 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ridgeline.plan.calibrate import clear_caches
from ridgeline.plan.rows import Row, Unreadable, load_rows, read_row
from ridgeline.plan.validate import calibrate, changed, check_rows, measured_s

LEAST_ROWS = 6
FITTED = 15


def usable(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows with a time that can be predicted, by set."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if str(row.get("kind", "measured")) != "measured":
            continue
        try:
            read = read_row(row)
        except Unreadable:
            continue
        if measured_s(read) is not None:
            found.setdefault(read.set, []).append(row)
    return {name: chosen for name, chosen in found.items() if len(chosen) >= LEAST_ROWS}


def errors(rows: Sequence[Row], change: Any = None) -> list[float]:
    """Sizes of the errors of time in per cent, sorted."""
    checked = check_rows(rows, change)
    clear_caches()
    return sorted(100 * abs(c.time_error) for c in checked if c.time_error is not None)


def p90(sizes: Sequence[float]) -> float:
    return sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]


def draw(rows: Sequence[Row], chance: random.Random) -> tuple[list[Row], list[Row]]:
    count = FITTED if len(rows) >= 2 * FITTED else len(rows) // 2
    chosen = set(chance.sample(range(len(rows)), count))
    return (
        [row for i, row in enumerate(rows) if i in chosen],
        [row for i, row in enumerate(rows) if i not in chosen],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=None)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--show", action="store_true", help="Also print the fitted factors.")
    args = parser.parse_args()

    head = "set                      rows  fitted  as shipped  mean of draws (each)  p90 (each)  s a fit"
    print(head)
    records = []
    for name, rows in usable(load_rows(args.rows)).items():
        if args.sets and name not in args.sets:
            continue
        chance = random.Random(f"{args.seed} {name}")
        shipped = statistics.fmean(errors(rows))
        means, tails, took, factors = [], [], [], []
        for _ in range(args.draws):
            chosen, rest = draw(rows, chance)
            began = time.perf_counter()
            found = calibrate(chosen)
            took.append(time.perf_counter() - began)
            sizes = errors(rest, changed(found))
            means.append(statistics.fmean(sizes))
            tails.append(p90(sizes))
            factors.append(found)
        print(
            f"{name:<24} {len(rows):<5} {len(chosen):<7} {shipped:<11.2f} "
            f"{statistics.fmean(means):.2f} ({', '.join(f'{m:.1f}' for m in means)})  "
            f"{statistics.fmean(tails):.1f} ({', '.join(f'{t:.1f}' for t in tails)})  "
            f"{statistics.fmean(took):.1f}",
            flush=True,
        )
        if args.show:
            for found in factors:
                print(
                    "   ",
                    ", ".join(f"{k.partition('.')[2] or k} {v:.2f}" for k, v in found.items()),
                )
        records.append(
            {
                "set": name,
                "rows": len(rows),
                "fitted": len(chosen),
                "shipped_mean": shipped,
                "means": means,
                "p90s": tails,
                "factors": factors,
            }
        )
    if args.json is not None:
        from benchmarks.table import write_json

        write_json(args.json, {"seed": args.seed, "draws": args.draws, "sets": records})


if __name__ == "__main__":
    main()
