"""What the planner says of the loss of split classes, against the program that computes it."""

from __future__ import annotations

import pytest

from ridgeline.layout import Layout
from ridgeline.plan.general_memory import LOSS
from ridgeline.plan.job import job_from_layout
from ridgeline.plan.known import find_model
from ridgeline.plan.machine import load_machine
from ridgeline.plan.own import own_logits

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("mode", "dtype"), [("cast", "bfloat16"), ("wide", "float32")])
def test_it_makes_as_many_bytes_as_its_program(mode: str, dtype: str) -> None:
    from ridgeline.parallel.tensor.loss import _Loss
    from ridgeline.scaling.watch import StepWatch

    rows, classes = 64, 4096
    logits = torch.zeros(rows, classes, dtype=getattr(torch, dtype), requires_grad=True)
    target = torch.zeros(rows, dtype=torch.long)
    watch = StepWatch(lambda: "")
    with watch:
        wide = logits.float()
        _Loss.apply(wide, target, classes, 0, None, -100, 0.0)
    each = watch.peak_bytes / logits.numel()
    assert each == pytest.approx(LOSS[mode], rel=0.01)
    precision = {"cast": "bf16", "wide": "fp32"}[mode]
    job = job_from_layout(
        find_model("1.3b", 2048),
        load_machine("h200"),
        Layout.parse(f"tp=2,precision={precision}"),
        4,
    )
    elements = 4 * 2048 * job.model.vocab / 2
    forward, _ = own_logits(job.model, job.part, 0)
    assert forward / elements == LOSS[mode] + logits.element_size()
