"""What only a CUDA device can show. Skipped, and said so, where there is none."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ridgeline.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from ridgeline.errors import RunError
from ridgeline.launch.env import read_rank_env
from ridgeline.optim.update import build_update
from ridgeline.rundir import CONFIG, SPLIT, WEIGHTS, RunDir
from ridgeline.train.record import Recorder
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


@pytest.mark.parametrize("layout", ["precision=fp16", "precision=bf16,offload=optimizer"])
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved in the background, from pinned copies that the next steps must not change."""
    saving = CheckpointConfig(every=3, minutes=0)
    config = replace(mlp_config(layout, deterministic=True), checkpoint=saving)
    whole = run(config, tmp_path / "whole")

    class Died(Exception):
        pass

    real = Recorder.add

    def add(self: Recorder, result: Any) -> Any:
        if result.step == 17:
            raise Died
        return real(self, result)

    cut = RunDir.at(tmp_path / "cut")
    cut.write_text(CONFIG, "name: gpu\n")
    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "add", add)
        with pytest.raises(Died):
            run_training(config, read_rank_env({}), cut)
    run_training(config, read_rank_env({}), cut)
    resumed = [e for e in cut.events() if e.event == "resume"]
    assert len(resumed) == 1
    assert resumed[0].details["step"] >= 3
    one, other = (load_file(path.file(WEIGHTS)) for path in (whole, cut))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {s.step: s.loss for s in cut.steps()} == {s.step: s.loss for s in whole.steps()}


def test_out_of_memory_is_a_budget(tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(3e9 / total)
    wide = ModelConfig("mlp", {"in_features": 64, "hidden": 8192, "depth": 3, "out_features": 10})
    data = DataConfig("synthetic", {"shape": [64], "classes": 10, "samples": 2**17, "distinct": 64})
    config = replace(mlp_config(batch=2**17, steps=2), model=wide, data=data)
    try:
        with pytest.raises(RunError) as caught:
            run(config, tmp_path)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    text = str(caught.value)
    print(text)
    assert text.startswith("rank 0 is out of memory on cuda")
    sizes = {
        line[2:30].strip(): float(line[30:].split()[0])
        for line in text.splitlines()[1:]
        if line.endswith(" GB")
    }
    # Two square layers of 8192 and the small ends: 134M parameters and a bit.
    assert 0.5 < sizes["weights"] < 0.6
    assert sizes["optimizer state"] == pytest.approx(2 * sizes["weights"], rel=0.01)
    # Of the layer that was refused its output of 131072 x 8192 numbers, at least that.
    assert sizes["activations and temporaries"] > 4.2
    assert sizes["the device has"] == pytest.approx(3.0, rel=0.01)
    assert text.count("try layout=") == 3
