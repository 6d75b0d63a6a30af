"""`ridgeline verify` as a user types it: a table, a verdict, an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK_DEPENDENT = """
import torch.distributed as dist
from torch import nn

class Net(nn.Module):
    '''Computes something else on every rank but the first.'''
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.first(x.flatten(1)).relu()
        return self.second(x * (1.001 if dist.is_initialized() and dist.get_rank() else 1.0))
"""


def command(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "ridgeline.cli", "verify", *args],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_a_difference_is_named_and_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "wrong_net.py").write_text(RANK_DEPENDENT)
    done = command(tmp_path, "digits", "model={name: wrong_net:Net}", "--layout", "dp=2")
    assert done.returncode == 1
    assert "dp=2 in float64 differs: " in done.stderr
    assert "at step 1 by " in done.stderr
    assert "0 of 2 same" in done.stdout


@pytest.mark.slow
def test_the_same_in_float64_and_in_the_recipes_precision(tmp_path: Path) -> None:
    args = ("--layout", "dp=2,zero=1", "--steps", "2")
    done = command(tmp_path, "digits", *args)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 same after 2 steps" in done.stdout
    assert "fp32" in done.stdout
    assert "(bounds " in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "either --layout"),
        (("--all", "--layout", "dp=2"), "either --layout"),
        (("--layout", "tp=2,spatial=2"), "do not compose"),
        (("--layout", "dp=two"), "dp=two"),
    ],
)
def test_wrong_use_is_one_sentence(tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    done = command(tmp_path, "digits", *args)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
