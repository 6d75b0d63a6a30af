"""What the library costs a step: its training loop beside a bare torch DDP loop, in the same run.

Every rank holds both: `ridgeline` (setup, loader thread, loop, records written to a run directory) and
`bare` (DistributedDataParallel, batches cut from a tensor in memory, fused AdamW, clipping; nothing is
recorded). They take turns of a few steps, in alternating order; the ratio is of the medians over all
steps. CPU time of the process is given too: it is what counts where other jobs share the cores.

    python benchmarks/overhead.py [--processes 1 2] [--rounds 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import print_table, spread, write_json

BATCH, SEQ, CLIP, LR = 8, 64, 1.0, 1e-3
MODEL = {"size": "1m", "vocab": 256, "max_seq": SEQ}
TEXT = {"seq_len": SEQ, "max_bytes": 2_000_000}
STEPS_A_TURN = 4
LOOPS = ("ridgeline", "bare")


def ridgeline_steps(out: Path) -> Iterator[None]:
    from ridgeline.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
    from ridgeline.launch.env import read_rank_env
    from ridgeline.rundir import RunDir
    from ridgeline.train.loop import train_loop
    from ridgeline.train.record import Recorder
    from ridgeline.train.setup import build_training

    config = RunConfig(
        model=ModelConfig("llama", MODEL),
        data=DataConfig("text", TEXT),
        train=TrainConfig(batch=BATCH, steps=1_000_000, lr=LR, clip=CLIP),
        optim=OptimConfig("adamw", weight_decay=0.1),
        device="cpu",
        threads=1,
    )
    training = build_training(config, read_rank_env())
    recorder = Recorder(training)
    run = RunDir.create(out, "overhead")
    for result in train_loop(training):
        for record in recorder.add(result):
            if training.mesh.is_main:
                run.append(record)
        yield


def bare_steps(rank: int, world: int) -> Iterator[None]:
    from torch.nn.parallel import DistributedDataParallel

    from ridgeline.data.build import build_sources
    from ridgeline.models.build import build_model

    torch.manual_seed(0)
    model: Any = build_model("llama", **MODEL)
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=True)
    source, _ = build_sources("text", TEXT, 0)
    tokens, targets = source.fetch(torch.arange(len(source)).numpy(), 0)
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(len(tokens), generator=generator)
        for first in range(0, len(tokens) - BATCH, BATCH):
            mine = order[first + rank * BATCH // world : first + (rank + 1) * BATCH // world]
            logits = model(tokens[mine])
            loss = F.cross_entropy(logits.flatten(0, 1), targets[mine].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield


def _rank(rank: int, world: int, port: int, rounds: int, out: str) -> None:
    """One rank: both loops, turn by turn; rank 0 leaves the times of every step in a file."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    loops = {"ridgeline": ridgeline_steps(Path(out)), "bare": bare_steps(rank, world)}
    wall: dict[str, list[float]] = {name: [] for name in LOOPS}
    cpu: dict[str, list[float]] = {name: [] for name in LOOPS}
    for turn in range(rounds + 1):
        for name in LOOPS if turn % 2 else LOOPS[::-1]:
            next(loops[name])  # untimed: caches and the loader's thread settle
            if world > 1:
                dist.barrier()
            for _ in range(STEPS_A_TURN):
                start, start_cpu = time.perf_counter(), time.process_time()
                next(loops[name])
                if turn:
                    wall[name].append(time.perf_counter() - start)
                    cpu[name].append(time.process_time() - start_cpu)
    if rank == 0:
        torch.save({"wall": wall, "cpu": cpu}, Path(out) / "times.pt")
    if world > 1:
        dist.destroy_process_group()


def measure(world: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as out, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        torch.multiprocessing.spawn(_rank, (world, port, rounds, out), nprocs=world)
        times = torch.load(Path(out) / "times.pt", weights_only=True)
    result: dict[str, Any] = {"processes": world, "steps": len(times["wall"]["bare"])}
    for clock in ("wall", "cpu"):
        medians = {name: statistics.median(times[clock][name]) for name in LOOPS}
        result[clock] = {
            "ridgeline_ms": 1e3 * medians["ridgeline"],
            "bare_ms": 1e3 * medians["bare"],
            "ratio": medians["ridgeline"] / medians["bare"],
            "spread": max(spread(times[clock][name]) for name in LOOPS),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = [measure(world, args.rounds) for world in args.processes]
    rows = [
        (
            str(r["processes"]), clock, f"{r[clock]['ridgeline_ms']:.2f}",
            f"{r[clock]['bare_ms']:.2f}", f"{r[clock]['ratio']:.4f}", f"{r[clock]['spread']:.1%}",
            str(r["steps"]),
        )
        for r in results
        for clock in ("wall", "cpu")
    ]  # fmt: skip
    head = ("processes", "clock", "ridgeline ms", "bare ms", "ratio", "spread", "steps")
    print_table(head, rows)
    write_json(args.json, {"model": MODEL, "batch": BATCH, "results": results})


if __name__ == "__main__":
    main()
