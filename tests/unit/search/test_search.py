"""Real searches, of the digits that come with scikit-learn: stopped, gone on with, and trained again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import ridgeline
from ridgeline.cli import app
from ridgeline.errors import RunError, UsageError
from ridgeline.launch.job import JobState
from ridgeline.launch.records import JobRecord
from ridgeline.rundir import EvalRecord, RunDir
from ridgeline.search.places import (
    LOST_S,
    Ended,
    Local,
    Queue,
    _Job,
    build_places,
    last_words,
)
from ridgeline.search.request import make_request
from ridgeline.search.run import Search, judge
from ridgeline.search.trials import Journal

RIDGELINE = [sys.executable, "-m", "ridgeline.cli"]
SMALL = ("digits", "device=cpu", "train.epochs=1", "train.batch=128", "train.eval_samples=64")
OVER = ("--over", "train.lr=1e-3..1e-1:log", "--over", "optim.weight_decay=0.0..0.1")


def search(folder: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [*RIDGELINE, "search", *words], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_population_is_stopped_goes_on_and_is_trained_again_bit_for_bit(tmp_path: Path) -> None:
    words = (*SMALL, *OVER, "--schedule", "population", "--rounds", "2", "--trials", "3")
    command = [*RIDGELINE, "search", *words, "--metric", "accuracy", "--at-once", "2", "--out", "s"]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    journal = tmp_path / "s" / "journal.jsonl"
    until = time.monotonic() + 120
    while time.monotonic() < until and first.poll() is None:
        if journal.is_file() and "reached" in journal.read_text():
            break
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    out, error = first.communicate(timeout=120)
    assert first.returncode == 75, out + error
    assert b"`ridgeline search s` goes on" in error
    known = {(t.number, s): v for t in Journal(tmp_path / "s").trials for s, v in t.scores.items()}
    assert known

    # From elsewhere: what the recipe names is found from where the search was begun.
    (tmp_path / "elsewhere").mkdir()
    said = search(tmp_path / "elsewhere", "../s", "--at-once", "2")
    trials = Journal(tmp_path / "s").trials
    after = {(t.number, s): v for t in trials for s, v in t.scores.items()}
    assert known.items() <= after.items()
    assert sum(t.share == 1.0 for t in trials) == 3
    children = [t for t in trials if t.parent is not None]
    assert len(children) == 1
    assert children[0].begins == 0.5
    # It began at its parent's step, not at the first.
    steps = RunDir(tmp_path / "s" / "trials" / children[0].name).steps()
    halfway = max(r.step for r in RunDir(tmp_path / "s" / "trials" / "000").steps()) // 2
    assert steps[0].step > halfway
    assert "best: trial" in said

    # The best, and a child whose settings changed on the way: the commands give the same bits.
    best = said.partition("best: trial ")[2][:3]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(
        ["sh", "s/again.sh", "again"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
    )
    weights = [
        (tmp_path / folder / "weights.safetensors").read_bytes()
        for folder in ("again", f"s/trials/{best}")
    ]
    assert weights[0] == weights[1]
    page = (tmp_path / "s" / "search.html").read_text()
    assert f"best: trial {best}, accuracy" in page
    assert 'href="trials/000/report.html"' in page
    assert "accuracy by train.lr" in page


@pytest.mark.slow
def test_settings_that_cannot_be_trained_end_a_search_that_has_no_others(tmp_path: Path) -> None:
    """A batch that two ranks cannot share: every trial fails, the third ends it with the reason."""
    words = (*SMALL, "--over", "train.batch=31,33,35", "--draw", "grid", "-n", "2", "--out", "s")
    said = search(tmp_path, *words, code=1)
    assert "3 trials failed one after the other" in said
    assert "is not divisible by dp=2" in said
    assert all(t.failed for t in Journal(tmp_path / "s").trials)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*SMALL, "--over", "train.lrr=0.1,0.2"), "unknown key train.lrr"),
        (
            (*SMALL, *OVER, "--on", "node"),
            "unknown scheduler 'node' in --on; did you mean 'nodes'?",
        ),
        (
            (*SMALL, *OVER, "--on", "nodes"),
            "--on nodes is for the nodes of a job, and this is none",
        ),
        ((*SMALL, "--over", "train.batch=0,32"), "train.batch=0 is too small"),
        ((*SMALL,), "nothing to search"),
        ((*SMALL, *OVER, "--draw", "magic"), "unknown way 'magic' in --draw"),
        ((*SMALL, *OVER, "--schedule", "magic"), "unknown schedule 'magic' in --schedule"),
        ((*SMALL, *OVER, "--draw", "grid"), "is a range; write a list"),
        ((*SMALL, "--over", "train.batch=32,64", "--draw", "grid", "--trials", "3"), "2 points"),
        ((*SMALL, *OVER, "--job=--time=1h"), "say where with --on"),
        ((*SMALL, *OVER, "--retry-failed"), "--retry-failed is for searches"),
        ((*SMALL, *OVER, "checkpoint.keep=7"), "checkpoint.keep=7 is the search's own"),
        (
            (*SMALL, "--over", "train.stop_after=0.2,0.4"),
            "--over train.stop_after is the search's own",
        ),
        ((*SMALL, *OVER, "layout=dp=2", "-n", "1"), "needs 2 processes"),
        ((*SMALL, *OVER, "--on", "magic"), "unknown scheduler 'magic' in --on"),
        ((*SMALL, "--show"), "--show is for searches"),
        ((*SMALL, *OVER, "--rounds", "4"), "--rounds 4 is for --schedule population"),
        ((*SMALL, *OVER, "--schedule", "full", "--first", "0.2"), "is for --schedule halving"),
    ],
)
def test_a_slip_of_the_pen_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["search", *words])
    assert isinstance(found.exception, UsageError)
    assert said in str(found.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_a_recipe_keeps_for_says_nothing_of_the_metric(tmp_path: Path) -> None:
    """Kept for its accuracy, judged by its loss: less is better. The one with the rate of next to nothing
    is the worst; the same command goes on with the same search, another in its folder is refused, and what
    failed is tried again."""
    recipe = tmp_path / "kept.yaml"
    text = (Path(ridgeline.__file__).parent / "recipes" / "digits.yaml").read_text()
    recipe.write_text(text + "checkpoint: {keep_best: accuracy}\n")
    words = (
        "kept.yaml",
        *SMALL[1:],
        "--over",
        "train.lr=1e-9,1e-2",
        "--draw",
        "grid",
        "--schedule",
        "full",
    )
    said = search(tmp_path, *words, "--out", "s")
    assert "train.lr=0.01" in said.partition("best: trial")[2].splitlines()[0]
    before = (tmp_path / "s" / "journal.jsonl").read_bytes()
    assert "best: trial" in search(tmp_path, *words, "--out", "s")
    assert (tmp_path / "s" / "journal.jsonl").read_bytes() == before
    other = search(tmp_path, *words, "train.seed=1", "--out", "s", code=2)
    assert "s is another search: `ridgeline search s` goes on with it" in other

    journal = Journal(tmp_path / "s")
    trial = journal.trials[0]
    journal.fail(trial, "the disk was full", 1.0)
    assert "failed: the disk was full" in search(tmp_path, "s", "--show")
    assert "failed" not in search(tmp_path, "s", "--retry-failed")
    assert Journal(tmp_path / "s").trials[0].scores == trial.scores


def test_a_folder_that_is_no_search_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("dear diary")
    assert "choose another --out" in search(tmp_path, *SMALL, *OVER, "--out", "mine", code=2)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_run_is_no_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    found = CliRunner().invoke(app, ["search", "run", *OVER])
    assert "run is a folder and no search" in str(found.exception)
    # A folder of that name beside it does not hide a recipe.
    (tmp_path / "digits").mkdir()
    found = CliRunner().invoke(app, ["search", "digits"])
    assert "nothing to search" in str(found.exception)


def test_trials_share_out_devices_and_cores() -> None:
    four = Local(4, tuple("01234567"), tuple(range(16)))
    assert [four.variables(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(4)] == [
        "0,1", "2,3", "4,5", "6,7",
    ]  # fmt: skip
    assert [four.cores_of(slot)[0] for slot in range(4)] == [0, 4, 8, 12]
    assert sorted(core for slot in range(4) for core in four.cores_of(slot)) == list(range(16))
    assert build_places(None, None, 2, list("01234567"), range(16)).count == 4
    assert build_places(None, None, 1, [], range(16)).count == 1
    assert isinstance(build_places("slurm", None, 1, [], []), Queue)


@pytest.mark.parametrize(
    ("state", "said", "code", "how"),
    [
        ("waiting", "PENDING", None, None), ("running", "RUNNING", None, None),
        ("done", "COMPLETED", 0, "done"),
        ("failed", "FAILED", 1, "failed"), ("failed", "FAILED", 75, "stopped"),
        ("failed", "NODE_FAIL", None, "stopped"), ("cancelled", "PREEMPTED", None, "stopped"),
        ("timeout", "TIMEOUT", 0, "stopped"), ("cancelled", "CANCELLED", 0, "failed"),
        ("unknown", "", None, None),
    ],
)  # fmt: skip
def test_what_was_done_to_a_job_is_not_its_trial_s_fault(
    tmp_path: Path, state: str, said: str, code: int | None, how: str | None
) -> None:
    record = JobRecord("7", "slurm", "n", str(tmp_path), 1, 1, 0.0)
    job = _Job(record, tmp_path / "log")
    ended = job.judge(JobState(state, said, exit_code=code))
    assert (ended.how if ended else None) == how
    if state == "unknown":
        job.known -= LOST_S + 1
        late = job.judge(JobState(state, said))
        assert late is not None
        assert late.how == "stopped"


class _Broken:
    """Places where every start fails, but the first."""

    count, left = 1, ""

    def __init__(self) -> None:
        self.started = 0

    def open(self, is_over: object) -> None:
        pass

    def close(self) -> None:
        pass

    def start(self, words: list[str], run: Path, log: Path, workdir: str) -> Any:
        self.started += 1
        if self.started == 1:
            made = RunDir.at(run)
            made.add_event("stopped", share=1.0, step=1)
            made.append(EvalRecord(1, 0, 0.0, 1, 1.0, {"loss": 1.0}))
        return SimpleNamespace(
            poll=lambda: Ended("failed", "No space left on device"), stop=lambda: True
        )


def test_a_fault_that_passes_does_not_use_up_all_trials(tmp_path: Path) -> None:
    request = make_request(["train.lr=0.1..1.0"], workdir=str(tmp_path), schedule="full")
    places, told = _Broken(), []
    found = Search(tmp_path, request, places, lambda trial, why: told.append(why))
    with pytest.raises(RunError, match=r"5 trials failed one after the other.*--retry-failed"):
        found.run()
    trials = Journal(tmp_path).trials
    assert [bool(t.failed) for t in trials] == [False, *[True] * 5]
    assert told == ["", *["No space left on device"] * 5]
    # Mended: those five are begun again, and the other ten.
    for trial in trials[1:]:
        made = RunDir.at(tmp_path / "trials" / trial.name)
        made.add_event("stopped", share=1.0, step=1)
        made.append(EvalRecord(1, 0, 0.0, 1, 1.0, {"loss": 2.0}))
    again = Search(tmp_path, request, _Broken(), lambda trial, why: None)
    with pytest.raises(RunError, match="5 trials failed"):
        again.run(retry_failed=True)
    assert [bool(t.failed) for t in Journal(tmp_path).trials[:7]] == [False] * 7


def test_a_failed_trial_is_told_by_its_own_sentence(tmp_path: Path) -> None:
    log = tmp_path / "000.log"
    log.write_text("ridgeline: an earlier stretch\nKeyError: 'x'\nbye\n")
    assert last_words(log, log.read_text().index("KeyError")) == "KeyError: 'x'"
    log.write_text("step 1\nridgeline: the loss is nan; lower train.lr\n  run directory: x\n")
    assert last_words(log) == "the loss is nan; lower train.lr"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digits", "--metric", "acuracy"], "did you mean 'accuracy'?"),
        (["text", "--metric", "accuracy"], "known: loss, perplexity, token_accuracy"),
        (["text", "train.eval_samples=0", "--metric", "perplexity"], "use --metric loss"),
    ],
)
def test_a_metric_that_no_trial_will_give_is_told_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [{"text": "llama-text"}.get(word, word) for word in words]
    found = CliRunner().invoke(app, ["search", *words, *OVER])
    assert isinstance(found.exception, UsageError)
    assert "--metric" in str(found.exception)
    assert said in str(found.exception)
    assert not any(tmp_path.iterdir())


def test_without_evaluations_the_last_losses_are_the_score(tmp_path: Path) -> None:
    lines = [
        {"kind": "step", "step": n, "epoch": 0, "time": 0.0, "loss": float(20 - n), "lr": 0.1,
         "num_samples": 1, "step_s": 1.0}
        for n in range(1, 21)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert judge(tmp_path, "loss") == (0.5, False)
    with pytest.raises(UsageError, match="--metric accuracy is of evaluations"):
        judge(tmp_path, "accuracy")
