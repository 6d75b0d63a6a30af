"""The planner's promises: how far its predictions are from what others, and we, measured.

The bounds are those of `docs/plan.md`. `plan/rows.json` holds the rows with their sources; the runs on one
H200 are those of `benchmarks/gpu_plan_runs.py`.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from ridgeline.layout import Layout
from ridgeline.plan.job import job_from_layout
from ridgeline.plan.known import model_of_recipe
from ridgeline.plan.machine import load_machine
from ridgeline.plan.measured import load_measured
from ridgeline.plan.memory import fits, predict_memory, stage_memory
from ridgeline.plan.rows import load_rows
from ridgeline.plan.time import rank_alone_s
from ridgeline.plan.validate import Checked, check_rows, summarize

HERE = Path(__file__).parent
RUNS = HERE.parents[1] / "benchmarks" / "results" / "plan_runs_h200.json"


@pytest.fixture(scope="module")
def checked() -> list[Checked]:
    return check_rows(load_rows(HERE / "plan" / "rows.json"))


@pytest.mark.parametrize(
    ("name", "rows", "bound"),
    [
        ("megatron_sc21_table1", 10, 3.5),
        ("megatron_ptd_vs_zero3", 12, 5.0),
        ("korthikanti_table5", 8, 2.5),
        ("vtrain_multi", 49, 7.0),
        ("vtrain_single", 61, 11.0),
    ],
)
def test_times_of_published_rows(
    checked: list[Checked], name: str, rows: int, bound: float
) -> None:
    found = {s.set: s for s in summarize(checked) if s.what == "time"}[name]
    assert found.rows == rows
    assert found.mean <= bound


def test_memory_of_megatrons_tests(checked: list[Checked]) -> None:
    errors = [
        abs(c.memory_error)
        for c in checked
        if c.set == "megatron_ci_golden" and c.memory_error is not None
    ]
    assert len(errors) >= 25
    assert statistics.fmean(errors) <= 0.01
    assert max(errors) <= 0.04


def test_rows_that_cannot_be_expressed_say_why(checked: list[Checked]) -> None:
    skipped = [c for c in checked if c.skipped]
    assert skipped
    for c in skipped:
        assert c.values == {"id": c.id, "skipped": c.skipped}


def _own_runs() -> list[dict[str, object]]:
    runs: list[dict[str, object]] = json.loads(RUNS.read_text())["runs"]
    return runs


@pytest.mark.parametrize("measured", [False, True], ids=["profile", "measured"])
def test_own_runs_on_one_h200(measured: bool) -> None:
    """Memory within 3 per cent on the mean and no false fit; time within 5."""
    machine = load_measured(RUNS) if measured else load_machine("h200")
    memory_errors, time_errors = [], []
    for run in _own_runs():
        layout = Layout.parse(str(run["layout"]))
        args = {"size": run["size"], **run["change"]}  # type: ignore[dict-item]
        model = model_of_recipe("llama", args, int(str(run["seq"])))
        assert model.num_parameters == run["num_parameters"]
        batch = layout.dp * max(layout.microbatches, layout.accumulate) * int(str(run["samples"]))
        job = job_from_layout(model, machine, layout, batch)
        memory = stage_memory(job, int(str(run["rank"])))
        memory_errors.append(memory.allocated / float(str(run["peak_step_bytes"])) - 1)
        time_errors.append(rank_alone_s(job) / float(str(run["step_s"])) - 1)
        tight = float(str(run["peak_step_bytes"]))
        small = job.replace(machine=machine.replace(**{"device.memory_bytes": tight}))
        assert not fits(small, predict_memory(small)), run["layout"]
    assert len(memory_errors) >= 20
    assert statistics.fmean(map(abs, memory_errors)) <= 0.01
    assert max(map(abs, memory_errors)) <= 0.05
    assert statistics.fmean(map(abs, time_errors)) <= 0.05


@pytest.mark.parametrize("day", ["first", "later", "bound"])
def test_own_runs_of_other_days(day: str) -> None:
    """On hosts that were slower or faster, where a third of the runs wait for the host."""
    runs = json.loads(RUNS.with_stem(f"{RUNS.stem}_{day}").read_text())["runs"]
    errors = []
    for run in runs:
        layout = Layout.parse(run["layout"])
        model = model_of_recipe("llama", {"size": run["size"], **run["change"]}, run["seq"])
        batch = layout.dp * max(layout.microbatches, layout.accumulate) * run["samples"]
        job = job_from_layout(model, load_machine("h200"), layout, batch)
        errors.append(abs(rank_alone_s(job) / run["step_s"] - 1))
    assert len(errors) >= 30
    assert statistics.fmean(errors) <= 0.06


def test_choice_within_two_per_cent_of_the_best_measured(checked: list[Checked]) -> None:
    """Of every model in vTrain's multi-node runs, the layout predicted to be fastest is nearly so."""
    rows = {row["id"]: row for row in load_rows(HERE / "plan" / "rows.json")}
    groups: dict[str, list[tuple[float, float]]] = {}
    for c in checked:
        if c.set == "vtrain_multi":
            pair = (c.values["predicted_s"], c.values["measured"]["iter_s"])
            groups.setdefault(rows[c.id]["model"]["name"], []).append(pair)
    assert len(groups) == 4
    for pairs in groups.values():
        picked = min(pairs)[1]
        assert picked <= 1.02 * min(measured for _, measured in pairs)
