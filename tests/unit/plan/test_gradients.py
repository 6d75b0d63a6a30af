"""Gradients of every ZeRO stage are in the plan, by the formulas that tests/dist/test_zero_memory.py
holds the ranks to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.layout import Layout
from ridgeline.plan.job import job_from_layout
from ridgeline.plan.known import find_model
from ridgeline.plan.machine import load_machine
from ridgeline.plan.memory import StepMemory, fits, stage_memory

H200 = load_machine("h200")
D = 8
STATE = {  # bytes a parameter at the end of backward: weights, gradients, two moments, master weights
    ("zero=1", "bf16"): 2 + 2 + 12 / D,
    ("zero=2", "bf16"): 2 + (2 + 12) / D,
    ("zero=3", "bf16"): 16 / D,
    ("zero=1", "fp32"): 4 + 4 + 8 / D,
    ("zero=2", "fp32"): 4 + (4 + 8) / D,
    ("zero=3", "fp32"): 16 / D,
}


def planned(layout: str, batch: int, seq: int = 128) -> StepMemory:
    model = replace(find_model("3b"), seq=seq)
    return stage_memory(job_from_layout(model, H200, Layout.parse(layout), batch), 0)


@pytest.mark.parametrize(("stage", "precision"), STATE)
def test_all_of_a_stage_is_there(stage: str, precision: str) -> None:
    count = find_model("3b").num_parameters
    expected = STATE[stage, precision] * count
    rest = f"dp={D},{stage},precision={precision}"
    again = planned(f"{rest},accumulate=4", 4 * D)
    held = again.weights + again.gradients + again.optimizer
    assert held == pytest.approx(expected, rel=1e-3)  # gradients wait for the next microbatch
    once = planned(rest, D)
    assert once.allocated > 0.999 * expected  # and are all there when backward ends


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", ["zero=2", "zero=3"])
def test_microbatches_in_turn_do_not_save_gradients(stage: str, precision: str) -> None:
    rest = f"dp={D},{stage},precision={precision}"
    once, again = planned(rest, D), planned(f"{rest},accumulate=4", 4 * D)
    assert again.allocated >= 0.999 * once.allocated


def test_zero_2_holds_both_widths_where_it_updates() -> None:
    count = find_model("3b").num_parameters
    found = planned(f"dp={D},zero=2,precision=bf16", D, seq=16)
    assert found.allocated >= (2 + (2 + 4 + 12) / D) * count


def test_seventy_billion_do_not_fit_on_eight() -> None:
    """16 bytes a parameter on 8 devices are 141 GB, of 150 that have activations to hold as well."""
    model = find_model("llama3-70b")
    layout = Layout.parse("dp=8,zero=3,recompute=full,precision=bf16,accumulate=32")
    job = job_from_layout(model, H200, layout, 256)
    memory = stage_memory(job, 0)
    assert memory.weights + memory.gradients + memory.optimizer > 141e9
    assert not fits(job, memory)
