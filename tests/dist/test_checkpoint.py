"""Checkpoints: the same layout goes on bit for bit, any other with exact values and the same losses."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ridgeline.checkpoint.files import Reader
from ridgeline.checkpoint.load import read_tensor
from ridgeline.checkpoint.manifest import MODEL, OPTIMIZER, list_checkpoints, read_manifest
from ridgeline.config import load_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.parallel.gather import full_state
from ridgeline.rundir import BLOCKS, CHECKPOINTS, RunDir
from ridgeline.train import run as train_run
from ridgeline.train.checkpoints import Checkpoints
from ridgeline.train.loop import train_loop
from ridgeline.train.position import Position
from ridgeline.train.setup import Training, build_training

BOUND = 1e-9
BASE = (
    "device=cpu",
    "threads=1",
    "data.prefetch=0",
    "train.steps=40",
    "checkpoint.background=true",
)
LLAMA = (  # heads, vocabulary and width that four ranks do not divide; one weight in two places
    "model.name=llama",
    "model.args={vocab: 259, width: 24, depth: 4, heads: 6, kv_heads: 2, ffn: 44, max_seq: 32,"
    " tie_embeddings: true}",
    "data.source=text",
    f"data.args={{path: {argparse.__file__}, seq_len: 32, max_bytes: 3000}}",
    "optim.name=adamw", "optim.weight_decay=0.01", "train.batch=16", "train.clip=1.0",
    "model.dtype=float64",
)  # fmt: skip
CNN = (  # batch norm, and dropout, which is keyed by the position in the data
    "model.name=cifar_cnn",
    "model.args={in_channels: 1, image_size: 8, width: 4, batch_norm: true, dropout: 0.1}",
    "data.source=digits", "optim.name=sgd", "optim.momentum=0.9", "train.lr=0.02", "train.batch=64",
)  # fmt: skip


def build(
    overrides: tuple[str, ...], layout: str, costs: dict[str, float] | None = None
) -> Training:
    config = load_config(None, (*BASE, *overrides, f"layout={layout}")).config
    return build_training(config, read_rank_env(), block_costs=costs)


def run_dir(folder: str) -> RunDir:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return RunDir(Path(folder))


def advance(training: Training, start: Position, num: int) -> tuple[Position, list[float]]:
    """So many steps on, and the global loss of each."""
    losses, position = [], start
    steps = train_loop(training, start)
    for _ in range(num):
        result = next(steps)
        losses.append(float(training.mesh.sum_over_data(result.loss_share.double())))
        position = result.position
    steps.close()
    return position, losses


def save_and_go_on(overrides: tuple[str, ...], layout: str, folder: str) -> list[float]:
    """Three steps, a checkpoint, and the loss of the step after it."""
    training = build(overrides, layout)
    checkpoints = Checkpoints(training, run_dir(folder))
    position, _ = advance(training, Position(), 3)
    outcomes = checkpoints.save(position, wait=True)
    assert [o.problem for o in outcomes] == [""]
    return advance(training, position, 1)[1]


def load_each(
    overrides: tuple[str, ...], layout: str, sources: list[str], folder: str
) -> list[list[float]]:
    """For each checkpoint: read it, write it again, and take a step."""
    found = []
    training = build(overrides, layout)
    for number, source in enumerate(sources):
        checkpoint = Checkpoints(training, run_dir(source)).find()
        assert checkpoint is not None
        again = Checkpoints(training, run_dir(f"{folder}/{number}"))
        position, _ = again.restore(checkpoint)
        assert position == Position(3, 0, 3)
        again._last_saved = -1  # it would see no need to save what it has just read
        again.save(position, wait=True)
        found.append(advance(training, position, 1)[1])
    return found


def whole_state(folder: str) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the only checkpoint of a run, in full."""
    (path,) = list_checkpoints(Path(folder) / CHECKPOINTS)
    manifest = read_manifest(path)
    reader = Reader(path)
    return {
        name: read_tensor(reader, manifest, name).clone()
        for name in manifest.tensors
        if name.startswith((MODEL, OPTIMIZER))
    }


# Every kind of layout of the matrix, at two numbers of ranks where that is another layout.
MATRIX = {
    "dp": ("dp=2", "dp=4"),
    "zero=1": ("dp=2,zero=1", "dp=4,zero=1"),
    "zero=2": ("dp=2,zero=2", "dp=4,zero=2"),
    "zero=3": ("dp=2,zero=3", "dp=4,zero=3"),
    "tp": ("tp=2", "tp=4"),
    "pp": ("pp=2,microbatches=2", "pp=4,microbatches=4"),
    "dp x tp": ("dp=2,tp=2", "dp=2,zero=1,tp=2"),
    "tp x pp": ("tp=2,pp=2,microbatches=2", "dp=1,tp=2,sp=true,pp=2,microbatches=2"),
}
LAYOUTS = [layout for pair in MATRIX.values() for layout in pair]
if os.environ.get("RIDGELINE_TABLES") == "reduced":  # as tests/conftest.py says
    LAYOUTS = ["dp=2,zero=1", "dp=4,zero=3", "dp=2,tp=2", "pp=2,microbatches=2"]


def memory_folder(path: Path) -> Path:
    """A folder that goes when the session does, in memory where there is a place for it: thousands of
    small files that are waited for one by one are the disk's time, not ours."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        return path
    folder = Path(tempfile.mkdtemp(dir=memory, prefix="ridgeline-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def world(layout: str) -> int:
    from ridgeline.layout import Layout

    return Layout.parse(layout).world_size


@pytest.fixture(scope="module")
def saved(
    ranks: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, list[float]]]:
    """A checkpoint of every layout of the matrix, and how its run went on."""
    root = memory_folder(tmp_path_factory.mktemp("saved"))
    found = {}
    for number, layout in enumerate(["", *LAYOUTS]):
        folder = str(root / str(number))
        losses = ranks(world(layout), save_and_go_on, LLAMA, layout, folder, timeout=480)[0]
        found[layout] = (folder, losses)
    return found


def close(a: list[float], b: list[float]) -> bool:
    return all(abs(x - y) <= BOUND * abs(y) for x, y in zip(a, b, strict=True))


def test_checkpoints_of_all_layouts_hold_the_same(saved: Any) -> None:
    expected = whole_state(saved[""][0])
    for layout, (folder, losses) in saved.items():
        state = whole_state(folder)
        assert state.keys() == expected.keys(), layout
        for name, value in state.items():
            assert value.dtype == expected[name].dtype, (layout, name)
            assert torch.allclose(value, expected[name], rtol=1e-9, atol=1e-12), (layout, name)
        assert close(losses, saved[""][1]), layout


@pytest.mark.parametrize("target", ["", *LAYOUTS])
def test_any_layout_reads_the_checkpoint_of_any(
    ranks: Any, saved: Any, tmp_path: Path, target: str
) -> None:
    sources = [folder for folder, _ in saved.values()]
    tmp_path = memory_folder(tmp_path)
    args = (LLAMA, target, sources, str(tmp_path))
    found = ranks(world(target), load_each, *args, timeout=900)[0]
    for number, (layout, (folder, losses)) in enumerate(saved.items()):
        assert close(found[number], losses), f"{layout} -> {target}: {found[number]} {losses}"
        before, after = whole_state(folder), whole_state(str(tmp_path / str(number)))
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert torch.equal(value, after[name]), f"{layout} -> {target}: {name}"


def train_through(overrides: tuple[str, ...], layout: str, steps: int) -> Any:
    """Losses and final weights of a run that nothing interrupts."""
    training = build(overrides, layout)
    _, losses = advance(training, Position(), steps)
    return losses, full_state(training.arranged), training.arranged.block_costs


def train_in_two(
    overrides: tuple[str, ...], layout: str, steps: int, folder: str, costs: dict[str, float] | None
) -> Any:
    """The same with a checkpoint half-way, from which a run that knows nothing of it goes on but where a
    pipeline was cut: its run directory says that."""
    first = build(overrides, layout, costs)
    checkpoints = Checkpoints(first, run_dir(folder))
    position, before = advance(first, Position(), steps // 2)
    checkpoints.save(position)
    # In the background: training goes on, and what is written must be the state of the moment.
    advance(replace(first, update=_released(checkpoints, first.update)), position, 1)
    assert [o.problem for o in checkpoints.outcomes(wait=True)] == [""]
    torch.manual_seed(12345)
    second = build(overrides, layout, costs)
    later = Checkpoints(second, run_dir(folder))
    found = later.find()
    assert found is not None
    start, notes = later.restore(found)
    assert (start, notes) == (position, [])
    _, after = advance(second, start, steps - steps // 2)
    return before + after, full_state(second.arranged)


def _released(checkpoints: Checkpoints, update: Any) -> Any:
    def released() -> Any:
        checkpoints.release()
        return update()

    return released


SAME = {
    "cnn": (CNN, ["", "dp=4", "dp=2,accumulate=2,precision=fp16", "dp=2,compress=powersgd:2",
                  "dp=2,sync=local:2", "spatial=2"]),
    "llama": ((*LLAMA, "model.dtype=float32"), [
        "dp=4,zero=1,precision=bf16", "dp=2,zero=2,precision=bf16", "dp=4,zero=3,shard=2,precision=bf16",
        "tp=2,pp=2,microbatches=2", "dp=2,cp=2", "dp=2,offload=optimizer", "dp=2,zero=3,offload=params",
    ]),
}  # fmt: skip


@pytest.mark.table(keep=8)
@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, layout) for kind, (_, found) in SAME.items() for layout in found]
)
def test_the_same_layout_goes_on_bit_for_bit(
    ranks: Any, tmp_path: Path, kind: str, layout: str
) -> None:
    overrides, count = SAME[kind][0], world(layout)
    expected = ranks(count, train_through, overrides, layout, 7, timeout=480)[0]
    last = (7, str(tmp_path), expected[2])
    found = ranks(count, train_in_two, overrides, layout, *last, timeout=480)[0]
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(value, found[1][name]), name


def cut_by(costs: dict[str, float], folder: str) -> list[str]:
    """Where the stages begin in a run whose directory says what its blocks cost."""
    env = read_rank_env()
    run = run_dir(folder)
    if env.rank == 0:
        run.write_json(BLOCKS, costs)
    config = load_config(
        None, (*BASE, *LLAMA, "layout=pp=2,microbatches=2", "train.steps=1")
    ).config
    found: list[str] = []

    def note(config: Any, env: Any, resumes: bool, given: Any) -> Training:
        # Only rank 0 has the directory; the others have to hear of it.
        training = build_training(config, env, resumes, given if env.rank == 0 else None)
        assert training.arranged.staged is not None
        found.extend(str(stage.first) for stage in training.arranged.staged.plan.stages)
        return training

    with mock.patch.object(train_run, "build_training", note):
        train_run.run_training(config, env, run if env.rank == 0 else None)
    return found


def test_a_run_that_goes_on_is_cut_where_it_was(ranks: Any, tmp_path: Path) -> None:
    """Whatever its blocks take today: stages in other places are sums in another order."""
    blocks = [f"layers.{index}" for index in range(4)]
    cuts = []
    for number, heavy in enumerate(("layers.0", "layers.3")):
        costs = {name: 100.0 if name == heavy else 1.0 for name in blocks}
        folder = str(tmp_path / str(number))
        both = ranks(2, cut_by, costs, folder, timeout=480)
        assert both[0] == both[1]
        assert json.loads((Path(folder) / BLOCKS).read_text()) == costs
        cuts.append(both[0])
    assert cuts[0] != cuts[1]


def refused(folder: str) -> str:
    config = load_config(
        None, (*BASE, *LLAMA, "layout=pp=2,microbatches=2", "train.steps=1")
    ).config
    with pytest.raises(UsageError) as error:
        train_run.run_training(config, read_rank_env(), run_dir(folder))
    return str(error.value)


def test_times_of_another_model_are_told_with_their_file(ranks: Any, tmp_path: Path) -> None:
    run_dir(str(tmp_path)).write_json(BLOCKS, {"layers.0": 1.0, "layers.9": 1.0})
    for text in ranks(2, refused, str(tmp_path), timeout=480):
        assert text.startswith(f"{tmp_path / BLOCKS} has a time of 'layers.9'")
        assert "delete that file" in text
