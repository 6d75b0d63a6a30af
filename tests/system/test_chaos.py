"""Rounds of `benchmarks/chaos.py` on small runs; `make chaos` does fifty on larger ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--ranks", "2", "--epochs", "4")
ROUNDS = 2 if os.environ.get("RIDGELINE_TABLES") == "reduced" else 5


@pytest.mark.slow
def test_harms_are_survived() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/chaos.py", "--rounds", str(ROUNDS), "--seed", "1", *SMALL],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2400,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{ROUNDS} of {ROUNDS} survived"
