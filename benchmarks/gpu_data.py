"""A ViT on fields of 20 x 360 x 720 stored as HDF5: how much of a step waits for data, before and after.

    python benchmarks/gpu_data.py                         # one GPU
    python benchmarks/gpu_data.py --device cpu --small    # the same on a CPU, to see that it works

The fields are 16-bit integers with a scale and an offset a variable, as climate data are kept. Before: no
workers, nothing read ahead, unpacked on the CPU. After: reading threads ahead of the step, 16-bit integers
copied on a stream of their own and unpacked on the device. Both see the same samples in the same order, and
the losses have to be the same. torch computes on one CPU thread, as torchrun has it for every rank; with
all cores of a node for one rank (`--cpu-threads 16`) unpacking may hide behind the device's step.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from table import print_table, write_json

from ridgeline.config import load_config
from ridgeline.launch.env import read_rank_env
from ridgeline.parallel.mesh import close_mesh
from ridgeline.train.loop import train_loop
from ridgeline.train.setup import build_training

SCALE, OFFSET = 1 / 4096, 0.5


def write_fields(path: Path, samples: int, shape: tuple[int, int, int]) -> None:
    import h5py

    path.parent.mkdir(parents=True)
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name in ("input", "target"):
            stored = file.create_dataset(name, (samples, *shape), dtype="int16")
            for number in range(samples):
                stored[number] = rng.integers(-8192, 8192, shape, dtype=np.int16)


def configure(root: Path, options: argparse.Namespace, changes: dict[str, Any]) -> Any:
    channels, height, width = options.shape
    model = "width: 64, depth: 2, heads: 4" if options.small else "width: 768, depth: 12, heads: 12"
    settings = {
        "model.name": "vit",
        "model.args": f"{{image_size: [{height}, {width}], in_channels: {channels}, patch: 8, "
        f"task: forecast, {model}}}",
        "data.source": "packed",
        "data.args": f"{{path: {root}, holdout: 0}}",
        "data.augment.scale": f"[{SCALE}]",
        "data.augment.offset": f"[{OFFSET}]",
        "train.batch": options.batch,
        "train.steps": options.steps,
        "train.lr": 1e-4,
        "train.eval_samples": 0,
        # Else the backward pass of attention adds in whatever order it comes, and no two runs agree.
        "train.deterministic": True,
        "device": options.device,
        "threads": options.cpu_threads,
        "layout.precision": "fp32" if options.small else "bf16",
        **changes,
    }
    return load_config(None, [f"{key}={value}" for key, value in settings.items()]).config


def run(config: Any, warm_up: int) -> tuple[list[float], list[float], list[float]]:
    """Losses, seconds of steps, and seconds in them in which the device waited for data."""
    training = build_training(config, read_rank_env({}))
    losses, steps, waits = [], [], []
    pending = []
    for result in train_loop(training):
        losses.append(result.loss_share)
        pending.append(result.times)
    for times in pending[warm_up:]:
        read = times.read()
        steps.append(read["step_s"])
        waits.append(read.get("data_s", 0.0) + read.get("h2d_s", 0.0))
    training.close_loaders()
    close_mesh(training.mesh)
    return [float(loss) for loss in losses], steps, waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--cpu-threads", type=int, default=1, help="of torch, for one rank")
    parser.add_argument("--where", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.shape = (4, 32, 64) if options.small else (20, 360, 720)
    root = Path(tempfile.mkdtemp(prefix="ridgeline-fields-", dir=options.where)) / "fields"
    ways = {
        "before: 0 workers, unpacked on the CPU": {
            "data.prefetch": 0,
            "data.augment.where": "host",
        },
        "read ahead in threads, unpacked on the CPU": {
            "data.threads": options.threads,
            "data.augment.where": "host",
        },
        "after: and unpacked on the device": {"data.threads": options.threads},
    }
    try:
        write_fields(root / "fields.h5", options.samples, options.shape)
        rows, results, losses = [], {}, []
        for name, changes in ways.items():
            found, steps, waits = run(configure(root, options, changes), warm_up=5)
            share = sum(waits) / sum(steps)
            losses.append(found)
            rows.append([name, f"{1e3 * statistics.median(steps):.1f}", f"{100 * share:.1f} %"])
            results[name] = {"step_s": steps, "wait_s": waits, "losses": found}
    finally:
        shutil.rmtree(root.parent, ignore_errors=True)
    print_table(("loader", "step, ms", "waits for data"), rows)
    same = all(found == losses[0] for found in losses)
    print(f"losses of {options.steps} steps: {'the same bits' if same else 'NOT the same'}")
    write_json(options.json, results)


if __name__ == "__main__":
    main()
