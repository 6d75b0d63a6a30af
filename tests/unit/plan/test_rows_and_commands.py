"""Rows that cannot be read say why; the commands print, write and refuse."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.errors import UsageError
from ridgeline.plan.measured import load_measured
from ridgeline.plan.rows import Unreadable, load_rows, read_row
from ridgeline.plan.validate import BOUNDS, calibrate, changed, check_row, check_rows

ROOT = Path(__file__).resolve().parents[3]
ROWS = ROOT / "tests" / "golden" / "plan" / "rows.json"
RUNS = ROOT / "benchmarks" / "results" / "plan_runs_h200.json"


def rows() -> list[dict[str, Any]]:
    return [dict(row) for row in load_rows(ROWS)]


def call(*args: str) -> Any:
    return CliRunner().invoke(app, ["plan", *args])


def test_a_row_becomes_the_job_it_states() -> None:
    row = next(r for r in rows() if r["id"] == "megatron_sc21_table1-0008")
    job = read_row(row).job
    assert (job.dp, job.tp, job.pp, job.virtual, job.schedule) == (9, 8, 35, 3, "interleaved")
    assert (job.samples, job.microbatches, job.recompute) == (1, 280, "full")
    assert job.machine.inter.bandwidth == 200e9
    assert job.model.num_parameters == pytest.approx(529.6e9, rel=0.001)


@pytest.mark.parametrize(
    ("where", "key", "value", "reason"),
    [
        ("model", "arch", "moe", "not modelled"),
        ("model", "layers", None, "sizes are not stated"),
        ("hardware", "gpu", "TPU v4", "no profile"),
        ("layout", "ep", 8, "expert parallelism"),
        ("layout", "pp", 7, "do not divide"),
        ("layout", "microbatch", None, "microbatch is not stated"),
        ("layout", "precision", "NVFP4", "not modelled"),
        ("layout", "tp", "many", "missing or is no number"),
        ("layout", "args", 3, "missing or is no number"),
        ("layout", "microbatch", -2, "microbatch is -2"),
        ("hardware", "gpus_per_node", -1, "gpus_per_node is -1"),
        ("model", "heads", -8, "heads"),
    ],
)
def test_what_cannot_be_expressed_is_said(where: str, key: str, value: Any, reason: str) -> None:
    row = copy.deepcopy(next(r for r in rows() if r["set"] == "megatron_sc21_table1"))
    row[where][key] = value
    with pytest.raises(Unreadable, match=reason):
        read_row(row)
    record = check_row(row, 0).values
    assert set(record) == {"id", "skipped"}


def test_wild_rows_never_raise() -> None:
    wild = random.Random(3)
    values = (None, 0, 1, 3, 8, 64, -1, "x", True, [], {}, 0.5)
    some = rows()
    for _ in range(400):
        row = copy.deepcopy(wild.choice(some))
        for _ in range(wild.randint(1, 3)):
            section = row[wild.choice(("model", "layout", "hardware", "measured"))]
            section[wild.choice(list(section))] = wild.choice(values)
        record = check_row(row, 0).values
        assert "skipped" in record or record["predicted_s"] > 0


def test_analytic_rows_are_not_judged() -> None:
    row = next(r for r in rows() if r["set"] == "korthikanti_fig1_analytic")
    assert "not measured" in check_row(row, 0).skipped


def test_validate_prints_sets_and_writes_a_record_a_row(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = call("validate", "--rows", str(ROWS), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "korthikanti_table5" in done.output
    assert "out of memory when measured" in done.output
    records = json.loads(out.read_text())
    assert [r["id"] for r in records] == [r["id"] for r in rows()]
    for record in records:
        assert "skipped" in record or record["predicted_s"] > 0
    first = records[0]
    assert first["error_pct"] == pytest.approx(
        100 * (first["predicted_tflops_per_gpu"] / first["measured"]["tflops_per_gpu"] - 1)
    )


def test_calibration_stays_in_bounds_helps_and_takes_few_rows(tmp_path: Path) -> None:
    every = [r for r in rows() if r["set"] == "vtrain_single"]
    chosen = every[::5][:12]
    factors = calibrate(chosen)
    machine = changed(factors)(read_row(every[0]).job.machine)
    for name, (low, high) in BOUNDS.items():
        value: Any = machine
        for part in name.split("."):
            value = getattr(value, part)
        assert low <= value <= high

    def error(change: Any) -> float:
        found = [abs(c.time_error) for c in check_rows(chosen, change) if c.time_error is not None]
        return sum(found) / len(found)

    assert error(changed(factors)) < error(None)
    with pytest.raises(UsageError, match="more than the 15"):
        calibrate(every[:16])
    few = tmp_path / "few.json"
    few.write_text(json.dumps(chosen))
    done = call("validate", "--rows", str(ROWS), "--calibrate", str(few))
    assert done.exit_code == 0, done.output
    assert f"fitted on {len(chosen)} rows" in done.output


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"rows": 3}'])
def test_a_file_without_rows_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="--rows"):
        load_rows(path)
    with pytest.raises(UsageError, match="cannot read"):
        load_rows(tmp_path / "nothing.json")


def test_best_layouts_with_reasons() -> None:
    done = call(
        "1.3b", "--machine", "h200", "--batch", "64", "--top", "3", "--why", "--tokens", "1e11"
    )
    assert done.exit_code == 0, done.output
    assert "MFU" in done.output
    assert "matrix products" in done.output
    assert "days" in done.output
    assert "40 GB more memory" in done.output


def test_explain_says_why_it_does_not_fit() -> None:
    done = call(
        "llama3-70b",
        "--machine",
        "perlmutter",
        "-N",
        "2",
        "--batch",
        "8",
        "--explain",
        "dp=8,zero=1",
    )
    assert done.exit_code == 0, done.output
    assert "does not fit" in done.output
    assert "weights" in done.output


def test_scale_what_if_and_writing(tmp_path: Path) -> None:
    curve = call("1.3b", "--machine", "h200", "--batch", "64", "--scale", "1..4")
    assert "weak scaling" in curve.output
    assert "strong scaling" in curve.output
    recipe = tmp_path / "mine.yaml"
    recipe.write_text((ROOT / "ridgeline" / "recipes" / "llama-text.yaml").read_text())
    args = (
        str(recipe),
        "--machine",
        "cpu-node",
        "-N",
        "2",
        "--what-if",
        "device.memory_bytes=64e9",
    )
    done = call(*args, "--write", str(recipe))
    assert done.exit_code == 0, done.output
    assert recipe.read_text().splitlines()[-1].startswith("layout: dp=")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nosuch", "--machine", "h200"], "unknown model"),
        (["1.3b", "--machine", "nosuch"], "unknown machine"),
        (["1.3b", "--machine", "h200", "--by", "luck"], "none of time"),
        (["1.3b", "--machine", "h200", "--what-if", "inter.speed=1"], "changes nothing"),
        (["1.3b", "--machine", "h200", "--scale", "4"], "no range"),
        (["1.3b", "--machine", "h200", "--explain", "dp=8,zero=1,compress=bf16"], "do not compose"),
        (["llama3-405b", "--machine", "perlmutter", "--batch", "4"], "no layout"),
        (["resnet50-synthetic", "--machine", "h200", "--seq", "9"], "planned from a trace"),
    ],
)
def test_refusals(args: list[str], words: str) -> None:
    done = call(*args)
    assert done.exit_code != 0
    assert words in str(done.exception)


def test_measured_rates_make_a_machine(tmp_path: Path) -> None:
    machine = load_measured(RUNS)
    assert 0.7 < machine.device.gemm_efficiency < 0.95
    assert 0.8 < machine.device.memory_efficiency < 0.95
    done = call("1.3b", "--machine", str(RUNS), "--batch", "64", "--top", "1")
    assert done.exit_code == 0, done.output
    wrong = tmp_path / "m.json"
    wrong.write_text("{}")
    with pytest.raises(UsageError, match="no measured rates"):
        load_measured(wrong)


def test_pictures_are_what_the_planner_draws() -> None:
    import runpy

    drawn = runpy.run_path(str(ROOT / "docs" / "plan_pictures.py"))
    for name, draw in drawn["PICTURES"].items():
        kept = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
        assert draw() == kept, "run `python docs/plan_pictures.py` and commit"
