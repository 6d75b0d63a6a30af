"""What a checkpoint costs: the stall of the loop, the speed of the disk, beside torch.save and plain DCP.

    python benchmarks/checkpoint.py                    # 1 GB of state, 3 rounds, in a temporary folder
    python benchmarks/checkpoint.py --where /scratch   # on the disk that matters

One process trains a Llama in float32 with AdamW. Each round does all of it in turn, so that a noisy disk
is noisy for everyone: `dd` with fsync, torch.save with fsync, torch.distributed.checkpoint (its own files,
synced), a synchronous save of ours, an asynchronous one while training goes on. The stall of the
asynchronous save is the time the loop is kept waiting: in the call, and before the next update for what was
not copied by then. The steps that run while the disk writes are timed as well.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from ridgeline.checkpoint.held import hold_state
from ridgeline.config import load_config
from ridgeline.launch.env import read_rank_env
from ridgeline.rundir import RunDir
from ridgeline.train.checkpoints import Checkpoints
from ridgeline.train.loop import train_loop
from ridgeline.train.setup import Training, build_training

_BYTES_PER_PARAMETER = 12
"""A float32 weight and two moments."""


def build(gigabytes: float, tokens: int, device: str) -> Training:
    """A Llama whose weights and optimizer state are so large."""
    width, vocab = 768, 8192
    block = 4 * width * width + 3 * width * 4 * width
    wanted = gigabytes * 1e9 / _BYTES_PER_PARAMETER - 2 * vocab * width
    depth = max(1, math.ceil(wanted / block))
    overrides = (
        "model.name=llama",
        f"model.args={{vocab: {vocab}, width: {width}, depth: {depth}, heads: 12, kv_heads: 12,"
        f" ffn: {4 * width}, max_seq: {tokens}}}",
        "data.source=synthetic",
        f"data.args={{task: causal_lm, shape: [{tokens}], vocab: {vocab}, samples: 1000}}",
        "train.batch=1", "train.steps=100000", "optim.name=adamw", "checkpoint.keep=1",
        f"device={device}",
    )  # fmt: skip
    return build_training(load_config(None, overrides).config, read_rank_env({}))


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Loop:
    """The training loop one step at a time, and how long `release` has kept it waiting."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.checkpoints = Checkpoints(training, RunDir(folder))
        self.waited = 0.0
        inner = training.update

        def update() -> Any:
            self.waited += timed(self.checkpoints.release)
            return inner()

        self.training = replace(training, update=update)
        self._steps: Iterator[Any] = train_loop(self.training)

    def step(self) -> float:
        def work() -> None:
            self.last = next(self._steps)
            if self.training.mesh.device.type == "cuda":
                torch.cuda.synchronize()

        return timed(work)


def one_round(loop: Loop, folder: Path, num_bytes: int) -> dict[str, float]:
    """Every way of writing once; seconds."""
    training, found = loop.training, {}
    target = folder / "other"
    count = max(1, num_bytes // 2**20)
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={count}", "conv=fsync"]
    found["dd"] = timed(lambda: subprocess.run(command, check=True, capture_output=True))
    target.unlink()
    state = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
    }

    def plain() -> None:
        torch.save(state, target)
        sync_file(target)

    found["torch.save"] = timed(plain)
    target.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = dcp.FileSystemWriter(target, sync_files=True)
        found["dcp.save"] = timed(lambda: dcp.save(state, storage_writer=writer, no_dist=True))
    shutil.rmtree(target)
    loop.step()
    found["save"] = timed(lambda: loop.checkpoints.save(loop.last.position, wait=True))
    quiet = [loop.step() for _ in range(3)]
    loop.waited = 0.0
    found["call"] = timed(lambda: loop.checkpoints.save(loop.last.position))
    busy = [loop.step()]
    found["wait"] = loop.waited
    while not (ended := loop.checkpoints.outcomes()):
        busy.append(loop.step())
    assert ended[0].path is not None, ended[0].problem
    found["background"] = ended[0].seconds
    found["quiet step"], found["busy step"] = statistics.median(quiet), statistics.median(busy)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=128, help="of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--where", type=Path, default=None, help="a folder on the disk to measure")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    training = build(args.gigabytes, args.tokens, args.device)
    with tempfile.TemporaryDirectory(dir=args.where, prefix="checkpoint-") as name:
        folder = Path(name)
        loop = Loop(training, folder)
        loop.step()
        held = hold_state(training.arranged, training.optimizer)
        num_bytes = sum(v.numel() * v.element_size() for h in held.values() for v in h.views)
        # The first asynchronous save also makes the memory that it copies to.
        loop.checkpoints.save(loop.last.position)
        loop.step()
        loop.checkpoints.outcomes(wait=True)
        rounds = []
        for number in range(args.rounds):
            rounds.append(one_round(loop, folder, num_bytes))
            print(f"round {number + 1} of {args.rounds} done", flush=True)
    median = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    stall = statistics.median(r["call"] + r["wait"] for r in rounds)
    share = statistics.median((r["call"] + r["wait"]) / r["save"] for r in rounds)
    speed = statistics.median(r["dd"] / r["save"] for r in rounds)
    print(
        f"\n{num_bytes / 1e9:.2f} GB of state, medians of {args.rounds} rounds, device {args.device}"
    )
    for key, text in (
        ("dd", "dd conv=fsync"),
        ("torch.save", "torch.save, fsync"),
        ("dcp.save", "torch.distributed.checkpoint, synced"),
        ("save", "ridgeline, synchronous (checksums, atomic)"),
        ("background", "ridgeline, asynchronous, until it is on disk"),
    ):
        print(f"{text:<46}{median[key]:7.2f} s {num_bytes / median[key] / 1e6:7.0f} MB/s")
    print(
        f"{'stall of the loop by an asynchronous save':<46}{stall:7.3f} s "
        f"({median['call']:.3f} in the call, {median['wait']:.3f} before the update)"
    )
    print(f"a step while nothing is written {median['quiet step']:.2f} s, while it is "
          f"{median['busy step']:.2f} s")  # fmt: skip
    print(f"stall / synchronous save {share:.4f} (at most 0.05)")
    print(f"bandwidth / dd           {speed:.3f} (at least 0.80)")
    return 0 if share <= 0.05 and speed >= 0.8 else 1


if __name__ == "__main__":
    raise SystemExit(main())
