"""Real jobs of other frameworks, started by `ridgeline launch` with nothing but its variables.

TensorFlow and JAX are no dependencies: each is looked for in the interpreter that
RIDGELINE_TENSORFLOW_PYTHON or RIDGELINE_JAX_PYTHON names, or in this one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parent / "frameworks"
INSTALL = {"tensorflow": "tensorflow==2.21.0", "jax": "jax==0.10.2"}
TIMEOUT_S = 120

# Not what launched the tests, but what a rank is told, is to be seen by the scripts.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TF_CONFIG", "JAX_", "OMPI_", "SLURM_", "PMI")


def python_with(package: str) -> str:
    """An interpreter that has the package."""
    variable = f"RIDGELINE_{package.upper()}_PYTHON"
    named = os.environ.get(variable)
    if named:
        assert Path(named).exists(), f"{variable}={named} is not there"
        return named
    if importlib.util.find_spec(package):
        return sys.executable
    pytest.skip(
        f"{package} is not here: python3 -m venv DIR && DIR/bin/pip install {INSTALL[package]}, and set "
        f"{variable}=DIR/bin/python"
    )


def run_ranks(
    python: str, script: str, *args: str, around: dict[str, str] | None = None
) -> list[dict[str, object]]:
    """What each of two ranks printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    clean |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(around or {})}
    with tempfile.TemporaryDirectory() as folder:
        launch = [
            sys.executable,
            "-m",
            "ridgeline.cli",
            "launch",
            "--scheduler",
            "local",
            "-n",
            "2",
        ]
        done = subprocess.run(
            [*launch, "--folder", folder, "--", python, str(SCRIPTS / script), *args],
            env=clean,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"{script}: {done.stderr[-4000:]}"
        texts = [(Path(folder) / f"logs/rank-{rank}.out").read_text() for rank in range(2)]
    # Libraries print as well.
    return [
        json.loads(next(line for line in text.splitlines() if line.startswith("{")))
        for text in texts
    ]


@pytest.mark.slow
def test_tensorflow_trains_on_two_workers() -> None:
    """The weights are those of one process that descends by the gradient over all data."""
    told = run_ranks(
        python_with("tensorflow"), "tensorflow_train.py", around={"TF_CPP_MIN_LOG_LEVEL": "2"}
    )
    assert [(t["rank"], t["size"], t["torch_rank"]) for t in told] == [(0, 2, 0), (1, 2, 1)]
    assert told[0]["weights"] == told[1]["weights"]
    assert told[0]["losses"] == told[1]["losses"]

    features = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32).astype(np.float64)
    labels = features @ np.array([1.0, -2.0, 3.0])
    weights, losses = np.zeros(3), []
    for _ in range(20):
        errors = features @ weights - labels
        losses.append(float(np.mean(errors**2)))
        weights -= 0.1 * 2 * features.T @ errors / len(errors)
    assert told[0]["weights"] == pytest.approx(weights, rel=1e-4)
    assert told[0]["losses"] == pytest.approx(losses, rel=1e-4)


# A shell of `srun --pty` says so to whatever is started in it.
ONE_TASK_OF_SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


@pytest.mark.slow
@pytest.mark.parametrize("around", [{}, ONE_TASK_OF_SLURM], ids=["plain", "in a shell of Slurm's"])
def test_jax_initializes_without_arguments(around: dict[str, str]) -> None:
    check_jax(run_ranks(python_with("jax"), "jax_sum.py", around=around))


@pytest.mark.slow
def test_jax_initializes_with_number_and_index() -> None:
    check_jax(run_ranks(python_with("jax"), "jax_sum.py", "--given"))


def check_jax(told: list[dict[str, object]]) -> None:
    assert [(t["rank"], t["size"], t["torch_rank"]) for t in told] == [(0, 2, 0), (1, 2, 1)]
    assert [t["sum"] for t in told] == [110.0, 110.0]
    assert [t["gradient"] for t in told] == [-3.0, -3.0]  # the mean over both: 2 (0 - 1.5)
