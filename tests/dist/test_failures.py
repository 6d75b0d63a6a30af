"""What a person sees when a run goes wrong, through the real command and real processes.

One error, in one line or two, that names the cause; the exit code 2 for what was asked wrongly and 1
for what went wrong; and a run directory that can still be read.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from ridgeline.config import load_config
from ridgeline.errors import RunError, UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.launch.failures import write_failure
from ridgeline.launch.local import Death, _raise_first
from ridgeline.rundir import CONFIG, METRICS, REPORT, RunDir
from ridgeline.train.run import run_training

# A user's model that misbehaves on one rank at one step; counting models on meta is no step.
OWN_MODEL = """
import os, signal, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, what="nothing", rank=1, step=5, slow=0.0):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.what, self.rank, self.step, self.slow, self.calls = what, rank, step, slow, 0

    def forward(self, x):
        out = self.layer(x)
        if x.is_meta or not self.training:
            return out
        time.sleep(self.slow)
        self.calls += 1
        if self.calls == self.step and int(os.environ["RANK"]) == self.rank:
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "raise":
                raise ValueError("the third wheel came off")
            if self.what == "nan":
                return out * float("nan")
        return out
"""
RECIPE = {
    "name": "own",
    "model": {"name": "own:Net"},
    "data": {
        "source": "synthetic",
        "args": {"shape": [8], "classes": 4, "samples": 64},
    },
    "train": {"batch": 8, "steps": 20, "eval_samples": 0},
    "log": {"every": 1, "tensorboard": "no"},
    "device": "cpu",
    "threads": 1,
}
LONGEST_S = 480.0


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    error: str
    run: RunDir | None
    seconds: float

    @property
    def text(self) -> str:
        return self.out + self.error


Train = Callable[..., Ended]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "own.py").write_text(OWN_MODEL)
    (folder / "own.yaml").write_text(yaml.safe_dump(RECIPE))
    return subprocess.Popen(
        [sys.executable, "-m", "ridgeline.cli", "train", "own.yaml", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], folder: Path, began: float) -> Ended:
    try:
        out, error = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    runs = sorted((folder / "runs").glob("own-*"))
    run = RunDir.open(runs[0]) if runs else None
    return Ended(process.returncode, out, error, run, time.monotonic() - began)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    def run(*arguments: str) -> Ended:
        return finish(start(tmp_path, *arguments), tmp_path, time.monotonic())

    return run


def assert_one_error(ended: Ended, code: int) -> None:
    assert ended.code == code, ended.text
    assert "Traceback" not in ended.text
    assert ended.error.startswith("ridgeline: "), ended.error
    assert ended.error.count("ridgeline: ") == 1
    assert len(ended.error.splitlines()) <= 3, ended.error


def assert_readable(run: RunDir | None, status: str) -> RunDir:
    """Everything that a reader of run directories looks for is there and whole."""
    assert run is not None
    assert yaml.safe_load(run.file(CONFIG).read_text())["name"] == "own"
    for line in run.file(METRICS).read_text().splitlines():
        json.loads(line)
    assert run.steps()
    assert "</html>" in run.file(REPORT).read_text()
    assert run.status() == status
    return run


# What was asked wrongly: exit code 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.bach=8"], ["unknown key train.bach", "did you mean train.batch?"]),
        (["optim.name=adamv"], ["'adamv' in optim.name", "did you mean 'adam"]),
        (["layout=dp=3", "-n", "2"], ["'dp=3'", "needs 3 processes", "there are 2", "dp=2"]),
        (["layout=dq=2", "-n", "2"], ["'dq'", "did you mean 'dp'"]),
        (["model.name=lama"], ["'lama' in model.name", "did you mean 'llama'?"]),
        (
            ["train.batch=7", "-n", "2"],
            ["train.batch=7 is not divisible", "dp=2", "train.batch=6 or 8"],
        ),
    ],
    ids=["key", "optimizer", "processes", "layout-field", "model", "batch"],
)
def test_a_mistake_is_answered_in_a_line(
    train: Train, arguments: list[str], words: list[str]
) -> None:
    ended = train(*arguments)
    assert_one_error(ended, 2)
    for word in words:
        assert word in ended.error


# The same and more without a command around them, which costs seconds a case.


def train_here(*overrides: str) -> None:
    recipe = {**RECIPE, "model": {"name": "mlp", "args": {"in_features": 8}}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.yaml"
        path.write_text(yaml.safe_dump(recipe))
        config = load_config(path, overrides).config
    run_training(config, read_rank_env())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.source=synthetik"], ["'synthetik' in data.source", "did you mean 'synthetic'?"]),
        (
            ["data.source=text", "data.args={path: nowhere.txt}"],
            ["'nowhere.txt' in data.args does"],
        ),
        (["data.source=text", "data.args={path: EMPTY}"], ["empty.txt'", "0 bytes"]),
        (["data.source=text", "data.args={path: FOLDER}"], ["no file in folder"]),
        (["train.task=clasify"], ["'clasify' in train.task", "did you mean 'classify'?"]),
        (["model.args.hiden=4"], ["'hiden'", "did you mean 'hidden'?"]),
    ],
    ids=["source", "no-file", "empty-file", "empty-folder", "task", "model-argument"],
)
def test_a_mistake_is_a_usage_error(
    ranks: Any, tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    empty, folder = tmp_path / "empty.txt", tmp_path / "folder"
    empty.touch()
    folder.mkdir()
    told = [text.replace("EMPTY", str(empty)).replace("FOLDER", str(folder)) for text in overrides]
    with pytest.raises(ranks.Failure) as caught:
        ranks(1, train_here, *told)
    assert isinstance(caught.value.error, UsageError)
    for word in words:
        assert word in str(caught.value.error)


def test_a_loss_that_explodes_names_step_and_remedy(ranks: Any) -> None:
    with pytest.raises(ranks.Failure) as caught:
        ranks(2, train_here, "train.lr=1e30", "optim.name=sgd")
    assert isinstance(caught.value.error, RunError)
    text = str(caught.value.error)
    assert re.search(rf"at step \d+ on rank {caught.value.rank};", text)
    assert "train.lr (now 1e+30)" in text
    assert "train.clip" in text


# What went wrong: exit code 1


def test_a_loss_that_is_nan_on_one_rank_names_that_rank(train: Train) -> None:
    ended = train("model.args={what: nan, step: 5}", "-n", "2")
    assert_one_error(ended, 1)
    assert "loss is nan at step 5 on rank 1" in ended.error
    run = assert_readable(ended.run, "failed")
    assert [record.step for record in run.steps()] == [1, 2, 3, 4]


def test_a_rank_that_is_killed_ends_the_run(train: Train) -> None:
    ended = train("model.args={what: kill, step: 5}", "-n", "2")
    assert_one_error(ended, 1)
    assert "rank 1: was killed by SIGKILL" in ended.error
    run = assert_readable(ended.run, "failed")
    assert time_to_end(run) < 10


def test_a_rank_that_raises_is_heard_first(train: Train) -> None:
    ended = train("model.args={what: raise, step: 5}", "-n", "2")
    assert_one_error(ended, 1)
    assert ended.error.startswith("ridgeline: rank 1: ValueError: the third wheel came off")
    run = assert_readable(ended.run, "failed")
    assert time_to_end(run) < 10
    trace = run.file("logs") / "traceback-1.txt"
    assert str(trace.relative_to(run.path.parent.parent)) in ended.error
    assert 'raise ValueError("the third wheel came off")' in trace.read_text()


def test_a_rank_that_was_ended_for_another_is_not_the_cause(tmp_path: Path) -> None:
    write_failure(tmp_path, 1, 100.9, UsageError("train.batch=7 is wrong"), "")
    with pytest.raises(UsageError, match=r"train\.batch=7 is wrong"):
        _raise_first({0: Death(-signal.SIGTERM, 100.0), 1: Death(2, 100.0)}, tmp_path)


def time_to_end(run: RunDir) -> float:
    """Seconds from the last step that was recorded to the event that closed the run."""
    closing = [event.time for event in run.events() if event.event == "failed"]
    return closing[-1] - run.steps()[-1].time


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run of two ranks whose command got a Ctrl-C; `seconds` counts from there."""
    folder = tmp_path_factory.mktemp("interrupted")
    arguments = ("model.args={slow: 0.02}", "train.steps=100000", "log.every=5", "-n", "2")
    process = start(folder, *arguments)
    wait_for_metrics(folder, process)
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if "ridgeline.train.worker" in child.cmdline()]
    assert len(workers) == 2
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    return finish(process, folder, began)


def test_control_c_ends_every_rank_and_keeps_the_run(interrupted: Ended) -> None:
    assert interrupted.seconds < 30
    assert interrupted.code == 1
    assert "Traceback" not in interrupted.text
    assert "ridgeline: interrupted; what was recorded so far is in runs/own-" in interrupted.error
    run = assert_readable(interrupted.run, "interrupted")
    assert [event.event for event in run.events()] == ["start", "interrupted"]
    assert [record.step for record in run.steps()] == list(range(1, len(run.steps()) + 1))


def test_control_c_prints_one_error(interrupted: Ended) -> None:
    assert_one_error(interrupted, 1)


def wait_for_metrics(folder: Path, process: subprocess.Popen[Any]) -> Path:
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        found = list(folder.glob(f"runs/*/{METRICS}"))
        if found:
            return found[0]
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError("the run never recorded a step")
