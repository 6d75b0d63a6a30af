"""`layout: auto`: what is chosen, what a run that goes on keeps, and what is compared afterwards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.config import PlanConfig, RunConfig, dump_config, find_recipe, load_config
from ridgeline.errors import UsageError
from ridgeline.layout import Layout, check_layout, override_text, read_auto
from ridgeline.plan.auto import Place, choose_layout, cpu_machine, find_machine, runnable
from ridgeline.plan.kept import compare_run
from ridgeline.plan.own_machine import profile_of
from ridgeline.plan.recipe import plan_recipe, predict_recipe
from ridgeline.rundir import CONFIG, LAYOUT, PLAN, RunDir

H200 = Place(8, 8, 64, "NVIDIA H200")


def recipe(*overrides: str, name: str = "llama-text") -> RunConfig:
    return load_config(find_recipe(name), overrides).config


def large(*overrides: str) -> RunConfig:
    sizes = ("model.args.size=llama3-8b", "model.args.max_seq=8192", "data.args.seq_len=8192")
    return recipe("layout=auto,precision=bf16", *sizes, *overrides)


def test_the_text() -> None:
    assert read_auto("dp=2") is None
    assert read_auto("auto") == Layout()
    assert read_auto(" auto, precision=bf16") == Layout(precision="bf16")
    assert override_text("auto", "precision", "bf16") == "auto,precision=bf16"
    assert override_text("auto,precision=bf16", "precision", "fp32") == "auto,precision=fp32"
    for text in ("auto,tp=2", "auto,dp=4"):
        with pytest.raises(UsageError, match="beside auto only precision"):
            read_auto(text)
    with pytest.raises(UsageError, match="beside auto only precision"):
        override_text("auto", "tp", "2")
    with pytest.raises(UsageError, match="chosen when `ridgeline train` starts"):
        Layout.parse("auto")
    assert recipe("layout=auto", "layout.precision=bf16").layout == "auto,precision=bf16"
    with pytest.raises(UsageError, match="autoo"):
        recipe("layout=autoo")


def test_the_planners_best_is_what_ranks_get() -> None:
    config = large("train.batch=64")
    chosen = choose_layout(config, H200, None)
    machine, origin = find_machine(config, H200)
    best = plan_recipe(config, machine, 8).best[0]
    layout = Layout.parse(chosen.config.layout)
    assert layout == best.layout
    assert layout.world_size == 8
    assert layout.precision == "bf16"
    assert not check_layout(layout)
    assert chosen.config.layout.startswith("dp=")
    assert chosen.plan is not None
    assert chosen.plan["asked"] == "auto,precision=bf16"
    assert chosen.plan["layout"] == chosen.config.layout
    assert chosen.plan["predicted"]["step_s"] == pytest.approx(best.seconds)
    assert chosen.plan["predicted"]["device_bytes"] == pytest.approx(best.memory.device)
    assert json.loads(json.dumps(chosen.plan)) == chosen.plan
    assert len(chosen.lines) == 2
    assert chosen.config.layout in chosen.lines[0]
    assert "8 x " in chosen.lines[0]
    assert origin in chosen.lines[0]
    assert "next of" in chosen.lines[1]


def test_nodes_are_as_large_as_the_ranks_on_them() -> None:
    place = Place(8, 4, 64, "NVIDIA H200")
    assert find_machine(large(), place)[0].devices_per_node == 4
    chosen = choose_layout(large("train.batch=64"), place, None)
    assert Layout.parse(chosen.config.layout).tp <= 4


@pytest.mark.parametrize(
    ("config", "place", "reason"),
    [
        (recipe("layout=auto", name="digits"), Place(4, 4, 8, None), "which needs torch"),
        (recipe("layout=auto"), Place(4, 4, 8, "NVIDIA L4"), "NVIDIA L4 has no profile"),
        (recipe("layout=auto", "device=cuda"), Place(4, 4, 8, None), "plan.machine=h200"),
        (recipe("layout=auto", "train.batch=6"), Place(5, 5, 8, None), "none divides a batch of 6"),
    ],
    ids=("model", "profile", "no GPU", "batch"),
)
def test_what_cannot_be_planned_is_plain_replicas_and_says_why(
    config: RunConfig, place: Place, reason: str
) -> None:
    chosen = choose_layout(config, place, None)
    assert chosen.config.layout == f"dp={place.num_ranks}"
    assert chosen.plan is not None
    assert chosen.plan["predicted"] is None
    assert len(chosen.lines) == 1
    assert "unplanned, because" in chosen.lines[0]
    assert reason in chosen.lines[0]


def test_a_model_without_sizes_is_traced() -> None:
    from ridgeline.train.traced import trace_recipe

    config = recipe("layout=auto,precision=bf16", "train.batch=512", name="resnet50-synthetic")
    chosen = choose_layout(config, H200, None, trace_recipe)
    assert chosen.plan is not None
    assert chosen.plan["predicted"]["step_s"] > 0
    assert Layout.parse(chosen.config.layout).world_size == 8
    # The same layout by hand has the same prediction, through `plan.machine`.
    by_hand = dataclasses.replace(chosen.config, plan=PlanConfig(machine="h200"))
    kept = choose_layout(by_hand, H200, None, trace_recipe).plan
    assert kept is not None
    assert kept["predicted"] == chosen.plan["predicted"]


def test_where_nothing_fits_the_smallest_is_tried() -> None:
    long = ("model.args.max_seq=131072", "data.args.seq_len=131072", "train.batch=1")
    chosen = choose_layout(large(*long), Place(1, 1, 64, "NVIDIA H200"), None)
    assert Layout.parse(chosen.config.layout).world_size == 1
    assert "recompute=full" in chosen.config.layout
    assert "may run out of memory" in chosen.lines[0]
    with pytest.raises(UsageError, match="weights and optimizer state alone"):
        choose_layout(large("model.args.size=llama3-405b", "train.batch=8"), H200, None)


def test_a_machine_that_is_none_is_an_error() -> None:
    for layout in ("auto", "dp=4"):
        with pytest.raises(UsageError, match=r"h2000.*plan\.machine"):
            choose_layout(recipe(f"layout={layout}", "plan.machine=h2000"), H200, None)


def test_tied_weights_get_no_virtual_stages() -> None:
    config = large("model.args.size=llama3.2-1b", "train.batch=64")
    assert Layout.parse(choose_layout(config, H200, None).config.layout).virtual == 1


@pytest.mark.parametrize(
    ("tied", "text", "starts"),
    [
        (True, "dp=2,zero=3,pp=2,schedule=interleaved,microbatches=2,virtual=2", True),
        (("head.weight",), "dp=2,zero=3,pp=2,schedule=interleaved,microbatches=2,virtual=2", False),
        (("head.weight",), "dp=2,zero=3,pp=2,microbatches=2", True),
        (("head.weight",), "dp=2,pp=2,schedule=interleaved,microbatches=2,virtual=2", True),
        ((), "dp=2,zero=3,pp=2,schedule=interleaved,microbatches=2,virtual=2", True),
    ],
)
def test_what_cannot_be_started_with_tied_weights(tied: Any, text: str, starts: bool) -> None:
    job = SimpleNamespace(model=SimpleNamespace(tied=tied))
    planned = SimpleNamespace(layout=Layout.parse(text), job=job)
    found: Any = SimpleNamespace(best=(planned,))
    assert (runnable(found) is planned) == starts


def test_a_run_that_goes_on_keeps_its_layout_on_as_many_ranks() -> None:
    first = choose_layout(large("train.batch=64"), H200, None)
    again = choose_layout(first.config, H200, first.plan)
    assert again.config == first.config
    assert again.plan == first.plan
    assert again.lines == ()

    other = choose_layout(first.config, dataclasses.replace(H200, num_ranks=16), first.plan)
    assert Layout.parse(other.config.layout).world_size == 16
    assert "8 ranks and there are 16" in other.lines[0]
    assert other.plan is not None
    assert other.plan["asked"] == "auto,precision=bf16"

    train = dataclasses.replace(first.config.train, batch=128)
    bigger = choose_layout(dataclasses.replace(first.config, train=train), H200, first.plan)
    assert bigger.config.layout == first.config.layout
    assert bigger.plan is not None
    assert first.plan is not None
    assert bigger.plan["batch"] == 128
    assert bigger.plan["predicted"]["step_s"] > first.plan["predicted"]["step_s"]
    assert bigger.plan["asked"] == first.plan["asked"]


def test_a_layout_that_is_said_stays() -> None:
    first = choose_layout(large("train.batch=64"), H200, None)
    said = dataclasses.replace(first.config, layout="dp=8,zero=3,precision=bf16")
    kept = choose_layout(said, H200, first.plan)
    assert kept.config == said
    assert kept.plan is not None
    assert "asked" not in kept.plan
    assert kept.plan["layout"] == "dp=8,zero=3,precision=bf16"
    assert choose_layout(recipe("layout=dp=8"), H200, None).plan is None
    named = choose_layout(recipe("layout=dp=8", "plan.machine=h200"), H200, None)
    assert named.plan is not None
    assert named.plan["predicted"]["step_s"] > 0
    # The planner has no word for it, and that is no error.
    assert choose_layout(recipe("plan.machine=h200", name="digits"), H200, None).plan is None


def test_what_the_planner_has_no_model_of_is_refused() -> None:
    machine, _ = find_machine(recipe(), H200)
    with pytest.raises(UsageError, match="spatial"):
        predict_recipe(recipe(), machine, Layout(spatial=(2, 1)))
    with pytest.raises(UsageError, match="more than the 4 layers"):
        predict_recipe(recipe(), machine, Layout(pp=8, microbatches=8))


def test_profiles_by_name() -> None:
    assert profile_of("NVIDIA GB200") == "gb200"
    assert profile_of("NVIDIA H100 80GB HBM3") == "h100"
    for other in ("NVIDIA L4", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA GH200 480GB"):
        assert profile_of(other) is None
    half, whole = cpu_machine(64, 2), cpu_machine(64, 1)
    assert half.device.peak_flops["fp32"] == pytest.approx(whole.device.peak_flops["fp32"] / 2)
    assert half.device.memory_bytes == pytest.approx(whole.device.memory_bytes / 2)
    assert half.devices_per_node == 2


def kept(folder: Path, ran: str) -> RunDir:
    config = large("train.batch=64")
    chosen = choose_layout(config, H200, None)
    run = RunDir.at(folder / "run")
    run.write_text(CONFIG, dump_config(chosen.config))
    run.write_json(PLAN, chosen.plan)
    run.write_text(LAYOUT, ran or str(Layout.parse(chosen.config.layout)))
    return run


def test_predictions_are_compared_with_what_was_measured(tmp_path: Path) -> None:
    run = kept(tmp_path, "")
    said = run.read_json(PLAN)["predicted"]
    step, memory = compare_run(run, 2 * said["step_s"], said["allocated_bytes"] / 1.1, True)
    assert (step.name, step.unit) == ("step", "s")
    assert step.error == pytest.approx(-0.5)
    assert memory.error == pytest.approx(0.1)
    assert [one.name for one in compare_run(run, 1.0, 1e9, False)] == ["step"]
    assert compare_run(run, None, None, True) == []


def test_fewer_ranks_are_not_what_was_predicted(tmp_path: Path) -> None:
    run = kept(tmp_path, "dp=7")
    assert compare_run(run, 1.0, 1e9, True) == []
    run.file(PLAN).write_text("{", encoding="utf-8")
    assert compare_run(run, 1.0, 1e9, True) == []
    run.file(PLAN).unlink()
    assert compare_run(run, 1.0, 1e9, True) == []


def test_a_job_in_a_queue_chooses_on_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = [
        "train",
        "llama-text",
        "layout=auto",
        "--on",
        "slurm",
        "-N",
        "2",
        "-n",
        "4",
        "--dry-run",
    ]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "layout auto:" not in done.output
    assert "--here" in done.output


def test_a_script_of_ones_own_has_it_too(tmp_path: Path) -> None:
    from ridgeline import run_recipe

    short = ("train.steps=1", "train.eval_samples=0", "model.args.depth=1", "threads=1")
    run_recipe("llama-text", "layout=auto", "device=cpu", *short, run=str(tmp_path / "r"))
    plan = RunDir(tmp_path / "r").read_json(PLAN)
    assert plan["num_devices"] == 1
    assert f"layout: {plan['layout']}\n" in (tmp_path / "r" / CONFIG).read_text()
