"""What it costs to record a node's resources, and to watch a long run: `python benchmarks/watch.py`.

A sample is what `ridgeline train` takes every `log.resources_s` seconds on each node; a look is what
`ridgeline watch` does every two. Needs no torch, 0.3 GB of disk and half a minute.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ridgeline import rundir
from ridgeline.machine.gauges import Gauges, Gpus
from ridgeline.report.live import LiveRun
from ridgeline.rundir import RunDir, StepRecord

SAMPLES = 200
STEPS = 1_000_000


def seconds(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def sampling() -> None:
    gauges = Gauges(lambda: [os.getpid()], Gpus(None))
    first = seconds(gauges.sample)
    times = sorted(seconds(gauges.sample) for _ in range(SAMPLES))
    num_gpus = len(gauges.sample().gpus)
    print(
        f"a sample of this node ({os.cpu_count()} cores, {num_gpus} GPUs): median "
        f"{statistics.median(times) * 1e3:.2f} ms, 95 % below {times[int(0.95 * SAMPLES)] * 1e3:.2f} ms "
        f"({SAMPLES} samples); with the search for processes {first * 1e3:.1f} ms"
    )


def looking(folder: Path) -> None:
    run = RunDir(folder)
    line = json.dumps(
        {"kind": "step", **dataclasses.asdict(StepRecord(0, 0, 1e9, 2.5, 1e-3, 256, 0.1))}
    )
    with run.file(rundir.METRICS).open("w") as file:
        for step in range(1, STEPS + 1):
            file.write(line.replace('"step": 0,', f'"step": {step},') + "\n")
    live = LiveRun(run)
    first = seconds(live.refresh)
    run.append(StepRecord(STEPS + 1, 0, 1e9, 2.5, 1e-3, 256, 0.1))
    size = run.file(rundir.METRICS).stat().st_size
    print(
        f"{STEPS:,} steps ({size / 1e6:.0f} MB): first look {first:.2f} s, one step later "
        f"{seconds(live.refresh) * 1e3:.2f} ms"
    )


if __name__ == "__main__":
    sampling()
    with tempfile.TemporaryDirectory() as name:
        looking(Path(name))
