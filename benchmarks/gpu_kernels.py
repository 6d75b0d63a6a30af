"""One GPU: the kernels of a step by name, of a state beside those of the loop tuned by hand.

    python benchmarks/gpu_kernels.py --model 1.3b --states "bf16, regional"      # two minutes on a GPU
    python benchmarks/gpu_kernels.py --model 1.3b --states hand "bf16, regional, merged" --json kernels.json
    python benchmarks/gpu_kernels.py --device cpu --tiny --states hand           # to see that it works

States are those of `gpu_climb.py` by name, `hand` is its loop. Each runs in a process of its own: ten steps
to compile and warm up, fifteen that are timed, and four under torch's profiler. Milliseconds a step and
starts a step, the longest first; what is left of a step is where the device waited.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.climb_cases import CASES, hand_steps
from benchmarks.gpu_climb import configure, prepare
from benchmarks.table import print_table, write_json

HAND = "hand"
WARM, TIMED, PROFILED = 10, 15, 4


def build_step(options: argparse.Namespace, state: str) -> Callable[[], Any]:
    case = prepare(CASES[options.model], options)
    if state == HAND:
        steps = hand_steps(case, configure(case, options))
        return lambda: next(steps)
    from ridgeline.config import dump_config
    from ridgeline.doctor.candidate import Runner

    config = configure(case, options, *(case.states | case.more)[state])
    recipe = options.folder / "recipe.yaml"
    recipe.write_text(dump_config(config))
    runner = Runner(recipe)
    return lambda: next(runner._steps)


def measure(options: argparse.Namespace, state: str) -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = options.device == "cuda"
    step = build_step(options, state)

    def run(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            step()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begun) / max(count, 1)

    short = options.tiny
    run(2 if short else WARM)
    step_s = run(2 if short else TIMED)
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    count = 1 if short else PROFILED
    with profile(activities=[activity]) as seen:
        run(count)
    rows = []
    for event in seen.key_averages():
        spent_us = event.self_device_time_total if cuda else event.self_cpu_time_total
        rows.append((spent_us / 1e3 / count, event.count / count, event.key))
    return {"step_ms": 1e3 * step_s, "kernels": sorted(rows, reverse=True)}


def show(state: str, found: dict[str, Any], most: int) -> None:
    kernels, step_ms = found["kernels"], found["step_ms"]
    busy = sum(row[0] for row in kernels)
    print(f"\n{state}: a step of {step_ms:.1f} ms, kernels of {busy:.1f}")
    lines = [
        (f"{ms:.2f}", f"{ms / step_ms:.1%}", f"{count:g}", name[:110])
        for ms, count, name in kernels[:most]
    ]
    print_table(("ms", "share", "starts", "kernel"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(CASES), default="1.3b")
    parser.add_argument("--states", nargs="+", default=[HAND])
    parser.add_argument("--most", type=int, default=30, help="kernels that are shown")
    parser.add_argument("--samples", type=int, default=96, help="fields in the ViT's file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    case = CASES[options.model]
    known = [HAND, *case.states, *case.more]
    for state in options.states:
        if state not in known:
            parser.error(f"no state {state!r} of {options.model}; there are {', '.join(known)}")
    with tempfile.TemporaryDirectory(prefix="ridgeline-kernels-") as name:
        options.folder = Path(name)
        if options.one:  # the process of one state
            Path(options.one).write_text(json.dumps(measure(options, options.states[0])))
            sys.stdout.flush()
            os._exit(0)  # a loader's thread may still wait for room
        found = {}
        for state in options.states:
            out = options.folder / "found.json"
            asked = [a for a in sys.argv[1:] if a not in ("--states", *options.states)]
            command = [sys.executable, __file__, *asked, "--states", state, "--one", str(out)]
            if subprocess.run(command, check=False).returncode or not out.is_file():
                print(f"{state}: failed", file=sys.stderr)
                continue
            found[state] = json.loads(out.read_text())
            out.unlink()
            show(state, found[state], options.most)
            write_json(options.json, found)


if __name__ == "__main__":
    main()
