"""How well the planner does on the rest of a set once calibrated on a few of its rows.

Of each set 15 rows (half the set where it has fewer than 30) are fitted: those that `ridgeline plan choose`
names without looking at what was measured, and several random choices, which follow from the seed alone.
The errors on the set's other rows are printed: mean and 90th percentile, for the chosen ones, over the
random choices and for each. The rows are those of `ridgeline plan validate`.

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
from ridgeline.plan.validate import calibrate, changed, check_rows, choose_rows, measured_s

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


def num_fitted(rows: Sequence[Row]) -> int:
    return FITTED if len(rows) >= 2 * FITTED else len(rows) // 2


def draw(rows: Sequence[Row], chance: random.Random) -> list[Row]:
    return [rows[place] for place in sorted(chance.sample(range(len(rows)), num_fitted(rows)))]


def judge(rows: Sequence[Row], chosen: Sequence[Row]) -> tuple[float, float, dict[str, float]]:
    """Mean and 90th percentile of the errors on the other rows, and the fitted factors."""
    found = calibrate(chosen)
    sizes = errors([row for row in rows if row not in chosen], changed(found))
    return statistics.fmean(sizes), p90(sizes), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--sets", nargs="*", default=None)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--show", action="store_true", help="Also print the fitted factors.")
    args = parser.parse_args()

    head = (
        "set                      rows  fitted  as shipped  chosen: mean, p90  mean of draws (each)  "
        "p90 (each)  s a fit"
    )
    print(head)
    records = []
    for name, rows in usable(load_rows(args.rows)).items():
        if args.sets and name not in args.sets:
            continue
        chance = random.Random(f"{args.seed} {name}")
        shipped = statistics.fmean(errors(rows))
        telling, _ = choose_rows(rows, num_fitted(rows))
        mean, tail, found = judge(rows, telling)
        means, tails, took, factors = [], [], [], [found]
        for _ in range(args.draws):
            began = time.perf_counter()
            one, other, found = judge(rows, draw(rows, chance))
            took.append(time.perf_counter() - began)
            means.append(one)
            tails.append(other)
            factors.append(found)
        line = f"{name:<24} {len(rows):<5} {num_fitted(rows):<7} {shipped:<11.2f} {mean:.2f}, {tail:<12.1f}"
        if means:
            line += (
                f"{statistics.fmean(means):.2f} ({', '.join(f'{m:.1f}' for m in means)})  "
                f"{statistics.fmean(tails):.1f} ({', '.join(f'{t:.1f}' for t in tails)})  "
                f"{statistics.fmean(took):.1f}"
            )
        print(line, flush=True)
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
                "fitted": num_fitted(rows),
                "shipped_mean": shipped,
                "chosen": [str(row["id"]) for row in telling],
                "chosen_mean": mean,
                "chosen_p90": tail,
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
