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
    together: bool = True
    """Whether all loops fit on the device at once while they compile."""
    loops: tuple[str, ...] = ("ridgeline", "graphs=true", "hand")


CASES = {
    "llama-124m": Case(
        "llama-124m", "llama", {"size": "124m", "max_seq": 1024},
        {"task": "causal_lm", "shape": [1024], "vocab": 32768}, 64, "tokens", 1024, 1.0,
    ),
    "llama-1.3b": Case(
        "llama-1.3b", "llama", {"size": "1.3b", "max_seq": 2048},
        {"task": "causal_lm", "shape": [2048], "vocab": 32768, "distinct": 48}, 12, "tokens",
        2048, 1.0, steps=8, together=False, loops=("ridgeline", "hand"),
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


def graphs_steps(case: Case) -> Any:
    return ridgeline_steps(case, "precision=bf16,compile=true,graphs=true")


def ridgeline_steps(case: Case, layout: str = "precision=bf16,compile=true") -> Any:
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
        layout=layout,
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
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(x, y)
        loss.backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()


LOOPS = {"ridgeline": ridgeline_steps, "graphs=true": graphs_steps, "hand": hand_steps}


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
        # Give the blocks back, so that the others have room for their turn.
        torch.cuda.empty_cache()
        pipe.send((seconds, value, peak))


def _compile_all(case: Case, pipes: dict[str, Connection]) -> None:
    """The first steps, untimed: side by side where the device holds both models' activations."""
    start = time.perf_counter()
    if case.together:
        for pipe in pipes.values():
            pipe.send((3, 1))
        for pipe in pipes.values():
            pipe.recv()
    else:
        for pipe in pipes.values():
            pipe.send((3, 1))
            pipe.recv()
    spent = time.perf_counter() - start
    print(f"{case.name}: both loops compiled in {spent:.0f} s", file=sys.stderr, flush=True)


def run_case(case: Case, turns: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, {}
    for kind in case.loops:
        pipes[kind], child = context.Pipe()
        processes[kind] = context.Process(target=_worker, args=(kind, case, child), daemon=True)
        processes[kind].start()
        child.close()  # so that a worker that dies ends the wait for its answer
    answers: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in case.loops}
    _compile_all(case, pipes)
    for turn in range(turns):
        for kind in case.loops if turn % 2 else case.loops[::-1]:
            pipes[kind].send((3, case.steps))
            answers[kind].append(pipes[kind].recv())
        pair = ", ".join(f"{kind} {1e3 * answers[kind][-1][0]:.2f} ms" for kind in case.loops)
        print(f"{case.name} turn {turn + 1}: {pair}", file=sys.stderr, flush=True)
    for kind in case.loops:
        pipes[kind].send(None)
        processes[kind].join(30)
    return {"case": case.name, "unit": case.unit, "loops": _figures(case, answers)}


def _figures(case: Case, answers: dict[str, list[tuple[float, float, int]]]) -> dict[str, Any]:
    """Medians over turns, and the median of each turn's ratio to the hand-written loop."""
    flops = train_flops_per_sample(case) * case.batch
    figures = {}
    for kind, turns in answers.items():
        median = statistics.median(seconds for seconds, _, _ in turns)
        pairs = zip(answers["hand"], turns, strict=True)
        ratios = sorted(hand[0] / ours[0] for hand, ours in pairs)
        figures[kind] = {
            "step_ms": 1e3 * median,
            "spread": spread([seconds for seconds, _, _ in turns]),
            "rate": case.batch * case.units_per_sample / median,
            "tflops": flops / median / 1e12,
            "peak_gb": max(peak for _, _, peak in turns) / 1e9,
            "loss": turns[-1][1],
            "ratio": statistics.median(hand[0] for hand in answers["hand"]) / median,
            "turn_ratios": ratios,
        }
    return figures


def _rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            result["case"], kind, f"{f['rate']:,.0f} {result['unit']}/s", f"{f['tflops']:.0f}",
            f"{f['peak_gb']:.1f}", f"{f['step_ms']:.2f}", f"{f['spread']:.1%}", f"{f['loss']:.3f}",
            f"{f['ratio']:.4f}", f"{f['turn_ratios'][0]:.4f}-{f['turn_ratios'][-1]:.4f}",
        )
        for kind, f in result["loops"].items()
    ]  # fmt: skip


HEAD = ("case", "loop", "rate", "TFLOP/s", "peak GB", "step ms", "spread", "loss", "ratio", "turns")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("gpu_single: torch sees no CUDA device here; this benchmark needs one")
    device = torch.cuda.get_device_name()
    results = []
    for name in args.case:
        results.append(run_case(CASES[name], args.turns))
        write_json(args.json, {"device": device, "results": results})
    print(f"{device}, torch {torch.__version__}, {args.turns} turns each; ratio: hand / loop")
    print_table(HEAD, [row for result in results for row in _rows(result)])


if __name__ == "__main__":
    main()
