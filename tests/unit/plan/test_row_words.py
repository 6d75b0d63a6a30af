"""What rows say in other words: misspelt fields, adapters, and what a fit tells of itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.plan.rows import Unreadable, read_row

ROW: dict[str, Any] = {
    "id": "first", "set": "mine", "source": {},
    "hardware": {"gpu": "A100-SXM4-80GB", "gpus_per_node": 8},
    "model": {"arch": "gpt", "layers": 24, "hidden": 2304, "heads": 24, "ffn": 9216, "seq": 2048,
              "vocab": 51200},
    "layout": {"gpus": 32, "dp": 32, "tp": 1, "pp": 1, "microbatch": 16, "global_batch": 512,
               "recompute": "full", "precision": "fp16", "framework": "Megatron-DeepSpeed"},
    "measured": {"iter_s": 3.5},
}  # fmt: skip


def changed(section: str, **fields: Any) -> dict[str, Any]:
    row = copy.deepcopy(ROW)
    (row[section] if section else row).update(fields)
    return row


def call(tmp_path: Path, rows: list[dict[str, Any]], *more: str) -> Any:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    return CliRunner().invoke(app, ["plan", "validate", "--rows", str(path), *more])


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("layout", {"peft": "lora"}),
        ("layout", {"peft": {"type": "lora", "r": 16}}),
        ("layout", {"lora": True}),
        ("layout", {"lora_rank": 16}),
        ("model", {"finetune": "LoRA"}),
        ("source", {"task": "LoRA Performance"}),
    ],
)
def test_adapters_in_whatever_words(section: str, fields: dict[str, Any]) -> None:
    assert read_row(changed(section, **fields)).job.model.frozen


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("layout", {"peft": "none"}),
        ("layout", {"lora": False}),
        ("source", {"task": "SFT, no LoRA"}),
    ],
)
def test_no_adapters_are_none(section: str, fields: dict[str, Any]) -> None:
    assert not read_row(changed(section, **fields)).job.model.frozen


def test_other_adapters_are_not_taken_for_training() -> None:
    with pytest.raises(Unreadable, match="ia3 is not modelled; LoRA is"):
        read_row(changed("layout", peft="ia3"))


def test_a_version_behind_this_librarys_name_is_no_other_program() -> None:
    for name in ("ridgeline", "Ridgeline 0.1"):
        assert read_row(changed("layout", framework=name)).job.software.name == "ridgeline"


def test_fields_that_are_nearly_known_are_told(tmp_path: Path) -> None:
    wrong = changed("layout", zer0=3)
    wrong["measured"] = {"iter_sec": 3.5}
    done = call(tmp_path, [wrong])
    assert done.exit_code == 0
    assert "layout.zer0, did you mean zero?" in done.output
    assert "measured.iter_sec, did you mean iter_s?" in done.output
    # Somebody's own fields are left alone, and so are other common names.
    fine = changed("layout", queue="boost", my_note="x", micro_batch_size=16)
    assert "not known" not in call(tmp_path, [fine]).output


def test_records_name_the_machine_and_skipped_rows_are_named(tmp_path: Path) -> None:
    odd = {**changed("layout", microbatch=3), "id": "odd"}
    out = tmp_path / "out.json"
    done = call(tmp_path, [ROW, odd], "--out", str(out))
    assert "no multiple of dp=32 times microbatch=3): odd" in done.output
    assert [record.get("machine") for record in json.loads(out.read_text())] == ["selene", None]


def test_a_fit_says_what_it_did_and_need_not_leave_rows(tmp_path: Path) -> None:
    rows = [
        {**changed("layout", microbatch=size, global_batch=32 * size), "id": f"run-{size}",
         "measured": {"iter_s": 0.25 * size}}
        for size in (4, 8, 16)
    ]  # fmt: skip
    machine = tmp_path / "mine.yaml"
    path = tmp_path / "rows.json"
    done = call(tmp_path, rows, "--calibrate", str(path), "--write-machine", str(machine))
    assert done.exit_code == 0, done.output
    assert f"{machine} written" in done.output
    assert "was used for fitting" in done.output
    words = next(
        line for line in done.output.splitlines() if line.startswith("mean error of these")
    )
    shipped, fitted = (float(part.rstrip("%")) for part in words.split() if part.endswith("%"))
    assert fitted < shipped
    assert "recomputed 1" not in done.output


def test_rows_of_two_machines_are_refused_before_they_are_fitted(tmp_path: Path) -> None:
    other = {**changed("hardware", gpus_per_node=4), "id": "other"}
    path, machine = tmp_path / "rows.json", tmp_path / "mine.yaml"
    done = call(tmp_path, [ROW, other], "--calibrate", str(path), "--write-machine", str(machine))
    assert "8 devices a node" in str(done.exception)
    assert "4 devices a node" in str(done.exception)
    assert "fitted" not in done.output
    assert not machine.exists()
