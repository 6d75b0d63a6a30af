"""Runs that go on, from made-up directories: what is said of them, and that little is read for it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline import rundir
from ridgeline.errors import RunError, UsageError
from ridgeline.report import follow
from ridgeline.report import live as live_module
from ridgeline.report.live import LiveRun, Watched, find_runs, span_text, sparkline, tell_event
from ridgeline.report.terminal import as_text, figures
from ridgeline.rundir import EvalRecord, Event, GpuUse, ResourceRecord, RunDir, StepRecord

NOW = 1_700_000_000.0


def make_run(path: Path, start: float = NOW, num_steps: int = 400, **details: Any) -> RunDir:
    path.mkdir(parents=True)
    run = RunDir(path)
    run.write_text(rundir.CONFIG, "log:\n  every: 10\ntrain:\n  steps: 999\n")
    run.write_text(rundir.LAYOUT, "dp=2\n")
    run.write_json(
        rundir.FACTS,
        {"model": {"name": "gpt", "unit": "tokens", "units_per_sample": 8},
         "machine": {"device_name": "H200"}},
    )  # fmt: skip
    add_event(run, start, "start", layout="dp=2", num_ranks=2, num_steps=num_steps, **details)
    return run


def add_event(run: RunDir, when: float, event: str, **details: Any) -> None:
    run.append_line(rundir.EVENTS, dataclasses.asdict(Event(when, event, details)))


def make_step(
    step: int, loss: float | None = None, start: float = NOW, **values: Any
) -> StepRecord:
    parts = {"step_s": 0.5, "data_s": 0.1, "comm_s": 0.05, "mfu": 0.41, "memory_bytes": 2**30}
    loss = 4.0 / step if loss is None else loss
    return StepRecord(step, 1, start + 0.5 * step, loss, 1e-3, 16, **{**parts, **values})


def set_times(run: RunDir, when: float) -> None:
    """As if nothing had been written since."""
    for path in run.path.rglob("*"):
        os.utime(path, (when, when))


def live_of(run: RunDir) -> LiveRun:
    live = LiveRun(run)
    live.refresh()
    return live


def figure(live: LiveRun, name: str) -> str:
    return dict(figures(live)).get(name, "")


# What is said.


@pytest.fixture
def hundred(tmp_path: Path) -> RunDir:
    """Steps 1 to 100 of 400, half a second each, and an evaluation."""
    run = make_run(tmp_path / "hundred")
    for step in range(1, 101):
        run.append(make_step(step))
    run.append(EvalRecord(100, 1, NOW + 50, 64, 0.2, {"loss": 0.5, "accuracy": 0.75}))
    return run


def test_the_figures_are_those_of_the_records(hundred: RunDir) -> None:
    live = live_of(hundred)
    assert (live.step, live.num_steps, live.num_ranks) == (100, 400, 2)
    assert live.eta_s == pytest.approx(150.0)
    assert live.rate == pytest.approx(16 * 8 / 0.5)
    assert figure(live, "loss") == "0.04"
    assert figure(live, "throughput") == "256 tokens/s"
    assert figure(live, "MFU") == "41 %"
    assert figure(live, "waiting for data") == "20.0 % of a step"
    assert figure(live, "exposed communication") == "10.0 % of a step"
    assert figure(live, "last evaluation") == "loss 0.5  accuracy 0.75  (step 100)"
    assert figure(live, "peak memory of rank 0") == "1 GiB"


def test_the_text_has_it_all(hundred: RunDir) -> None:
    gpu = GpuUse(0, 93.0, 60 * 2**30, 140 * 2**30, 655.0, 61.0, 1755.0)
    hundred.append_resources(
        ResourceRecord(NOW + 50, "nid7", 64, 25.0, 2**36, 2**38, 2**33, 5e6, 1e6, 2e6, 3e6,
                       4e9, 5e9, (gpu, dataclasses.replace(gpu, index=1, watts=None)))
    )  # fmt: skip
    add_event(hundred, NOW + 30, "straggler", rank=1, part="data", excess=0.25, step=60)
    add_event(hundred, NOW + 40, "restart", rank=1, cause="killed by SIGKILL\nand more")
    set_times(hundred, NOW + 50)
    text = as_text([live_of(hundred)], NOW + 52)
    for words in (
        "hundred  running", "gpt  2 x H200  dp=2", "step 100 of 400 (25%)", "epoch 1", "ETA 2 min 30 s",
        "█▃▂▁", "1 restart, 1 straggler", "nid7", "██░░░░ 25 % of 64", "64 of 256 GiB",
        "5.0M / 1.0M", "4.0G / 5.0G", "gpu 0", "█████░ 93 %", "655 W",
        "61 °C", "1755 MHz", "rank 1 (data) holds the others up by 25 % of a step at step 60",
        "started again: rank 1: killed by SIGKILL",
    ):  # fmt: skip
        assert words in text, words
    assert "\x1b" not in text
    assert "and more" not in text


def test_nodes_that_a_run_has_left_are_not_shown(hundred: RunDir) -> None:
    for host in ("old", "kept"):
        hundred.append_resources(ResourceRecord(NOW + 50, host, 8))
    live = live_of(hundred)
    assert set(live.nodes) == {"old", "kept"}
    add_event(hundred, NOW + 60, "start", layout="dp=1", num_ranks=1, num_steps=400)
    live.refresh()
    assert set(live.nodes) == {"old", "kept"}  # nobody has said anything since
    hundred.append_resources(ResourceRecord(NOW + 70, "kept", 8))
    live.refresh()
    assert set(live.nodes) == {"kept"}


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    run = RunDir(tmp_path / "bare")
    run.write_text(rundir.CONFIG, "")
    text = as_text([live_of(run)], time.time())
    assert "bare  waiting" in text
    assert "has not started yet" in text
    assert "MFU" not in text


def test_a_run_that_has_gone_quiet_is_not_called_running(hundred: RunDir) -> None:
    set_times(hundred, NOW + 50)
    live = live_of(hundred)
    assert live.state(NOW + 60).word == "running"
    quiet = live.state(NOW + 50 + 200)
    assert (quiet.word, quiet.has_ended) == ("silent", False)
    assert "silent for 3 min 20 s" in quiet.sentence
    assert "ETA 2 min 30 s" in as_text([live], NOW + 60)
    assert "ETA" not in as_text([live], NOW + 250)


def test_a_run_that_lives_but_does_not_step_says_so(hundred: RunDir) -> None:
    for number in range(100):
        hundred.append_resources(ResourceRecord(NOW + 50 + 5 * number, "n", 8))
    set_times(hundred, NOW + 545)
    state = live_of(hundred).state(NOW + 550)
    assert state.word == "running"
    assert "no step has been recorded for 8 min 20 s" in state.sentence


def test_a_file_that_is_newer_than_its_records_counts(hundred: RunDir) -> None:
    """The clock of the node may be behind."""
    set_times(hundred, NOW + 3600)
    assert live_of(hundred).state(NOW + 3605).word == "running"


@pytest.mark.parametrize(
    ("event", "details", "word", "sentence"),
    [
        ("end", {"steps": 400, "reached_target": True}, "finished",
         "finished after 400 steps, target reached"),
        ("failed", {"message": "rank 1: out of memory\nrun directory"}, "failed",
         "failed: rank 1: out of memory"),
        ("stopped", {"signal": "SIGTERM", "step": 100}, "stopped",
         "stopped at step 100 (SIGTERM); it can go on"),
        ("interrupted", {}, "interrupted", "interrupted"),
    ],
)  # fmt: skip
def test_how_it_ended(
    hundred: RunDir, event: str, details: dict[str, Any], word: str, sentence: str
) -> None:
    live = live_of(hundred)
    add_event(hundred, NOW + 60, event, **details)
    live.refresh()
    state = live.state(NOW + 1e6)
    assert (state.word, state.sentence, state.has_ended) == (word, sentence, True)
    assert "ETA" not in as_text([live], NOW + 61)
    add_event(hundred, NOW + 70, "start", num_ranks=2, num_steps=500)  # and it goes on
    live.refresh()
    assert not live.state(NOW + 71).has_ended
    assert live.num_steps == 500


def test_every_event_that_a_run_writes_has_words() -> None:
    """Those that are added anywhere in the package, as literals."""
    package = Path(rundir.__file__).parent
    text = "".join(path.read_text() for path in package.rglob("*.py"))
    written = set(re.findall(r'(?:add_event|\.event|_add_event)\(\s*(?:run, )?"([\w-]+)"', text))
    assert {"start", "end", "failed", "checkpoint", "straggler", "resume"} <= written
    plain = {name for name in written if tell_event(Event(0.0, name)) == name}
    assert plain <= {"interrupted", "gathered"}


# Going back, starting over.


def test_steps_that_are_done_again_replace_those_before(hundred: RunDir) -> None:
    live = live_of(hundred)
    for step in range(81, 91):
        hundred.append(make_step(step, loss=7.0))
    live.refresh()
    assert [s.step for s in live.steps] == list(range(1, 91))
    assert live.steps[-1].loss == 7.0
    assert live.evals == []


def test_a_run_that_starts_over_is_another(hundred: RunDir) -> None:
    hundred.append_resources(ResourceRecord(NOW, "n", 8, cpu_percent=1.0))
    live = live_of(hundred)
    add_event(hundred, NOW + 60, "failed", message="x")
    live.refresh()
    config = hundred.file(rundir.CONFIG).read_text()
    hundred.start_over()
    live.refresh()
    assert (live.steps, live.events, live.nodes) == ([], [], {})
    hundred.write_text(rundir.CONFIG, config)
    add_event(hundred, NOW + 100, "start", num_ranks=1, num_steps=10)
    hundred.append(make_step(1))
    hundred.append_resources(ResourceRecord(NOW + 100, "n", 8, cpu_percent=2.0))
    live.refresh()
    assert (live.step, live.num_steps, live.status) == (1, 10, "running")
    assert live.num_events == {"start": 1}
    assert [r.cpu_percent for r in live.nodes["n"]] == [2.0]


@pytest.mark.parametrize("how", ["replaced", "shrunk"])
def test_a_file_that_was_replaced_or_cut_is_read_from_its_beginning(
    hundred: RunDir, how: str
) -> None:
    live = live_of(hundred)
    path = hundred.file(rundir.METRICS)
    line = json.dumps({"kind": "step", **dataclasses.asdict(make_step(3))}) + "\n"
    if how == "replaced":  # by one that is longer
        hundred.write_text(rundir.METRICS, line + " " * 10**6 + "\n")
    else:
        path.write_text(line)
    live.refresh()
    assert [s.step for s in live.steps] == [3]


def test_a_line_counts_when_its_end_is_there(hundred: RunDir) -> None:
    live = live_of(hundred)
    line = json.dumps({"kind": "step", **dataclasses.asdict(make_step(101))})
    with hundred.file(rundir.METRICS).open("a") as file:
        file.write(line[:50])
        file.flush()
        live.refresh()
        assert live.step == 100
        file.write(line[50:] + "\n")
        file.flush()
        live.refresh()
        assert live.step == 101


# How much is read.


def bytes_read(work: Callable[[], object]) -> int:
    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = count()
    work()
    return count() - before


def test_a_look_reads_what_is_new_and_nothing_else(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", num_steps=10**6)
    line = json.dumps({"kind": "step", **dataclasses.asdict(make_step(1))})
    with run.file(rundir.METRICS).open("w") as file:
        for step in range(1, 10_001):
            file.write(line.replace('"step": 1,', f'"step": {step},') + "\n")
    size = run.file(rundir.METRICS).stat().st_size
    assert size > 2_000_000
    live = LiveRun(run)
    assert bytes_read(live.refresh) >= size
    assert bytes_read(live.refresh) < 2000
    run.append(make_step(10_001))
    assert bytes_read(live.refresh) < 20_000
    assert live.step == 10_001
    assert len(live.steps) <= 4001


def test_of_very_many_lines_some_are_left_out_but_no_evaluation_and_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "MUCH", 50_000)
    monkeypatch.setattr(follow, "_TAIL", 5_000)
    run = make_run(tmp_path / "run")
    for step in range(1, 1001):
        run.append(make_step(step))
        if step % 100 == 0:
            run.append(EvalRecord(step, 1, NOW, 64, 0.2, {"accuracy": step / 1000}))
    live = live_of(run)
    steps = [s.step for s in live.steps]
    assert [e.step for e in live.evals] == list(range(100, 1001, 100))
    assert steps[0] == 1
    assert steps[-10:] == list(range(991, 1001))
    assert len(steps) < 500


def test_of_what_nodes_recorded_for_long_the_end_is_read(
    hundred: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "TAIL", 2**16)
    for number in range(1000):
        hundred.append_resources(ResourceRecord(NOW + 5 * number, "n", 8, float(number % 100)))
    size = hundred.resource_files()[0].stat().st_size
    live = LiveRun(hundred)
    assert bytes_read(live.refresh) < size / 2
    times = [(r.time - NOW) / 5 for r in live.nodes["n"]]
    assert times == list(range(1000 - len(times), 1000))
    assert len(times) > 100
    hundred.append_resources(ResourceRecord(NOW + 5000, "n", 8))
    live.refresh()
    assert len(live.nodes["n"]) == len(times) + 1


# Which runs.


def test_runs_are_found_in_folders_and_arrays_but_not_what_was_put_aside(tmp_path: Path) -> None:
    for name in ("a", "b", "array/1", "array/2", "a/before-2026", "search/trials/000"):
        make_run_at = tmp_path / name
        make_run_at.mkdir(parents=True, exist_ok=True)
        (make_run_at / rundir.CONFIG).write_text("")
    (tmp_path / "none").mkdir()
    names = {str(path.relative_to(tmp_path)) for path in find_runs([tmp_path])}
    assert names == {"a", "b", "array/1", "array/2", "search/trials/000"}
    assert find_runs([tmp_path / "a", tmp_path / "a"]) == [tmp_path / "a"]


def test_places_without_runs_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run directories in"):
        Watched([tmp_path])
    with pytest.raises(UsageError, match=r"no run directory at .*nowhere"):
        Watched([tmp_path / "nowhere"])


def test_several_runs_are_a_table_with_the_newest_first_and_new_ones_come(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "new", "mid")):
        run = make_run(tmp_path / name)
        when = NOW + (0, 100, 50)[number]
        run.append(dataclasses.replace(make_step(7), time=when))
        set_times(run, when)
    watched = Watched([tmp_path])
    assert [live.name for live in watched.refresh()] == ["new", "mid", "old"]
    late = make_run(tmp_path / "late", start=NOW + 200)
    set_times(late, NOW + 200)
    runs = watched.refresh()
    assert [live.name for live in runs] == ["late", "new", "mid", "old"]
    lines = as_text(runs, NOW + 210).splitlines()
    assert lines[0].split()[:3] == ["run", "status", "step"]
    assert [line.split()[0] for line in lines[1:5]] == ["late", "new", "mid", "old"]
    assert "7 of 400" in lines[2]
    assert "4 runs: 2 running, 2 silent" in lines[-1]


def test_runs_that_are_removed_are_no_longer_shown(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / name)
    watched = Watched([tmp_path / "a", tmp_path / "b"])
    assert len(watched.refresh()) == 2
    shutil.rmtree(tmp_path / "a")
    assert [live.name for live in watched.refresh()] == ["b"]
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(RunError, match="nothing is left to watch"):
        watched.refresh()


# Small things.


def test_spans_of_time() -> None:
    shown = [span_text(s) for s in (-3, 42, 185, 7620, 273600)]
    assert shown == ["0 s", "42 s", "3 min 05 s", "2 h 07 min", "3 d 04 h"]


def test_sparklines() -> None:
    assert sparkline([1.0]) == ""
    assert sparkline([0.0, 1.0, float("nan"), 2.0, 3.0]) == "▁▃▆█"
    assert sparkline([5.0] * 100, 4) == "▁▁▁▁"
    assert len(sparkline([float(i) for i in range(1000)], 24)) == 24
