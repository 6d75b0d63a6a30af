"""A run that ends after a share of its steps, and goes on later as if it had not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.checkpoint.manifest import list_checkpoints
from ridgeline.config import load_config
from ridgeline.errors import UsageError
from ridgeline.rundir import CHECKPOINTS, WEIGHTS, RunDir
from ridgeline.train.run import run_recipe

BASE = (
    "name: share\n"
    "model: {name: mlp, args: {in_features: 16, hidden: 8, depth: 1, out_features: 3}}\n"
    "data: {source: synthetic, args: {task: classify, shape: [4, 4], classes: 3, samples: 22}}\n"
    "train: {batch: 4, epochs: 2, lr: 0.01}\n"
    "schedule: {name: cosine, warmup_steps: 3}\n"
    "checkpoint: {at_end: false}\n"
    "log: {tensorboard: no}\n"
    "device: cpu\n"
    "threads: 1\n"
)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "share.yaml"
    path.write_text(BASE)
    return str(path)


def test_in_three_stretches_it_is_the_run_that_it_would_have_been(
    tmp_path: Path, recipe: str
) -> None:
    """Twelve steps, two epochs with a smaller last batch: stopped after the fourth and the ninth."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_recipe(recipe, run=str(whole))
    for share, step in ((1 / 3, 4), (0.7, 9)):
        summary = run_recipe(recipe, f"train.stop_after={share!r}", run=str(parts))
        run = RunDir(parts)
        assert (summary.num_steps, summary.stopped) == (step, False)
        assert run.status() == "stopped"
        assert run.events()[-1].details == {"share": share, "step": step}
        assert run.evals()[-1].step == step
        assert [p.name for p in list_checkpoints(run.file(CHECKPOINTS))][-1] == f"step-{step:08d}"
        assert not run.file(WEIGHTS).exists()
    run_recipe(recipe, run=str(parts))
    assert RunDir(parts).status() == "finished"
    assert RunDir(parts).file(WEIGHTS).read_bytes() == RunDir(whole).file(WEIGHTS).read_bytes()
    losses = [[(r.step, r.loss, r.lr) for r in RunDir(p).steps()] for p in (whole, parts)]
    assert losses[0] == losses[1]


def test_a_share_that_is_there_already_trains_nothing(tmp_path: Path, recipe: str) -> None:
    run_recipe(recipe, "train.stop_after=0.5", run=str(tmp_path / "run"))
    before = RunDir(tmp_path / "run").steps()
    for share in ("0.5", "0.49", "0.1"):
        summary = run_recipe(recipe, f"train.stop_after={share}", run=str(tmp_path / "run"))
        assert summary.num_steps == 6
    assert RunDir(tmp_path / "run").steps() == before


def test_a_share_of_next_to_nothing_is_a_step(tmp_path: Path, recipe: str) -> None:
    assert run_recipe(recipe, "train.stop_after=1e-9", run=str(tmp_path / "run")).num_steps == 1


@pytest.mark.parametrize("share", ["0", "-0.5", "1.5", ".nan"])
def test_what_is_no_share_is_refused(recipe: str, share: str) -> None:
    with pytest.raises(UsageError, match="no share of the run"):
        load_config(Path(recipe), [f"train.stop_after={share}"])
