"""Runs that are kept alive, through the real command and real processes: signals, restarts, fewer ranks,
and hangs that name the rank and the place."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from ridgeline.launch.ranks import known_ranks
from ridgeline.rundir import CONFIG, LOGS, METRICS, RunDir

# A user's model that misbehaves on one local rank until a file appears, or writes it and does so once.
OWN_MODEL = """
import os, pathlib, re, signal, time
import torch
from torch import nn

HERE = pathlib.Path(__file__).parent

class Net(nn.Module):
    def __init__(self, what="nothing", rank=1, step=5, slow=0.0, once=False):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.what, self.rank, self.step, self.slow, self.once = what, rank, step, slow, once
        self.calls = 0

    def forward(self, x):
        out = self.layer(x)
        if x.is_meta or not self.training:
            return out
        time.sleep(self.slow)
        if self.what == "work" and int(os.environ["LOCAL_RANK"]) == self.rank:
            spin(0.04)
        self.calls += 1
        mine = int(os.environ["LOCAL_RANK"]) == self.rank
        if self.calls == self.step and mine and not (HERE / "good").exists():
            if self.once:
                (HERE / "good").touch()
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "grip":
                re.match(r"(a+)+$", "a" * 60 + "b")  # years in C, without letting go of the lock
        return out

def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.ones(100, 100) @ torch.ones(100, 100)

class Samples(torch.utils.data.Dataset):
    def __init__(self, sleeps=-1, step=0, seconds=600):
        self.sleeps, self.reads, self.step, self.seconds = sleeps, 0, step, seconds
    def __len__(self):
        return 64
    def __getitem__(self, index):
        self.reads += 1
        if int(os.environ["RANK"]) == self.sleeps and self.reads > self.step:
            time.sleep(self.seconds)
        return torch.ones(8), index % 4

def samples(split, sleeps=-1, step=0, seconds=600):
    return Samples(sleeps if split == "train" else -1, step, seconds)
"""
RECIPE = {
    "name": "own",
    "model": {"name": "own:Net"},
    "data": {"source": "synthetic", "args": {"shape": [8], "classes": 4, "samples": 64}},
    "train": {"batch": 8, "steps": 20, "eval_samples": 0},
    "log": {"every": 1, "tensorboard": "no"},
    "device": "cpu",
    "threads": 1,
}
LONGEST_S = 480.0
LONG = ("train.steps=100000", "model.args={slow: 0.02}")


class Job:
    """A command that was started in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "own.py").write_text(OWN_MODEL)
        (folder / "own.yaml").write_text(yaml.safe_dump(RECIPE))
        self.process: subprocess.Popen[str] | None = None
        self.out = self.error = ""

    def start(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{self.folder}"},
        )

    def train(self, *arguments: str) -> None:
        self.start("ridgeline.cli", "train", "own.yaml", *arguments)

    def end(self) -> int:
        assert self.process is not None
        self.out, self.error = self.process.communicate(timeout=LONGEST_S)
        return self.process.returncode

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()

    @property
    def run(self) -> RunDir:
        return RunDir.open(next(self.folder.glob("runs/own-*")))

    def events(self, name: str) -> list[dict[str, object]]:
        return [event.details for event in self.run.events() if event.event == name]

    def wait_for(self, what: str) -> None:
        """Until a file of the run directory has this text."""
        name, text = what.split(":", 1)
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            found = list(self.folder.glob(f"runs/*/{name}"))
            if found and text in found[0].read_text():
                return
            assert self.process is not None
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        raise AssertionError(f"{what} never came")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.close()


# Signals


def test_a_scheduler_s_signal_ends_the_run_after_a_step(job: Job) -> None:
    """Every process of the job gets it, loader workers too, as from Slurm."""
    job.train("-n", "2", *LONG, "data.source=own:samples", "data.args={}", "data.workers=1")
    job.wait_for(f"{METRICS}:step")
    assert job.process is not None
    tree = psutil.Process(job.process.pid).children(recursive=True)
    assert len(tree) > 4
    for process in [*tree, psutil.Process(job.process.pid)]:
        process.send_signal(signal.SIGTERM)
    assert job.end() == 75, job.error
    assert job.error.startswith("ridgeline: stopped by SIGTERM;"), job.error
    assert len(job.error.splitlines()) == 1
    (stopped,) = job.events("stopped")
    assert stopped["signal"] == "SIGTERM"
    assert [r.step for r in job.run.steps()][-1] == stopped["step"]
    assert job.run.status() == "stopped"
    assert not job.run.evals()


@pytest.mark.thorough
def test_a_second_signal_ends_the_run_at_once(job: Job) -> None:
    job.train("-n", "2", "train.steps=100", "model.args={slow: 30}", "watch.timeout_s=0")
    job.wait_for("events.jsonl:start")
    assert job.process is not None
    time.sleep(1)
    job.process.send_signal(signal.SIGUSR1)
    time.sleep(1.5)
    assert job.process.poll() is None
    began = time.monotonic()
    job.process.send_signal(signal.SIGUSR1)
    assert job.end() == 75, job.error
    assert time.monotonic() - began < 20
    assert job.run.status() == "stopped"


def test_under_torchrun_a_rank_asks_for_the_requeue_itself(job: Job) -> None:
    run = start_torchrun(job, "train.steps=100000", "model.args.slow=0.02", "-", "0")
    job.wait_for(f"{METRICS}:step")
    ranks = known_ranks(run.file(LOGS))
    assert [rank.rank for rank in ranks] == [0, 1]
    ranks[1].send(signal.SIGUSR1)
    assert job.end() == 1
    assert "exitcode  : 75" in job.error
    assert run.status() == "stopped"


def start_torchrun(job: Job, *arguments: str) -> RunDir:
    """`torchrun ... -m ridgeline.train.worker RUNDIR` on 2 ranks; overrides, then `-`, then restarts."""
    from ridgeline.config import dump_config, load_config

    *overrides, _, restarts = arguments
    run = RunDir.create(job.folder / "runs", "own")
    run.write_text(CONFIG, dump_config(load_config(job.folder / "own.yaml", overrides).config))
    job.start(
        "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--monitor-interval=0.1",
        f"--max-restarts={restarts}", "-m", "ridgeline.train.worker", str(run.path),
    )  # fmt: skip
    return run


# Restarts


def test_a_killed_rank_is_started_again(job: Job) -> None:
    """By default where there is a checkpoint, and from there."""
    job.train("-n", "2", "checkpoint.every=3", "checkpoint.background=false",
              "model.args={what: kill, once: true}")  # fmt: skip
    assert job.end() == 0, job.error
    (restart,) = job.events("restart")
    assert restart == {"cause": "was killed by SIGKILL", "rank": 1, "attempt": 1}
    line = "restart 1: rank 1: was killed by SIGKILL; going on from checkpoint step-00000003\n"
    assert line in job.out
    assert [resume["step"] for resume in job.events("resume")] == [3]
    assert job.run.status() == "finished"


@pytest.mark.thorough
def test_the_same_failure_twice_is_given_up(job: Job) -> None:
    job.train("-n", "2", "--restarts", "5", "model.args={what: kill}")
    assert job.end() == 1
    assert "rank 1: was killed by SIGKILL" in job.error
    assert "given up: it failed twice after step 4, with no checkpoint in between" in job.error
    assert len(job.events("restart")) == 1


@pytest.mark.thorough
def test_torchrun_starts_a_killed_rank_again(job: Job) -> None:
    run = start_torchrun(job, "model.args={what: kill, once: true}", "-", "3")
    assert job.end() == 0, job.error
    (restart,) = job.events("restart")
    assert restart["attempt"] == 1
    assert run.status() == "finished"


@pytest.mark.slow
def test_a_slot_that_keeps_failing_is_left_out_and_comes_back(job: Job) -> None:
    job.train("-n", "4", "--restarts", "3", "--min-ranks", "2", "restart.regrow_minutes=0.05",
              "train.steps=200", "model.args={what: kill, rank: 3, slow: 0.05}")  # fmt: skip
    job.wait_for("layout.txt:dp=2,accumulate=2")
    (job.folder / "good").touch()
    assert job.end() == 0, job.error
    first, second, regrown = job.events("restart")
    assert first["rank"] == second["rank"] == 3
    assert (second["without_slot"], second["layout"]) == (3, "dp=2,accumulate=2")
    assert regrown["cause"] == "regrow"
    assert "regrow: going on with 4 ranks again" in job.out
    assert [start["num_ranks"] for start in job.events("start")] == [4, 4, 2, 4]
    assert job.run.status() == "finished"


# Hangs

WATCH = ("watch.timeout_s=5", "watch.first_step_s=30")


def test_a_stopped_rank_is_named_with_the_collective(job: Job) -> None:
    job.train("-n", "4", *LONG, *WATCH, "log.every=40")
    job.wait_for(f"{METRICS}:step")
    (rank,) = [r for r in known_ranks(job.run.file(LOGS)) if r.rank == 2]
    began = time.monotonic()
    rank.send(signal.SIGSTOP)
    assert job.end() == 1
    assert time.monotonic() - began < 5 + 60, "the limit and some time to look around and end"
    first = job.error.splitlines()[0]
    assert "rank 2 stopped answering at step" in first
    assert "(its process is stopped)" in first
    assert "ranks 0, 1, 3 wait for it in" in first
    assert "gloo:all_reduce of [36]" in first
    told = (job.run.file(LOGS) / "hang.txt").read_text()
    assert "missing: its process is stopped" in told
    assert "/ridgeline/train/" in told.split("rank 2, main thread")[1].split("rank 3, main")[0]
    assert not psutil.pid_exists(rank.pid)


def test_a_rank_that_waits_for_data_is_named_with_its_line(job: Job) -> None:
    job.train("-n", "2", "train.steps=1000", *WATCH, "data.source=own:samples", "data.prefetch=0",
              "data.args={sleeps: 1, step: 40}")  # fmt: skip
    assert job.end() == 1
    first = job.error.splitlines()[0]
    assert re.search(r"rank 1 made no progress for \d+ s at step", first), job.error
    assert "in data (own.py:" in first
    assert "in __getitem__)" in first
    assert "rank 0 waits for it in" in first


@pytest.mark.thorough
def test_a_rank_that_holds_python_s_lock_is_named(job: Job) -> None:
    job.train("-n", "2", "train.steps=1000", *WATCH, "model.args={what: grip}")
    assert job.end() == 1
    first = job.error.splitlines()[0]
    assert "rank 1 stopped answering at step 5 (its process is running), in own.py:" in first
    assert "rank 0 waits for it in" in first


def test_a_hang_is_a_failure_that_is_restarted(job: Job) -> None:
    job.train("-n", "2", *WATCH, "--restarts", "1", "model.args={what: grip, once: true}")
    assert job.end() == 0, job.error
    (restart,) = job.events("restart")
    assert "rank 1 stopped answering" in str(restart["cause"])
    assert json.dumps(restart["rank"]) == "1"


# Stragglers


@pytest.mark.table(keep=1)
@pytest.mark.parametrize(
    ("part", "arguments"),
    [
        ("data", ("data.source=own:samples", "data.args={sleeps: 1, seconds: 0.02}")),
        ("compute", ("model.args={what: work, slow: 0.02}",)),
    ],
)
def test_a_slow_rank_is_told_with_the_reason(job: Job, part: str, arguments: tuple[str]) -> None:
    job.train("-n", "2", "train.steps=120", "data.prefetch=0", *arguments)
    assert job.end() == 0, job.error
    found = [event for event in job.events("straggler") if event["rank"] == 1]
    assert found, job.out
    assert found[0]["part"] == part
    assert "straggler: rank 1 needs" in job.out
    assert "Stragglers" in job.run.file("report.html").read_text()
