"""The moving average of the weights on one device: of narrow weights, and where steps are left out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from ridgeline import rundir
from ridgeline.checkpoint.manifest import read_manifest
from ridgeline.checkpoint.weights import fill_model
from ridgeline.cli import app
from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.models.build import build_model
from ridgeline.optim.average import Average
from ridgeline.plan.machine import load_machine
from ridgeline.plan.recipe import predict_recipe
from ridgeline.rundir import CHECKPOINTS, RunDir
from ridgeline.train.guard import Guard
from ridgeline.train.job import start
from ridgeline.train.loop import train_loop
from ridgeline.train.run import run_training
from ridgeline.train.setup import build_training


def config_of(*overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            "model={name: mlp, args: {in_features: 12, hidden: 16, out_features: 5}}",
            "data.source=synthetic",
            "data.args={shape: [12], classes: 5, samples: 40, distinct: 40, eval_samples: 8}",
            "train={batch: 8, steps: 4, lr: 0.01}",
            "optim={name: adamw, ema: 0.9}",
            "checkpoint.minutes=0",
            "log.tensorboard=no",
            "device=cpu",
            "threads=1",
            *overrides,
        ],
    ).config


@pytest.mark.parametrize("ema", [0.0, 1.0, -0.5, 1.5])
def test_a_share_that_is_none_is_refused(ema: float) -> None:
    with pytest.raises(UsageError, match=r"optim\.ema=.* from above 0 to below 1"):
        config_of(f"optim.ema={ema}")
    with pytest.raises(UsageError, match=r"ema=.* from above 0 to below 1"):
        Average([], torch.optim.SGD(nn.Linear(1, 1).parameters()), ema, True)


def test_the_warm_up_lets_the_first_weights_go() -> None:
    average = Average([], torch.optim.SGD(nn.Linear(1, 1).parameters()), 0.9, True)
    assert [average.decay_of(done) for done in (0, 1, 80, 1000)] == [0.1, 2 / 11, 0.9, 0.9]
    plainly = Average([], torch.optim.SGD(nn.Linear(1, 1).parameters()), 0.9, False)
    assert plainly.decay_of(0) == 0.9


@pytest.mark.parametrize("weights", ["bf16", "stochastic"])
def test_narrow_weights_have_a_wide_average(weights: str) -> None:
    """Of the masters where there are some; and what an evaluation puts in place goes without a trace."""
    training = build_training(
        config_of("layout=precision=bf16", f"tune.weights={weights}"), read_rank_env({})
    )
    average = training.arranged.average
    assert average is not None
    parameters = [t.parameter for t in training.arranged.trainables()]
    narrow = parameters[0]
    assert narrow.dtype is torch.bfloat16
    wide = training.optimizer.state[narrow].get("master", narrow)
    expected = wide.detach().double()
    for done, _ in enumerate(train_loop(training)):
        stays = min(0.9, (1 + done) / (10 + done))
        expected = stays * expected + (1 - stays) * wide.detach().double()
    assert average.of(narrow).dtype is torch.float32
    assert torch.allclose(average.of(narrow).double(), expected, rtol=1e-6, atol=1e-8)
    before = [p.detach().clone() for p in parameters]
    values = [value.clone() for value in average.values]
    with training.arranged.averaged():
        assert torch.equal(narrow, average.of(narrow).bfloat16())
        assert not torch.equal(narrow, before[0])
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    assert all(torch.equal(v, old) for v, old in zip(average.values, values, strict=True))


def test_complex_weights_have_one() -> None:
    parameter = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    first = parameter.detach().clone()
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    average = Average([parameter], optimizer, 0.75, False)
    (parameter.abs() ** 2).sum().backward()
    optimizer.step()
    average.update()
    last = parameter.detach().clone()
    average.exchange()
    assert torch.allclose(parameter, 0.75 * first + 0.25 * last)
    average.exchange()
    assert torch.equal(parameter, last)


@pytest.mark.parametrize("fused", [False, True])
def test_updates_that_an_overflow_leaves_out_do_not_count(fused: bool) -> None:
    job = start("precision=fp16", device="cpu")
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    engine = job.engine(net, optimizer, ema=0.5, ema_warmup=False)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    expected = net.weight.detach().clone()
    for factor in (math.inf, 1.0, math.inf, 1.0, 1.0):
        engine.backward(F.cross_entropy(engine(x), y) * factor)
        skipped = engine.num_skipped
        engine.step()
        if engine.num_skipped == skipped:
            expected = 0.5 * expected + 0.5 * net.weight.detach()
    assert engine.num_skipped == 2
    assert torch.allclose(engine.weights(averaged=True)["weight"], expected)
    assert engine.state_dict()["num_averaged"] == 3


def test_what_is_being_saved_is_copied_before_averages_are_in_place(
    tmp_path: Path, monkeypatch: Any
) -> None:
    job = start("", device="cpu")
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = job.engine(net, optimizer, ema=0.5)
    loader = job.loader(TensorDataset(torch.zeros(8, 2)), batch_size=4)
    saves = job.checkpoints(tmp_path, engine, optimizer, loader, every=1)
    seen: list[bool] = []
    average = engine.arranged.average
    assert average is not None
    monkeypatch.setattr(saves._saver, "release", lambda: seen.append(average.is_in_place))
    with engine.averaged():
        assert seen == [False]
    monkeypatch.undo()
    saves.close()


def test_batches_that_the_guard_skips_do_not_count() -> None:
    guard = Guard(
        build_training(config_of("guard.on_bad=skip"), read_rank_env({})), lambda: [[0, 1]]
    )
    for _ in train_loop(guard.training):
        pass
    assert guard.training.arranged.num_averaged == 3


def test_without_one_it_is_said_how_to_have_it() -> None:
    job = start("", device="cpu")
    net = nn.Linear(2, 2)
    engine = job.engine(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"ema=0\.999"), engine.averaged():
        pass


def test_an_evaluation_that_fails_leaves_the_weights(monkeypatch: Any) -> None:
    training = build_training(config_of(), read_rank_env({}))
    list(train_loop(training))
    before = [p.detach().clone() for p in training.model.parameters()]
    with pytest.raises(ValueError, match="a word"), training.arranged.averaged():
        raise ValueError("a word")
    after = training.model.parameters()
    assert all(torch.equal(p, old) for p, old in zip(after, before, strict=True))


def test_what_a_run_leaves_is_the_average(tmp_path: Path) -> None:
    """Its weights, its checkpoint's export and what `ridgeline export` builds, in one."""
    config = config_of()
    (tmp_path / rundir.LOGS).mkdir()
    run = RunDir(tmp_path)
    run.write_text(rundir.CONFIG, dump_config(config))
    run_training(config, read_rank_env({}), run)
    average, live = (load_file(run.file(n)) for n in (rundir.WEIGHTS, rundir.LIVE_WEIGHTS))
    name = next(iter(average))
    assert not torch.equal(average[name], live[name])
    assert run.evals()[-1].averaged
    for words, expected in (((), average), (("--live",), live)):
        out = tmp_path / "out.safetensors"
        done = CliRunner().invoke(app, ["checkpoint", "export", str(tmp_path), str(out), *words])
        assert ("weights themselves, not their moving average" in done.output) == bool(words)
        assert "moving average (optim.ema), of" in done.output
        found = load_file(out)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    newest = run.file(CHECKPOINTS) / "step-00000004"
    model = build_model(config.model.name, **config.model.args)
    for is_live, expected in ((False, average), (True, live)):
        fill_model(model, newest, read_manifest(newest), live=is_live)
        assert torch.equal(model.state_dict()[name], expected[name])
    shown = CliRunner().invoke(app, ["checkpoint", "show", str(tmp_path), "--json"])
    assert json.loads(shown.output)["totals"]["averaged weights"]["tensors"] == len(average)


def test_a_package_says_which_weights_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / rundir.LOGS).mkdir()
    config = config_of("train.steps=1")
    run_training(config, read_rank_env({}), RunDir(tmp_path))
    about: list[dict[str, Any]] = []

    def export_model(*_: Any, **given: Any) -> Any:
        about.append(given["about"])
        return SimpleNamespace(num_bytes=1)

    monkeypatch.setattr("ridgeline.export.run.export_model", export_model)
    for words in ((), ("--live",)):
        done = CliRunner().invoke(app, ["export", str(tmp_path), *words])
        assert ("weights themselves, not their moving average" in done.output) == bool(words)
        assert "moving average (optim.ema), of" in done.output
        assert about[-1]["averaged"] is not bool(words)


def test_live_weights_are_asked_for_beside_an_average_alone(tmp_path: Path) -> None:
    (tmp_path / rundir.LOGS).mkdir()
    run_training(config_of("optim.ema=null", "train.steps=1"), read_rank_env({}), RunDir(tmp_path))
    out = tmp_path / "out.safetensors"
    for command in (("checkpoint", "export", tmp_path, out), ("export", tmp_path)):
        done = CliRunner().invoke(app, [*map(str, command), "--live"])
        assert isinstance(done.exception, UsageError)
        assert "--live is for checkpoints with a moving average" in str(done.exception)
    done = CliRunner().invoke(app, ["checkpoint", "export", str(tmp_path), str(out)])
    assert out.exists()
    assert "average" not in done.output


def test_the_planner_counts_four_bytes_a_parameter() -> None:
    words = ["model={name: llama, args: {size: 1m}}", "data.source=text", "data.args={seq_len: 64}"]
    machine = load_machine("h200")
    for text, shards in (("dp=2", 1), ("dp=2,zero=1", 2), ("dp=2,zero=3", 2)):
        memory = [
            predict_recipe(config_of(*words, f"optim.ema={ema}"), machine, Layout.parse(text))
            for ema in ("null", "0.999")
        ]
        without, with_one = (planned.memory for planned in memory)
        model = memory[0].job.model
        more = with_one.optimizer - without.optimizer
        assert more == pytest.approx(4.0 * model.num_parameters / shards, rel=1e-3)
