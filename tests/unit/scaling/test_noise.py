"""The gradient noise scale: without bias, as sure as it says, and that of every sample's own gradient."""

from __future__ import annotations

import dataclasses
import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from ridgeline import rundir
from ridgeline.cli import app
from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.rundir import RunDir
from ridgeline.scaling.noise import (
    GROUPS,
    Noise,
    Products,
    estimate,
    samples_factor,
    show,
    steps_factor,
)
from ridgeline.scaling.noise_run import measure_noise
from ridgeline.train.run import run_training

# The estimate alone


def of_gradients(gradients: np.ndarray, batch: int, population: int) -> Noise:
    groups = [gradients[k::GROUPS] for k in range(GROUPS)]
    squares = [[float(g @ g) for g in group] for group in groups]
    means = [group.mean(0) for group in groups]
    products = {(a, b): float(means[a] @ means[b]) for a, b in combinations(range(GROUPS), 2)}
    return estimate(Products(squares, products, batch, population), 0, 1.0)


def drawn(
    rng: np.random.Generator, true: np.ndarray, spread: float, batch: int, count: int
) -> Noise:
    """From gradients whose noise is known: `spread` is a sample's variance in each direction."""
    noise = rng.normal(size=(count, len(true))) * math.sqrt(spread / batch)
    return of_gradients(true + noise, batch, 10**9)


def test_it_is_without_bias_and_as_sure_as_it_says() -> None:
    rng = np.random.default_rng(0)
    true = rng.normal(size=50) / math.sqrt(50)
    square, variance = float(true @ true), 50 * 2.0
    found = [drawn(rng, true, 2.0, 8, 60) for _ in range(400)]
    assert np.mean([f.square for f in found]) == pytest.approx(square, rel=0.03)
    assert np.mean([f.variance for f in found]) == pytest.approx(variance, rel=0.03)
    held = [f.low <= variance / square <= (f.high or math.inf) for f in found]
    assert 0.84 <= np.mean(held) <= 0.97  # 90 % are promised


def test_few_samples_of_which_none_is_drawn_twice() -> None:
    """The noise scale is half of what there is: groups that share no sample lean away from each other."""
    rng = np.random.default_rng(2)
    each = rng.normal(size=(720, 40)) * 3 + 1.0
    mean = each.mean(0)
    square, variance = float(mean @ mean), float((each - mean).var(0).sum())
    assert variance / square / 720 < 0.5
    each = each - mean * (1 - math.sqrt(variance / 360 / square))
    mean = each.mean(0)
    square = float(mean @ mean)
    found = []
    for _ in range(400):
        order = rng.permutation(720)
        found.append(of_gradients(each[order].reshape(90, 8, 40).mean(1)[:60], 8, 720))
    assert np.mean([f.square for f in found]) == pytest.approx(square, rel=0.06)
    assert np.mean([f.variance for f in found]) == pytest.approx(variance * 720 / 719, rel=0.03)


def test_noise_that_hides_the_gradient_gives_a_lower_bound() -> None:
    rng = np.random.default_rng(1)
    true = np.full(50, 1e-3)
    found = [drawn(rng, true, 2.0, 1, 12) for _ in range(60)]
    scale = 50 * 2.0 / float(true @ true)
    unsure = [f for f in found if f.high is None]
    assert len(unsure) > 30
    assert np.mean([f.low <= scale for f in unsure]) > 0.9
    text = "\n".join(show(unsure[:1], 64))
    assert "above" in text
    assert "take more samples (--gradients, --batch)" in text


def test_what_batches_are_worth() -> None:
    """At the noise scale a training takes twice the fewest steps and twice the fewest samples."""
    assert steps_factor(100, 100) == samples_factor(100, 100) == 2
    assert steps_factor(100, 1e9) == pytest.approx(1)
    assert samples_factor(100, 1e-9) == pytest.approx(1)
    sure = Noise(10, 8, 60, 0.5, square=1.0, variance=100.0, low=80.0, high=120.0)
    for batch, said in (
        (5, "saves nearly as many steps as it is larger"),
        (100, "saves steps and costs samples"),
        (1000, "saves hardly any step"),
    ):
        text = "\n".join(show([sure], batch))
        assert f"train.batch={batch}: a larger one" in text
        assert said in text
        assert "80 to 120" in text
    assert "is not sure" in show([dataclasses.replace(sure, low=20.0)], 100)[-1]
    assert "first weights" in show([dataclasses.replace(sure, step=0)], 100)[-1]


# Measured on a model

NUM = 3000


def samples(split: str) -> Any:
    """Numbers that a line explains but for noise."""
    if split == "eval":
        return None
    x = torch.randn(NUM, 6, generator=torch.Generator().manual_seed(3))
    noise = torch.randn(NUM, 1, generator=torch.Generator().manual_seed(4))
    y = x @ torch.arange(6.0).view(6, 1) / 6 + noise
    return torch.utils.data.TensorDataset(x, y)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 1)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)


def config_of(*overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            f"model.name={__name__}:Line",
            f"data.source={__name__}:samples",
            "train={task: forecast, batch: 64, steps: 4, lr: 0.05}",
            "optim={name: sgd, momentum: 0.9}",
            "checkpoint={every: 2, keep: 5}",
            "log.tensorboard=no",
            "device=cpu",
            "threads=1",
            *overrides,
        ],
    ).config


def exact(line: nn.Linear) -> float:
    """The noise scale from the gradient of every single sample."""
    x, y = samples("train").tensors
    with torch.no_grad():
        error = 2 * (line(x) - y)
    each = torch.cat([error * x, error], 1).double()
    mean = each.mean(0)
    return float((each - mean).square().sum(1).mean() / mean.square().sum())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with checkpoints of steps 2 and 4."""
    made, config = RunDir(tmp_path_factory.mktemp("run")), config_of()
    made.file(rundir.LOGS).mkdir()
    made.write_text(rundir.CONFIG, dump_config(config))
    run_training(config, read_rank_env({}), made)
    return made.path


def test_it_is_that_of_every_sample(run: Path) -> None:
    from safetensors.torch import load_file

    (found,) = measure_noise(config_of(), [run / "checkpoints" / "step-00000004"], 8, 300)
    line, weights = nn.Linear(6, 1), load_file(run / rundir.WEIGHTS)
    line.load_state_dict({"weight": weights["line.weight"], "bias": weights["line.bias"]})
    assert found.step == 4
    assert found.scale == pytest.approx(exact(line), rel=0.25)
    assert found.high is not None
    assert found.low < exact(line) < found.high


def test_the_command_looks_at_every_checkpoint(run: Path) -> None:
    done = CliRunner().invoke(app, ["scale", "noise", str(run), "--all", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["batch"] == 64
    assert [one["step"] for one in found["found"]] == [2, 4]
    assert [one["batch"] for one in found["found"]] == [8, 8]
    first, last = (one["loss"] for one in found["found"])
    assert last < first  # each with its own weights
    shown = CliRunner().invoke(app, ["scale", "noise", str(run), "--gradients", "24"])
    assert shown.exit_code == 0
    assert "24 gradients of 8 samples each" in shown.stdout
    assert "64 (train.batch)" in shown.stdout


def test_in_half_precision() -> None:
    (wide,) = measure_noise(config_of(), [], 16, 60)
    (half,) = measure_noise(config_of("layout=precision=bf16,recompute=full"), [], 16, 60)
    assert half.square == pytest.approx(wide.square, rel=0.05)
    assert half.variance == pytest.approx(wide.variance, rel=0.05)
    assert half != wide


def test_fp16_has_no_steps_to_find_its_scale_in() -> None:
    assert measure_noise(config_of("layout=precision=fp16"), [], 16, 60) == measure_noise(
        config_of(), [], 16, 60
    )


class Broken(Line):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * self.factor


@pytest.mark.parametrize(("factor", "said"), [(0.0, "is zero"), (math.nan, "is not finite")])
def test_gradients_that_say_nothing(factor: float, said: str) -> None:
    config = config_of(f"model.name={__name__}:Broken", f"model.args={{factor: {factor}}}")
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, args={"factor": factor})
    )
    with pytest.raises(UsageError, match=f"a gradient at step 0 {said}"):
        measure_noise(config, [], 8, 12)


def test_weights_come_from_the_checkpoint_alone(run: Path) -> None:
    """The file that a run began from may be gone."""
    given = config_of("model.weights=/nowhere/begun.safetensors")
    (found,) = measure_noise(given, [run / "checkpoints" / "step-00000002"], 8, 12)
    assert found.step == 2


def test_what_is_asked_wrongly(run: Path) -> None:
    with pytest.raises(
        UsageError,
        match=r"60 gradients of 64 samples each need 3840 samples, and .* has 3000; take --gradients 46 or "
        "--batch 50",
    ):
        measure_noise(config_of(), [], 64, 60)
    with pytest.raises(
        UsageError, match=r"12 gradients of 5000 samples each .* has 3000; take --batch 250"
    ):
        measure_noise(config_of(), [], 5000, 12)
    done = CliRunner().invoke(app, ["scale", "noise", "digits", "--all"])
    assert isinstance(done.exception, UsageError)
    assert "--all is for runs" in str(done.exception)


@pytest.mark.parametrize("what", ["digits", "run"])
def test_what_is_given_without_a_command_names_the_command(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    done = CliRunner().invoke(app, ["scale", what])
    assert isinstance(done.exception, UsageError)
    assert f"`ridgeline scale noise {what}`" in str(done.exception)
