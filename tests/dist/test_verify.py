"""`ridgeline verify` as a user types it: a table, a verdict, an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ridgeline.layout import Layout
from ridgeline.verify.compare import Comparison, Sizes
from ridgeline.verify.run import Row
from ridgeline.verify.show import header_of, row_of

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


def environment(folder: Path) -> dict[str, str]:
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def command(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ridgeline.cli", "verify", *args],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_mixing_and_crops_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """A batch of 9 on 3 ranks: pairs that are mixed lie on two ranks, and one sample has no partner."""
    augment = (
        "mixup=0.4",
        "cutmix=0.5",
        "crop=padded",
        "padding=1",
        "flip_horizontal=0.5",
    )
    done = command(
        tmp_path,
        "digits",
        "train.batch=9",
        *(f"data.augment.{setting}" for setting in augment),
        "--layout",
        "dp=3",
    )
    assert done.returncode == 0, done.stderr
    assert "2 of 2 same" in done.stdout


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
        (("--all", "--layout", "dp=2"), "not both"),
        (("--layout", "tp=2", "-n", "3"), "needs a multiple of 2 processes but there are 3"),
        (("--layout", "tp=2,spatial=2"), "do not compose"),
        (("--layout", "dp=two"), "dp=two"),
    ],
)
def test_wrong_use_is_one_sentence(tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    done = command(tmp_path, "digits", *args)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_the_number_of_processes_fills_in_dp(tmp_path: Path) -> None:
    done = command(tmp_path, "digits", "--layout", "zero=1", "-n", "2", "--steps", "1")
    assert done.returncode == 0, done.stderr
    header, row = done.stdout.splitlines()[:2]
    assert row.startswith("dp=2,zero=1 ")
    assert row.index("float64") == header.index("in ")


def test_a_header_is_above_its_columns_for_short_layouts() -> None:
    found = Comparison(Sizes(0.0, 0.0, 0.0, 0.0), Sizes(1e-9, 1e-9, 1e-9, 1e-9), None)
    header, width = header_of([Layout.parse("tp=2")])
    row = row_of(Row(Layout.parse("tp=2"), "float64", found), width)
    assert row.index("float64") == header.index("in ")
    assert row.index("same") == header.index("verdict")


@pytest.mark.slow
def test_ctrl_c_says_so_and_leaves_no_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ridgeline.cli",
            "verify",
            "digits",
            "--layout",
            "dp=2",
            "--steps",
            "500",
        ],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()  # the header: processes are being started
    deadline = time.monotonic() + 240
    while not psutil.Process(process.pid).children() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert errors.strip() == ("ridgeline: interrupted; layouts without a row above were not proven")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
