"""What only a CUDA device can show. Skipped, and said so, where there is none."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ridgeline.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from ridgeline.errors import RunError
from ridgeline.launch.env import read_rank_env
from ridgeline.optim.update import build_update
from ridgeline.rundir import CONFIG, SPLIT, RunDir
from ridgeline.train.run import run_training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def mlp_config(layout: str = "", **train: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig("mlp", {"in_features": 64, "hidden": 128, "out_features": 10}),
        data=DataConfig("synthetic", {"shape": [64], "classes": 10, "samples": 256}),
        train=TrainConfig(**{"batch": 32, "steps": 24, "lr": 3e-3, "clip": 1.0, **train}),
        optim=OptimConfig("adamw"),
        layout=layout,
        device="cuda",
    )


def run(config: RunConfig, tmp_path: Path) -> RunDir:
    directory = RunDir.create(tmp_path, "gpu")
    directory.write_text(CONFIG, "name: gpu\n")
    run_training(config, read_rank_env({}), directory)
    return directory


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_trains_in_each_precision(precision: str, tmp_path: Path) -> None:
    steps = run(mlp_config(f"precision={precision}"), tmp_path).steps()
    assert len(steps) == 24
    assert steps[-1].loss < 0.8 * steps[0].loss
    assert all(math.isfinite(s.grad_norm or 0.0) for s in steps)


def test_times_of_a_step_add_up(tmp_path: Path) -> None:
    directory = run(mlp_config(), tmp_path)
    for step in directory.steps():
        parts = [getattr(step, part) for part in SPLIT]
        assert min(parts) >= 0
        assert sum(parts) <= step.step_s * 1.001
        assert step.mfu is not None
        assert 0 < step.mfu < 1
        assert step.memory_bytes


def test_nan_is_named_by_its_step(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"at step \d+ on rank 0"):
        run(mlp_config(lr=1e30, clip=None), tmp_path)


def test_captured_graphs_give_the_same_losses(tmp_path: Path) -> None:
    compiled = run(mlp_config("compile=true"), tmp_path / "a").steps()
    captured = run(mlp_config("compile=true,graphs=true"), tmp_path / "b").steps()
    for one, other in zip(compiled, captured, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)


def test_folded_clipping_is_clipping() -> None:
    torch.manual_seed(0)
    first = nn.Linear(32, 32, device="cuda")
    second = copy.deepcopy(first)
    x = torch.randn(16, 32, device="cuda")
    folded = torch.optim.AdamW(first.parameters(), lr=0.1, fused=True)
    plain = torch.optim.AdamW(second.parameters(), lr=0.1, fused=True)
    update = build_update(folded, list(first.parameters()), 0.01, None)
    for _ in range(5):
        (first(x) ** 2).sum().backward()
        (second(x) ** 2).sum().backward()
        norm = update()
        expected = nn.utils.clip_grad_norm_(second.parameters(), 0.01)
        plain.step()
        plain.zero_grad()
        assert norm is not None
        torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(first.weight, second.weight, rtol=1e-4, atol=1e-5)


def test_loss_records_arrive_in_order(tmp_path: Path) -> None:
    """Windows are read one behind on CUDA; none may be lost or doubled at the end."""
    steps = run(mlp_config(steps=37), tmp_path).steps()
    assert [s.step for s in steps] == list(range(1, 38))
