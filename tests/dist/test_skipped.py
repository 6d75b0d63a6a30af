"""Samples that cannot be read, met by different ranks of one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.config import load_config
from ridgeline.data.dataset import open_dataset
from ridgeline.data.formats.table import FORMATS
from ridgeline.data.pack import pack
from ridgeline.launch.env import read_rank_env
from ridgeline.rundir import RunDir
from ridgeline.train.run import run_training

NUM = 32
DAMAGED = (2, 9, 30)
RECIPE = (
    "model.name=mlp",
    "model.args={in_features: 4, hidden: 8, depth: 1, out_features: 3}",
    "data.source=packed",
    "train.batch=8",
    "train.steps=8",
    "train.eval_samples=0",
    "log.tensorboard=no",
    "device=cpu",
    "threads=1",
)


def make(path: Path) -> Path:
    folder = path / "folder"
    folder.mkdir()
    for number in range(NUM):
        np.save(folder / f"{number:02d}.x.npy", np.full(4, number, dtype=np.float32))
        np.save(folder / f"{number:02d}.y.npy", np.array(number % 3))
    for part in ("train", "eval"):
        dataset = pack(open_dataset(folder), path / "packed" / part, FORMATS["tar"]).dataset
    table = dataset.shard(0).table
    assert table.offsets is not None
    assert table.sizes is not None
    shard = path / "packed" / "train" / dataset.entries[0].name
    data = bytearray(shard.read_bytes())
    for number in DAMAGED:
        data[int(table.offsets[number, 0] + table.sizes[number, 0]) - 1] ^= 1
    shard.write_bytes(data)
    return path / "packed"


def train(data: Path, folder: Path) -> int:
    args = f"data.args={{path: {data}, classes: 3, on_error: skip}}"
    config = load_config(None, [*RECIPE, args]).config
    return run_training(config, read_rank_env(), RunDir(folder)).num_skipped


def test_every_rank_writes_what_it_skipped(ranks: Any, tmp_path: Path) -> None:
    data, folder = make(tmp_path), tmp_path / "run"
    folder.mkdir()
    assert ranks(2, train, data, folder)[0] == len(DAMAGED)
    run = RunDir(folder)
    told = [event.details for event in run.events() if event.event == "skipped-sample"]
    # Two epochs: each of the three once on any rank, at most once on both.
    assert {one["sentence"].partition("sample ")[2].split()[0] for one in told} == {
        str(number) for number in DAMAGED
    }
    assert {one["rank"] for one in told} == {0, 1}
    assert len(told) == len({(one["rank"], one["sentence"]) for one in told})
    assert run.events()[-1].details["skipped_samples"] == len(DAMAGED)
