"""Rows that are odd are read as they are meant, or refused with the reason; none is misread in silence."""

from __future__ import annotations

import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.errors import RunError, UsageError
from ridgeline.plan.memory import GIB
from ridgeline.plan.possible import MOST_OPERATIONS, played_operations
from ridgeline.plan.predict import predict
from ridgeline.plan.rows import Unreadable, load_rows, read_row
from ridgeline.plan.validate import (
    MOST_FITTED_OPERATIONS,
    check_row,
    choose_rows,
    fit_rows,
    is_fitted,
)
from ridgeline.plan.words import number

ROOT = Path(__file__).resolve().parents[3]
ROWS = ROOT / "tests" / "golden" / "plan" / "rows.json"


def plain(**changes: dict[str, Any]) -> dict[str, Any]:
    """32 devices, dp=32, 16 samples a microbatch, 24 heads; with changes of some sections."""
    found = next(r for r in load_rows(ROWS) if r["id"] == "megatron_sc21_table1-0000")
    row = copy.deepcopy(dict(found))
    for section, values in changes.items():
        row[section].update(values)
    return row


def piped(**layout: Any) -> dict[str, Any]:
    row = plain(layout={"gpus": 8, "dp": 1, "pp": 8, "microbatch": 1, "global_batch": 16})
    row["layout"].update({"num_microbatches": 16, **layout})
    return row


def experts(**layout: Any) -> dict[str, Any]:
    row = plain(model={"arch": "moe", "experts": 8, "top_k": 2})
    row["layout"].update(layout)
    return row


def reason(row: dict[str, Any]) -> str:
    checked = check_row(row, 0)
    assert set(checked.values) == {"id", "skipped"}, checked.values
    return checked.skipped


def call(*args: str) -> Any:
    return CliRunner().invoke(app, ["plan", "validate", *args])


def written(path: Path, rows: Any) -> str:
    path.write_text(json.dumps(rows))
    return str(path)


@pytest.mark.parametrize(
    ("value", "ours"),
    [
        (True, "full"),
        (False, "none"),
        (None, "none"),
        ("activation checkpointing", "full"),
        ("Full, uniform", "full"),
        ("selective (op)", "selective"),
        ("core attention", "selective"),
        ("no recomputation", "none"),
    ],
)
def test_words_for_recompute(value: Any, ours: str) -> None:
    assert read_row(plain(layout={"recompute": value})).job.recompute == ours


@pytest.mark.parametrize(
    "value", ["block", "every second layer", "0.5", 2, 0.5, ["mlp"], "fullest"]
)
def test_other_words_for_recompute_are_refused(value: Any) -> None:
    assert "not known as full, selective or none" in reason(plain(layout={"recompute": value}))


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("layout", {"global_batch": 700, "num_microbatches": None}, "700 is no multiple of dp=32"),
        ("layout", {"global_batch": 8, "num_microbatches": None}, "8 is no multiple"),
        ("layout", {"num_microbatches": 2}, "global_batch=512 contradicts"),
        ("layout", {"num_microbatches": None, "grad_accum": 4}, "and 4 microbatches"),
        ("layout", {"zero": 5}, "none of 0, 1, 2 and 3"),
        ("layout", {"zero": -1}, "none of 0, 1, 2 and 3"),
        ("layout", {"zero": True}, "none of 0, 1, 2 and 3"),
        ("layout", {"sp": "perhaps"}, "neither true nor false"),
        ("layout", {"microbatch": 1.5}, "no whole number"),
        ("layout", {"microbatch": True}, "microbatch is missing or is no number: True"),
        ("layout", {"tp": math.nan}, "no number"),
        ("layout", {"vp": 2}, "vp=2 is of stages"),
        ("layout", {"act_offload": "True"}, "offloaded activations"),
        ("layout", {"tp": -1, "dp": None, "gpus": -32}, "tp is -1"),
        ("model", {"kv_heads": 4800}, "do not divide into kv_heads=4800"),
        ("model", {"heads": 23}, "does not divide into 23 heads"),
        ("model", {"hidden": 10**9, "heads": 10**3}, "more than"),
        ("model", {"layers": "24 or so"}, "layers is missing or is no number"),
        ("hardware", {"inter_GBps_per_gpu": "fast"}, "inter_GBps_per_gpu"),
        ("hardware", {"inter_GBps_per_gpu": math.inf}, "inter_GBps_per_gpu"),
    ],
)
def test_what_contradicts_itself_is_refused(
    section: str, values: dict[str, Any], words: str
) -> None:
    assert words in reason(plain(**{section: values}))


def test_heads_have_to_divide_over_ranks() -> None:
    row = plain(model={"heads": 25, "hidden": 3200}, layout={"tp": 8, "dp": 4, "global_batch": 64})
    assert "25 heads do not divide over tp=8" in reason(row)


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        ({"experts": -8}, {}, "experts is -8"),
        ({"top_k": -2}, {}, "top_k is -2"),
        ({"top_k": 9}, {}, "more than there are experts"),
        ({}, {"ep": 64}, "8 experts do not divide over ep=64"),
        ({"experts": 96}, {"ep": 3}, "ranks of a stage do not divide over ep=3"),
    ],
)
def test_experts_that_cannot_be(model: dict[str, Any], layout: dict[str, Any], words: str) -> None:
    assert "skipped" not in check_row(experts(ep=8), 0).values
    row = experts(**layout)
    row["model"].update(model)
    assert words in reason(row)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"schedule": "gpipe", "vp": 2}, "gpipe with vp=2"),
        ({"schedule": "zero bubble", "vp": 2}, "zerobubble with vp=2"),
        ({"schedule": "interleaved"}, "vp, its chunks a stage, is not stated"),
        ({"schedule": "dualpipe"}, "'dualpipe', which is not modelled"),
    ],
)
def test_schedules_that_are_not_modelled(layout: dict[str, Any], words: str) -> None:
    assert words in reason(piped(**layout))


def test_schedules_by_their_names() -> None:
    for word, vp, ours in (
        ("GPipe", 1, "gpipe"), ("ZB-H1", 1, "zerobubble"), (None, 2, "interleaved"),
        ("interleaved-1f1b", 2, "interleaved"), ("1F1B (non-interleaved)", 1, "1f1b"),
    ):  # fmt: skip
        row = piped(schedule=word, vp=vp)
        assert read_row(row).job.schedule == ours
        assert "predicted_s" in check_row(row, 0).values


def test_schedules_that_would_take_too_long_are_refused_at_once() -> None:
    deep = piped(gpus=1024, pp=1024, global_batch=4096, num_microbatches=4096)
    deep["model"]["layers"] = 1024
    many = piped(schedule="gpipe", gpus=2, pp=2, global_batch=3_000_000, num_microbatches=3_000_000)
    begun = time.monotonic()
    for row in (deep, many):
        assert "operations to play, more than 5e+06" in reason(row)
    assert time.monotonic() - begun < 20.0
    usual = piped(gpus=96, pp=96, global_batch=1024, num_microbatches=1024)
    usual["model"]["layers"] = 96
    operations = played_operations(read_row(usual).job)
    assert MOST_FITTED_OPERATIONS < operations < MOST_OPERATIONS
    assert "predicted_s" in check_row(usual, 0).values
    usual["measured"] = {"iter_s": 100.0}
    fitted = fit_rows([plain(), usual])
    assert len(fitted.rows) == 1
    assert "3e+05 that are fitted on" in fitted.skipped[0][1]


def test_plain_texts_are_sections() -> None:
    row = plain()
    row["hardware"], row["source"] = "A100-SXM4-80GB", "https://arxiv.org/abs/2104.04473, Narayanan"
    read = read_row(row)
    assert (read.job.machine.name, read.job.software.name) == ("selene", "megatron-2021")
    assert read.guessed == ""
    row["source"] = ["a list", "Narayanan"]
    assert read_row(row).job.software.name == "megatron-2021"
    row["kind"] = None
    assert "predicted_s" in check_row(row, 0).values


@pytest.mark.parametrize("name", ["model", "layout", "hardware", "source", "measured"])
def test_sections_that_are_none_are_said_so(name: str) -> None:
    row = plain()
    row[name] = 7
    words = reason(row)
    assert words == f"{name} is 7, no section with fields"


def test_rows_of_nothing_are_refused_without_words_of_python() -> None:
    for row in ({}, {"id": None, "set": None}, {"model": {}, "layout": {}}, {"kind": ["a"]}):
        words = reason(row)
        assert "object" not in words
        assert "Error" not in words


def test_figures_as_text_count() -> None:
    row = plain()
    row["measured"] = {"iter_s": "3.5", "mem_GB": "40"}
    read = read_row(row).measured
    assert (read.seconds, read.memory_bytes, read.ignored) == (3.5, 40 * GIB, "")
    assert check_row(row, 0).time_error is not None


@pytest.mark.parametrize(
    "value", [True, math.inf, -math.inf, math.nan, -1.0, 0, "soon", [1], 10**400]
)
def test_figures_that_are_none_do_not_count_and_are_told(value: Any, tmp_path: Path) -> None:
    row = plain()
    row["measured"] = {"iter_s": value, "mem_GB": value}
    checked = check_row(row, 0)
    assert (checked.time_error, checked.memory_error) == (None, None)
    assert "iter_s is" in checked.values["ignored"]
    assert "mem_GB is" in checked.values["ignored"]
    row["measured"] = {"iter_s": 3.5, "mem_GB": value, "oom": "who knows"}
    checked = check_row(row, 0)
    assert checked.time_error is not None
    assert "oom is 'who knows'" in checked.values["ignored"]
    out = tmp_path / "out.json"
    done = call("--rows", written(tmp_path / "rows.json", [row, plain()]), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "measured figures that do not count:" in done.output
    assert "nan" not in done.output.replace("mem_GB is nan", "")
    json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(name))


def test_the_first_figure_that_counts_is_taken() -> None:
    row = plain()
    row["measured"] = {"iter_s": None, "iter_ms": 3528, "mem_GiB": "much", "mem_GB": 40}
    read = read_row(row).measured
    assert (read.seconds, read.memory_bytes) == (pytest.approx(3.528), 40 * GIB)
    assert read.ignored == "mem_GiB is 'much'"


@pytest.mark.parametrize("seconds", [1e295, 1e-290, 5e-324])
def test_tables_stay_narrow(seconds: float, tmp_path: Path) -> None:
    row = plain()
    row["measured"] = {"iter_s": seconds, "mem_GB": seconds}
    row["set"] = "s" * 400
    other = {**copy.deepcopy(row), "id": "i" * 400}
    done = call("--rows", written(tmp_path / "rows.json", [row, other]))
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) < 400


def test_names_that_no_terminal_shows(tmp_path: Path) -> None:
    row = plain()
    row["id"], row["set"], row["model"]["arch"] = "a\ud800\n", "b\udfff", "c\ud800"
    row["layout"]["precision"] = "d\ud800"
    for arch in ("c\ud800", "gpt"):
        row["model"]["arch"] = arch
        done = call("--rows", written(tmp_path / "rows.json", [row]))
        assert done.exit_code == 0, done.exception
        assert "not modelled" in done.output


def test_devices_by_the_words_of_their_names() -> None:
    for gpu, profile, size in (
        ("A100-40GB", "a100-40g", 40), ("A100-PCIE-40GB", "a100-40g", 40),
        ("A100-SXM-40GB", "a100-40g", 40), ("A100-SXM-64GB", "selene", 64),
        ("V100-SXM2-32GB", "summit", 32), ("V100-SXM2-16GB", "summit", 16), ("H100 NVL 94GB", "h100", 94),
        ("H100 PCIe", "h100", 80), ("8xH100 80 GB", "h100", 80), ("GB300", "gb300", 288),
    ):  # fmt: skip
        machine = read_row(plain(hardware={"gpu": gpu})).job.machine
        assert machine.name == profile, gpu
        assert machine.device.memory_bytes == pytest.approx(size * GIB, rel=0.03), gpu


@pytest.mark.parametrize(
    "gpu",
    ["GH200 96GB", "RTX A1000", "A100X", "A100/H100", "A100-SXM4-80GB MIG 1g.10gb", "A100 0GB"],
)
def test_devices_without_a_profile(gpu: str) -> None:
    assert "has no profile" in reason(plain(hardware={"gpu": gpu}))


def test_devices_that_are_only_like_a_profile_are_told(tmp_path: Path) -> None:
    for gpu, words in (
        ("A100-PCIE-40GB", "'A100-PCIE-40GB' taken as A100-SXM4-40GB"),
        ("H100 NVL", "'H100 NVL' taken as H100-SXM5-80GB"),
        ("V100-SXM2-32GB", "taken as V100-SXM2-16GB with 34e9 bytes"),
        ("B200", "taken as GB200"),
        ("A100", "taken as A100-SXM4-80GB, since its memory is not stated"),
        ("A100 Ultra 80GB", "taken as A100-SXM4-80GB"),
    ):
        row = plain(hardware={"gpu": gpu})
        assert words in check_row(row, 0).values["guessed"]
    done = call("--rows", written(tmp_path / "rows.json", [row]))
    assert "software or devices that are not known:" in done.output
    for gpu in ("A100-SXM4-80GB", "h100_80gb", "NVIDIA H200 141GB", "DGX-GB200", "A800-SXM4-80GB"):
        assert read_row(plain(hardware={"gpu": gpu})).guessed == "", gpu


def test_a_device_that_only_the_source_names_is_told() -> None:
    row = plain(hardware={"gpu": None})
    row["source"] = {"repo": "Megatron tests/golden_values_dgx_a100.json, 700 GB of text"}
    read = read_row(row)
    assert read.job.machine.name == "selene"
    assert "the device that its source names taken as A100-SXM4-80GB" in read.guessed
    row["source"] = {"repo": "Megatron, an A100 beside an H100"}
    assert "no profile" in reason(row)


def test_odd_rows_are_not_fitted_on_and_told(tmp_path: Path) -> None:
    good = [dict(r) for r in load_rows(ROWS) if r["set"] == "vtrain_multi"][:2]
    endless = {**copy.deepcopy(good[0]), "id": "endless", "measured": {"iter_s": math.inf}}
    wide = copy.deepcopy({**good[0], "id": "wide"})
    wide["model"]["hidden"] = 10**200
    analytic = {**good[0], "id": "analytic", "kind": "analytic"}
    timeless = {**good[0], "id": "timeless", "measured": {}}
    stuck = {**piped(schedule="gpipe", vp=2), "id": "stuck"}
    odd = [endless, wide, analytic, timeless, stuck]
    fitted = fit_rows([*odd, *good])
    assert fitted.rows == good
    reasons = dict(fitted.skipped)
    assert "iter_s is inf" in reasons["endless"]
    assert "hidden is" in reasons["wide"]
    assert reasons["analytic"] == "the row is analytic, not measured"
    assert reasons["timeless"] == "it has no time"
    assert "gpipe with vp=2" in reasons["stuck"]
    few = written(tmp_path / "few.json", [*odd, *good])
    machine = tmp_path / "mine.yaml"
    done = call("--rows", str(ROWS), "--calibrate", few, "--write-machine", str(machine))
    assert done.exit_code == 0, done.exception
    assert "factors fitted on 2 rows" in done.output
    assert "not fitted on: analytic (the row is analytic, not measured)" in done.output
    done = call("--rows", str(ROWS), "--calibrate", written(tmp_path / "none.json", odd))
    assert isinstance(done.exception, UsageError)
    assert "no row in --calibrate has a time that can be predicted (endless: " in str(
        done.exception
    )


def test_a_fit_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> dict[str, float]:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setattr("ridgeline.plan.validate.fit", fails)
    with pytest.raises(RunError, match="cannot be fitted together"):
        fit_rows([plain()])


@pytest.mark.parametrize(
    "measured",
    [
        {"iter_s": 5e-324},
        {"iter_s": 1e290},
        {"tokens_per_s_per_gpu": 1e308},
        {"tflops_per_gpu": 5e-324},
    ],
)
def test_times_of_any_size_are_fitted_on_or_told(measured: dict[str, float]) -> None:
    good, far = plain(), {**plain(), "id": "far", "measured": measured}
    fitted = fit_rows([good, far])
    assert len(fitted.rows) + len(fitted.skipped) == 2
    assert good in fitted.rows
    assert all(map(math.isfinite, fitted.values.values()))


def test_only_the_rows_fitted_on_are_left_out() -> None:
    row = plain()
    chosen = [{**copy.deepcopy(row), "measured": {"iter_s": 1.0}}]
    assert is_fitted(row, 0, chosen)
    assert is_fitted({key: row[key] for key in row if key != "set"}, 0, chosen)
    assert not is_fitted({**row, "set": "another"}, 0, chosen)
    assert not is_fitted({**row, "layout": {**row["layout"], "microbatch": 8}}, 0, chosen)
    assert not is_fitted(row, 0, [])


def test_rows_of_another_set_with_the_same_ids_are_judged(tmp_path: Path) -> None:
    mine = [dict(r) for r in load_rows(ROWS) if r["set"] == "vtrain_multi"][:3]
    theirs = [{**row, "set": "theirs"} for row in mine]
    rows = written(tmp_path / "rows.json", [*mine, *theirs])
    done = call("--rows", rows, "--calibrate", written(tmp_path / "few.json", mine))
    assert done.exit_code == 0, done.exception
    assert "theirs  time" in done.output
    assert "vtrain_multi" not in done.output.partition("set ")[2].replace("vtrain_multi-", "")


@pytest.mark.parametrize("option", ["--rows", "--calibrate"])
@pytest.mark.parametrize("text", ["[" * 200_000, "", "[1]"])
def test_a_wrong_file_is_one_sentence_about_its_option(
    option: str, text: str, tmp_path: Path
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    other = [] if option == "--rows" else ["--rows", str(ROWS)]
    done = call(*other, option, str(path))
    assert isinstance(done.exception, UsageError)
    assert f"wrong.json of {option} " in str(done.exception)


def test_deep_fields_do_not_end_the_command(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(600):
        deep = [deep]
    names = ("model", "layout", "hardware", "source", "measured")
    rows = [{**plain(), name: deep} for name in ("id", "set", "kind", "notes", *names)]
    rows += [plain(**{name: {key: deep}}) for name in names for key in plain()[name]]
    out = tmp_path / "out.json"
    done = call("--rows", written(tmp_path / "rows.json", rows), "--out", str(out))
    assert done.exit_code == 0, done.exception
    assert len(json.loads(out.read_text())) == len(rows)


def test_every_field_with_every_oddity_gives_a_number_or_a_reason() -> None:
    odd = (
        None,
        True,
        False,
        0,
        -1,
        3,
        1e300,
        10**400,
        5e-324,
        math.inf,
        math.nan,
        "",
        "x",
        "8",
        [],
        {},
        [[1]],
    )
    for row in (plain(), experts(ep=8), piped()):
        for section in ("model", "layout", "hardware", "measured", "source"):
            for key in row[section]:
                for value in odd:
                    changed = copy.deepcopy(row)
                    changed[section][key] = value
                    record = check_row(changed, 0).values
                    if "skipped" in record:
                        assert "object" not in record["skipped"], (key, value, record)
                        continue
                    assert 0 < record["predicted_s"] < math.inf
                    assert record["error_pct"] is None or math.isfinite(record["error_pct"])


def test_chosen_rows_are_written_as_json(tmp_path: Path) -> None:
    rows = [dict(r) for r in load_rows(ROWS) if r["set"] == "vtrain_multi"][:3]
    rows[0]["notes"] = math.nan
    path, out = written(tmp_path / "rows.json", rows), tmp_path / "out.json"
    done = CliRunner().invoke(app, ["plan", "choose", "--rows", path, "--out", str(out)])
    assert done.exit_code == 0, done.exception
    chosen = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert {row["id"] for row in chosen} == {row["id"] for row in rows}
    assert choose_rows(rows, 3)[1] == []


def test_numbers() -> None:
    assert [number(v) for v in (3, "3.5", " 4 ", 1e3)] == [3.0, 3.5, 4.0, 1000.0]
    assert [number(v) for v in (True, None, "x", math.nan, "inf", [1], 10**400)] == [None] * 7


def test_a_stated_stage_of_zero() -> None:
    for value, stage in (("ZeRO-3", 3), ("stage 2", 2), ("1", 1), (2.0, 2), (None, 0), ("none", 0)):
        assert read_row(plain(layout={"zero": value})).job.zero == stage
    with pytest.raises(Unreadable, match="zero is 'all'"):
        read_row(plain(layout={"zero": "all"}))


def test_flags_as_text() -> None:
    row = plain(layout={"tp": 8, "dp": 4, "global_batch": 64, "sp": "False"})
    assert not read_row(row).job.sp
    row["layout"]["sp"] = "yes"
    job = read_row(row).job
    assert job.sp
    assert predict(job).seconds > 0
