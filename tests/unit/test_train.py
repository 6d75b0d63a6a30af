"""Whole runs in this process: what they compute, what they leave behind, and when they stop."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ridgeline import rundir
from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.data.build import build_sources
from ridgeline.data.dataset import open_dataset
from ridgeline.data.formats.table import FORMATS
from ridgeline.data.pack import pack
from ridgeline.errors import RunError, UsageError
from ridgeline.facts import ModelFacts
from ridgeline.launch.env import read_rank_env
from ridgeline.models import build_model
from ridgeline.rundir import SPLIT, EvalRecord, RunDir, StepRecord
from ridgeline.train import progress
from ridgeline.train.loop import train_loop
from ridgeline.train.run import Summary, reaches, run_recipe, run_training
from ridgeline.train.setup import build_training
from ridgeline.train.tasks import TASKS

ALONE = read_rank_env({})
BASE = (
    "model.name=mlp",
    "model.args={in_features: 16, hidden: 24, depth: 1, out_features: 3}",
    "data.source=synthetic",
    "data.args={task: classify, shape: [4, 4], classes: 3, samples: 64, eval_samples: 24}",
    "train.batch=24",  # three steps an epoch, the last of 16
    "train.steps=6",
    "optim.name=sgd",
    "train.lr=0.1",
    "log.tensorboard=no",
    "device=cpu",
    "threads=1",
)


def config_of(*overrides: str) -> RunConfig:
    return load_config(None, [*BASE, *overrides]).config


def run_here(tmp_path: Path, *overrides: str) -> tuple[Summary, RunDir]:
    run = RunDir.create(tmp_path, "test")
    config = config_of(*overrides)
    run.write_text(rundir.CONFIG, dump_config(config))
    return run_training(config, ALONE, run), run


# What is computed.


@pytest.mark.parametrize("layout", ["", "accumulate=4"])
def test_a_run_is_the_loop_one_would_write_by_hand(tmp_path: Path, layout: str) -> None:
    """The whole set is one batch, of 62 samples that four microbatches share unevenly."""
    full = ["train.batch=64", "train.steps=5", "optim.momentum=0.9", "train.clip=0.3"]
    full.append("data.args.samples=62")
    summary, run = run_here(tmp_path, *full, "model.dtype=float64", f"layout={layout}")
    config = config_of(*full)
    source, _ = build_sources(config.data.source, config.data.args, config.train.seed)
    inputs, targets = source.fetch(np.arange(62), 0)
    torch.manual_seed(config.train.seed)
    model = build_model("mlp", **config.model.args).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for record in run.steps():
        loss = nn.functional.cross_entropy(model(inputs.double()), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        assert record.loss == pytest.approx(loss.item(), rel=1e-9)
        assert record.grad_norm == pytest.approx(norm.item(), rel=1e-9)
    assert summary.num_steps == len(run.steps()) == 5
    assert summary.final_loss == run.steps()[-1].loss
    for name, value in load_file(run.file(rundir.WEIGHTS)).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-9, atol=1e-12)


def test_the_same_seed_is_the_same_run_and_windows_change_nothing(tmp_path: Path) -> None:
    _, one = run_here(tmp_path, "log.every=1")
    _, window = run_here(tmp_path, "log.every=4")
    _, other = run_here(tmp_path, "train.seed=1")
    losses = [[r.loss for r in run.steps()] for run in (one, window, other)]
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    first, second = (load_file(run.file(rundir.WEIGHTS)) for run in (one, window))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_saved_weights_give_the_last_evaluation_again(tmp_path: Path) -> None:
    summary, run = run_here(tmp_path, "train.epochs=2", "train.steps=null")
    config = config_of()
    model = build_model("mlp", **config.model.args)
    model.load_state_dict(load_file(run.file(rundir.WEIGHTS)), strict=True)
    _, held_out = build_sources(config.data.source, config.data.args, config.train.seed)
    inputs, targets = held_out.fetch(np.arange(24), 0)
    outputs = model(inputs)
    assert summary.metrics["loss"] == pytest.approx(
        nn.functional.cross_entropy(outputs, targets).item(), rel=1e-5
    )
    assert summary.metrics["accuracy"] == (outputs.argmax(1) == targets).sum().item() / 24
    assert run.evals()[-1].metrics == summary.metrics


def test_an_uneven_evaluation_is_exact(tmp_path: Path) -> None:
    """Batches of 10, 10 and 4 count by their samples."""
    small, _ = run_here(tmp_path, "train.batch=10", "train.steps=1", "train.lr=0")
    whole, _ = run_here(tmp_path, "train.batch=24", "train.steps=1", "train.lr=0")
    assert small.metrics == pytest.approx(whole.metrics, rel=1e-6)


def test_a_batch_of_more_than_there_are_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "train.batch=4096 is more than the"
    run_here(tmp_path, "train.batch=4096", "train.steps=1")
    assert words in "".join(capsys.readouterr())
    run_here(tmp_path, "train.batch=8", "train.steps=1")
    assert "is more than the" not in "".join(capsys.readouterr())


def test_tied_weights_are_saved_under_both_names(tmp_path: Path) -> None:
    args = {"vocab": 16, "width": 16, "depth": 1, "heads": 2, "max_seq": 8, "tie_embeddings": True}
    _, run = run_here(
        tmp_path,
        "model.name=llama",
        f"model.args={json.dumps(args)}",
        "data.args={task: causal_lm, shape: [8], vocab: 16, samples: 16}",
        "train.batch=8",
        "train.steps=2",
    )
    weights = load_file(run.file(rundir.WEIGHTS))
    assert torch.equal(weights["embed.weight"], weights["head.weight"])
    model = build_model("llama", **args)
    before = model.embed.weight.clone()
    model.load_state_dict(weights, strict=True)
    assert model.head.weight is model.embed.weight
    assert not torch.equal(before, model.embed.weight)
    assert {"loss", "token_accuracy", "perplexity"} == set(run.evals()[-1].metrics)


# How long it goes on.


@pytest.mark.parametrize(
    ("overrides", "samples", "epochs"),
    [
        (["train.steps=4"], [24, 24, 16, 24], [0, 0, 0, 1]),
        (["train.steps=null", "train.epochs=2"], [24, 24, 16] * 2, [0] * 3 + [1] * 3),
        (["train.steps=4", "train.epochs=1"], [24, 24, 16], [0, 0, 0]),
        (["train.steps=2", "train.epochs=9"], [24, 24], [0, 0]),
        (["train.steps=3", "data.drop_last=true"], [24, 24, 24], [0, 0, 1]),
    ],
)
def test_steps_and_epochs(
    tmp_path: Path, overrides: list[str], samples: list[int], epochs: list[int]
) -> None:
    summary, run = run_here(tmp_path, *overrides)
    assert [r.num_samples for r in run.steps()] == samples
    assert [r.epoch for r in run.steps()] == epochs
    assert [r.step for r in run.steps()] == list(range(1, len(samples) + 1))
    assert summary.num_steps == len(samples)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["train.steps=7"], [3, 6, 7]),
        (["train.steps=5", "train.eval_every=2"], [2, 4, 5]),
        (["train.steps=4", "train.eval_every=2"], [2, 4]),
        (["train.steps=4", "train.eval_samples=0"], []),
    ],
)
def test_when_it_evaluates(tmp_path: Path, overrides: list[str], steps: list[int]) -> None:
    summary, run = run_here(tmp_path, *overrides)
    assert [r.step for r in run.evals()] == steps
    assert bool(summary.metrics) == bool(steps)


def test_evaluation_can_be_on_the_first_samples(tmp_path: Path) -> None:
    _, run = run_here(tmp_path, "train.eval_samples=10", "train.steps=1")
    assert [r.num_samples for r in run.evals()] == [10]
    _, run = run_here(tmp_path, "train.eval_samples=1000", "train.steps=1")
    assert [r.num_samples for r in run.evals()] == [24]


def test_a_target_ends_the_run_at_the_evaluation_that_reaches_it(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    overrides = [
        "model.args={in_features: 64}",
        "data.source=digits",
        "data.args={}",
        "train.batch=64",
        "train.steps=null",
        "train.epochs=40",
        "train.target.accuracy=0.85",
        "optim.name=adamw",
        "train.lr=1e-3",
    ]
    summary, run = run_here(tmp_path, *overrides)
    accuracies = [r.metrics["accuracy"] for r in run.evals()]
    assert all(a < 0.85 for a in accuracies[:-1])
    assert accuracies[-1] >= 0.85
    assert summary.reached_target
    assert summary.num_steps == run.evals()[-1].step == len(run.steps()) < 40 * 22
    assert run.events()[-1].details["reached_target"] is True


def test_a_target_out_of_reach_does_not(tmp_path: Path) -> None:
    summary, run = run_here(tmp_path, "train.target={accuracy: 0.0, loss: 1e-9}")
    assert not summary.reached_target
    assert summary.num_steps == 6
    assert run.events()[-1].details["reached_target"] is False


def test_targets_are_met_from_the_side_that_is_better() -> None:
    task = TASKS["classify"]
    assert reaches({"accuracy": 0.9, "loss": 0.1}, {"accuracy": 0.9, "loss": 0.1}, task)
    assert not reaches({"accuracy": 0.8, "loss": 0.1}, {"accuracy": 0.9}, task)
    assert not reaches({"accuracy": 0.9, "loss": 0.2}, {"accuracy": 0.9, "loss": 0.1}, task)
    assert not reaches({"accuracy": 0.9, "loss": math.nan}, {"loss": 0.1}, task)
    assert not reaches({"accuracy": 1.0}, {}, task)


def test_a_loss_that_is_no_number_ends_the_run_and_names_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_loss.py").write_text(
        "steps = 0\n"
        "def loss(outputs, targets):\n"
        "    global steps\n"
        "    steps += outputs.device.type != 'meta'\n"
        "    return outputs.square().mean() * (float('nan') if steps == 3 else 1.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = RunDir.create(tmp_path, "nan")
    config = config_of("train.task=own_loss:loss", "train.eval_samples=0", "log.every=10")
    with pytest.raises(RunError, match=r"loss is nan at step 3 .*train\.lr \(now 0\.1\)"):
        run_training(config, ALONE, run)
    # The steps before it were waiting for their window to fill; they are what one looks at now.
    assert [r.step for r in run.steps()] == [1, 2, 3]
    assert math.isnan(run.steps()[-1].loss)
    assert not run.file(rundir.WEIGHTS).exists()
    assert run.status() == "running"  # whoever started the ranks writes how it ended


def test_a_run_that_diverges_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"loss is (nan|inf|-inf) at step \d+ on rank 0"):
        run_here(tmp_path, "train.lr=1e30", "train.steps=50")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.batch=6", "layout=accumulate=4"], r"train\.batch=6 .*train\.batch=4 or 8"),
        (["train.batch=65", "data.drop_last=true"], "64 samples .*no whole batch of 65"),
        (["train.target.acuracy=0.9"], "did you mean 'accuracy'"),
        (["train.task=clasify"], "did you mean 'classify'"),
        (["layout=dp=2"], "dp=2"),
        (["model.args.widht=3"], "widht"),
        (
            [
                "model={name: llama, args: {vocab: 256}}",
                "data={source: text, args: {pack: fit, max_bytes: 20000}}",
            ],
            "vocab=256 is too small for data.source=text, .* 257 different tokens; use .*vocab=257",
        ),
    ],
)
def test_what_cannot_be_trained_is_said_at_once(overrides: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        build_training(config_of(*overrides), ALONE)


# What is left behind.


def test_the_run_directory_is_complete(tmp_path: Path) -> None:
    _, run = run_here(tmp_path, "layout.precision=bf16")
    names = {path.name for path in run.path.iterdir()}
    assert names == {
        "config.yaml",
        "layout.txt",
        "facts.json",
        "env.json",
        "metrics.jsonl",
        "events.jsonl",
        "weights.safetensors",
        "checkpoints",
        "logs",
    }
    assert run.file(rundir.LAYOUT).read_text() == "precision=bf16\n"
    facts = run.read_json(rundir.FACTS)
    assert facts["model"]["num_parameters"] == 16 * 24 + 24 + 24 * 3 + 3
    assert facts["model"]["flops_source"] == "counted"
    assert facts["machine"]["peak_flops"]["bf16"] > 0
    assert run.read_json(rundir.ENV)["packages"]["torch"] == torch.__version__
    assert [e.event for e in run.events()] == ["start", "checkpoint", "end"]
    assert run.status() == "finished"
    assert [r.rank for r in run.ranks()] == [0]
    assert run.ranks()[0].num_steps == 6
    assert RunDir.open(run.path) == run


def test_weights_can_be_left_out(tmp_path: Path) -> None:
    _, run = run_here(tmp_path, "log.weights=false")
    assert not run.file(rundir.WEIGHTS).exists()


def test_only_the_main_rank_writes_and_a_run_needs_no_directory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_training(config_of(), ALONE).num_steps == 6
    assert capsys.readouterr().out == ""


def test_a_recipe_from_a_script(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(dump_config(config_of()))
    summary = run_recipe(str(recipe), "train.steps=2", "name=mine", out=str(tmp_path / "runs"))
    (path,) = (tmp_path / "runs").iterdir()
    assert path.name.startswith("mine-")
    assert summary.num_steps == 2 == len(RunDir.open(path).steps())
    assert load_config(path / rundir.CONFIG).config.train.steps == 2


def test_the_recorded_rate_follows_schedule_and_batch_rule(tmp_path: Path) -> None:
    _, run = run_here(
        tmp_path,
        "schedule={name: linear, warmup_steps: 2, floor: 0.5}",
        "train.lr_rule=linear",
        "train.reference_batch=12",
    )
    expected = [0.2 * f for f in (1 / 3, 2 / 3, 1.0, 1 - 1 / 6, 1 - 2 / 6, 0.5)]
    assert [r.lr for r in run.steps()] == pytest.approx(expected)


def test_a_rate_of_zero_changes_no_weight(tmp_path: Path) -> None:
    _, run = run_here(tmp_path, "train.lr=0", "train.batch=64")
    assert np.ptp([r.loss for r in run.steps()]) < 1e-6


def test_times_and_mfu_of_each_step_add_up(tmp_path: Path) -> None:
    start = time.perf_counter()
    _, run = run_here(tmp_path, "train.steps=20", "log.every=3")
    wall_s = time.perf_counter() - start
    facts = run.read_json(rundir.FACTS)
    peak = facts["machine"]["peak_flops"]["fp32"]
    for record in run.steps():
        parts = [getattr(record, part) for part in SPLIT]
        assert all(part >= 0 for part in parts)
        assert 0 < sum(parts) <= record.step_s * (1 + 1e-9)
        assert record.forward_s > 0
        assert record.backward_s > 0
        assert record.optimizer_s > 0
        flops = facts["model"]["train_flops_per_sample"] * record.num_samples
        assert record.mfu == pytest.approx(flops / record.step_s / peak)
        assert record.memory_bytes is not None
        assert record.memory_bytes > 2**20
    assert sum(r.step_s for r in run.steps()) < wall_s


def test_what_is_done_between_steps_is_not_called_waiting_for_data() -> None:
    times = []
    for result in train_loop(build_training(config_of("train.steps=7"), ALONE)):
        times.append(result.times.read())
        time.sleep(0.05)
    later = times[1:]
    assert all(t["step_s"] >= 0.05 for t in later)
    assert statistics.median(t["data_s"] for t in later) < 0.025


def test_an_evaluation_is_no_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_model.py").write_text(
        "import time\nfrom torch import nn\n"
        "class Slow(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if not self.training: time.sleep(0.2)\n"
        "        return super().forward(x.flatten(1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    args = "model.args={in_features: 16, out_features: 3}"
    _, run = run_here(tmp_path, "model.name=slow_model:Slow", args, "train.eval_every=1")
    assert min(r.seconds for r in run.evals()) >= 0.2
    assert statistics.median(r.step_s for r in run.steps()) < 0.1


def test_without_clipping_no_norm_is_recorded(tmp_path: Path) -> None:
    _, run = run_here(tmp_path)
    assert all(r.grad_norm is None for r in run.steps())


# What is shown.


def scalars_of(run: RunDir) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run.file(rundir.TENSORBOARD)))
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_gets_what_the_records_say(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    _, run = run_here(tmp_path, "log.tensorboard=yes", "train.clip=1")
    scalars = scalars_of(run)
    assert {"train/lr", "train/grad_norm", "speed/mfu", "time/step_s", "time/comm_s"} <= set(
        scalars
    )
    assert [step for step, _ in scalars["train/loss"]] == [1, 2, 3, 4, 5, 6]
    found = [value for _, value in scalars["train/loss"]]
    assert found == pytest.approx([r.loss for r in run.steps()])
    evals = [(r.step, pytest.approx(r.metrics["accuracy"])) for r in run.evals()]
    assert scalars["eval/accuracy"] == evals


def test_tensorboard_stays_away_when_told(tmp_path: Path) -> None:
    _, run = run_here(tmp_path, "log.tensorboard=no")
    assert not run.file(rundir.TENSORBOARD).exists()


def test_a_log_shows_loss_throughput_mfu_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = run_here(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model mlp: 483 parameters, ")
    assert lines[1].startswith("layout dp=1 on 1 x ")
    assert "learning rate 0.1 as given (batch 24)" in lines
    assert "6 steps of 24 samples" in lines
    first, last = (line for line in lines if re.match(r"step \d+/6 ", line))
    figures = r"loss \d+\.\d{4}  [\d,]+ samples/s  MFU \d+\.\d%"
    assert re.fullmatch(rf"step 1/6  {figures}", first)
    assert re.fullmatch(rf"step 6/6  {figures}  ETA 0 s", last)
    assert f"loss {run.steps()[-1].loss:.4f}" in last
    shown = [line for line in lines if "accuracy" in line]
    assert len(shown) == 2
    assert re.fullmatch(
        r"evaluation after step 3: .*accuracy 0\.\d{4}.*\(24 samples, .* s\)", shown[0]
    )


FACTS = ModelFacts("m", 10, 10, 40, 1.0, 1.0, "counted", (128,), 128, "tokens")


def step_of(step: int, **changes: Any) -> StepRecord:
    return StepRecord(step, 0, 0.0, 1.0, 0.1, 8, **{"step_s": 1.0, **changes})


def test_time_left_whatever_the_window_and_the_first_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records come ten at a time, and the first step compiled for a minute."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    lines = progress.Lines(100, FACTS)
    for window in range(5):
        now = 60.0 + 10.0 * (window + 1)
        for step in range(10 * window + 1, 10 * window + 11):
            lines.step(step_of(step, step_s=60.0 if step == 1 else 1.0))
    found = capsys.readouterr().out.splitlines()
    assert len(found) == 5  # one a window, which is what a line every five seconds comes to
    assert [re.findall(r"step (\d+)/100", line)[0] for line in found] == [
        "1", "11", "21", "31", "41"
    ]  # fmt: skip
    left = [float(re.findall(r"ETA (\d+) s", line)[0]) for line in found[1:]]
    assert left == pytest.approx([89, 79, 69, 59], abs=1)
    assert "1,024 tokens/s" in found[1]


def test_time_left_counts_evaluations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    lines = progress.Lines(21, FACTS)
    lines.step(step_of(1))
    for step in range(2, 12):
        lines.step(step_of(step))
    lines.evaluation(EvalRecord(11, 0, 0.0, 8, 10.0, {"loss": 1.0}))
    capsys.readouterr()
    now += 100.0
    lines.step(step_of(12))
    assert "ETA 17 s" in capsys.readouterr().out  # 9 steps at (11 + 10) / 11 s


OWN_NETS = """
import torch
from torch import nn

class Looks(nn.Module):
    \"\"\"Reads values in its constructor, which the meta device has none of; keeps extra state.\"\"\"

    def __init__(self):
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 1, 3)]
        self.linear = nn.Linear(8, 4)

    def get_extra_state(self):
        return {"rates": self.rates}

    def set_extra_state(self, state):
        self.rates = state["rates"]

    def forward(self, x):
        return self.linear(x)

class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(8, 4)
        self.requires_grad_(False)
"""


@pytest.fixture
def own_nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_nets.py").write_text(OWN_NETS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def own_config(*overrides: str) -> RunConfig:
    base = ["data.source=synthetic", "data.args.shape=[8]", "data.args.classes=4", "train.steps=2"]
    return load_config(None, [*base, "train.batch=4", "device=cpu", *overrides]).config


def test_a_model_that_reads_values_when_it_is_built(own_nets: Path) -> None:
    run = RunDir.create(own_nets, "looks")
    run_training(own_config("model.name=own_nets:Looks"), ALONE, run)
    facts = run.read_json(rundir.FACTS)["model"]
    assert facts["flops_source"] == "forward counted"
    assert facts["train_flops_per_sample"] == 6 * 8 * 4  # without the bias, which is no product
    assert len(run.steps()) == 2
    assert run.file(rundir.WEIGHTS).exists()


def test_a_model_with_nothing_to_train(own_nets: Path) -> None:
    with pytest.raises(UsageError, match="no parameter of own_nets:Frozen is trainable"):
        run_training(own_config("model.name=own_nets:Frozen"), ALONE)


# Samples that cannot be read.


def pack_damaged(path: Path, damaged: dict[str, list[int]]) -> Path:
    """Fields to classify, packed, with a changed byte in some samples of each half."""
    for part, numbers in damaged.items():
        rng = np.random.default_rng(0)
        folder = path / "files" / part
        folder.mkdir(parents=True)
        for number in range(24):
            np.save(folder / f"{number:02d}.x.npy", rng.standard_normal((4, 4), dtype=np.float32))
            np.save(folder / f"{number:02d}.y.npy", np.array(number % 3))
        dataset = pack(open_dataset(folder), path / "packed" / part, FORMATS["tar"]).dataset
        table = dataset.shard(0).table
        shard = dataset.path / dataset.entries[0].name
        data = bytearray(shard.read_bytes())
        for number in numbers:
            data[int(table.offsets[number, 0] + table.sizes[number, 0]) - 3] ^= 1
        shard.write_bytes(data)
    return path / "packed"


@pytest.mark.parametrize("reading", ["threads=3", "workers=1"])
def test_skipped_samples_are_written_down(
    tmp_path: Path, reading: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = pack_damaged(tmp_path, {"train": [5, 17], "eval": [3]})
    args = f"data.args={{path: {path}, classes: 3, on_error: skip}}"
    steps = ["data.source=packed", args, "train.batch=8", "train.steps=9", f"data.{reading}"]
    steps.append("train.eval_samples=9")
    summary, run = run_here(tmp_path, *steps)
    told = [event.details for event in run.events() if event.event == "skipped-sample"]
    # Three epochs meet the same two, and each of three evaluations the third.
    names = sorted(
        re.search(r"(\w+)/shard.*: sample (\d+)", one["sentence"]).groups() for one in told
    )
    assert names == [("eval", "3"), ("train", "17"), ("train", "5")]
    assert {one["rank"] for one in told} == {0}
    assert all(1 <= one["step"] <= 3 for one in told)
    assert summary.num_skipped == run.events()[-1].details["skipped_samples"] == 3
    said = " ".join(capfd.readouterr().out.split())
    assert "skipped: " in said
    assert "3 samples could not be read and were skipped" in said


def test_a_damaged_sample_ends_a_run_unless_it_may_be_skipped(tmp_path: Path) -> None:
    path = pack_damaged(tmp_path, {"train": [5], "eval": []})
    args = f"data.args={{path: {path}, classes: 3}}"
    with pytest.raises(RunError, match=r"sample 5 .* is damaged"):
        run_here(tmp_path, "data.source=packed", args, "train.batch=8")
    (run,) = tmp_path.glob("test-*")
    assert "skipped-sample" not in [event.event for event in RunDir(run).events()]
