"""A run that is asked to end where it has long been: it is told so, and its records stay as they were."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ridgeline import cli
from ridgeline.config import load_config
from ridgeline.rundir import CONFIG, RunDir
from ridgeline.train import run as run_module

BASE = (
    "name: past\n"
    "model: {name: mlp, args: {in_features: 16, hidden: 8, depth: 1, out_features: 3}}\n"
    "data: {source: synthetic, args: {task: classify, shape: [4, 4], classes: 3, samples: 16}}\n"
    "train: {batch: 4, epochs: 2}\n"
    "log: {tensorboard: no}\n"
    "device: cpu\n"
    "threads: 1\n"
)


@pytest.fixture
def finished(tmp_path: Path) -> RunDir:
    recipe = tmp_path / "past.yaml"
    recipe.write_text(BASE)
    run_module.run_recipe(str(recipe), run=str(tmp_path / "run"))  # 8 steps
    return RunDir(tmp_path / "run")


def records(run: RunDir) -> dict[str, bytes]:
    files = [path for path in run.path.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files}


def train(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ridgeline", "train", *args])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("override", "more"),
    [
        ("train.steps=3", []),
        ("train.epochs=1", []),
        ("train.steps=7", ["--on", "slurm", "--dry-run"]),
    ],
)
def test_nothing_is_changed(
    finished: RunDir, override: str, more: list[str], monkeypatch, capsys
) -> None:
    before = records(finished)
    assert train(monkeypatch, str(finished.path), override, *more) == 0
    told = capsys.readouterr().out
    assert len(told.splitlines()) == 1, told
    assert f"already past {override}: its newest checkpoint is of step 8" in told
    assert records(finished) == before


def test_a_script_leaves_the_configuration_too(finished: RunDir, capsys) -> None:
    config = finished.file(CONFIG)
    assert (
        run_module.run_recipe(str(config), "train.steps=3", run=str(finished.path)).num_steps == 8
    )
    assert "already past step 3" in capsys.readouterr().out
    assert load_config(config).config.train.steps is None


@pytest.mark.slow
@pytest.mark.parametrize("override", ["train.steps=8", "train.epochs=3"])
def test_at_its_end_or_before_it_goes_on_as_ever(
    finished: RunDir, override: str, monkeypatch
) -> None:
    assert train(monkeypatch, str(finished.path), override) == 0
    assert len(finished.steps()) == (8 if override == "train.steps=8" else 12)
