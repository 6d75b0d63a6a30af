"""One rank of a large job on one GPU: its memory, without the other ranks.

Torch's fake process group stands in for the others: nothing is sent, values are wrong, shapes and memory
are right. Each layout runs in a process of its own: the recipe's setup, then a few steps, through the
same code as `ridgeline train`. Prints what the rank holds and the peak of a step; `--json` keeps it as a
fact for the planner. `ridgeline plan simulate` does it for any recipe, and adds the network.

    python benchmarks/gpu_one_rank.py [--world 1024] [--size llama3-8b] [--json FILE] [--layout TEXT ...]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import print_table, write_json

LAYOUTS = (
    "zero=3,precision=bf16",
    "zero=3,recompute=selective,precision=bf16",
    "zero=3,recompute=full,precision=bf16",
    "tp=8,pp=4,zero=1,microbatches=8,precision=bf16",
    "tp=8,sp=true,pp=4,zero=1,microbatches=8,precision=bf16",
)
STEPS = 2


def measure(text: str, world: int, size: str, seq_len: int, rank: int, pipe: Any) -> None:
    import torch

    from ridgeline.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
    from ridgeline.layout import Layout
    from ridgeline.scaling.rank import build_rank
    from ridgeline.scaling.request import RankRequest

    layout = Layout.parse_for(text, world, "--layout")
    batch = layout.dp * max(layout.microbatches, layout.accumulate)
    config = RunConfig(
        model=ModelConfig("llama", {"size": size, "max_seq": seq_len}),
        data=DataConfig(
            "synthetic",
            {"task": "causal_lm", "shape": [seq_len], "vocab": 32768, "distinct": 8,
             "samples": 4 * batch},
        ),
        train=TrainConfig(batch=batch, steps=100, lr=1e-4, clip=1.0, eval_samples=0),
        optim=OptimConfig("adamw", weight_decay=0.1),
        layout=text,
        device="cuda",
    )  # fmt: skip
    training, built_s = build_rank(RankRequest(config, world, 8, rank))
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    peaks, seconds = [], []
    for index, batch_here in enumerate(training.loader.epoch(0)):
        if index == STEPS:
            break
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        training.forward_backward(training.to_device(batch_here), training.clock)
        torch.cuda.synchronize()
        backward = torch.cuda.max_memory_allocated()
        training.update()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        peaks.append((backward, torch.cuda.max_memory_allocated()))
    pipe.send(
        {
            "model": size,
            "num_parameters": training.model_facts.num_parameters,
            "layout": str(layout),
            "world_size": world,
            "rank": rank,
            "seq_len": seq_len,
            "samples_per_microbatch": 1,
            "held_after_setup_bytes": held,
            "peak_forward_backward_bytes": peaks[-1][0],
            "peak_step_bytes": peaks[-1][1],
            "held_between_steps_bytes": torch.cuda.memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "step_s_without_communication": seconds[-1],
            "build_s": built_s,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=1024)
    parser.add_argument("--size", default="llama3-8b")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--layout", nargs="+", default=LAYOUTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("gpu_one_rank: torch sees no CUDA device here; this benchmark needs one")
    context = multiprocessing.get_context("spawn")
    facts: list[dict[str, Any]] = []
    for text in args.layout:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=measure, args=(text, args.world, args.size, args.seq_len, args.rank, theirs)
        )
        process.start()
        theirs.close()
        try:
            facts.append(ours.recv())
            print(json.dumps(facts[-1]), file=sys.stderr, flush=True)
        except EOFError:
            print(f"{text}: failed", file=sys.stderr, flush=True)
        process.join()
        write_json(args.json, {"facts": facts})
    rows = [
        (
            f["layout"], f"{f['held_between_steps_bytes'] / 1e9:.2f}",
            f"{f['peak_forward_backward_bytes'] / 1e9:.2f}", f"{f['peak_step_bytes'] / 1e9:.2f}",
            f"{f['step_s_without_communication']:.2f}",
        )
        for f in facts
    ]  # fmt: skip
    print(f"{args.size}, rank {args.rank} of {args.world}, 1 x {args.seq_len} tokens")
    print_table(("layout", "held GB", "peak fwd+bwd GB", "peak step GB", "s, no comm"), rows)
    if len(facts) < len(args.layout):
        sys.exit(1)


if __name__ == "__main__":
    main()
