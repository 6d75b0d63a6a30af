"""Machines written by hand: what is wrong with one is said with its place, its value and what would be
right; and what a device does not have is not planned with."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.errors import RunError, UsageError
from ridgeline.plan.machine import MACHINES, machine_names

VALUES = yaml.safe_load((MACHINES / "selene.yaml").read_text())


@dataclass
class Done:
    exit_code: int
    output: str


def ridgeline(*words: object) -> Done:
    """As `main` ends it: a sentence, 2 for wrong use and 1 for what failed."""
    found = CliRunner().invoke(app, ["plan", *map(str, words)])
    if isinstance(found.exception, (UsageError, RunError)):
        code = 2 if isinstance(found.exception, UsageError) else 1
        return Done(code, f"{found.output}{found.exception}")
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return Done(found.exit_code, found.output)


def changed(path: Path, place: str, value: Any) -> Path:
    """selene.yaml with one field changed, or removed."""
    values = copy.deepcopy(VALUES)
    inner, *rest = values, *place.split(".")
    for name in rest[:-1]:
        inner = inner[name]
    if value is None:
        del inner[rest[-1]]
    else:
        inner[rest[-1]] = value
    file = path / "mine.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


WRONG = [
    ("device.memory_bytes", "24GB", "'24GB' of device.memory_bytes is no number"),
    ("device.memory_bytes", -1, "-1 of device.memory_bytes is no value"),
    ("device.memory_bandwidth", 0, "0 of device.memory_bandwidth is no value"),
    ("device.gemm_efficiency", 87, "87 of device.gemm_efficiency is a share"),
    ("device.num_sms", 10.5, "10.5 of device.num_sms is no count"),
    ("device.memory_bandwith", 1e12, "did you mean 'memory_bandwidth'?"),
    ("device.kernel_s", None, "device lacks kernel_s"),
    ("device.peak_flops", {"bf16": 1e12}, "device.peak_flops has no fp32"),
    ("device.peak_flops", {"bf61": 1e12, "fp32": 1e12}, "unknown precision 'bf61'"),
    ("device.peak_flops", 1e12, "give rates by precision"),
    ("device", "A100", "device is 'A100', where fields were expected"),
    ("devices_per_node", "two", "'two' of devices_per_node is no number"),
    ("inter", None, "the profile lacks inter"),
    ("inter.efficiency", 1.5, "1.5 of inter.efficiency is a share"),
    ("overlap_cost", 3, "3 of overlap_cost is a share"),
    ("price", 3, "unknown field 'price' in the profile"),
    ("skew", float("nan"), "nan of skew is no value"),
    ("programs", {"x": 3}, "programs.x is 3"),
]


@pytest.mark.parametrize(("place", "value", "said"), WRONG)
def test_a_field_that_cannot_be_is_named(tmp_path: Path, place: str, value: Any, said: str) -> None:
    done = ridgeline("124m", "--machine", changed(tmp_path, place, value), "--batch", 8)
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert "mine.yaml is no machine profile" in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ["", "[]", "word", "{", "\x00"])
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    done = ridgeline("124m", "--machine", tmp_path / "mine.yaml")
    assert done.exit_code == 2, done.output
    assert "mine.yaml" in done.output


def test_a_machine_that_is_not_there() -> None:
    assert "there is no file mine.yaml" in ridgeline("124m", "--machine", "mine.yaml").output
    device = ridgeline("124m", "--machine", "a100").output
    assert "'a100' in --machine is a device" in device
    assert "selene" in device
    assert "did you mean 'selene'" in ridgeline("124m", "--machine", "selen").output
    listed = ridgeline("machines")
    assert listed.exit_code == 0
    assert all(name in listed.output for name in machine_names())


@pytest.mark.parametrize(
    "change", ["device.gemm_efficiency=9", "devices_per_node=2.5", "inter.bandwidth=0", "skew=-1"]
)
def test_what_if_takes_what_a_machine_can_have(change: str) -> None:
    done = ridgeline("124m", "--machine", "h200", "--batch", 8, "--what-if", change)
    assert done.exit_code == 2, done.output
    assert f"{change.partition('=')[0]} in --what-if" in done.output


def test_a_precision_that_the_device_has_not() -> None:
    done = ridgeline("llama3-8b", "--machine", "perlmutter", "--precision", "fp8", "--batch", 64)
    assert done.exit_code == 2
    assert "A100" in done.output
    assert "has no fp8, asked for in --precision; it has fp16, bf16, tf32, fp32" in done.output
    one = ("--machine", "perlmutter", "--batch", 64, "--explain", "dp=4,precision=fp8")
    assert "has no fp8, asked for in --explain" in ridgeline("124m", *one).output
    usual = ridgeline("124m", "--machine", "summit", "--batch", 48, "--top", 1)
    assert usual.exit_code == 0, usual.output
    assert "V100-SXM2-16GB has no bf16: planned in fp16" in usual.output
    assert "precision=fp16" in usual.output
    assert ridgeline("124m", "--machine", "summit", "--precision", "bf16").exit_code == 2


def test_every_with_counts() -> None:
    words = ("124m", "--machine", "h200", "--batch", 8, "--top", 1)
    done = ridgeline(*words, "--with", "compress=bf16", "--with", "compile=true")
    assert done.exit_code == 0, done.output
    assert "compress=bf16" in done.output
    assert "compile=true" in done.output


def test_options_that_would_do_nothing_are_refused() -> None:
    words = ("124m", "--machine", "h200", "--batch", 8)
    for more, said in (
        (("--sample-bytes", 1e9), "h200 does not say"),
        (("--price", 3), "give that with --tokens"),
        (("--scale", "1..2", "--why"), "--why is of one number of nodes"),
        (("--scale", "1..2", "--tokens", 1e9), "--tokens is of one number of nodes"),
    ):
        done = ridgeline(*words, *more)
        assert done.exit_code == 2, done.output
        assert said in done.output
    rate = ("--what-if", "storage_bandwidth=5e9")
    assert ridgeline(*words, "--top", 1, "--sample-bytes", 1e3, *rate).exit_code == 0


def test_a_scale_ends_where_it_was_told_to() -> None:
    lines = ridgeline("124m", "--machine", "h200", "--batch", 48, "--scale", "1..3").output
    assert [line.split()[0] for line in lines.splitlines() if line[:6].strip().isdigit()] == [
        "1", "2", "3", "1", "2", "3",
    ]  # fmt: skip


RECIPE = """
name: mine
model: {name: llama, args: {size: 1m}}
data: {source: text, args: {path: x, seq_len: 128}}
train: {batch: 32, steps: 1}
"""


def test_only_what_fits_and_is_of_that_model_is_written(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    other = ridgeline(
        "llama3-8b", "--batch", 32, "--machine", "perlmutter", "-N", 4, "--explain", "dp=4,tp=4",
        "--write", file,
    )  # fmt: skip
    assert other.exit_code == 2, other.output
    assert "parameters and llama3-8b 8,030,261,248" in other.output
    file.write_text(RECIPE.replace("size: 1m", "size: llama3-8b"))
    before = file.read_text()
    large = ridgeline(file, "--machine", "perlmutter", "--explain", "dp=4", "--write", file)
    assert large.exit_code == 1, large.output
    assert "does not fit, and" in large.output
    assert file.read_text() == before


def test_a_batch_that_devices_cannot_share_is_told() -> None:
    words = ("124m", "--machine", "perlmutter", "-N", 4, "--top", 1, "--batch")
    assert "not shared evenly by 16 devices; 48 or 64 would be" in ridgeline(*words, 63).output
    assert "not shared evenly by 16 devices; 16 would be" in ridgeline(*words, 1).output
    assert "shared evenly" not in ridgeline(*words, 64).output
