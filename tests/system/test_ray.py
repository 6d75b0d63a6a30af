"""Ranks on a real Ray cluster of two nodes on this machine. Ray is an extra: it is looked for in the
interpreter that RIDGELINE_RAY_PYTHON names, or in this one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PORT = "26379"
SAY = (
    "import json, os, sys; print(json.dumps([os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', "
    "'GROUP_RANK', 'OMP_NUM_THREADS')] + sys.argv[1:]))"
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ray_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The interpreter, with a cluster running."""
    named = os.environ.get("RIDGELINE_RAY_PYTHON")
    if not named and importlib.util.find_spec("ray") is None:
        pytest.skip(
            "ray is not here: pip install 'ridgeline[ray]', or set RIDGELINE_RAY_PYTHON to an "
            "interpreter that has it"
        )
    python = named or sys.executable
    ray = [python, "-m", "ray.scripts.scripts"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": True}
    head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
    for words in (head, [f"--address=127.0.0.1:{PORT}"]):
        subprocess.run([*ray, "start", *words, "--num-cpus=2", "--disable-usage-stats"], **quiet)
    yield python
    subprocess.run([*ray, "stop"], **quiet)


def launch(python: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            python,
            "-m",
            "ridgeline.cli",
            "launch",
            "--scheduler",
            "ray",
            "--folder",
            str(folder),
            *words,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": f"127.0.0.1:{PORT}"},
        capture_output=True,
        text=True,
        timeout=480,
    )


def test_ranks_on_two_nodes_of_ray(ray_python: str, tmp_path: Path) -> None:
    words = ("-N", "2", "-n", "2", "--", sys.executable, "-c", SAY, "a b", "$(x)")
    done = launch(ray_python, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"logs/rank-{rank}.out").read_text()) for rank in range(4)]
    assert [one[:4] for one in told] == [
        ["0", "4", "0", "0"],
        ["1", "4", "1", "0"],
        ["2", "4", "0", "1"],
        ["3", "4", "1", "1"],
    ]
    # Ray has set it to the cores of the whole task.
    assert {one[4] for one in told} == {"1"}
    assert {tuple(one[5:]) for one in told} == {("a b", "$(x)")}


def test_a_rank_that_fails_under_ray_is_named(ray_python: str, tmp_path: Path) -> None:
    script = "import os, time; assert os.environ['RANK'] != '1', 'boom'; time.sleep(60)"
    done = launch(ray_python, tmp_path, "-N", "2", "-n", "1", "--", sys.executable, "-c", script)
    assert done.returncode == 1
    assert "rank 1: ended with exit code 1" in done.stderr
    assert "boom" in done.stderr


def test_more_nodes_than_ray_has_is_said_at_once(ray_python: str, tmp_path: Path) -> None:
    done = launch(ray_python, tmp_path, "-N", "3", "-n", "1", "--", "true")
    assert done.returncode == 2
    assert "3 nodes" in done.stderr
    assert "ask for fewer" in done.stderr
