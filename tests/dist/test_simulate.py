"""A rank alone in a fake group holds and sends what the same rank does among real ones."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor

from ridgeline.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    find_recipe,
    load_config,
)
from ridgeline.errors import UsageError
from ridgeline.launch.env import RankEnv
from ridgeline.scaling.rank import build_rank, measure_rank, tensor_bytes
from ridgeline.scaling.request import RankRequest, for_one_rank
from ridgeline.scaling.watch import StepWatch
from ridgeline.train.setup import Training, build_training

LAYOUTS = (
    "dp=4",
    "dp=4,zero=2,accumulate=2",
    "dp=4,zero=3,shard=2,recompute=full",
    "dp=2,tp=2,sp=true,zero=1,precision=bf16",
    "dp=2,cp=2",
    "pp=2,dp=2,zero=1,schedule=interleaved,virtual=2,microbatches=2",
)
RANK = 2
"""In another stage, replica or shard than rank 0, whatever the layout."""
COSTS = {**{f"layers.{index}": 1.0 for index in range(5)}, "embed": 0.1, "norm": 0.1, "head": 1.0}
"""What a pipeline is cut by: given, so that clocks have no say."""


def config_of(layout: str) -> RunConfig:
    sizes = {"vocab": 67, "width": 32, "depth": 5, "heads": 4, "ffn": 56, "max_seq": 16}
    return RunConfig(
        model=ModelConfig("llama", sizes),
        data=DataConfig("synthetic", {"task": "causal_lm", "shape": [16], "vocab": 67}),
        train=TrainConfig(batch=16, steps=10, clip=1.0, eval_samples=0),
        optim=OptimConfig("adamw"),
        layout=layout,
        device="cpu",
        threads=1,
    )


def look(training: Training) -> dict[str, Any]:
    """Two steps, the second of them watched."""
    batch = training.to_device(next(iter(training.loader.epoch(0))))
    training.clock.start()
    training.forward_backward(batch, training.clock)
    training.update()
    watch = StepWatch(lambda: "")
    with watch:
        training.forward_backward(batch, training.clock)
        gradients = tensor_bytes(training)["gradients"]
        training.update()
    held = tensor_bytes(training)
    shapes = {
        t.name: tuple(getattr(t.parameter, "_local_tensor", t.parameter).shape)
        for t in training.arranged.trainables()
    }
    calls = {(c.kind, c.num_bytes, c.ranks): count for c, count in watch.calls.items()}
    training.close_loaders()
    return {"held": held, "gradients": gradients, "shapes": shapes, "calls": calls,
            "peak": watch.peak_bytes}  # fmt: skip


def among_others(layout: str) -> dict[str, Any]:
    env = RankEnv(dist.get_rank(), 4, dist.get_rank(), 4, "", 0, "test")
    training = build_training(config_of(layout), env, False, COSTS)
    training.arranged.train()
    return look(training)


def alone(layouts: tuple[str, ...], pipe: Connection) -> None:
    for layout in layouts:
        request = RankRequest(config_of(layout), 4, 4, RANK, block_costs=COSTS)
        pipe.send((layout, look(build_rank(request)[0])))
    pipe.close()


@pytest.fixture(scope="module")
def simulated() -> dict[str, dict[str, Any]]:
    """All layouts in one process, which has nothing but the fake group."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=alone, args=(LAYOUTS, theirs))
    process.start()
    theirs.close()
    found = {}
    for _ in LAYOUTS:
        layout, value = ours.recv()
        found[layout] = value
    process.join()
    return found


@pytest.mark.table(keep=4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_alone_is_the_rank(
    ranks: Any, simulated: dict[str, dict[str, Any]], layout: str
) -> None:
    real = ranks(4, among_others, layout, timeout=480)[RANK]
    fake = simulated[layout]
    assert fake["shapes"] == real["shapes"]
    assert fake["held"] == real["held"]
    assert fake["gradients"] == real["gradients"]
    assert fake["calls"] == real["calls"]
    assert fake["peak"] == pytest.approx(real["peak"], rel=0.02)
    assert real["held"]["weights"] > 0
    assert real["peak"] > 0


def gathered_bytes(num: int) -> int:
    watch = StepWatch(lambda: "")
    part = torch.ones(num)
    with watch:
        whole = all_gather_tensor(part, 0, dist.group.WORLD) * 1.0  # waited for by the product
    assert whole.shape == (2 * num,)
    return watch.peak_bytes


def test_a_result_on_its_way_is_counted_once(ranks: Any) -> None:
    """The gathered tensor and the product, and not what stands for the first until it is there."""
    assert ranks(2, gathered_bytes, 1000) == [2 * 2 * 1000 * 4] * 2


def ridgeline(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ridgeline.cli", *args],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=900,
    )


def test_a_rank_of_a_thousand_from_the_command_line(tmp_path: Path) -> None:
    job = ("train.batch=1024", "threads=1", "--layout", "zero=3", "-N", "128", "--per-node", "8")
    done = ridgeline(tmp_path, "plan", "simulate", "llama-text", *job, "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["world_size"], found["layout"]) == (1024, "dp=1024,zero=3")
    rows = {row["name"]: row for row in found["memory"]}
    whole = 868_480 * 4
    assert rows["weights"]["here"] < whole / 100
    parts = {part["name"]: part for part in found["communication"]}
    # Forward and backward both gather what is cut, with what is filled up: never less than all.
    assert parts["shards"]["num_bytes"] > 1.5 * whole
    assert found["step_s"] > found["time"][0]["here"] > 0
    assert found["time"][-1]["predicted"] > 0


def test_a_pipeline_of_another_model_from_the_command_line(tmp_path: Path) -> None:
    job = (
        "train.batch=8",
        "threads=1",
        "--layout",
        "pp=2,microbatches=2",
        "-N",
        "2",
        "--stage",
        "1",
    )
    done = ridgeline(tmp_path, "plan", "simulate", "vit-fields", *job, "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert "stage 1 of 2" in done.stdout
    assert "bubble and sends, played" in done.stdout
    assert "sends between stages" in done.stdout
    assert "no prediction:" not in done.stdout  # a vision transformer is traced


def test_a_small_source_is_no_full_step() -> None:
    config = load_config(find_recipe("digits"), ["train.batch=4096", "device=cpu"]).config
    with pytest.raises(UsageError, match="fewer samples than train"):
        measure_rank(RankRequest(for_one_rank(config, "dp=1", "cpu"), 1, 1))


def test_auto_is_chosen_once_kept_and_chosen_again(tmp_path: Path) -> None:
    short = ("train.steps=4", "train.eval_samples=0", "log.every=1", "model.args.depth=2")
    done = ridgeline(
        tmp_path,
        "train",
        "llama-text",
        "-n",
        "2",
        "layout=auto",
        "device=cpu",
        *short,
        "--run",
        "r",
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / "r" / "plan.json").read_text())
    assert f"layout auto: {plan['layout']} on 2 x CPU" in done.stdout
    assert plan["asked"] == "auto"
    assert f"layout: {plan['layout']}\n" in (tmp_path / "r" / "config.yaml").read_text()
    assert (tmp_path / "r" / "layout.txt").read_text().strip() == plan["layout"]
    assert "Predicted and measured" in (tmp_path / "r" / "report.html").read_text()

    told = ridgeline(tmp_path, "doctor", "r", "--json")
    assert told.returncode == 0, told.stderr
    (step,) = json.loads(told.stdout)["predicted"]
    assert step["predicted"] == plan["predicted"]["step_s"]
    assert step["error"] == pytest.approx(step["predicted"] / step["measured"] - 1)

    done = ridgeline(tmp_path, "train", "r", "train.steps=5", "-n", "1")
    assert done.returncode == 0, done.stderr
    assert "was chosen for 2 ranks and there are 1" in done.stdout
    assert "going on from step-00000004" in done.stdout
    again = json.loads((tmp_path / "r" / "plan.json").read_text())
    assert (again["num_devices"], again["asked"]) == (1, "auto")
    assert again["layout"].startswith("dp=1")
