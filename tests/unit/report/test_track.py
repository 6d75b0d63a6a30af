"""Runs to trackers of experiments: everything once, in order, into the same run there; with fakes, and with
the packages themselves where they are installed."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.errors import RunError, UsageError
from ridgeline.report import trackers
from ridgeline.report.track import Tracked
from ridgeline.report.trackers import Told
from ridgeline.rundir import EvalRecord, RunDir, StepRecord

CONFIG = "name: digits\ntrain:\n  lr: 0.1\n  batch: 32\n"


class Memory:
    """A service that keeps what it is told."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}

    def __call__(self, told: Told, id: str | None) -> Memory.Run:
        name = id or f"r{len(self.runs)}"
        kept = self.runs.setdefault(name, {"told": told, "rows": [], "ends": []})
        return Memory.Run(name, kept)

    class Run:
        where = "memory"

        def __init__(self, id: str, kept: dict[str, Any]) -> None:
            self.id, self._kept = id, kept

        def log(self, step: int, at: float, scalars: dict[str, float]) -> None:
            self._kept["rows"].append((step, at, dict(scalars)))

        def flush(self) -> None:
            pass

        def end(self, status: str) -> None:
            self._kept["ends"].append(status)


def step(number: int, at: float = 0.0) -> StepRecord:
    values = {"step": number, "time": at or 100.0 + number, "loss": 1.0 / number, "lr": 0.1}
    found = StepRecord.__dataclass_fields__
    rest = {
        name: 0.0
        for name, one in found.items()
        if name not in values and one.default is one.default_factory  # type: ignore[comparison-overlap]
    }
    return StepRecord(**{**rest, **values})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir.at(tmp_path / "run")
    made.write_text("config.yaml", CONFIG)
    for number in (1, 2, 3):
        made.append(step(number))
    return made


def steps_of(memory: Memory, name: str = "r0") -> list[int]:
    return [row[0] for row in memory.runs[name]["rows"]]


def test_a_run_is_sent_once_and_goes_on_where_it_was(run: RunDir) -> None:
    memory = Memory()
    first = Tracked(run, "wandb", "", memory)
    assert first.catch_up() == 3
    assert first.catch_up() == 0
    run.append(step(4))
    run.append(EvalRecord(4, 0, 104.0, 1, 1.0, {"accuracy": 0.5}))
    assert first.catch_up() == 2
    first.end()
    assert memory.runs["r0"]["ends"] == ["running"]
    run.append(step(5))
    run.add_event("end", step=5)
    later = Tracked(run, "wandb", "", memory)  # another process
    assert later.catch_up() == 1
    later.end()
    assert steps_of(memory) == [1, 2, 3, 4, 4, 5]
    assert list(memory.runs) == ["r0"]
    assert memory.runs["r0"]["ends"][-1] == run.status()
    rows = memory.runs["r0"]["rows"]
    assert rows[0][2]["train/loss"] == 1.0
    assert rows[0][1] == 101.0
    assert rows[4][2] == {"eval/accuracy": 0.5}
    told = memory.runs["r0"]["told"]
    assert (told.project, told.settings["train.lr"], told.config) == ("digits", "0.1", CONFIG)


def test_another_training_in_the_same_place_is_another_run_there(run: RunDir) -> None:
    memory = Memory()
    one = Tracked(run, "wandb", "mine", memory)
    one.catch_up()
    run.file("metrics.jsonl").unlink()
    run.append(step(1, at=500.0))
    assert one.catch_up() == 1
    assert steps_of(memory, "r1") == [1]
    run.file("metrics.jsonl").unlink()
    for number in range(1, 9):
        run.append(step(number, at=900.0 + number))
    assert Tracked(run, "wandb", "mine", memory).catch_up() == 8
    assert sorted(memory.runs) == ["r0", "r1", "r2"]
    assert memory.runs["r2"]["told"].project == "mine"
    assert Tracked(run, "wandb", "", memory).catch_up() == 0
    assert Tracked(run, "wandb", "other", memory).catch_up() == 8
    assert memory.runs["r3"]["told"].project == "other"


def test_trackers_are_told_apart(run: RunDir) -> None:
    memory = Memory()
    assert Tracked(run, "wandb", "", memory).catch_up() == 3
    assert Tracked(run, "mlflow", "", memory).catch_up() == 3


def test_what_is_interrupted_between_sending_and_noting_stays_one_run(run: RunDir) -> None:
    class Fails(Memory.Run):
        def flush(self) -> None:
            raise RunError("it does not answer")

    memory = Memory()
    failing = Tracked(
        run, "wandb", "", lambda told, id: Fails(memory(told, id).id, memory.runs["r0"])
    )
    with pytest.raises(RunError, match="does not answer"):
        failing.catch_up()
    assert Tracked(run, "wandb", "", memory).catch_up() == 3
    assert list(memory.runs) == ["r0"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "wandbb"], "did you mean 'wandb'"),
        (["nowhere", "--to", "wandb"], "no run directory at nowhere"),
    ],
)
def test_slips_are_one_sentence(
    words: list[str], said: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner().invoke(app, ["track", str(run.path), *words])
    assert isinstance(done.exception, UsageError)
    assert said in str(done.exception)


def test_a_package_that_is_missing_is_named(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(trackers.importlib, "import_module", missing)
    done = CliRunner().invoke(app, ["track", str(run.path), "--to", "mlflow"])
    assert "needs the package mlflow" in str(done.exception)
    assert "pip install 'ridgeline[track]'" in str(done.exception)


def test_the_command_follows_until_the_run_has_ended(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory()
    monkeypatch.setitem(trackers.TRACKERS, "wandb", memory)

    def meanwhile(seconds: float) -> None:
        run.append(step(4))
        run.add_event("end", step=4)

    monkeypatch.setattr("ridgeline.cli_track.time.sleep", meanwhile)
    done = CliRunner().invoke(app, ["track", str(run.path.parent), "--to", "wandb", "--follow"])
    assert done.exit_code == 0, done.output
    assert steps_of(memory) == [1, 2, 3, 4]
    assert memory.runs["r0"]["ends"] == ["finished"]
    assert "3 records, memory" in done.stdout


def test_what_comes_just_before_a_run_ends_is_sent(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends between two looks, right after the records were read."""
    memory = Memory()

    def make(told: Told, id: str | None) -> Memory.Run:
        made = memory(told, id)
        monkeypatch.setattr(made, "flush", ends, raising=False)
        return made

    def ends() -> None:
        if run.status() == "running":
            run.append(step(4))
            run.add_event("end", step=4)

    monkeypatch.setitem(trackers.TRACKERS, "wandb", make)
    monkeypatch.setattr("ridgeline.cli_track.time.sleep", lambda seconds: None)
    done = CliRunner().invoke(app, ["track", str(run.path), "--to", "wandb", "--follow"])
    assert done.exit_code == 0, done.output
    assert steps_of(memory) == [1, 2, 3, 4]


def test_an_interrupt_notes_what_was_sent(run: RunDir) -> None:
    class Interrupted(Memory.Run):
        def log(self, step: int, at: float, scalars: dict[str, float]) -> None:
            if step == 3:
                raise KeyboardInterrupt
            super().log(step, at, scalars)

    memory = Memory()

    def make(told: Told, id: str | None) -> Memory.Run:
        return Interrupted(memory(told, id).id, memory.runs["r0"])

    with pytest.raises(KeyboardInterrupt):
        Tracked(run, "wandb", "", make).catch_up()
    assert Tracked(run, "wandb", "", memory).catch_up() == 1
    assert steps_of(memory) == [1, 2, 3]


def test_mlflow_has_what_the_run_has(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{run.path.parent / 'there'}")
    for _ in range(2):
        done = CliRunner().invoke(app, ["track", str(run.path), "--to", "mlflow"])
        assert done.exit_code == 0, done.output + str(done.exception)
        run.append(step(len(run.steps()) + 1))
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(n, 1.0 / n) for n in (1, 2, 3, 4)]
    assert history[0].timestamp == 101_000
    assert found.data.params["train.lr"] == "0.1"


def records_in(log: bytes) -> Iterator[bytes]:
    """Of a log in LevelDB's format: blocks of 32 KiB, in which a record lies whole or in parts."""
    at, whole = 7, b""
    while at + 7 <= len(log):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", log[at : at + 7])
        whole += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_wandb_has_what_the_run_has(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    done = CliRunner().invoke(app, ["track", str(run.path), "--to", "wandb"])
    assert done.exit_code == 0, done.output + str(done.exception)
    (path,) = run.path.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for data in records_in(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {
                    one.key or "/".join(one.nested_key): json.loads(one.value_json)
                    for one in record.history.item
                }
            )
    assert [(row["step"], row["train/loss"]) for row in rows] == [(n, 1.0 / n) for n in (1, 2, 3)]
    assert rows[0]["_timestamp"] == 101.0
