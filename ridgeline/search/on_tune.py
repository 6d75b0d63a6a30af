"""A recipe as a trainable of Ray Tune, for whoever searches with Tune's own schedulers and searchers.

    from ray import tune
    from ridgeline.search.on_tune import trainable

    train = tune.with_resources(trainable("digits", rounds=10), {"cpu": 1})
    tune.Tuner(train, param_space={"train.lr": tune.loguniform(1e-4, 1e-1)}, tune_config=...).fit()

Each of its `rounds` trains a part of the run, evaluates and saves; the results are the metrics of the
evaluation. Tune may stop it after any, and may let it go on from another's checkpoint with other settings,
as population based training does. Keys of `param_space` are those of a recipe. Needs the extra `[search]`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ridgeline.checkpoint.manifest import list_checkpoints
from ridgeline.config import dump_config, find_recipe, load_config
from ridgeline.errors import RunError, UsageError
from ridgeline.launch.rank import end_with_parent
from ridgeline.rundir import CHECKPOINTS, RunDir
from ridgeline.search.places import last_words
from ridgeline.search.run import begin_from, mean_loss
from ridgeline.search.space import overrides_of

_ROUND = "round.txt"


def trainable(
    recipe: str, *overrides: str, rounds: int = 10, ranks: int = 1, out: str | Path = "runs/tune"
) -> type[Any]:
    """The class that Tune makes an object of for every trial. Run directories are made under `out`, which
    all nodes of the cluster have to see."""
    try:
        from ray import tune
    except ModuleNotFoundError as error:
        raise UsageError("this needs Ray Tune; pip install 'ridgeline[search]'") from error
    if rounds < 1 or ranks < 1:
        raise UsageError(f"rounds={rounds} and ranks={ranks} are counts from 1 on")
    same = (*overrides, "train.target={}", "checkpoint.keep=1")
    # Known here: the trials' working directory is another.
    folder, workdir = Path(out).absolute(), Path.cwd()
    text = dump_config(load_config(find_recipe(recipe), same).config)

    class RidgelineTrainable(tune.Trainable):  # type: ignore[misc]
        def setup(self, config: dict[str, Any]) -> None:
            self._folder = folder / str(self.trial_id)
            self._folder.mkdir(parents=True, exist_ok=True)
            self._recipe = self._folder / "recipe.yaml"
            self._recipe.write_text(text, encoding="utf-8")
            self._settings = dict(config)
            self._round, self._number = 0, 0
            self._run = self._folder / "run-0"
            self._next_run()

        def _next_run(self) -> None:
            """A directory of its own for what is trained next: what was trained before stays as it is."""
            while self._run.exists():
                self._number += 1
                self._run = self._folder / f"run-{self._number}"

        def step(self) -> dict[str, Any]:
            self._round += 1
            share = self._round / rounds
            words = [
                str(self._recipe),
                *overrides_of(self._settings),
                f"train.stop_after={share!r}",
            ]
            log = self._folder / "train.log"
            with log.open("ab") as out:
                command = [sys.executable, "-m", "ridgeline.cli", "train", *words]
                done = subprocess.run(
                    [*command, "--run", str(self._run), "-n", str(ranks)],
                    stdout=out,
                    stderr=out,
                    cwd=workdir,
                    preexec_fn=end_with_parent,
                )
            if done.returncode:
                raise RunError(f"{last_words(log)} ({log})")
            return {**results(self._run), "share": share, "done": share >= 1}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            saved = list_checkpoints(self._run / CHECKPOINTS)
            if not saved:
                raise RunError(f"{self._run} has no checkpoint to save")
            shutil.copytree(saved[-1], Path(checkpoint_dir) / saved[-1].name)
            (Path(checkpoint_dir) / _ROUND).write_text(str(self._round))

        def load_checkpoint(self, checkpoint_dir: str) -> None:
            saved = Path(checkpoint_dir)
            self._round = int((saved / _ROUND).read_text())
            self._next_run()
            config = load_config(self._recipe, overrides_of(self._settings)).config
            begin_from(list_checkpoints(saved)[-1], self._run, config)

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            """Tune may use one process for many trials."""
            self.setup(new_config)
            return True

    return RidgelineTrainable


def results(path: Path) -> dict[str, float]:
    """The metrics of the last evaluation, and the mean of the last tenth of the losses."""
    run = RunDir(path)
    evals = run.evals()
    return {"train_loss": mean_loss(run), **(evals[-1].metrics if evals else {})}
