"""A recipe under Ray Tune's own population based training. Ray is an extra: it is looked for in the
interpreter that RIDGELINE_RAY_PYTHON names, or in this one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, random, sys
import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from ridgeline.search.on_tune import trainable

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
train = trainable(
    "digits", "device=cpu", "threads=1", "train.epochs=1", "train.batch=128", "train.eval_samples=64",
    rounds=3, out=sys.argv[1] + "/runs",
)
pbt = PopulationBasedTraining(
    time_attr="training_iteration", perturbation_interval=1, quantile_fraction=0.34, synch=True,
    hyperparam_mutations={"train.lr": tune.loguniform(1e-5, 1e-1)},
)
tuner = tune.Tuner(
    tune.with_resources(train, {"cpu": 1}),
    param_space={"train.lr": tune.grid_search([1e-5, 1e-2, 2e-2])},
    tune_config=tune.TuneConfig(metric="accuracy", mode="max", scheduler=pbt),
    run_config=tune.RunConfig(storage_path=sys.argv[1], name="t", verbose=0),
)
found = tuner.fit()
best = found.get_best_result()
print(json.dumps({
    "errors": len(found.errors), "shares": [r.metrics["share"] for r in found],
    "best": best.metrics["accuracy"], "lr": best.config["train.lr"],
}))
"""


def test_population_based_training_of_ray_tune(tmp_path: Path) -> None:
    named = os.environ.get("RIDGELINE_RAY_PYTHON")
    if not named and importlib.util.find_spec("ray") is None:
        pytest.skip(
            "ray is not here: pip install 'ridgeline[search]', or set RIDGELINE_RAY_PYTHON to an "
            "interpreter that has it"
        )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AIR_NEW_OUTPUT": "0"}
    done = subprocess.run(
        [named or sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["errors"] == 0
    assert said["shares"] == [1.0, 1.0, 1.0]
    # The trial that began with a rate of 1e-5 went on from another's weights, in a directory of its own.
    assert list((tmp_path / "runs").glob("*/run-1/checkpoints/step-*"))
    assert said["best"] > 0.5
