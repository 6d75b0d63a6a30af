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
from ridgeline.errors import RunError, UsageError
from ridgeline.plan.calibrate import FACTS, PARAMETERS
from ridgeline.plan.known import find_model
from ridgeline.plan.machine import load_machine, machine_to_yaml
from ridgeline.plan.measured import load_measured
from ridgeline.plan.predict import predict
from ridgeline.plan.rows import Unreadable, load_rows, read_row
from ridgeline.plan.search import search
from ridgeline.plan.software import RIDGELINE, own_program
from ridgeline.plan.validate import calibrate, changed, check_row, check_rows, choose_rows

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
        ("model", "arch", "moe", "number of experts is not stated"),
        ("model", "arch", "t5", "not modelled"),
        ("model", "layers", None, "sizes are not stated"),
        ("hardware", "gpu", "TPU v4", "no profile"),
        ("layout", "ep", 8, "states none"),
        ("layout", "precision", "posit", "not modelled"),
        ("model", "layers", 10**7, "more than"),
        ("layout", "pp", 7, "do not divide"),
        ("layout", "microbatch", None, "microbatch is not stated"),
        ("layout", "precision", "NVFP4", "not modelled"),
        ("layout", "tp", "many", "missing or is no number"),
        ("layout", "args", 3, "args is 3, no section"),
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


def test_other_names_and_missing_fields_are_read() -> None:
    row = copy.deepcopy(next(r for r in rows() if r["id"] == "megatron_sc21_table1-0008"))
    plain = read_row(row)
    model, layout = row["model"], row["layout"]
    for section, ours, theirs in (
        (model, "layers", "num_layers"), (model, "hidden", "hidden_size"), (model, "seq", "seq_len"),
        (layout, "microbatch", "micro_batch_size"), (layout, "precision", "dtype"),
    ):  # fmt: skip
        section[theirs] = section.pop(ours)
    model["arch"], layout["dtype"] = "gpt3", "float16"
    row["notes"], model["colour"], layout["nothing"] = {"a": [1]}, "blue", None
    del layout["gpus"], row["hardware"]["notes"], row["set"]
    read = read_row(row)
    assert (read.job, read.set, read.guessed) == (plain.job, "", "")


@pytest.mark.parametrize(
    ("framework", "layout", "software"),
    [
        ("NeMo 2.0", {}, "megatron-core"),
        ("PyTorch FSDP", {"zero": 3}, "fsdp"),
        ("DeepSpeed", {"zero": 1}, "megatron-deepspeed"),
        ("", {"zero": 3, "dp": 2520, "tp": 1, "pp": 1, "vp": 1, "num_microbatches": 1}, "fsdp"),
        ("something else", {}, "megatron-2022"),
    ],
)
def test_unknown_software_is_guessed_and_the_guess_said(
    framework: str, layout: dict[str, Any], software: str
) -> None:
    row = copy.deepcopy(next(r for r in rows() if r["id"] == "megatron_sc21_table1-0008"))
    row["source"], row["set"] = {"paper": "another one"}, "mine"
    row["layout"] = {**row["layout"], "framework": framework, **layout}
    read = read_row(row)
    assert read.job.software.name == software
    assert software in read.guessed
    if layout.get("zero") != 3:  # the others still state the layout's sizes
        assert check_row(row, 0).values["guessed"] == read.guessed


def test_guesses_are_printed(tmp_path: Path) -> None:
    row = copy.deepcopy(rows()[0])
    row["source"], row["set"] = {}, "mine"
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    done = call("validate", "--rows", str(path))
    assert done.exit_code == 0, done.output
    assert "software or devices that are not known" in done.output
    assert "mine: 1 (taken as" in done.output


@pytest.mark.parametrize(
    ("gpu", "name", "intra"),
    [
        ("NVIDIA H200 141GB", "h200", None),
        ("A800-SXM4-80GB", "selene", 200e9),
        ("B200", "gb200", None),
    ],
)
def test_machines_are_found_by_the_device(gpu: str, name: str, intra: float | None) -> None:
    row = copy.deepcopy(rows()[0])
    row["hardware"] = {"gpu": gpu}
    machine = read_row(row).job.machine
    assert machine.name == name
    if intra:
        assert machine.intra.bandwidth == intra


def test_measures_in_other_units() -> None:
    row = copy.deepcopy(rows()[0])
    row["measured"] = {"iter_ms": 3528}
    assert read_row(row).measured.seconds == pytest.approx(3.528)
    row["measured"] = {"tokens_per_s": 3200.0}
    assert read_row(row).measured.tokens_per_s == pytest.approx(100.0)


def _with_experts() -> dict[str, Any]:
    return {
        "id": "experts", "set": "mine", "source": {"repo": "NVIDIA/Megatron-LM tests, dgx_a100"},
        "hardware": {"gpu": "A100", "gpus_per_node": 8},
        "model": {"name": "moe", "arch": "moe", "layers": 12, "hidden": 512, "heads": 8, "seq": 1024},
        "layout": {
            "gpus": 8, "tp": 2, "pp": 1, "ep": 2, "sp": True, "microbatch": 4, "global_batch": 32,
            "precision": "bf16",
            "args": {
                "--num-experts": 8, "--moe-router-topk": 2, "--bf16": True, "--seq-length": 1024,
                "--disable-bias-linear": True, "--attention-backend": "unfused",
            },
        },
        "measured": {"mem_max_allocated_bytes": 3.85e9, "mem_kind": "torch allocator (last rank)"},
    }  # fmt: skip


def test_experts_are_spread_over_their_ranks() -> None:
    """As measured by Megatron-LM's test of a top-2 router with 8 experts on two ranks each."""
    row = _with_experts()
    job = read_row(row).job
    assert (job.model.experts, job.model.top_k, job.ep, job.expert_copies) == (8, 2, 2, 2)
    expert = 2 * 512 * 2048
    assert job.model.expert_parameters(job.ep, job.tp) == 4 * expert / 2
    assert abs(check_row(row, 0).memory_error or 1.0) < 0.05

    def memory(**changes: Any) -> float:
        from ridgeline.plan.memory import predict_memory

        return predict_memory(job.replace(**changes)).allocated

    assert memory(ep=4) < memory() < memory(ep=1)
    assert memory(zero=1) < memory()
    assert check_row(row, 0).values["predicted_s"] > 0
    more = job.replace(model=job.model.__class__(**{**vars(job.model), "top_k": 4}))
    from ridgeline.plan.predict import predict

    assert predict(more).seconds > predict(job).seconds
    assert predict(more).memory.activations > predict(job).memory.activations


def test_wild_rows_never_raise() -> None:
    wild = random.Random(3)
    values = (None, 0, 1, 3, 8, 64, -1, "x", True, [], {}, 0.5)
    some = [*rows(), *[_with_experts()] * 100]
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
    assert set(factors) <= {*PARAMETERS, *FACTS}
    job = changed(factors)(read_row(every[0]).job)
    for name, parameter in PARAMETERS.items():
        value: Any = job if name.startswith("software.") else job.machine
        for part in name.split("."):
            value = getattr(value, part)
        assert value == 0 or parameter.low <= value <= parameter.high, name

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


def test_the_runs_worth_measuring_are_chosen_without_a_look_at_their_times(tmp_path: Path) -> None:
    every = [r for r in rows() if r["set"] == "vtrain_multi"]
    path, out = tmp_path / "runs.json", tmp_path / "chosen.json"
    wrong = [{**row, "measured": {"iter_s": 1.0 + index}} for index, row in enumerate(every)]
    path.write_text(json.dumps(wrong))
    done = call("choose", "--rows", str(path), "-n", "5", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert f"5 of {len(every)} runs" in done.output
    ids = [row["id"] for row in json.loads(out.read_text())]
    assert len(set(ids)) == 5
    assert ids == [row["id"] for row in choose_rows(every, 5)[0]]
    assert ids[:3] == [row["id"] for row in choose_rows(every, 3)[0]]


def test_chosen_runs_lead_to_predictions_of_the_others(tmp_path: Path) -> None:
    """Rows without names and without times: choose, measure those, and have the rest predicted."""
    every = [{**r} for r in rows() if r["set"] == "vtrain_multi"][:12]
    times = {f"row-{index}": row.pop("measured") for index, row in enumerate(every)}
    for row in every:
        del row["id"]
    path, chosen, out = (tmp_path / name for name in ("runs.json", "chosen.json", "out.json"))
    path.write_text(json.dumps(every))
    done = call("choose", "--rows", str(path), "-n", "4", "--out", str(chosen))
    assert done.exit_code == 0, done.output
    picked = json.loads(chosen.read_text())
    assert all(f"  {row['id']}\n" in done.output for row in picked)
    chosen.write_text(json.dumps([{**row, "measured": times[row["id"]]} for row in picked]))
    done = call(
        "validate", "--rows", str(path), "--calibrate", str(chosen), "--out", str(out)
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "predicted, and not measured:\n  vtrain_multi: 8" in done.output
    records = {record["id"]: record for record in json.loads(out.read_text())}
    assert len(records) == 12
    for name, record in records.items():
        assert record["predicted_s"] == pytest.approx(times[name]["iter_s"], rel=0.6)
        assert record["error_pct"] is None


def test_a_fitted_machine_is_a_profile_to_plan_with(tmp_path: Path) -> None:
    few, path = tmp_path / "few.json", tmp_path / "mine.yaml"
    chosen = [r for r in rows() if r["set"] == "vtrain_multi"][:4]
    few.write_text(json.dumps(chosen))
    given = ("validate", "--rows", str(ROWS), "--write-machine", str(path))
    done = call(*given, "--calibrate", str(few))
    assert done.exit_code == 0, done.output
    machine = load_machine(str(path))
    fitted = changed(calibrate(chosen))(read_row(chosen[0]).job).machine
    assert machine.name == f"{fitted.name}-fitted"
    assert machine.replace(name=fitted.name, source=fitted.source, programs={}) == fitted
    shipped = read_row(chosen[0]).job.machine
    assert machine.device.gemm_efficiency != shipped.device.gemm_efficiency
    done = call("1.3b", "--machine", str(path), "--batch", "64", "--top", "1")
    assert done.exit_code == 0, done.output
    # Of another program than the one that is planned.
    assert list(machine.programs) == ["megatron-deepspeed"]
    assert "facts of megatron-deepspeed in" in done.output
    assert "are not used: plans are of ridgeline" in done.output
    assert own_program(machine) == RIDGELINE
    assert isinstance(call(*given).exception, UsageError)
    mixed = [*chosen, next(r for r in rows() if r["set"] == "megatron_sc21_table1")]
    few.write_text(json.dumps(mixed))
    assert "are of 2 machines" in str(call(*given, "--calibrate", str(few)).exception)


def test_facts_of_this_program_go_from_a_fit_into_a_plan(tmp_path: Path) -> None:
    """An update that moves half as many bytes again as shipped: fitted, kept, and planned with."""
    few, path = tmp_path / "few.json", tmp_path / "mine.yaml"
    slow = changed({"software.optimizer_bytes_moved": 1.5})
    given = [copy.deepcopy(r) for r in rows() if r["set"] == "vtrain_multi"][:8]
    for samples, row in enumerate(given, 1):
        row["layout"].update(
            framework="Ridgeline", gpus=1, dp=1, tp=1, pp=1, zero=0, microbatch=samples, precision="bf16",
            global_batch=samples, num_microbatches=1, recompute="none",
        )  # fmt: skip
        row["model"].update(layers=4, hidden=4096, heads=32, ffn=16384, seq=64 * samples)
        job = read_row(row).job
        assert job.software == RIDGELINE
        row["measured"] = {"iter_s": predict(slow(job)).seconds}
    few.write_text(json.dumps(given))
    done = call(
        "validate", "--rows", str(ROWS), "--calibrate", str(few), "--write-machine", str(path)
    )
    assert done.exit_code == 0, done.output
    machine = load_machine(str(path))
    moved = machine.programs["ridgeline"]["optimizer_bytes_moved"]
    assert moved > 1.1 * RIDGELINE.optimizer_bytes_moved
    explained = ("1.3b", "--batch", "64", "--explain", "dp=8", "--machine")
    done = call(*explained, str(path))
    assert done.exit_code == 0, done.output
    assert f"fitted facts of ridgeline in {machine.name} are used: " in done.output
    assert f"optimizer_bytes_moved {moved:.4g}" in done.output
    without = machine.replace(programs={})
    (tmp_path / "without.yaml").write_text(machine_to_yaml(without, ""))
    plain = call(*explained, str(tmp_path / "without.yaml"))
    assert "fitted facts" not in plain.output
    sizes = find_model("1.3b")
    found, less = (search(sizes, m, 8, 64, top=1).best[0].seconds for m in (machine, without))
    assert found > less
    wrong = machine.replace(programs={"ridgeline": {"colour": 1.0}})
    with pytest.raises(UsageError, match=r"programs\.ridgeline .*colour.*leave it out"):
        own_program(wrong)


def test_runs_that_would_not_fit_are_not_chosen() -> None:
    every = [r for r in rows() if r["set"] == "vtrain_multi"][:6]
    large = copy.deepcopy(every[0])
    large.update(id="large", measured={})
    large["model"].update(layers=960)
    wild = copy.deepcopy(every[0])
    wild.update(id="wild")
    wild["layout"].update(gpus=10**30, dp=10**30, global_batch=10**31)
    chosen, skipped = choose_rows([large, wild, *every], 8)
    assert {row["id"] for row in chosen} == {row["id"] for row in every}
    assert len(skipped) == 2
    assert "would not fit" in skipped[0]
    with pytest.raises(UsageError, match="would not fit"):
        choose_rows([large], 3)
    with pytest.raises(UsageError, match="more than the 15"):
        choose_rows(every, 16)


def test_what_cannot_be_chosen_from_is_one_sentence(tmp_path: Path) -> None:
    done = call("choose", "--rows", str(ROWS), "--set", "nobody")
    assert isinstance(done.exception, UsageError)
    assert "of set 'nobody'; its sets are:" in str(done.exception)
    assert "vtrain_multi" in str(done.exception)
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([{"id": "a"}, {"id": "b"}]))
    done = call("choose", "--rows", str(path))
    assert isinstance(done.exception, UsageError)
    assert "none of 2 rows is a run that could be measured: " in str(done.exception)
    few = ("choose", "--rows", str(ROWS), "--set", "vtrain_multi", "-n", "1")
    done = call(*few, "--out", str(tmp_path / "nowhere" / "x"))
    assert isinstance(done.exception, RunError)
    assert "name another file" in str(done.exception)


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
        (["resnet50-synthetic", "--machine", "h200", "--seq", "8"], "planned from a trace"),
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
