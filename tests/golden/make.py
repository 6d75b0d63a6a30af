"""The first losses of three recipes, shrunk and in float64, kept in `losses.json`.

They change when the arithmetic of a model, an optimizer, a schedule, the order of samples or the
initial weights changes. Where that is what you meant, make them anew and commit the difference:

    python tests/golden/make.py

Run as a script to write them, and by `test_losses.py` to compare. One thread, one process, no
dropout, and no data that differs between installations: the language model reads a text made here.
"""

import json
import tempfile
from pathlib import Path

import torch

from ridgeline.config import find_recipe, load_config
from ridgeline.launch.env import read_rank_env
from ridgeline.train.loop import train_loop
from ridgeline.train.setup import build_training

GOLDEN = Path(__file__).parent / "losses.json"
NUM_STEPS = 10

SMALL_FIELDS = ["data.args.channels=2", "data.args.height=8", "data.args.width=16"]
SHRUNK = {
    "digits": ["model.args.width=4", "train.batch=32", "schedule.warmup_steps=3"],
    "llama-text": [
        "data.args.seq_len=32",
        "model.args.width=32",
        "model.args.depth=2",
        "model.args.kv_heads=2",
        "train.batch=16",
        "schedule.warmup_steps=3",
    ],
    "unet-fields": [
        *SMALL_FIELDS,
        "data.args.samples=128",
        "model.args.in_channels=2",
        "model.args.out_channels=2",
        "model.args.width=4",
        "model.args.depth=2",
        "train.batch=16",
        "schedule.warmup_steps=3",
    ],
}
COMMON = [f"train.steps={NUM_STEPS}", "model.dtype=float64", "device=cpu", "threads=1"]


def first_losses(name: str) -> list[float]:
    """The losses of the first steps of a shrunk recipe, computed here and now."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*SHRUNK[name], *COMMON]
        if name == "llama-text":
            text = Path(folder) / "text.txt"
            text.write_text("".join(f"{n} times {n + 1} is {n * (n + 1)}.\n" for n in range(1000)))
            overrides.append(f"data.args.path={text}")
        threads = torch.get_num_threads()
        try:
            config = load_config(find_recipe(name), overrides).config
            training = build_training(config, read_rank_env({}))
            return [result.loss_share.item() for result in train_loop(training)]
        finally:
            torch.set_num_threads(threads)


def main() -> None:
    losses = {name: first_losses(name) for name in SHRUNK}
    GOLDEN.write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {GOLDEN}")


if __name__ == "__main__":
    main()
