"""`ridgeline checkpoint reshard`: through several layouts and back, and a run goes on from the result."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ridgeline import rundir
from ridgeline.checkpoint.compare import compare
from ridgeline.checkpoint.manifest import read_manifest
from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.parallel.gather import full_state
from ridgeline.rundir import CHECKPOINTS, RunDir
from ridgeline.train.reshard import reshard
from ridgeline.train.run import run_training
from ridgeline.train.setup import build_training


def config_of(steps: int) -> RunConfig:
    return load_config(
        None,
        [
            "model.name=llama",
            "model.args={vocab: 64, width: 32, depth: 2, heads: 4, kv_heads: 2, tie_embeddings: true}",
            "data.source=synthetic",
            "data.args={task: causal_lm, shape: [16], vocab: 64, samples: 32}",
            f"train={{batch: 4, steps: {steps}, eval_samples: 0}}",
            "log.tensorboard=no",
            "device=cpu",
            "threads=2",
        ],
    ).config


def train(path: Path, steps: int) -> RunDir:
    path.mkdir(exist_ok=True)
    (path / rundir.LOGS).mkdir(exist_ok=True)
    run = RunDir(path)
    run.write_text(rundir.CONFIG, dump_config(config_of(steps)))
    run_training(config_of(steps), read_rank_env({}), run)
    return run


def documented_reader() -> Any:
    """The function that docs/checkpoints.md tells readers to copy."""
    page = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "def " in block]
    names: dict[str, Any] = {}
    exec(block, names)
    return names["read"]


def test_through_layouts_and_back(tmp_path: Path) -> None:
    run = train(tmp_path / "run", 3)
    source = path = run.file(CHECKPOINTS) / "step-00000003"
    weights, read = load_file(run.file(rundir.WEIGHTS)), documented_reader()
    for layout, ranks in (("tp=2,pp=2,microbatches=2", 4), ("dp=2,zero=3", 2), ("dp=1", 1)):
        path, count = reshard(path, tmp_path / layout, layout)
        manifest = read_manifest(path)
        assert manifest.num_ranks == ranks
        assert path == tmp_path / layout / "step-00000003"
        parameters = 2 * 9 + 2  # what is tied counts once
        assert count == 4 * parameters
        assert f"layout: {layout}\n" in manifest.config
        assert "threads: 2\n" in manifest.config  # as it was, not as it was read
        for name in ("embed.weight", "layers.1.attention.wq.weight", "norm.weight"):
            assert torch.equal(read(path, f"model/{name}"), weights[name])
        assert float(read(path, "optim/step/norm.weight")) == 3
    different = [d.name for d in compare(source, path).differences]
    assert all(name.startswith("rank/0/random/") for name in different)  # of another process
    with pytest.raises(UsageError, match="exists already"):
        reshard(source, tmp_path / "dp=1", "dp=1")
    with pytest.raises(UsageError, match="divisible by dp=3"):
        reshard(source, tmp_path / "three", "dp=3")

    again = tmp_path / "again"
    again.mkdir()
    shutil.copytree(tmp_path / "dp=1", again / CHECKPOINTS)
    resumed = load_file(train(again, 5).file(rundir.WEIGHTS))
    whole = load_file(train(tmp_path / "whole", 5).file(rundir.WEIGHTS))
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


def start_from(file: str, layout: str) -> dict[str, torch.Tensor]:
    config = replace(config_of(1), layout=layout)
    config = replace(config, model=replace(config.model, weights=file))
    return full_state(build_training(config, read_rank_env()).arranged)


@pytest.mark.parametrize("layout", ["tp=2,pp=2,microbatches=2", "dp=4,zero=3"])
def test_every_layout_starts_from_a_file(ranks: Any, tmp_path: Path, layout: str) -> None:
    run = train(tmp_path / "run", 1)
    file = run.file(rundir.WEIGHTS)
    found, weights = ranks(4, start_from, str(file), layout)[0], load_file(file)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
