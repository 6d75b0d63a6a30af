"""The search: only layouts that the table allows, the best of all, and quick."""

from __future__ import annotations

import time

import pytest

from ridgeline.layout import check_available, check_layout
from ridgeline.plan.job import job_from_layout
from ridgeline.plan.known import find_model
from ridgeline.plan.machine import load_machine
from ridgeline.plan.memory import fits, predict_memory
from ridgeline.plan.predict import predict
from ridgeline.plan.search import layouts, scale, search
from ridgeline.plan.time import lower_bound_s, predict_time

H200 = load_machine("h200")


def test_only_layouts_that_compose_and_use_every_device() -> None:
    model = find_model("1.3b")
    for layout, samples in layouts(model, H200, 16, 64, "bf16"):
        assert layout.world_size == 16
        assert not check_layout(layout)
        assert not check_available(layout)
        parts = layout.microbatches if layout.pp > 1 else layout.accumulate
        assert layout.dp * parts * samples == 64


def test_pruning_loses_nothing() -> None:
    model, batch = find_model("350m", 1024), 32
    found = search(model, H200, 8, batch, top=3)
    every = []
    for layout, _ in layouts(model, H200, 8, batch, "bf16"):
        job = job_from_layout(model, H200, layout, batch)
        if fits(job, predict_memory(job)):
            every.append(predict(job).seconds)
    assert [p.seconds for p in found.best] == pytest.approx(sorted(every)[:3])
    assert found.played < len(every)


def test_bounds_are_bounds() -> None:
    model = find_model("llama3-8b")
    for index, (layout, _) in enumerate(layouts(model, H200, 32, 128, "bf16")):
        if index % 41 == 0:
            job = job_from_layout(model, H200, layout, 128)
            assert lower_bound_s(job) <= predict_time(job).seconds * (1 + 1e-9), str(layout)


def test_a_trillion_parameters_on_16384_devices_in_ten_seconds() -> None:
    start = time.process_time()
    found = search(find_model("gpt-1t"), load_machine("selene"), 16_384, 8192)
    assert time.process_time() - start < 10.0
    assert found.best
    assert all(p.memory.device < 85.1e9 for p in found.best)


def test_by_memory_is_the_least_memory() -> None:
    found = search(find_model("1.3b"), H200, 8, 64, top=2, by="memory")
    fastest = search(find_model("1.3b"), H200, 8, 64, top=1)
    assert found.best[0].memory.device <= fastest.best[0].memory.device
    assert found.best[0].memory.device <= found.best[1].memory.device


def test_nothing_fits_names_the_closest() -> None:
    found = search(find_model("llama3-405b"), load_machine("perlmutter"), 4, 8)
    assert not found.best
    assert found.closest is None or found.closest[1] > 40e9


def test_parts_sum_up() -> None:
    best = search(find_model("llama3-70b"), load_machine("h100"), 64, 128, top=3).best
    for planned in best:
        parts = planned.time
        values = [getattr(parts, name) for name in parts.__dataclass_fields__]
        assert sum(values) == pytest.approx(parts.seconds)
        assert 0 < planned.mfu < 0.8


def test_strong_scaling_falls_and_weak_holds() -> None:
    model = find_model("1.3b")
    weak = scale(model, H200, [1, 4], 64, "bf16", weak=True)
    strong = scale(model, H200, [1, 4], 64, "bf16", weak=False)
    rates = [[p.tokens_per_s / n for n, p in rows if p is not None] for rows in (weak, strong)]
    assert rates[0][1] > 0.85 * rates[0][0]
    assert rates[1][1] < rates[0][1] * 1.001
