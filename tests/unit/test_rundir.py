"""The run directory: what was written comes back, whatever happened to the writer."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline import rundir
from ridgeline.errors import UsageError
from ridgeline.rundir import (
    CONFIG,
    EVENTS,
    LOGS,
    METRICS,
    EvalRecord,
    Event,
    RankRecord,
    RunDir,
    StepRecord,
    newest_ranks,
    newest_stretch,
)

STEP = StepRecord(3, 0, 12.5, 0.25, 1e-3, 64, 0.5, 0.1, 0.0, 0.1, 0.2, 0.05, 0.05, 1.5, 0.3, 2**40)
EVAL = EvalRecord(3, 0, 13.0, 100, 0.25, {"loss": 0.5, "accuracy": 0.9})
RANK = RankRecord(1, "node1", "cuda:1", 10, 0.1, 0.2, {"data_s": 0.01}, 1024)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "test")


def add_line(run: RunDir, text: str, name: str = METRICS) -> None:
    with run.file(name).open("a") as file:
        file.write(text)


def step_line(**changes: object) -> dict[str, object]:
    line: dict[str, object] = {"kind": "step", "step": 4, "epoch": 0, "time": 1.0, "loss": 2.0}
    return {**line, "lr": 0.1, "num_samples": 8, "step_s": 0.5, **changes}


def test_records_come_back_as_they_were_and_in_order(run: RunDir) -> None:
    later = replace(STEP, step=STEP.step + 1)
    records = [STEP, EVAL, RANK, later]
    for record in records:
        run.append(record)
    assert list(run.records()) == records
    assert run.steps() == [STEP, later]
    assert run.evals() == [EVAL]
    assert run.ranks() == [RANK]


def test_of_a_step_that_was_done_again_the_later_record_counts(run: RunDir) -> None:
    """And what came after it before is of a run that did not go on."""
    again = replace(STEP, loss=0.125)
    later = replace(STEP, step=STEP.step + 1)
    for record in (STEP, later, again):
        run.append(record)
    assert run.steps() == [again]
    assert len(list(run.records())) == 3


def test_a_run_that_starts_over_has_no_steps_of_the_one_before(run: RunDir) -> None:
    for step in (10, 20, 30):
        run.append(replace(STEP, step=step))
        run.append(replace(EVAL, step=step))
    for step in (5, 15):
        run.append(replace(STEP, step=step, loss=0.5))
    run.append(replace(EVAL, step=15))
    assert [(r.step, r.loss) for r in run.steps()] == [(5, 0.5), (15, 0.5)]
    assert [r.step for r in run.evals()] == [15]


def full_after(room: int) -> Callable[[int, bytes], int]:
    """The `write` of a disk with so many bytes left."""
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        taken = real(descriptor, data[:room])
        room -= taken
        return taken

    return write


def test_a_full_disk_loses_no_line(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", full_after(10))
    run.append(STEP)
    run.append(EVAL)
    assert run.num_unwritten() > 0
    monkeypatch.undo()
    run.append(RANK)
    assert list(run.records()) == [STEP, EVAL, RANK]
    assert run.num_unwritten() == 0


def test_what_waits_for_room_needs_no_further_line(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_after(10))
        run.append(STEP)
        run.append_line("other.jsonl", {"a": 1})
        assert run.write_waiting() == run.num_unwritten() > 0
    assert run.write_waiting() == run.num_unwritten() == 0
    assert list(run.records()) == [STEP]
    assert json.loads(run.file("other.jsonl").read_text()) == {"a": 1}


@pytest.mark.parametrize("missing", [1, 2, 20])
def test_a_line_that_was_cut_spoils_no_other(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """Neither the next of a process that came after one that was killed, nor another process's in
    between; and none is there twice."""
    run.append(STEP)
    length = run.file(METRICS).stat().st_size
    run.file(METRICS).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_after(length - missing))
        run.append(STEP)
    with monkeypatch.context() as patch:
        patch.setattr(rundir, "_UNWRITTEN", {})  # another process
        patch.setattr(rundir, "_PARTS", {})
        run.append(EVAL)
    run.append(RANK)
    assert sorted(map(str, run.records())) == sorted(map(str, [STEP, EVAL, RANK]))


def test_a_disk_that_refuses_only_when_a_file_is_closed_loses_no_line(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.close

    def close(descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        real(descriptor)
        raise OSError(122, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        run.append(STEP)
    run.append(EVAL)
    assert list(run.records()) == [STEP, EVAL]


def test_a_run_without_records_has_none(run: RunDir) -> None:
    assert list(run.records()) == run.events() == []


def test_the_newest_record_of_a_rank_counts(run: RunDir) -> None:
    for rank, steps in [(1, 10), (0, 10), (1, 20)]:
        run.append(RankRecord(rank, "h", "cpu", steps, 0.1, 0.1))
    assert [(r.rank, r.num_steps) for r in run.ranks()] == [(0, 10), (1, 20)]


def test_ranks_are_those_of_the_last_time(run: RunDir) -> None:
    """A run that went on with fewer of them has no rank 2 any more."""
    for rank in range(3):
        run.append(RankRecord(rank, "h", "cpu", 10, 0.1, 0.1))
    run.append(STEP)
    for rank in range(2):
        run.append(RankRecord(rank, "h", "cpu", 20, 0.1, 0.1))
    assert [(r.rank, r.num_steps) for r in run.ranks()] == [(0, 20), (1, 20)]


def test_a_stretch_begins_where_ranks_or_layout_changed(run: RunDir) -> None:
    starts = [(1.0, "dp=4", 4), (3.0, "dp=2", 2), (5.0, "dp=2", 2)]
    events = [
        Event(at, "start", {"layout": layout, "num_ranks": ranks}) for at, layout, ranks in starts
    ]
    steps = [replace(STEP, step=n, time=n + 0.5) for n in range(1, 8)]
    assert [s.step for s in newest_stretch(steps, events)] == [3, 4, 5, 6, 7]
    assert newest_stretch(steps, events[1:]) == newest_stretch(steps, []) == steps
    assert newest_stretch(steps[:2], events) == steps[:2]  # none since
    ranks = [replace(RANK, rank=rank) for rank in range(4)]
    assert newest_ranks(ranks, events) == []
    assert newest_ranks(ranks, events[:1]) == newest_ranks(ranks, []) == ranks


def test_losses_that_are_no_numbers_survive(run: RunDir) -> None:
    for step, loss in enumerate((math.nan, math.inf, -math.inf)):
        run.append(StepRecord(step, 0, 0.0, loss, 0.1, 8, 0.5))
    nan, inf, minus = (record.loss for record in run.steps())
    assert math.isnan(nan)
    assert (inf, minus) == (math.inf, -math.inf)


def test_a_last_line_cut_off_at_any_byte_loses_only_itself(run: RunDir) -> None:
    run.append(STEP)
    whole = run.file(METRICS).read_bytes()
    for cut in range(len(whole) - 1):
        run.file(METRICS).write_bytes(whole + whole[:cut])
        assert run.steps() == [STEP], cut


def test_fields_and_kinds_of_a_newer_version_are_passed_over(run: RunDir) -> None:
    add_line(run, json.dumps(step_line(energy_j=5.0)) + "\n")
    add_line(run, json.dumps({"kind": "energy", "joules": 5.0}) + "\n")
    add_line(run, json.dumps({"time": 1.0, "event": "end", "host": "n"}) + "\n", EVENTS)
    assert list(run.records()) == [StepRecord(4, 0, 1.0, 2.0, 0.1, 8, 0.5)]
    assert run.events() == [Event(1.0, "end", {})]


@pytest.mark.parametrize(
    "line",
    [
        {k: v for k, v in step_line().items() if k != "loss"},
        {"kind": "eval", "step": 1},
        {"kind": "rank"},
        {"kind": ["step"]},
        {"kind": None},
        {},
        [],
        3,
        None,
    ],
)
def test_a_line_that_lacks_what_a_record_needs_is_passed_over(run: RunDir, line: object) -> None:
    run.append(STEP)
    add_line(run, json.dumps(line) + "\n")
    run.append(EVAL)
    assert list(run.records()) == [STEP, EVAL]


def test_events_that_lack_a_field_or_are_garbage_are_passed_over(run: RunDir) -> None:
    run.add_event("start", layout="dp=2")
    add_line(run, '{"event": "failed"}\n{"time": 1}\n\x00\xff\n\n', EVENTS)
    run.add_event("end", steps=3)
    assert [(e.event, e.details) for e in run.events()] == [
        ("start", {"layout": "dp=2"}),
        ("end", {"steps": 3}),
    ]


def test_lines_of_several_processes_stay_whole(run: RunDir) -> None:
    program = (
        "import sys; from pathlib import Path; from ridgeline.rundir import *\n"
        "run, rank = RunDir(Path(sys.argv[1])), int(sys.argv[2])\n"
        "metrics = {f'{rank}-{i}': float(i) for i in range(1000)}\n"
        "for step in range(60): run.append(EvalRecord(step, rank, 0.0, 1, 0.0, metrics))\n"
    )
    command = [sys.executable, "-c", program, str(run.path)]
    writers = [subprocess.Popen([*command, str(rank)]) for rank in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    lines = run.file(METRICS).read_text().splitlines()
    assert len(lines) == 180
    seen: list[list[int]] = [[], [], []]
    for record in run.records():
        assert isinstance(record, EvalRecord)
        assert set(record.metrics) == {f"{record.epoch}-{i}" for i in range(1000)}
        seen[record.epoch].append(record.step)
    assert seen == [list(range(60))] * 3


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], "running"),
        (["start"], "running"),
        (["start", "end"], "finished"),
        (["start", "failed"], "failed"),
        (["start", "interrupted"], "interrupted"),
        (["start", "failed", "start", "end", "note"], "finished"),
    ],
)
def test_status_is_the_last_closing_event(run: RunDir, events: list[str], status: str) -> None:
    for event in events:
        run.add_event(event)
    assert run.status() == status


def test_runs_of_the_same_second_get_directories_of_their_own(tmp_path: Path) -> None:
    root = tmp_path / "not" / "there" / "yet"
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: RunDir.create(root, "same"), range(40)))
    assert len({run.path for run in runs}) == 40
    assert all(run.path.parent == root for run in runs)
    assert all(run.path.name.startswith("same-") for run in runs)
    assert all((run.path / LOGS).is_dir() for run in runs)


def test_only_what_holds_a_configuration_opens(run: RunDir) -> None:
    with pytest.raises(UsageError, match=f"{run.path} is not a run directory.*{CONFIG}"):
        RunDir.open(run.path)
    run.write_text(CONFIG, "name: x\n")
    assert RunDir.open(run.path) == run
    for wrong in (run.path / "gone", run.file(CONFIG)):
        with pytest.raises(UsageError, match=f"no run directory at {wrong}"):
            RunDir.open(wrong)


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/ridgeline")):
        with pytest.raises(UsageError, match=rf"under {root} \(.+\).*--out DIR"):
            RunDir.create(root, "x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_root_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match=r"Permission denied.*--out DIR"):
        RunDir.create(tmp_path, "x")


def test_a_failed_write_leaves_the_old_file(run: RunDir) -> None:
    run.write_json("facts.json", {"a": 1})
    with pytest.raises(TypeError):
        run.write_json("facts.json", {"a": object()})
    with pytest.raises(UnicodeEncodeError):
        run.write_text("facts.json", "{" * 100_000 + "\ud800")
    assert run.read_json("facts.json") == {"a": 1}
    assert run.read_json("other.json") is None
