"""Runs in this process that are cut off, go on, and meet bad batches."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ridgeline import rundir
from ridgeline.checkpoint.manifest import MANIFEST, list_checkpoints, read_manifest
from ridgeline.config import dump_config, load_config
from ridgeline.errors import RunError, UsageError, WouldRepeat
from ridgeline.launch.env import read_rank_env
from ridgeline.launch.lock import locked
from ridgeline.rundir import CHECKPOINTS, RunDir
from ridgeline.train import checkpoints as checkpoints_module
from ridgeline.train import run as run_module
from ridgeline.train.run import Summary, run_training

BASE = (
    "model.name=mlp",
    "model.args={in_features: 16, hidden: 24, depth: 1, out_features: 3}",
    "data.source=synthetic",
    "data.args={task: classify, shape: [4, 4], classes: 3, samples: 64, distinct: 64,"
    " eval_samples: 24}",
    "train.batch=8",
    "train.steps=20",
    "optim.name=adamw",
    "train.lr=0.01",
    "log.tensorboard=no",
    "log.samples=true",
    "checkpoint.every=3",
    "checkpoint.keep=3",
    "checkpoint.background=false",  # steps of microseconds are over before a disk has turned
    "device=cpu",
    "threads=1",
)

POISON = """
import torch
from torch import nn

LIMIT = {limit}

class Net(nn.Module):
    '''Gives no number for one sample of the data.'''
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x):
        x = x.flatten(1)
        bad = (x[:, 0] >= LIMIT).any() and self.training
        return self.layer(self.norm(x * float('nan') if bad else x))
"""


def run_in(path: Path, *overrides: str) -> tuple[Summary, RunDir]:
    run = RunDir.at(path)
    config = load_config(None, [*BASE, *overrides]).config
    run.write_text(rundir.CONFIG, dump_config(config))
    return run_training(config, read_rank_env({}), run), run


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    return load_file(run.file(rundir.WEIGHTS))


def same(a: RunDir, b: RunDir) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def events(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [e.details for e in run.events() if e.event == name]


def sample_lines(run: RunDir) -> list[dict[str, Any]]:
    """Of the log of samples, without lines that were cut."""
    lines = []
    for text in run.file("samples/rank-0.jsonl").read_text().splitlines():
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


class Died(Exception):
    pass


def die_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The process is gone before the step is recorded; nothing is put in order."""
    from ridgeline.train.record import Recorder

    real = Recorder.add

    def add(self: Recorder, result: Any) -> Any:
        if result.step == step:
            raise Died
        return real(self, result)

    monkeypatch.setattr(Recorder, "add", add)


def test_a_run_that_died_goes_on_as_if_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = run_in(tmp_path / "whole")
    with monkeypatch.context() as patch:
        die_at(patch, 14)
        with pytest.raises(Died):
            run_in(tmp_path / "cut")
    summary, cut = run_in(tmp_path / "cut")
    assert summary.num_steps == 20
    assert same(whole, cut)
    assert [r.loss for r in cut.steps()] == [r.loss for r in whole.steps()]
    assert events(cut, "resume") == [{"step": 12, "checkpoint": "step-00000012", "passed_over": []}]
    # Every sample once an epoch: eight steps of eight samples are the 64 there are.
    newest = {line["step"]: line for line in sample_lines(cut)}
    for epoch in (0, 1):
        used = [i for line in newest.values() if line["epoch"] == epoch for i in line["samples"]]
        assert sorted(used) == list(range(64))


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    _, long = run_in(tmp_path / "long")
    run_in(tmp_path / "short", "train.steps=11")
    _, short = run_in(tmp_path / "short")
    assert same(long, short)


@pytest.mark.parametrize("harm", ["truncate", "flip", "flip-manifest", "missing", "no-manifest"])
def test_a_damaged_newest_falls_back_and_says_so(tmp_path: Path, harm: str) -> None:
    _, whole = run_in(tmp_path / "whole")
    _, run = run_in(tmp_path / "run", "train.steps=12")
    newest = list_checkpoints(run.file(CHECKPOINTS))[-1]
    assert newest.name == "step-00000012"
    file = newest / ("manifest.json" if "manifest" in harm else "rank-00000.safetensors")
    data = bytearray(file.read_bytes())
    if harm == "truncate":
        file.write_bytes(data[:-7])
    elif harm.startswith("flip"):
        data[len(data) * 2 // 3] ^= 4
        file.write_bytes(data)
    else:
        file.unlink()
    _, run = run_in(tmp_path / "run")
    (resumed,) = events(run, "resume")
    assert resumed["step"] == 9
    assert len(resumed["passed_over"]) == 1
    assert resumed["passed_over"][0].startswith("checkpoint step-00000012 is not whole: ")
    assert same(whole, run)
    assert read_manifest(list_checkpoints(run.file(CHECKPOINTS))[-1]).step == 20


def test_no_checkpoint_that_is_whole_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    _, run = run_in(tmp_path / "run", "train.steps=3")
    for path in list_checkpoints(run.file(CHECKPOINTS)):
        (path / MANIFEST).unlink()
    with pytest.raises(RunError, match=r"is whole: .*--fresh"):
        run_in(tmp_path / "run")


def test_a_save_that_was_cut_off_is_never_seen(tmp_path: Path) -> None:
    _, run = run_in(tmp_path / "run", "train.steps=6")
    unfinished = run.file(CHECKPOINTS) / ".step-00000009-1.part"
    unfinished.mkdir()
    (unfinished / "rank-00000.safetensors").write_bytes(b"half")
    run_in(tmp_path / "run")
    assert events(run, "resume")[-1]["step"] == 6
    assert not unfinished.exists()


def test_two_at_once_are_refused_and_a_dead_one_s_lock_is_nobody_s(tmp_path: Path) -> None:
    with locked(tmp_path):
        other = subprocess.run(
            [sys.executable, "-c", "import sys; from pathlib import Path\n"
             "from ridgeline.launch.lock import locked\n"
             "with locked(Path(sys.argv[1])): pass", str(tmp_path)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert other.returncode == 1
        assert f"is being trained in by process {os.getpid()} on " in other.stderr
    dead = {"host": socket.gethostname(), "pid": 2**22 - 1, "started": 1.0}
    (tmp_path / ".lock").write_text(json.dumps(dead))
    with locked(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists()
    (tmp_path / ".lock").write_text(json.dumps({**dead, "host": "elsewhere"}))
    os.utime(tmp_path / ".lock", (1.0, 1.0))
    with locked(tmp_path):
        pass


def test_a_lock_of_another_host_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of another host only the time it was touched last is known: a job that follows one that was killed
    there waits instead of failing, and one beside a job that lives is refused."""
    path = tmp_path / ".lock"
    theirs = json.dumps({"host": "elsewhere", "pid": 1, "started": 1.0})
    waits: list[float] = []
    meanwhile: list[Any] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if meanwhile:
            meanwhile.pop()()

    clock = SimpleNamespace(time=time.time, monotonic=lambda: 1000.0 + sum(waits), sleep=sleep)
    monkeypatch.setattr("ridgeline.launch.lock.time", clock)
    path.write_text(theirs)
    with locked(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert 110 < sum(waits) < 122
    assert "was trained in on elsewhere a moment ago" in capsys.readouterr().err
    path.write_text(theirs)
    meanwhile.append(lambda: os.utime(path, (time.time() + 5, time.time() + 5)))
    with pytest.raises(UsageError, match="on elsewhere"), locked(tmp_path):
        pass
    path.write_text(theirs)
    waits.clear()
    meanwhile.append(path.unlink)
    with locked(tmp_path):
        assert len(waits) == 1
    # A file server whose clock is ahead makes nobody wait for longer.
    path.write_text(theirs)
    os.utime(path, (time.time() + 3600, time.time() + 3600))
    waits.clear()
    with locked(tmp_path):
        assert sum(waits) < 122


def test_what_is_kept(tmp_path: Path) -> None:
    """The newest, the multiples, and the first checkpoint with the best evaluation in it."""
    keep = ("checkpoint.keep=2", "checkpoint.keep_every=9", "checkpoint.keep_best=loss")
    _, run = run_in(tmp_path / "run", *keep, "train.eval_every=6", "train.lr=0.5")
    found = {path.name for path in list_checkpoints(run.file(CHECKPOINTS))}
    best = min(run.evals(), key=lambda record: record.metrics["loss"])
    assert best.step < 18  # with this rate it only gets worse
    assert found == {"step-00000018", "step-00000020", "step-00000009", f"step-{best.step:08d}"}


def poison_weights(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    from ridgeline.train.record import Recorder

    real = Recorder.add

    def add(self: Recorder, result: Any) -> Any:
        if result.step == at:
            with torch.no_grad():
                next(self._training.model.parameters())[0, 0] = float("nan")
        return real(self, result)

    monkeypatch.setattr(Recorder, "add", add)


def test_weights_that_are_no_numbers_are_never_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the step was fine; the next one's is not."""
    _, whole = run_in(tmp_path / "whole")
    with monkeypatch.context() as patch:
        poison_weights(patch, 9)
        with pytest.raises(WouldRepeat, match="loss is nan at step 10"):
            run_in(tmp_path / "run")
    run = RunDir(tmp_path / "run")
    (failed,) = events(run, "checkpoint-failed")
    assert failed["step"] == 9
    assert failed["problem"].endswith("is not a number everywhere")
    _, run = run_in(tmp_path / "run")
    assert events(run, "resume")[-1]["step"] == 6
    assert same(whole, run)


def test_what_a_spike_is_does_not_change_with_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spiky = ("guard.on_bad=skip", "guard.spike=1.02", "guard.most=100", "train.lr=0.3")
    _, whole = run_in(tmp_path / "whole", *spiky)
    assert any(entry["step"] > 12 for entry in events(whole, "bad-batch"))
    with monkeypatch.context() as patch:
        die_at(patch, 14)
        with pytest.raises(Died):
            run_in(tmp_path / "cut", *spiky)
    _, cut = run_in(tmp_path / "cut", *spiky)
    assert same(whole, cut)


def test_a_file_system_that_fails_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on from an older one, and the newer stay for when they can be read again."""
    from ridgeline.checkpoint import load as load_module

    _, run = run_in(tmp_path / "run", "train.steps=12")
    real = load_module._problems

    def problems(path: Path, *args: Any) -> list[str]:
        if path.name == "step-00000012":
            return ["rank-00000.safetensors cannot be read (Input/output error)"]
        return real(path, *args)

    monkeypatch.setattr(load_module, "_problems", problems)
    run_in(tmp_path / "run", "checkpoint.keep=9")
    assert events(run, "resume")[-1]["step"] == 9
    names = {path.name for path in run.file(CHECKPOINTS).iterdir()}
    assert not any("damaged" in name for name in names)


def test_a_larger_batch_ends_a_short_epoch(tmp_path: Path) -> None:
    """Of 60 samples 48 were used; with batches of 48 what is left is no batch and is dropped."""
    short = ("data.args.samples=60", "data.args.distinct=60", "data.drop_last=true")
    run_in(tmp_path / "run", *short, "train.steps=6")
    summary, _ = run_in(tmp_path / "run", *short, "train.batch=48", "train.steps=8")
    assert summary.num_steps == 8


def test_the_weights_wait_for_the_copy(tmp_path: Path) -> None:
    """A save in the background whose copy is slow: the update comes after it, not into it."""

    from ridgeline.checkpoint.held import Held, whole
    from ridgeline.checkpoint.manifest import Manifest
    from ridgeline.checkpoint.retain import Keep
    from ridgeline.checkpoint.save import Saver

    class Slow(torch.Tensor):
        gate = threading.Event()

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.copy_:
                cls.gate.wait(60)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    weight = torch.ones(8)
    held = Held((8,), torch.float32, (whole((8,)),), (weight.as_subclass(Slow),), steady=True)
    saver = Saver(tmp_path, 0, None, None, Keep(), torch.device("cpu"))
    saver.save({"model/w": held}, Manifest(1, "", 1, 0.0))
    updated = threading.Event()

    def update() -> None:
        saver.release()
        weight.zero_()
        updated.set()

    threading.Thread(target=update, daemon=True).start()
    assert not updated.wait(0.3)
    Slow.gate.set()
    assert updated.wait(60)
    saver.join()
    (done,) = saver.outcomes()
    assert done.path is not None
    values = load_file(done.path / "rank-00000.safetensors")["model/w"]
    assert torch.equal(values, torch.ones(8))


def test_another_model_or_seed_is_refused(tmp_path: Path) -> None:
    run_in(tmp_path / "run", "train.steps=3")
    records = [tmp_path / "run" / name for name in ("layout.txt", "facts.json", "events.jsonl")]
    before = [path.read_text() for path in records]
    with pytest.raises(UsageError, match=r"shape \[25, 16\].*--fresh"):
        run_in(tmp_path / "run", "model.args.hidden=25")
    with pytest.raises(UsageError, match=r"has exp_avg, .*SGD keeps nothing"):
        run_in(tmp_path / "run", "optim.name=sgd")
    with pytest.raises(UsageError, match=r"train\.seed=0 .* same seed"):
        run_in(tmp_path / "run", "train.seed=1")
    with pytest.raises(UsageError, match=r"24 samples into an epoch.*train.batch=16"):
        run_in(tmp_path / "run", "train.batch=16")
    with pytest.raises(UsageError, match=r"num_samples=80 and had 64"):
        run_in(tmp_path / "run", "data.args.samples=80", "data.args.distinct=80")
    assert [path.read_text() for path in records] == before


def test_a_disk_that_is_full_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ridgeline.checkpoint import save as save_module

    real = save_module.write_boxes
    full = [True]

    def write(aside: Path, *args: Any) -> Any:
        if full[0] and ".step-00000006" in aside.name:
            raise OSError(28, "No space left on device")
        return real(aside, *args)

    monkeypatch.setattr(save_module, "write_boxes", write)
    saver = checkpoints_module.Saver
    monkeypatch.setattr(
        checkpoints_module,
        "Saver",
        lambda *args, **more: saver(*args, **more, retry_after_s=(0.01,)),
    )
    _, run = run_in(tmp_path / "run")
    (failed,) = events(run, "checkpoint-failed")
    assert failed == {"step": 6, "problem": "rank 0: No space left on device"}
    assert [e["step"] for e in events(run, "checkpoint")] == [3, 9, 12, 15, 18, 20]
    # A disk that recovers in time is tried again.
    full[0] = True
    monkeypatch.setattr(save_module.time, "sleep", lambda _: full.__setitem__(0, False))
    _, run = run_in(tmp_path / "again")
    assert not events(run, "checkpoint-failed")


class Disk:
    """Takes the log of samples up to the middle of a step's line, and the rest when there is room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: Path, full_at: int) -> None:
        self.has_room = False
        real, log, part = os.write, run / "samples/rank-0.jsonl", f'"step": {full_at},'.encode()

        def write(descriptor: int, data: bytes) -> int:
            is_log = log.exists() and os.path.samestat(os.fstat(descriptor), log.stat())
            if self.has_room or not is_log or part not in data:
                return real(descriptor, data)
            if log.read_bytes().endswith(b"{"):
                raise OSError(28, "No space left on device")
            return real(descriptor, data[: data.index(part)])

        monkeypatch.setattr(os, "write", write)
        saver = checkpoints_module.Saver
        monkeypatch.setattr(
            checkpoints_module,
            "Saver",
            lambda *args, **more: saver(*args, **more, retry_after_s=()),
        )


def test_a_disk_that_is_full_at_the_end_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path / "run", full_at=17)
    monkeypatch.setattr(run_module, "_pause", lambda: setattr(disk, "has_room", True))
    _, run = run_in(tmp_path / "run")
    assert [line["step"] for line in sample_lines(run)] == list(range(1, 21))
    assert run.status() == "finished"


def test_a_run_whose_records_find_no_room_is_not_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Disk(patch, tmp_path / "run", full_at=17)
        patch.setattr(run_module, "_pause", lambda: None)
        with pytest.raises(WouldRepeat, match=r"disk is full: .* bytes .* make room and run again"):
            run_in(tmp_path / "run")
    assert RunDir.open(tmp_path / "run").status() == "running"
    monkeypatch.setattr(rundir, "_UNWRITTEN", {})  # gone with the process
    _, run = run_in(tmp_path / "run")
    assert events(run, "resume")[0]["step"] == 15
    assert {line["step"] for line in sample_lines(run)} == set(range(1, 21))
    assert run.status() == "finished"


def test_no_checkpoint_is_there_without_the_records_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed on a full disk, whose records die with it, goes on from before the first of them."""
    with monkeypatch.context() as patch:
        Disk(patch, tmp_path / "run", full_at=8)
        die_at(patch, 14)
        with pytest.raises(Died):
            run_in(tmp_path / "run")
    monkeypatch.setattr(rundir, "_UNWRITTEN", {})
    _, run = run_in(tmp_path / "run")
    assert [e["step"] for e in events(run, "checkpoint-failed")] == [9, 12]
    assert "does not take" in events(run, "checkpoint-failed")[0]["problem"]
    assert events(run, "resume")[0]["step"] == 6
    assert {line["step"] for line in sample_lines(run)} == set(range(1, 21))


@pytest.fixture
def poison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that gives no number for one sample of the data."""
    from ridgeline.data.build import build_sources

    config = load_config(None, BASE).config
    source, _ = build_sources(config.data.source, config.data.args, config.train.seed)
    inputs, _ = source.fetch(np.arange(64), 0)
    first = inputs.flatten(1)[:, 0]
    largest, second = first.sort(descending=True).values[:2].tolist()
    assert largest > second
    (tmp_path / "poison_net.py").write_text(POISON.format(limit=(largest + second) / 2))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "model={name: 'poison_net:Net'}"


def test_a_bad_batch_stops_the_run(tmp_path: Path, poison: str) -> None:
    with pytest.raises(RunError, match="loss is nan at step"):
        run_in(tmp_path / "run", poison)


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_bad_batch_leaves_no_trace(tmp_path: Path, poison: str, action: str) -> None:
    _, run = run_in(tmp_path / "run", poison, f"guard.on_bad={action}", "train.clip=1.0")
    # A step that was left out has no norm; the others keep theirs.
    bad_steps = {entry["step"] for entry in events(run, "bad-batch")}
    assert {r.step for r in run.steps() if r.grad_norm is None} == bad_steps
    bad = events(run, "bad-batch")
    assert bad
    assert all(entry["action"] == action for entry in bad)
    assert all(torch.isfinite(value.float()).all() for value in weights(run).values())
    first = bad[0]["batch"]
    resumed = events(run, "resume")
    assert (len(resumed) > 0) == (action == "rollback")
    if action == "rollback":
        # Back to the checkpoint before it, and past it the second time without going back again.
        assert resumed[0]["step"] == first // 3 * 3
        assert [e["batch"] for e in bad[:2]] == [first, first]


def test_skipping_and_rolling_back_learn_the_same(tmp_path: Path, poison: str) -> None:
    _, skipped = run_in(tmp_path / "skip", poison, "guard.on_bad=skip")
    _, rolled = run_in(tmp_path / "roll", poison, "guard.on_bad=rollback")
    assert same(skipped, rolled)


def test_a_spike_is_bad_too(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is usual; the run stopped"):
        run_in(tmp_path / "run", "guard.spike=1.0001", "train.lr=5.0", "checkpoint.every=0")
    with pytest.raises(RunError, match="stopped after 0 bad batches"):
        run_in(
            tmp_path / "more",
            "guard.spike=1.0001",
            "train.lr=5.0",
            "guard.on_bad=skip",
            "guard.most=0",
        )


def test_masters_of_narrow_weights_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Resumed from the bf16 weights alone, the first updates after it would be lost in rounding."""
    tuned = ("layout=precision=bf16", "tune.weights=bf16", "train.lr=0.0001")
    _, whole = run_in(tmp_path / "whole", *tuned)
    run_in(tmp_path / "parts", *tuned, "train.steps=9")
    _, parts = run_in(tmp_path / "parts", *tuned)
    assert same(whole, parts)
    states = [list_checkpoints(r.file(CHECKPOINTS))[-1] for r in (whole, parts)]
    manifests = [read_manifest(path) for path in states]
    masters = [n for n in manifests[0].tensors if "/master/" in n]
    assert masters
    for name in manifests[0].tensors:
        chunks = [[c.crc32 for c in m.tensors[name].chunks] for m in manifests]
        assert chunks[0] == chunks[1] or "generator" in name, name


def test_a_run_of_another_length_says_that_its_rate_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cosine = ("schedule.name=cosine", "schedule.warmup_steps=0")
    run_in(tmp_path, *cosine, "train.stop_after=0.5")
    run_in(tmp_path, *cosine)
    assert "learning rate goes on" not in capsys.readouterr().out
    other = tmp_path / "other"
    run_in(other, *cosine, "train.stop_after=0.5")
    run_in(other, *cosine, "train.steps=12")
    (told,) = re.findall(r"the learning rate goes on at .*", capsys.readouterr().out)
    whole = {record.step: record.lr for record in RunDir(tmp_path).steps()}
    shorter = {record.step: record.lr for record in RunDir(other).steps()}
    assert told == (
        f"the learning rate goes on at {shorter[11]:.4g}, where the checkpoint's run would have had "
        f"{whole[11]:.4g}: it had 20 steps in all, and there are 12 now"
    )
