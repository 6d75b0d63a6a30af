"""One GPU: this library's training loop beside a hand-written one, in the same run.

Each case runs in two processes that take turns on the device, so that neither inherits the other's
settings: `ridgeline` (setup, loop, records and all) and `hand` (bf16 autocast, torch.compile of model
and loss, fused AdamW, nothing else). A turn is some untimed steps and then timed ones; the ratio is of
the medians over turns. Prints tokens/s or images/s, TFLOP/s and peak memory.

    python benchmarks/gpu_single.py [--case llama-124m ...] [--turns 6] [--json FILE]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import print_table, spread, write_json


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    args: dict[str, Any]
    source: dict[str, Any]
    batch: int
    unit: str
    units_per_sample: int
    clip: float | None
    channels_last: bool = False
    steps: int = 20


CASES = {
    "llama-124m": Case(
        "llama-124m", "llama", {"size": "124m", "max_seq": 1024},
        {"task": "causal_lm", "shape": [1024], "vocab": 32768}, 64, "tokens", 1024, 1.0,
    ),
    "llama-1.3b": Case(
        "llama-1.3b", "llama", {"size": "1.3b", "max_seq": 2048},
        {"task": "causal_lm", "shape": [2048], "vocab": 32768, "distinct": 48}, 12, "tokens",
        2048, 1.0, steps=8,
    ),
    "resnet50": Case(
        "resnet50", "resnet50", {},
        {"shape": [3, 224, 224], "classes": 1000, "distinct": 256, "samples": 65536}, 256,
        "images", 1, None, channels_last=True, steps=30,
    ),
}  # fmt: skip

LR = 3e-4


def train_flops_per_sample(case: Case) -> float:
    """Llama: 6N + 6LdT a token (causal attention counted once); ResNet: counted on meta."""
    import torch

    from ridgeline.models.build import build_model

    with torch.device("meta"):
        model = build_model(case.model, **case.args)
    if case.model == "llama":
        config = model.config
        count = sum(p.numel() for p in model.parameters())
        length = case.units_per_sample
        return length * (6.0 * count + 6.0 * config.depth * config.width * length)
    from ridgeline.models.count import count_model

    with torch.device("meta"):
        inputs = torch.zeros(2, *case.source["shape"])
        targets = torch.zeros(2, dtype=torch.int64)
    loss = torch.nn.functional.cross_entropy
    facts = count_model(case.name, model, inputs, targets, lambda m, x, y: loss(m(x), y))
    return facts.train_flops_per_sample


def ridgeline_steps(case: Case) -> Any:
    """The library as `ridgeline train` runs it on one rank, run directory included."""
    from ridgeline.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
    from ridgeline.launch.env import read_rank_env
    from ridgeline.rundir import RunDir
    from ridgeline.train.loop import train_loop
    from ridgeline.train.record import Recorder
    from ridgeline.train.setup import build_training

    config = RunConfig(
        model=ModelConfig(case.model, case.args, channels_last=case.channels_last),
        data=DataConfig("synthetic", case.source),
        train=TrainConfig(batch=case.batch, steps=1_000_000, lr=LR, clip=case.clip),
        optim=OptimConfig("adamw", weight_decay=0.1),
        layout="precision=bf16,compile=true",
        device="cuda",
    )
    training = build_training(config, read_rank_env({}))
    recorder = Recorder(training)
    run = RunDir.create(Path(tempfile.mkdtemp()), case.name)
    for result in train_loop(training):
        for record in recorder.add(result):
            run.append(record)
        yield result.loss_share


def hand_steps(case: Case) -> Any:
    """What a good engineer writes for one GPU."""
    import torch
    import torch.nn.functional as F

    from ridgeline.data.build import build_sources
    from ridgeline.models.build import build_model

    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    torch.manual_seed(0)
    with device:
        model = build_model(case.model, **case.args)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
    source, _ = build_sources("synthetic", case.source, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=True)

    @torch.compile
    def loss_of(x: Any, y: Any) -> Any:
        logits = model(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    import numpy as np

    rng = np.random.default_rng(0)
    while True:
        x, y = source.device_fetch(rng.integers(0, 1 << 30, case.batch), device)
        if case.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(x, y)
        loss.backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()


LOOPS = {"ridgeline": ridgeline_steps, "hand": hand_steps}


def _worker(kind: str, case: Case, pipe: Connection) -> None:
    """Runs turns when told to; answers seconds a step, last loss and peak bytes."""
    import torch

    steps = LOOPS[kind](case)
    while (turn := pipe.recv()) is not None:
        untimed, timed = turn
        for _ in range(untimed):
            loss = next(steps)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(timed):
            loss = next(steps)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / timed
        peak = torch.cuda.max_memory_allocated()
        value = float(loss)
        # Give the blocks back, so that the other process has room for its turn.
        torch.cuda.empty_cache()
        pipe.send((seconds, value, peak))


def run_case(case: Case, turns: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, {}
    for kind in LOOPS:
        pipes[kind], child = context.Pipe()
        processes[kind] = context.Process(target=_worker, args=(kind, case, child), daemon=True)
        processes[kind].start()
    answers: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in LOOPS}
    for turn in range(turns + 1):
        order = list(LOOPS) if turn % 2 else list(LOOPS)[::-1]
        for kind in order:
            pipes[kind].send((3, case.steps))
            answer = pipes[kind].recv()
            if turn:  # the first turn compiles
                answers[kind].append(answer)
    for kind in LOOPS:
        pipes[kind].send(None)
        processes[kind].join(30)
    flops = train_flops_per_sample(case) * case.batch
    result: dict[str, Any] = {"case": case.name, "unit": case.unit}
    for kind in LOOPS:
        seconds = [a[0] for a in answers[kind]]
        median = statistics.median(seconds)
        result[kind] = {
            "step_ms": 1e3 * median,
            "spread": spread(seconds),
            "rate": case.batch * case.units_per_sample / median,
            "tflops": flops / median / 1e12,
            "peak_gb": max(a[2] for a in answers[kind]) / 1e9,
            "loss": answers[kind][-1][1],
        }
    result["ratio"] = result["hand"]["step_ms"] / result["ridgeline"]["step_ms"]
    pairs = zip(answers["hand"], answers["ridgeline"], strict=True)
    result["turn_ratios"] = sorted(h[0] / r[0] for h, r in pairs)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("gpu_single: torch sees no CUDA device here; this benchmark needs one")
    results = [run_case(CASES[name], args.turns) for name in args.case]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.turns} turns each")
    rows = [
        (
            r["case"], kind, f"{r[kind]['rate']:,.0f} {r['unit']}/s", f"{r[kind]['tflops']:.0f}",
            f"{r[kind]['peak_gb']:.1f}", f"{r[kind]['step_ms']:.2f}", f"{r[kind]['spread']:.1%}",
            f"{r[kind]['loss']:.3f}", f"{r['ratio']:.4f}" if kind == "ridgeline" else "1",
        )
        for r in results
        for kind in LOOPS
    ]  # fmt: skip
    head = ("case", "loop", "rate", "TFLOP/s", "peak GB", "step ms", "spread", "loss", "ratio")
    print_table(head, rows)
    write_json(args.json, {"device": torch.cuda.get_device_name(), "results": results})


if __name__ == "__main__":
    main()
