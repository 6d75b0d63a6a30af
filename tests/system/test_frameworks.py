"""Real jobs of other frameworks, started with nothing but the variables that they get from us.

TensorFlow and JAX are no dependencies: each is looked for in the interpreter that
RIDGELINE_TENSORFLOW_PYTHON or RIDGELINE_JAX_PYTHON names, or in this one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ridgeline.launch.frameworks import PORTS_A_RANK, framework_variables

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


def free_ports(num: int) -> list[int]:
    """All open at once, so that no two are the same."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@dataclass(frozen=True)
class Rank:
    rank: int
    local_rank: int
    ports: tuple[int, ...]
    node_rank: int = 0
    host: str = "localhost"
    address: str = "127.0.0.1"
    gpus: tuple[str, ...] = ()


def local_ranks(num: int) -> list[Rank]:
    ports = free_ports(PORTS_A_RANK * num)
    return [
        Rank(rank, rank, tuple(ports[PORTS_A_RANK * rank : PORTS_A_RANK * (rank + 1)]))
        for rank in range(num)
    ]


def run_ranks(
    python: str, script: str, *args: str, around: dict[str, str] | None = None
) -> list[dict[str, object]]:
    """What each of two ranks printed."""
    members = local_ranks(2)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    clean |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(around or {})}
    ranks = [
        subprocess.Popen(
            [python, str(SCRIPTS / script), *args],
            env={**clean, **framework_variables(members, rank, clean)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    told = []
    for rank, (out, err) in zip(ranks, texts, strict=True):
        assert rank.returncode == 0, f"{script} ended with {rank.returncode}:\n{err[-4000:]}"
        # Libraries print to standard output as well.
        told.append(json.loads(next(line for line in out.splitlines() if line.startswith("{"))))
    return told


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
