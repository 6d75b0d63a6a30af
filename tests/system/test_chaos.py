"""Five rounds of `benchmarks/chaos.py`; `make chaos` does fifty."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_five_harms_are_survived() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/chaos.py", "--rounds", "5", "--seed", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "5 of 5 survived"
