"""How soon ranks train: after the command, and again after one of them was killed.

A small training on the CPU, `ridgeline train -n N --restarts 1`, once with ranks forked from one process
that has loaded torch (as it is) and once with each started by itself (`RIDGELINE_WARM=0`), in turns, in
alternating order. Told are medians: from the start of the command to the end of the first step, from
SIGKILL for the last rank to the end of the next step, and the processor time of everything together.

    python benchmarks/restart.py [--processes 2 4] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import print_table, spread, write_json

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """
name: restart
model: {name: mlp, args: {in_features: 12, hidden: 16, out_features: 5}}
data: {source: synthetic, args: {shape: [12], classes: 5, samples: 4000, distinct: 40}}
train: {steps: 1000000, batch: 16}
checkpoint: {every: 50}
log: {every: 1}
device: cpu
threads: 1
"""
WAYS = {"forked": "1", "one by one": "0"}
FIGURES = ("first step s", "next step s", "processor s")
LONGEST_S = 300.0


def one_round(folder: Path, processes: int, warm: str) -> dict[str, float]:
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    command = [sys.executable, "-m", "ridgeline.cli", "train", "recipe.yaml", "--run", "run"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            [*command, "-n", str(processes), "--restarts", "1"],
            cwd=folder, stdout=out, stderr=out,
            env={**os.environ, "RIDGELINE_WARM": warm, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        run = folder / "run"
        first = wait_for_step(run, began)
        until = time.monotonic() + LONGEST_S
        while not any(run.glob("checkpoints/step-*")):
            if time.monotonic() > until:
                raise SystemExit(
                    f"no checkpoint after {LONGEST_S:.0f} s: {(folder / 'out').read_text()}"
                )
            time.sleep(0.02)
        rank = json.loads((run / f"logs/ranks/rank-{processes - 1}.json").read_text())
        killed = time.time()
        os.kill(rank["pid"], signal.SIGKILL)
        while '"restart"' not in (run / "events.jsonl").read_text():
            if time.monotonic() > until:
                raise SystemExit(f"no restart: {(folder / 'out').read_text()}")
            time.sleep(0.02)
        following = wait_for_step(run, time.time())
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return dict(zip(FIGURES, (first - began, following - killed, spent), strict=True))


def wait_for_step(run: Path, since: float) -> float:
    """When the first step after `since` was over."""
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until:
        path = run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        for line in lines:
            if line.endswith("\n") and (when := json.loads(line).get("time", 0.0)) > since:
                return float(when)
        time.sleep(0.02)
    raise SystemExit(f"no step after {LONGEST_S:.0f} s in {run}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, kept = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for processes in options.processes:
            seen: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for turn in range(options.rounds):
                for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                    place = Path(folder) / f"{processes}-{turn}-{way.replace(' ', '-')}"
                    seen[way].append(one_round(place, processes, WAYS[way]))
            for way, found in seen.items():
                cells = []
                for figure in FIGURES:
                    values = [one[figure] for one in found]
                    cells.append(f"{statistics.median(values):.1f} ±{spread(values):.0%}")
                rows.append((str(processes), way, *cells))
            kept[str(processes)] = seen
    print_table(("ranks", "started", *FIGURES), rows)
    write_json(options.json, kept)


if __name__ == "__main__":
    main()
