"""Data without an evaluation split: the run trains, says once that it evaluates nothing, and refuses what
would wait for an evaluation."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ridgeline.config import dump_config, load_config, needs_evaluation
from ridgeline.data.build import build_sources
from ridgeline.doctor.states import Effort, _to_measure
from ridgeline.errors import UsageError
from ridgeline.report.build import build_report
from ridgeline.rundir import RunDir
from ridgeline.scaling.request import for_one_rank
from ridgeline.train.run import run_recipe

MODULE = """
import torch

class Points:
    def __init__(self, split):
        self.length = 16 if split == "train" else 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index >= self.length:
            raise IndexError(index)
        return torch.full((4,), float(index)), index % 3

def points(split):
    return Points(split) if split == "train" else None

def nothing(split):
    return None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "unsplit.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "unsplit", raising=False)
    return "unsplit"


def recipe(folder: Path, source: str, more: str = "") -> str:
    path = folder / "unsplit.yaml"
    path.write_text(
        "model: {name: mlp, args: {in_features: 4, hidden: 8, depth: 1, out_features: 3}}\n"
        f"data: {{source: '{source}'}}\n"
        "train: {batch: 4, epochs: 2}\n"
        f"{more}log: {{tensorboard: no}}\ndevice: cpu\nthreads: 1\n"
    )
    return str(path)


@pytest.mark.parametrize("name", ["points", "Points"])
def test_it_trains_and_says_once_that_nothing_is_evaluated(
    name: str, own: str, tmp_path: Path, capsys
) -> None:
    summary = run_recipe(recipe(tmp_path, f"{own}:{name}"), run=str(tmp_path / "run"))
    told = capsys.readouterr().out
    assert (
        told.count(f"nothing is evaluated: data.source={own}:{name} has no evaluation split") == 1
    )
    assert (summary.num_steps, summary.metrics) == (8, {})
    run = RunDir(tmp_path / "run")
    assert (len(run.steps()), run.evals(), run.status()) == (8, [], "finished")
    assert build_report(run).is_file()
    longer = run_recipe(recipe(tmp_path, f"{own}:{name}"), "train.epochs=3", run=str(run.path))
    assert longer.num_steps == 12


@pytest.mark.parametrize("name", ["points", "Points"])
@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("train.target", "train.target={accuracy: 0.9}"),
        ("checkpoint.keep_best", "checkpoint.keep_best=loss"),
    ],
)
def test_what_needs_an_evaluation_is_refused(
    key: str, override: str, name: str, own: str, tmp_path: Path
) -> None:
    wanted = rf"{key} needs evaluations, and data.source={own}:{name} has no .* leave {key} out"
    with pytest.raises(UsageError, match=wanted):
        run_recipe(recipe(tmp_path, f"{own}:{name}"), override)
    with pytest.raises(UsageError, match=rf"{key} .* train.eval_samples=0"):
        run_recipe(recipe(tmp_path, "digits"), override, "train.eval_samples=0")


@pytest.mark.parametrize("override", ["train.target={accuracy: 0.9}", "checkpoint.keep_best=loss"])
def test_what_is_measured_without_evaluations_asks_for_none(override: str, tmp_path: Path) -> None:
    """The doctor's climb and a rank of many, whose configurations are written down and read again."""
    config = load_config(Path(recipe(tmp_path, "digits")), [override]).config
    for alone in (_to_measure(config, Effort()), for_one_rank(config, "dp=1", "cpu")):
        (tmp_path / "alone.yaml").write_text(dump_config(alone))
        read = load_config(tmp_path / "alone.yaml").config
        assert not needs_evaluation(read)


def test_a_data_set_without_training_samples_is_still_refused(own: str) -> None:
    with pytest.raises(UsageError, match="no __len__ and __getitem__"):
        build_sources(f"{own}:nothing", {}, 0)


def test_images_may_all_be_trained_on(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number in range(3):
        file = tmp_path / "c" / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(file)
    train, held_out = build_sources("images", {"path": str(tmp_path), "size": 4, "holdout": 0}, 0)
    assert (len(train), len(held_out)) == (3, 0)
