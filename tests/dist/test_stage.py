"""Staging by several nodes: directories stand for their disks, ranks of the pool for their ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.config import load_config
from ridgeline.data.stage import run as running
from ridgeline.data.stage import where as placing
from ridgeline.data.stage.held import base_folder, copies
from ridgeline.data.stage.meet import NodePlace
from ridgeline.data.stage.plan import Listing, list_source
from ridgeline.data.stage.run import Staged, stage
from ridgeline.data.stage.users import this_process
from ridgeline.errors import UsageError
from ridgeline.launch.env import RankEnv, read_rank_env
from ridgeline.layout import Layout
from ridgeline.parallel.mesh import build_mesh
from ridgeline.rundir import RunDir
from ridgeline.train.run import run_training

BLOCK = 64 * 1024
NODES, LOCAL = 2, 2


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "shared" / "set"
    (root / "small").mkdir(parents=True)
    (root / "large.bin").write_bytes(os.urandom(30 * BLOCK + 5))
    for number in range(40):
        (root / "small" / f"{number}.bin").write_bytes(os.urandom(500 + number))
    (root / "empty").touch()
    return root


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"node-{node}" for node in range(NODES)]
    for disk in made:
        disk.mkdir()
    return made


def tree(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def stage_on_nodes(
    source: Path, disks: list[Path], share: str, trouble: str = "", release: bool = False
) -> Staged:
    """On each of 4 ranks: two nodes of two, with a disk each."""
    me = read_rank_env()
    env = RankEnv(me.rank, 4, me.rank % LOCAL, LOCAL, "127.0.0.1", 0, "two nodes")
    mesh = build_mesh(env, Layout.parse("dp=4"), torch.device("cpu"))
    groups = mesh.node_groups("stage", timedelta(seconds=60))
    assert groups.num_nodes == NODES
    node = me.rank // LOCAL

    def listed(path: Path, **more: Any) -> Listing:
        listing = list_source(path, BLOCK, **more)
        if trouble == "vanishes":
            (source / "small" / "33.bin").unlink()
        return listing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "list_source", listed)
        patch.setattr(placing, "MARGIN_BYTES", 4096)
        if trouble == "full" and node == 1:
            patch.setattr(placing, "free_bytes", lambda path: 1000)
        place = NodePlace(node, NODES, env.local_rank, LOCAL, "a job")
        staged = stage(source, disks[node], place=place, share=share, group=groups.leaders)
    if release:
        staged.release()
    return staged


def reads(results: list[Staged]) -> list[int]:
    return [
        sum(one.read_bytes for one in results[node * LOCAL : (node + 1) * LOCAL])
        for node in range(NODES)
    ]


def test_each_node_reads_each_byte_once(ranks: Any, source: Path, disks: list[Path]) -> None:
    results = ranks(4, stage_on_nodes, source, disks, "node")
    total = results[0].total_bytes
    assert reads(results) == [total, total]
    assert all(one.read_bytes for one in results)
    for disk, one in zip(disks, results[::LOCAL], strict=True):
        assert one.path.is_relative_to(disk)
        assert tree(one.path) == tree(source)


def test_the_job_reads_each_byte_once(ranks: Any, source: Path, disks: list[Path]) -> None:
    results = ranks(4, stage_on_nodes, source, disks, "job")
    total = results[0].total_bytes
    assert sum(reads(results)) == total
    assert all(0.4 * total < read < 0.6 * total for read in reads(results))
    for disk, one in zip(disks, results[::LOCAL], strict=True):
        assert one.path.is_relative_to(disk)
        assert tree(one.path) == tree(source)
        assert one.verify() == []
    # One node loses its copy and gets it back from the other, without a look at the shared path.
    shutil.rmtree(base_folder(disks[1]))
    results = ranks(4, stage_on_nodes, source, disks, "job")
    assert reads(results) == [0, 0]
    assert tree(results[2].path) == tree(source)


def test_the_last_user_of_a_node_takes_the_copy_away(
    ranks: Any, source: Path, disks: list[Path]
) -> None:
    (first, *_) = ranks(4, stage_on_nodes, source, disks, "node")
    ranks(4, stage_on_nodes, source, disks, "node", "", True)
    assert tree(first.path) == tree(source), "every rank has used it twice and left it once"
    assert len(copies(base_folder(disks[1]))[0].users()) == LOCAL
    ranks(4, release_on_nodes, disks)
    assert [list(base_folder(disk).iterdir()) for disk in disks] == [[], []]


def release_on_nodes(disks: list[Path]) -> None:
    (held,) = copies(base_folder(disks[read_rank_env().rank // LOCAL]))
    with held.locked():
        held.leave(this_process())


def test_a_node_without_room_reads_for_the_others(
    ranks: Any, source: Path, disks: list[Path]
) -> None:
    results = ranks(4, stage_on_nodes, source, disks, "job", "full")
    assert tree(results[0].path) == tree(source)
    assert [one.path for one in results[2:]] == [source, source]
    assert all("has room for" in one.reason for one in results[2:])
    assert sum(reads(results)) == results[0].total_bytes
    assert reads(results)[1]


def test_nodes_that_see_one_disk_do_not_wait_for_each_other(
    ranks: Any, source: Path, disks: list[Path]
) -> None:
    results = ranks(4, stage_on_nodes, source, [disks[0], disks[0]], "job")
    assert len({one.path for one in results}) == 1, [one.reason for one in results]
    assert tree(results[0].path) == tree(source)
    assert sum(reads(results)) == results[0].total_bytes


def test_a_file_that_vanishes_is_named_on_all_nodes(
    ranks: Any, source: Path, disks: list[Path]
) -> None:
    results = ranks(4, stage_on_nodes, source, disks, "job", "vanishes")
    for one in results:
        assert one.path == source
        assert "33.bin is gone" in one.reason
    assert not copies(base_folder(disks[0]))


# Whole runs.

RECIPE = [
    *(
        "model.name=llama",
        "model.args={vocab: 256, width: 16, depth: 1, heads: 2, max_seq: 16}",
    ),
    *("data.source=text", "train.batch=8", "train.steps=4", "train.eval_samples=8"),
    *("log.every=1", "log.tensorboard=no", "checkpoint.at_end=false", "device=cpu"),
]


def losses(folder: Path, path: Path, overrides: list[str], nodes: list[Path] | None) -> list[float]:
    """Of a run on two ranks of one node, or, with a disk for each, on two nodes."""
    env = read_rank_env()
    if nodes is not None:
        env = RankEnv(env.rank, 2, 0, 1, "127.0.0.1", 0, "two nodes")
        overrides = [*overrides, f"data.stage={nodes[env.rank]}"]
    args = f"data.args={{path: {path}, seq_len: 16}}"
    config = load_config(None, [*RECIPE, args, *overrides]).config
    run = RunDir(folder)
    run_training(config, env, run)
    return [record.loss for record in run.steps()]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        text = " ".join(str(word * (number + 3) % 97) for word in range(600))
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def run_in(tmp_path: Path, name: str) -> Path:
    (tmp_path / name / "logs").mkdir(parents=True)
    return tmp_path / name


def test_a_recipe_trains_the_same_from_a_staged_copy(
    ranks: Any, tmp_path: Path, texts: Path, disks: list[Path], tiny_disk: Path
) -> None:
    plain = ranks(2, losses, run_in(tmp_path, "plain"), texts, [], None)[0]
    assert len(plain) == 4

    staged = run_in(tmp_path, "staged")
    assert ranks(2, losses, staged, texts, [f"data.stage={disks[0]}"], None)[0] == plain
    (event,) = [event for event in RunDir(staged).events() if event.event == "staged"]
    total = sum(file.stat().st_size for file in texts.iterdir())
    assert event.details["read_bytes"] == event.details["bytes"] == total
    assert event.details["path"].startswith(str(disks[0]))
    assert list(base_folder(disks[0]).iterdir()) == [], "the run has ended"

    shared = run_in(tmp_path, "shared")
    assert ranks(2, losses, shared, texts, ["data.stage_share=job"], disks)[0] == plain
    (event,) = [event for event in RunDir(shared).events() if event.event == "staged"]
    assert event.details["read_bytes"] == total
    assert all(not list(base_folder(disk).iterdir()) for disk in disks)

    full = run_in(tmp_path, "full")
    assert ranks(2, losses, full, texts, [f"data.stage={tiny_disk}"], None)[0] == plain
    (event,) = [event for event in RunDir(full).events() if event.event == "staged"]
    assert "has room for" in event.details["not_staged"]["0"]


def no_path() -> str:
    overrides = [*RECIPE, "data.args={seq_len: 16}", "data.stage=auto"]
    try:
        run_training(load_config(None, overrides).config, read_rank_env())
    except UsageError as error:
        return str(error)
    return ""


def test_there_has_to_be_something_to_stage(ranks: Any) -> None:
    assert "leave data.stage out" in ranks(2, no_path)[0]
