"""The search: only layouts that the table allows, the best of all, and quick."""

from __future__ import annotations

import time

import pytest

from ridgeline.layout import Layout, check_available, check_layout
from ridgeline.plan.job import job_from_layout
from ridgeline.plan.known import find_model
from ridgeline.plan.machine import load_machine
from ridgeline.plan.memory import fits, predict_memory
from ridgeline.plan.predict import predict
from ridgeline.plan.search import TIE, _but_for_samples, layouts, scale, search
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
    first, *others = (p.seconds for p in found.best)
    fastest = sorted(every)
    # The simplest of those that tie with the fastest, then the fastest of the others.
    assert fastest[0] <= first <= fastest[0] * (1 + TIE)
    left = list(fastest)
    left.remove(min(left, key=lambda s: abs(s - first)))
    assert others == pytest.approx(left[:2])
    assert found.played < len(every)


@pytest.mark.parametrize(("name", "batch"), [("350m", 24), ("1m", 8192), ("1.3b", 8 * 3 * 7)])
def test_microbatches_of_any_size_are_looked_at(name: str, batch: int) -> None:
    """Every way to cut a batch over replicas alone, written down apart from the search."""
    model = find_model(name)
    best = search(model, H200, 8, batch, top=1).best[0].seconds
    for parts in (n for n in range(1, batch // 8 + 1) if batch // 8 % n == 0):
        for zero in (0, 1, 2, 3):
            layout = Layout(dp=8, zero=zero, accumulate=parts, precision="bf16")
            job = job_from_layout(model, H200, layout, batch)
            if fits(job, predict_memory(job)):
                assert best <= predict(job).seconds * (1 + TIE), str(layout)


def test_more_samples_at_a_time_never_take_less_memory() -> None:
    """What lets the search pass over the larger of them."""
    model, batch = find_model("llama3-8b"), 48
    least: dict[tuple[object, ...], float] = {}
    for layout, _ in layouts(model, H200, 16, batch, "bf16"):
        job = job_from_layout(model, H200, layout, batch)
        alike, memory = _but_for_samples(layout), predict_memory(job).device
        assert memory >= least.get(alike, 0.0) * (1 - 1e-9), str(layout)
        least[alike] = memory


def test_of_two_that_tie_the_simpler_is_first() -> None:
    """Replicas alone and a pipeline with a bubble of 41 % take the same time, the host's."""
    best = search(find_model("1m"), H200, 8, 64, top=5).best
    assert best[0].layout.pp == best[0].layout.tp == best[0].layout.cp == 1
    assert best[0].seconds <= best[1].seconds * (1 + TIE)


def test_what_is_said_is_not_chosen() -> None:
    found = search(find_model("llama3-8b"), H200, 8, 64, top=3, said={"compile": True})
    assert found.best
    assert all(p.layout.compile for p in found.best)
    plain = search(find_model("llama3-8b"), H200, 8, 64, top=1).best[0]
    assert not plain.layout.compile
    assert found.best[0].seconds < plain.seconds


def test_waiting_for_storage_is_a_bound() -> None:
    """Where samples are what takes longest, nothing has to be played to know it."""
    slow = H200.replace(storage_bandwidth=1e6)
    found = search(find_model("350m"), slow, 8, 64, top=2, sample_bytes=1e6)
    assert found.best[0].seconds == pytest.approx(64.0)
    assert found.played < 40


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
    assert found.closest is None  # not even its weights do
    nearly = search(find_model("llama3-8b", 32768), load_machine("perlmutter"), 4, 4)
    assert not nearly.best
    assert nearly.closest is not None
    assert nearly.closest[1] > 40e9


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
