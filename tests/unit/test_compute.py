"""`ridgeline machine compute`: rates are real, the file keeps them, odd shapes are named."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.doctor.shapes import (
    Used,
    describe_swept,
    find_cliffs,
    product_of,
    sweep_model,
    watch_shapes,
)
from ridgeline.errors import UsageError
from ridgeline.machine.compute import AMOUNTS, Shape, measure_compute
from ridgeline.machine.record import add_compute, read_compute, read_machine
from ridgeline.machine.roofline import (
    ComputeFacts,
    Mark,
    Product,
    compute_from_dict,
    draw_roofline,
)

FACTS = ComputeFacts(
    host="node1",
    device_kind="cuda",
    device_name="Some GPU",
    time=1.0,
    num_threads=4,
    peak_flops={"fp32": 60e12, "bf16": 800e12},
    products=(Product("matrix", "bf16", (4096, 4096, 4096), 1.4e11, 1e8, 1.8e-4),),
    copy_bytes_per_s=4e12,
    triad_bytes_per_s=3.9e12,
)


def test_the_roof_is_memory_first_and_arithmetic_after_the_ridge() -> None:
    assert FACTS.ridge("bf16") == pytest.approx(200)
    assert FACTS.attainable("bf16", 10) == pytest.approx(40e12)
    assert FACTS.attainable("bf16", 1000) == pytest.approx(800e12)
    assert FACTS.attainable("fp8", 10) is None


def test_facts_survive_json_and_newer_keys() -> None:
    values = json.loads(json.dumps(FACTS.to_dict()))
    assert compute_from_dict({**values, "newer": 1}) == FACTS


def test_machine_json_keeps_what_others_wrote_and_one_row_a_device(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"storage": [], "links": {"a": 1}}')
    add_compute(path, FACTS)
    add_compute(path, compute_from_dict({**FACTS.to_dict(), "time": 2.0}))
    add_compute(path, compute_from_dict({**FACTS.to_dict(), "host": "node2"}))
    assert read_machine(path)["links"] == {"a": 1}
    assert [row["time"] for row in read_machine(path)["compute"]] == [2.0, 1.0]
    found = read_compute(path, "node1", "cuda", "Some GPU")
    assert found is not None
    assert found.time == 2.0
    assert read_compute(path, "node1", "cuda", "Another") is None


def test_a_machine_json_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"compute": 3}')
    with pytest.raises(UsageError, match="another kind"):
        read_machine(path)


def test_the_picture_is_a_drawing_with_every_roof_and_mark() -> None:
    text = draw_roofline(FACTS, [Mark("matrix", 300.0, 4e14)])
    ElementTree.fromstring(text)
    for word in ("bf16 800 TFLOP/s", "fp32 60 TFLOP/s", ">matrix<", "FLOPs a byte"):
        assert word in text
    ElementTree.fromstring(draw_roofline(compute_from_dict({**FACTS.to_dict(), "peak_flops": {}})))


def test_this_cpu_is_measured() -> None:
    facts = measure_compute(torch.device("cpu"), quick=True)
    assert {"fp32", "fp64"} <= set(facts.peak_flops)
    assert facts.peak_flops["fp32"] > 1e8
    assert facts.memory_bytes_per_s
    assert facts.memory_bytes_per_s > 1e8
    assert facts.launch_s
    assert 1e-8 < facts.launch_s < 1e-3
    kinds = {p.kind for p in facts.products}
    assert kinds == {"matrix", "convolution"}
    assert any("fp8" in note for note in facts.notes)


def test_a_case_that_takes_too_long_is_left_out_and_said() -> None:
    from dataclasses import replace

    from ridgeline.machine.compute import measure_products

    amounts = replace(AMOUNTS["cpu", True], longest_s=0.0)
    products, notes = measure_products(torch.device("cpu"), amounts, ["fp32"])
    assert products == []
    assert "fp32 was not measured" in notes[0]


def test_flops_of_shapes() -> None:
    assert Shape("matrix", (2, 3, 4)).flops == 48
    assert Shape("batched", (5, 2, 3, 4)).flops == 240
    assert Shape("convolution", (2, 3, 8, 4, 3)).flops == 2 * 2 * 4 * 64 * 3 * 9


def test_products_are_read_from_operands() -> None:
    assert product_of("aten::mm", [[2, 3], [3, 5]]) == ("matrix", (2, 5, 3))
    assert product_of("aten::addmm", [[5], [2, 3], [3, 5]]) == ("matrix", (2, 5, 3))
    assert product_of("aten::bmm", [[7, 2, 3], [7, 3, 5]]) == ("batched", (7, 2, 5, 3))
    assert product_of("aten::add", [[2, 3], [3, 5]]) is None


def test_shapes_of_a_model_name_their_parameters() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(24, 50), nn.ReLU(), nn.Linear(50, 7))
        x = torch.zeros(16, 24)
    used = watch_shapes(model, lambda: model(x).sum())
    found = {u.dims: u for u in used}
    assert found[16, 50, 24].where == ("*.weight",)
    assert found[16, 7, 50].count == 1  # forward
    assert (16, 50, 7) in found  # gradient of the input
    assert sum(u.count for u in used) == 5  # no gradient of the model's own input


CONVOLUTIONS = (
    nn.Conv2d(3, 10, 3, stride=2, padding=1, bias=False),
    nn.Conv2d(10, 10, 3, groups=5, dilation=2, padding="same", bias=False),
    nn.ConvTranspose2d(10, 6, 2, stride=2, bias=False),
)


def test_convolutions_of_a_model_are_its_shapes_too() -> None:
    model = nn.Sequential(*CONVOLUTIONS)
    x = torch.zeros(2, 3, 16, 16)
    with FlopCounterMode(display=False) as counter:
        model(x)
    used = watch_shapes(model, lambda: model(x).sum())
    forward = [u for u in used if u.kind == "convolution"]
    assert sum(u.flops for u in forward) == counter.get_total_flops()
    assert [(u.dims, u.where) for u in used if u.dims[1] == 3] == [
        ((2, 3, 16, 16, 10, 3, 3), ("*.weight",)),
        ((2, 3, 16, 16, 10, 3, 3), ("*.weight",)),
    ]
    first, *others = sorted(
        (u for u in used if u.kind == "convolution backward"), key=lambda u: u.dims[1]
    )
    # Nobody asks for the gradient of the model's own input.
    assert first.flops == next(u.flops for u in forward if u.dims == first.dims)
    assert all(u.flops == 2 * f.flops for u in others for f in forward if f.dims == u.dims)


def test_channels_that_are_odd_are_padded_and_timed() -> None:
    model = nn.Sequential(*CONVOLUTIONS)
    x = torch.randn(2, 3, 16, 16)
    used = watch_shapes(model, lambda: model(x).sum())
    rows = {
        (r.used.kind, r.used.dims[1], r.used.dims[-3]): r
        for r in sweep_model(used, torch.device("cpu"), "fp32", repeats=2)
    }
    assert len(rows) == len(used) == 6
    for kind in ("convolution", "convolution backward"):
        assert [c.padded for c in rows[kind, 3, 10].cliffs] == [4, 12]
        assert rows[kind, 3, 10].padded_dims == (2, 4, 16, 16, 12, 3, 3)
        assert rows[kind, 10, 6].padded_dims == (2, 12, 8, 8, 8, 2, 2)
        assert rows[kind, 10, 6].padded_s
        assert rows[kind, 10, 10].cliffs == ()  # in groups
    text = "\n".join(describe_swept(list(rows.values()), None))
    assert "convolution 2x3x16x16x10x3x3 (1 times)" in text
    assert "cliff: 3 channels: no multiple of 4, as fp32 wants" in text
    odd_ones = sweep_model(used, torch.device("cpu"), "fp32", most=0, repeats=2)
    assert len(odd_ones) == 4  # also where they are small
    # A CPU is too slow for some of a model's: what is odd about them is said all the same.
    left_out = [(u, find_cliffs(u, "fp32")) for u in used]
    text = "\n".join(describe_swept([], None, left_out))
    assert "convolution 2x3x16x16x10x3x3 (1 times): not timed" in text
    assert "6 of 6 shapes were not timed" in text
    assert "no dimension of this model is odd" not in text
    assert "no dimension of this model is odd" in describe_swept([], None, [(used[0], ())])[-1]
    # There are none in fp8; they stay in bf16 beside it.
    in_bf16 = sweep_model(used, torch.device("cpu"), "fp8", repeats=2)
    assert len(in_bf16) == 6
    assert {c.padded for row in in_bf16 for c in row.cliffs} == {8, 16}


def test_cliffs_say_which_dimension_and_why() -> None:
    (cliff,) = find_cliffs(Used("matrix", (8192, 50257, 768), 1), "bf16", vocabulary=50257)
    assert (cliff.dim, cliff.padded) == ("n", 50304)
    assert "vocabulary 50257 is no multiple of 8" in cliff.reason
    assert not find_cliffs(Used("matrix", (8192, 50304, 768), 1), "bf16")
    (cliff,) = find_cliffs(Used("batched", (96, 1024, 1024, 48), 1), "bf16")
    assert (cliff.dim, cliff.padded) == ("k", 64)
    assert find_cliffs(Used("matrix", (64, 72, 64), 1), "fp8")[0].padded == 80


def test_a_padded_product_is_measured_beside_the_odd_one() -> None:
    rows = sweep_model([Used("matrix", (64, 101, 64), 3)], torch.device("cpu"), "fp32", repeats=3)
    assert rows[0].padded_dims == (64, 104, 64)
    assert rows[0].padded_s
    assert rows[0].flops_per_s > 0


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    out, picture = tmp_path / "machine.json", tmp_path / "roofline.svg"
    args = ["machine", "compute", "--device", "cpu", "--quick", "--model", "llama-text"]
    args += ["model.args.vocab=257", "--out", str(out), "--picture", str(picture), "--json"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["model"]
    assert any("vocabulary 257" in c["reason"] for row in rows for c in row["cliffs"])
    assert read_machine(out)["compute"][0]["device_kind"] == "cpu"
    ElementTree.fromstring(picture.read_text())


def test_slips_are_one_sentence(tmp_path: Path) -> None:
    for args, word in (
        (["--device", "tpu"], "not one of cuda, cpu"),
        (["train.lr=1"], "--model"),
        (["--out", str(tmp_path)], "is a directory"),
    ):
        done = CliRunner().invoke(app, ["machine", "compute", *args])
        assert isinstance(done.exception, UsageError)
        assert word in str(done.exception)
