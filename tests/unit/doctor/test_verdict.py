"""Verdicts on recorded measurements: what each limit needs, and what it is called."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.doctor.measured import (
    CONVOLUTION,
    ELEMENTWISE,
    LOSS,
    MATRIX,
    OPTIMIZER,
    ClassTime,
    Measured,
    Memory,
    Missed,
    RankTime,
    Stall,
    measured_from_dict,
)
from ridgeline.doctor.pictures import draw_memory, draw_step, sort_lives, write_pictures
from ridgeline.doctor.show import show_verdict
from ridgeline.doctor.verdict import find_slow_rank, judge, reached_share
from ridgeline.machine.power import Power
from ridgeline.machine.roofline import ComputeFacts, Sustained

GPU = ComputeFacts(
    host="n",
    device_kind="cuda",
    device_name="Some GPU",
    time=0.0,
    num_threads=8,
    peak_flops={"fp32": 50e12, "tf32": 400e12, "bf16": 800e12},
    copy_bytes_per_s=4e12,
    h2d_pinned_bytes_per_s=50e9,
    launch_s=3e-6,
)
BASE = Measured(
    source="recipe x",
    device_kind="cuda",
    device_name="Some GPU",
    step_s=0.1,
    num_steps=20,
    num_profiled=10,
    compute_s=0.095,
    launch_s=0.005,
    classes=(
        ClassTime(MATRIX, 0.08, 100, 0.08 * 700e12, 0.08 * 1e12, "bf16"),
        ClassTime(ELEMENTWISE, 0.01, 200, 0.0, 0.01 * 3e12, "bf16"),
        ClassTime(OPTIMIZER, 0.005, 3),
    ),
    num_launches=303,
    tensor_core_share=0.98,
    memory=Memory(140e9, 60e9, 62e9, 10e9, 10e9, 20e9),
    roofline=GPU,
)


def test_arithmetic_near_the_peak_is_a_fine_verdict() -> None:
    verdict = judge(BASE)
    assert (verdict.limit, verdict.cause, verdict.within) == ("compute", "arithmetic", MATRIX)
    assert reached_share(BASE) == pytest.approx(700 / 800)
    assert verdict.sentence.startswith("compute-bound at 88% of what the device reaches")


def test_a_clock_that_power_holds_down_is_said() -> None:
    power = Power(690.0, 700.0, 1520.0, 1980.0, capped=0.97, hot=0.0, seconds=2.0)
    sustained = {"bf16": Sustained(670e12, 691.0, 1505.0, (8192, 8192, 8192))}
    capped = replace(BASE, power=power, roofline=replace(GPU, sustained=sustained))
    verdict = judge(capped)
    assert "at its power limit (1,520 of 1,980 MHz)" in verdict.sentence
    assert any("690 of 700 W" in line and "69 J a step" in line for line in verdict.evidence)
    assert any("670 TFLOP/s at 691 W; these reach 700 TFLOP/s" in line for line in verdict.evidence)
    assert "power: 690 of 700 W" in show_verdict(capped, verdict, ())
    free = judge(replace(BASE, power=replace(power, capped=0.2)))
    assert "power" not in free.sentence
    assert not any(" W " in line for line in free.evidence)


def test_a_device_that_is_not_cooled_is_the_cause() -> None:
    power = Power(400.0, 700.0, 1100.0, 1980.0, capped=0.0, hot=0.6, seconds=2.0)
    verdict = judge(replace(BASE, power=power))
    assert verdict.cause == "a device that is too hot"
    assert "a device that is too hot" in verdict.sentence
    assert any("temperature holds the clock down for 60%" in line for line in verdict.evidence)


def test_a_step_that_is_mostly_unexplained_is_said_to_be() -> None:
    """A loaded machine: 30 ms of products are seen in a step of 100 ms, and 60 ms are not explained."""
    rows = (ClassTime(MATRIX, 0.03, 100, 0.03 * 700e12, 0.03 * 1e12, "bf16"),)
    m = replace(BASE, classes=rows, compute_s=0.03, launch_s=0.01, other_s=0.06, spread=0.4)
    verdict = judge(m)
    assert verdict.sentence == (
        "60% of the step is not explained by what was measured, more than the 30% that is compute "
        "(arithmetic), the largest part that is"
    )
    assert (verdict.limit, verdict.share, verdict.unexplained) == ("not explained", 0.6, 0.6)
    assert "add up to 40 ms of a step of 100 ms" in verdict.evidence[0]
    assert "spread of the timed steps is 40%" in verdict.evidence[0]
    assert [f.limit for f in verdict.findings[:2]] == ["not explained", "compute"]
    text = show_verdict(m, verdict, [])
    assert text.startswith("60% of the step is not explained")
    assert "compute: 30%, arithmetic (matrix)" in text  # under "also"


def test_what_else_there_is_comes_with_its_line() -> None:
    stall = Stall("train.py:12 (log)", 0.02, 4, "aten::item", "total += loss.item()")
    rows = (ClassTime(MATRIX, 0.07, 100, 0.07 * 640e12, 0.07 * 1e12, "bf16"),)
    m = replace(BASE, classes=rows, compute_s=0.07, host_s=0.02, launch_s=0.01, stalls=(stall,))
    text = show_verdict(m, judge(m), [])
    below = text.partition("also:")[2]
    assert "host: 20%, synchronisation with the device (train.py:12 (log): aten::item" in below
    assert "total += loss.item()" in below
    read = Stall("data.py:7 (load)", 0.015, code="return np.load(path)")
    slow = replace(m, host_s=0.0, stalls=(), data_s=0.02, reading=(read,))
    below = show_verdict(slow, judge(slow), []).partition("also:")[2]
    assert "data: 20%, reading files (data.py:7 (load): return np.load(path))" in below


def test_a_large_unexplained_part_is_said_before_the_cause() -> None:
    rows = (ClassTime(MATRIX, 0.05, 100, 0.05 * 640e12, 0.05 * 1e12, "bf16"),)
    m = replace(BASE, classes=rows, compute_s=0.05, launch_s=0.01, other_s=0.04)
    verdict = judge(m)
    assert verdict.limit == "compute"
    assert verdict.sentence == (
        "40% of the step is not explained by what was measured; the rest is compute-bound at 80% of what "
        "the device reaches: 50% of the step is matrix"
    )
    little = judge(replace(m, other_s=0.02))
    assert little.sentence.startswith("compute-bound")
    assert little.unexplained == pytest.approx(0.2)


def test_arithmetic_of_two_classes_is_not_called_by_one_of_them() -> None:
    """The sentence's share is that of both, and the table has each: 40 and 25 %."""
    rows = (
        ClassTime(CONVOLUTION, 0.04, 50, 0.04 * 640e12, 0.04 * 1e12, "bf16"),
        ClassTime(MATRIX, 0.025, 50, 0.025 * 640e12, 0.025 * 1e12, "bf16"),
    )
    verdict = judge(replace(BASE, classes=rows, compute_s=0.065, launch_s=0.01, other_s=0.0))
    assert verdict.sentence.endswith(
        ": 65% of the step is arithmetic, most of it convolution (40%)"
    )


def test_what_caches_serve_is_not_told_as_more_than_the_device_allows() -> None:
    """Bytes are counted by op: three times the memory's rate is a cache, not a wonder."""
    rate = GPU.memory_bytes_per_s
    assert rate is not None
    rows = (ClassTime(ELEMENTWISE, 0.06, 100, 1e9, 0.06 * 3.3 * rate, "bf16"),)
    verdict = judge(replace(BASE, classes=rows, compute_s=0.06, launch_s=0.01, other_s=0.0))
    (line,) = (line for line in verdict.evidence if line.startswith(ELEMENTWISE))
    assert line.endswith("; 3.3 times what memory gives, so caches serve it")
    rows = (ClassTime(ELEMENTWISE, 0.06, 100, 1e9, 0.06 * 0.5 * rate, "bf16"),)
    verdict = judge(replace(BASE, classes=rows, compute_s=0.06, launch_s=0.01, other_s=0.0))
    assert any(line.endswith("; 50% of what the device allows") for line in verdict.evidence)


def test_waits_for_the_device_name_their_line() -> None:
    stall = Stall("train.py:31 (main)", 0.06, 3.0, "aten::item (cudaStreamSynchronize)", "x.item()")
    m = replace(BASE, host_s=0.06, compute_s=0.035, num_syncs=3.0, stalls=(stall,), classes=())
    verdict = judge(m)
    assert (verdict.limit, verdict.cause) == ("host", "synchronisation with the device")
    assert verdict.within == "train.py:31 (main)"
    assert any("x.item()" in text for text in verdict.evidence)


def test_products_beside_the_tensor_cores_name_their_layers() -> None:
    rows = (ClassTime(MATRIX, 0.09, 10, 0.09 * 45e12, 0.09 * 1e11, "fp32"),)
    missed = Missed((4096, 50257, 768), 0.05, "fp32 without TF32", ("head.weight",))
    verdict = judge(replace(BASE, classes=rows, tensor_core_share=0.0, missed=(missed,)))
    assert (verdict.limit, verdict.cause) == ("compute", "products that miss the tensor cores")
    assert any("head.weight" in text and "TF32" in text for text in verdict.evidence)


def test_odd_dimensions_are_the_cause_where_they_cost() -> None:
    odd = ("vocabulary 50257 is no multiple of 8, which bf16 products need (head.weight)",)
    verdict = judge(replace(BASE, odd=odd, odd_share=0.4))
    assert (verdict.limit, verdict.cause) == ("compute", "odd dimensions")
    assert odd[0] in verdict.evidence
    assert judge(replace(BASE, odd=odd, odd_share=0.02)).cause == "arithmetic"


def test_unpinned_copies() -> None:
    m = replace(BASE, h2d_s=0.07, compute_s=0.02, classes=(), h2d_bytes=1e9, h2d_pageable=1.0)
    verdict = judge(m)
    assert (verdict.limit, verdict.cause) == ("data", "unpinned copies")
    assert any("50 GB/s" in text for text in verdict.evidence)
    assert judge(replace(m, h2d_pageable=0.0)).cause == "copies to the device"


def test_a_full_device_is_named_where_a_larger_batch_would_help() -> None:
    thin = (ClassTime(MATRIX, 0.08, 10, 1e12, 0.08 * 3e12, "bf16"),)
    full = Memory(140e9, 137e9, 139e9, 30e9, 30e9, 60e9, 20e9, "aten::linear")
    m = replace(BASE, classes=thin, memory=full, smallest_side=4, batch=4)
    verdict = judge(m)
    assert (verdict.limit, verdict.cause) == ("memory size", "a full device")
    assert verdict.within == "aten::linear"  # the logits
    assert judge(replace(m, memory=replace(full, peak_bytes=60e9))).limit == "memory bandwidth"
    # A device that is full and computes at its peak is not held back by its size.
    assert judge(replace(BASE, memory=full)).limit == "compute"


def test_an_allocator_that_asks_again_is_named() -> None:
    rows = (ClassTime(MATRIX, 0.02, 10, 0.02 * 700e12, 1e9, "bf16"),)
    memory = Memory(140e9, 135e9, num_retries=4.0, retry_s=0.06)
    verdict = judge(replace(BASE, classes=rows, memory=memory))
    assert (verdict.limit, verdict.cause) == ("memory size", "the allocator's retries")
    assert verdict.share == pytest.approx(0.6)


def test_a_large_loss_is_memory_bandwidth() -> None:
    rows = (ClassTime(LOSS, 0.07, 5, 0.0, 0.07 * 3e12, "fp32"), ClassTime(MATRIX, 0.01))
    verdict = judge(replace(BASE, classes=rows))
    assert (verdict.limit, verdict.cause) == ("memory bandwidth", "the loss")


def test_one_slow_rank_is_judged_by_its_own_measurement() -> None:
    ranks = (RankTime(0, 0.1, 0.0, 0.08), RankTime(1, 0.1, 0.07, 0.001))
    waiting = replace(BASE, ranks=ranks, comm_exposed_s=0.08, compute_s=0.02, classes=())
    slow = replace(waiting, rank=1, comm_exposed_s=0.001, data_s=0.07)
    verdict = judge(waiting, [slow])
    assert (verdict.limit, verdict.cause, verdict.within) == ("data", "one slow rank", "rank 1")
    assert judge(waiting).limit == "data"  # from the exchanged times alone
    assert find_slow_rank(ranks[:1]) is None
    # Where even the slow one waits longer than it holds the others up, it is the network.
    assert find_slow_rank((RankTime(0, 0.1, 0.0, 0.08), RankTime(1, 0.1, 0.0, 0.05))) is None


def test_ranks_that_wait_alike_wait_for_the_network() -> None:
    ranks = tuple(RankTime(n, 0.1, 0.0, 0.07) for n in range(4))
    verdict = judge(replace(BASE, ranks=ranks, comm_exposed_s=0.07, compute_s=0.03, classes=()))
    assert (verdict.limit, verdict.cause) == ("communication", "the network")


def test_measurements_survive_json() -> None:
    full = replace(
        BASE,
        stalls=(Stall("a.py:1 (f)", 0.01),),
        missed=(Missed((1, 2, 3), 0.1, "why", ("w",)),),
        ranks=(RankTime(0, 0.1, 0.0, 0.0),),
        power=Power(690.0, 700.0, 1520.0, 1980.0, 0.9, 0.0, 2.0),
        roofline=replace(GPU, sustained={"bf16": Sustained(670e12, 691.0, 1505.0, (8, 8, 8))}),
    )
    values = json.loads(json.dumps(full.to_dict()))
    assert measured_from_dict({**values, "newer": 1}) == full


def test_pictures_are_drawings(tmp_path: Path) -> None:
    timeline = [
        (0.00, 100.0, "forward", 1.0),
        (0.01, 50.0, "backward", 2.0),
        (0.02, -100.0, "backward", 1.0),
        (0.03, 10.0, "forward", 3.0),
        (0.04, -10.0, "forward", 3.0),
        (0.05, -50.0, "optimizer", 2.0),
    ]
    kinds = {(size, kind) for _, _, size, kind in sort_lives(timeline)}
    assert kinds == {(100.0, "activations"), (50.0, "gradients"), (10.0, "temporaries")}
    made = write_pictures(tmp_path, BASE, timeline)
    assert {path.name for path in made} == {"step.svg", "roofline.svg", "memory.svg"}
    for path in made:
        ElementTree.fromstring(path.read_text())
    assert "matrix" in draw_step(BASE)
    assert "activations" in draw_memory(BASE, timeline)


def test_the_text_has_the_table_and_the_evidence() -> None:
    text = show_verdict(BASE, judge(BASE), ["fp8 (up to x1.30): most of it is products"])
    for word in ("compute-bound", "matrix", "evidence:", "on tensor cores: 98%", "fp8 (up to"):
        assert word in text


def test_pictures_of_the_documents_are_what_the_doctor_draws() -> None:
    import runpy

    root = Path(__file__).resolve().parents[3]
    drawn = runpy.run_path(str(root / "docs" / "doctor_pictures.py"))
    for name, draw in drawn["PICTURES"].items():
        kept = (root / "docs" / "pictures" / f"{name}.svg").read_text()
        assert draw() == kept, "run `python docs/doctor_pictures.py` and commit"
