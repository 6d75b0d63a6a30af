"""Ranks that Open MPI and MPICH start: by `ridgeline train --on mpi`, and by a bare mpirun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ridgeline_cluster.hosts import base_environment
from ridgeline_cluster.jobs import TRAINING, losses, ridgeline, write_script

Run = Callable[..., subprocess.CompletedProcess[str]]

OWN_LOOP = """
import torch, ridgeline
from torch.nn import functional as F

job = ridgeline.start()
generator = torch.Generator().manual_seed(1)
images = torch.randn(200, 1, 8, 8, generator=generator)
dataset = torch.utils.data.TensorDataset(images, torch.arange(200) % 10)
model = job.parallelize(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in job.loader(dataset, batch_size=60):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
job.print(f"loss {job.mean(loss):.6f}")
"""


@pytest.fixture(params=["open_mpi", "mpich"])
def mpi(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Run]:
    """An mpirun that is the first in the path, and a function that runs a command with that path."""
    program = request.getfixturevalue(request.param)
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("mpirun", "mpiexec"):
        # A script, not a link: MPICH looks for its helpers beside the name it was called by.
        (folder / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (folder / name).chmod(0o755)
    environment = base_environment()
    environment["PATH"] = f"{folder}:{environment['PATH']}"

    def run(argv: list[str], **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            env={**environment, **more},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=720,
            stdin=subprocess.DEVNULL,
        )

    return request.param, run


@pytest.mark.table(keep=1)
def test_a_training_under_mpirun_is_the_local_one(
    mpi: tuple[str, Run], tmp_path: Path, reference: list[float]
) -> None:
    _, run = mpi
    folder = tmp_path / "run"
    words = [*TRAINING, "train.steps=20", "--on", "mpi", "-n", 4, "--run", folder]
    done = run(ridgeline("train", *words))
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(folder) == reference[:20]
    assert "step 20/20" in done.stdout


@pytest.mark.table(keep=1)
def test_a_script_with_its_own_loop_under_a_bare_mpirun(
    mpi: tuple[str, Run], tmp_path: Path
) -> None:
    kind, run = mpi
    script = write_script(tmp_path, OWN_LOOP)
    alone = run([sys.executable, str(script)])
    assert alone.returncode == 0, alone.stderr
    root: dict[str, Any] = {}
    command = ["mpirun", "-n", "2"]
    if kind == "open_mpi":
        command.append("--oversubscribe")
        if os.geteuid() == 0:
            names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
            root = dict.fromkeys(names, "1")
    done = run([*command, sys.executable, str(script)], **root)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)
    assert len(lines) == 1, done.stdout  # rank 0's alone
    assert float(lines[0]) == pytest.approx(float(alone.stdout.split()[-1]), abs=2e-6)


BOOM = """
import os, time
if os.environ["RANK"] == "2":
    raise ValueError("boom at rank 2")
time.sleep(600)
"""


def test_a_rank_that_fails_is_named_and_ends_the_others(
    mpi: tuple[str, Run], tmp_path: Path
) -> None:
    _, run = mpi
    script = write_script(tmp_path, BOOM)
    words = ["launch", "--scheduler", "mpi", "-n", 4, "--folder", tmp_path / "job"]
    done = run(ridgeline(*words, "--", sys.executable, script))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "boom at rank 2" in done.stderr
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(script) not in left
