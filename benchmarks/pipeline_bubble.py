"""The bubble of each pipeline schedule beside its formula, with stages that take a fixed time.

A stage sleeps instead of computing (forward t, backward 2t), so four of them fit a machine with two
cores and nothing but the schedule and its messages is measured. The speed-up is over one process that
runs all stages one after the other; m microbatches on p ranks with v stages each can reach
m v p / (m v + p - 1), and idle (p-1) / (m v + p - 1) of the time.

    python benchmarks/pipeline_bubble.py [--sleep-ms 50] [--repeats 3] [--traces DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import print_table, spread, write_json
from ridgeline.parallel.pipeline import (
    Pipeline,
    build_stages,
    ideal_bubble,
    plan_stages,
    timeline_svg,
    write_chrome_trace,
)

NUM_RANKS = 4
CASES = (("gpipe", 9, 1), ("1f1b", 9, 1), ("interleaved", 8, 2))
TOLERANCE = 0.15


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float) -> Tensor:
        ctx.backward_s = 2 * forward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_s)
        return grad, None


class Sleeper(nn.Module):
    """Takes `forward_s` forward and twice that backward, and has one weight."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.weight, self.forward_s)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).sum()


def time_alone(model: nn.Module, parts: list[Tensor]) -> float:
    start = time.perf_counter()
    for part in parts:
        total(model(part), part).backward()
    return time.perf_counter() - start


def _rank(rank: int, sleep_s: float, repeats: int, out: str, traces: str | None) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{out}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    results = []
    for schedule, num_microbatches, virtual in CASES:
        num_stages = NUM_RANKS * virtual
        model = nn.Sequential(*(Sleeper(sleep_s / virtual) for _ in range(num_stages)))
        parts = [torch.ones(1, 8) for _ in range(num_microbatches)]
        plan = plan_stages(model, num_stages, parts[0])
        stages = build_stages(model, plan, plan.indices_of(rank, NUM_RANKS))
        pipeline = Pipeline(
            stages, plan, total, schedule, num_microbatches, virtual, dist.group.WORLD,
            torch.device("cpu"),
        )  # fmt: skip
        ones = [1] * num_microbatches
        pipeline.forward_backward(parts, parts, ones, ones)
        seconds, bubbles = [], []
        for _ in range(repeats):
            dist.barrier()
            pipeline.record_next_step()
            pipeline.forward_backward(parts, parts, ones, ones)
            timeline = pipeline.timeline()
            seconds.append(timeline.total_s)
            bubbles.append(timeline.measured_bubble)
        if rank == 0:
            results.append(
                {
                    "schedule": schedule,
                    "p": NUM_RANKS,
                    "m": num_microbatches,
                    "v": virtual,
                    "alone_s": time_alone(model, parts),
                    "seconds": seconds,
                    "bubbles": bubbles,
                }
            )
            if traces is not None:
                write_chrome_trace(timeline, Path(traces) / f"pipeline-{schedule}.json")
                picture = timeline_svg(timeline.events, title=timeline.describe())
                Path(traces, f"pipeline-{schedule}.svg").write_text(picture)
        dist.barrier()
    if rank == 0:
        torch.save(results, f"{out}/results.pt")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sleep-ms", type=float, default=50.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        traces = str(args.traces) if args.traces else None
        arguments = (args.sleep_ms / 1e3, args.repeats, out, traces)
        torch.multiprocessing.spawn(_rank, arguments, nprocs=NUM_RANKS)
        results = torch.load(f"{out}/results.pt", weights_only=True)
    rows, failed = [], False
    for r in results:
        step = statistics.median(r["seconds"])
        speed_up, bubble = r["alone_s"] / step, statistics.median(r["bubbles"])
        ideal = ideal_bubble(r["p"], r["m"], r["v"])
        ideal_speed_up = r["p"] * (1 - ideal)
        is_near = abs(speed_up / ideal_speed_up - 1) <= TOLERANCE
        failed = failed or not is_near or abs(bubble - ideal) > TOLERANCE
        rows.append(
            (
                r["schedule"], str(r["m"]), str(r["v"]), f"{speed_up:.2f}", f"{ideal_speed_up:.2f}",
                f"{speed_up / ideal_speed_up - 1:+.1%}", f"{bubble:.3f}", f"{ideal:.3f}",
                f"{(r['p'] - 1) / (r['m'] * r['v']):.3f}", f"{spread(r['seconds']):.1%}",
            )
        )  # fmt: skip
    head = ("schedule", "m", "v", "speed-up", "formula", "off by", "bubble", "formula",
            "(p-1)/mv", "spread")  # fmt: skip
    print_table(head, rows)
    print(
        f"\n{NUM_RANKS} ranks, {'outside' if failed else 'within'} {TOLERANCE:.0%} of the formula"
    )
    write_json(args.json, {"sleep_ms": args.sleep_ms, "results": results})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
