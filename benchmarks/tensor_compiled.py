"""Tensor parallelism in the view and as compiled programs: a step of a small Llama, turn by turn.

    python benchmarks/tensor_compiled.py [--ranks 2] [--turns 5]

Small enough that the host decides, as it does on a GPU with any but the largest blocks. Both arrangements
live in the same processes and take turns of ten steps; a figure is the median of the turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.models.llama import Llama
from ridgeline.parallel.apply import arrange
from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.mesh import build_mesh
from ridgeline.parallel.random import Randomness
from ridgeline.train.objective import Objective
from ridgeline.train.tasks import TASKS

STEPS = 10


def build(text: str, inputs: torch.Tensor) -> Arranged:
    torch.manual_seed(0)
    layout, loss = Layout.parse(text), TASKS["causal_lm"].loss
    model = Llama(vocab=512, width=64, depth=4, heads=4, max_seq=64, ffn=128)
    mesh = build_mesh(read_rank_env(), layout, torch.device("cpu"))
    objective, random = Objective(model, loss), Randomness(0)
    return arrange(
        objective, layout, mesh, model=model, loss=loss, randomness=random, example=(inputs,)
    )


def run(rank: int, num: int, turns: int, store: str) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num)
    tokens = torch.randint(0, 512, (2, 33), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for text in (f"tp={num}", f"tp={num},sp=true", f"tp={num},sp=true,recompute=full"):
        built = [build(text, inputs), build(f"{text},compile=true", inputs)]
        seconds: list[list[float]] = [[], []]
        for turn in range(turns + 1):
            for one, found in zip(built, seconds, strict=True):
                began = time.perf_counter()
                for _ in range(STEPS):
                    loss = one.objective(inputs, targets)
                    loss.backward()
                    one.objective.zero_grad()
                if turn:  # the first compiles
                    found.append((time.perf_counter() - began) / STEPS)
        if rank == 0:
            view, compiled = (1e3 * statistics.median(found) for found in seconds)
            left = "; ".join(built[1].uncompiled())
            print(
                f"{text:<32}{view:8.1f}{compiled:10.1f}{view / compiled:8.2f}x  {left}", flush=True
            )
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    print(f"{'layout':<32}{'ms':>8}{'compiled':>10}{'':>9}")
    with tempfile.TemporaryDirectory() as folder:
        given = (args.ranks, args.turns, str(Path(folder) / "store"))
        mp.start_processes(run, given, nprocs=args.ranks, start_method="spawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
