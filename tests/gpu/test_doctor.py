"""The doctor on a CUDA device: rates, classes of kernels, waits, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline.config import dump_config, find_recipe, load_config
from ridgeline.doctor.candidate import Runner
from ridgeline.doctor.measure import Options, measure
from ridgeline.doctor.shapes import Used, sweep_model
from ridgeline.doctor.verdict import judge
from ridgeline.launch.env import read_rank_env
from ridgeline.machine.compute import measure_compute
from ridgeline.machine.power import open_gauge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def test_rates_of_the_device() -> None:
    facts = measure_compute(torch.device("cuda"), quick=True)
    assert {"fp64", "fp32", "bf16", "fp16"} <= set(facts.peak_flops)
    if torch.cuda.get_device_capability() >= (8, 0):
        assert facts.peak_flops["tf32"] > 1.5 * facts.peak_flops["fp32"]
        assert facts.peak_flops["bf16"] > 2 * facts.peak_flops["fp32"]
    if torch.cuda.get_device_capability() >= (8, 9):
        assert facts.peak_flops["fp8"] > facts.peak_flops["bf16"]
    assert facts.h2d_pinned_bytes_per_s
    assert facts.h2d_pageable_bytes_per_s
    assert facts.h2d_pinned_bytes_per_s > facts.h2d_pageable_bytes_per_s
    assert facts.launch_s
    assert 1e-6 < facts.launch_s < 1e-4
    assert torch.get_float32_matmul_precision() == "highest"


def test_products_that_go_on_are_held_down_by_power() -> None:
    device = torch.device("cuda")
    if open_gauge(device) is None:
        pytest.skip("this device does not tell its power")
    facts = measure_compute(device)
    bf16 = facts.sustained["bf16"]
    assert 0.3 * facts.peak_flops["bf16"] < bf16.flops_per_s < 1.1 * facts.peak_flops["bf16"]
    assert bf16.watts > 100
    assert 200 < bf16.clock_mhz < 5000


def test_an_odd_vocabulary_is_slower_than_a_padded_one() -> None:
    used = Used("matrix", (8192, 50257, 768), 1)
    (row,) = sweep_model([used], torch.device("cuda"), "bf16", vocabulary=50257)
    assert row.padded_dims == (8192, 50304, 768)
    assert row.gain > 0.1


def test_a_recipe_is_taken_apart() -> None:
    config = load_config(
        find_recipe("llama-text"), ["model.args.size=5m", "train.batch=64", "layout=precision=bf16"]
    ).config
    seen = measure(config, read_rank_env({}), Options(steps=60))
    measured = seen.measured
    if open_gauge(torch.device("cuda")) is not None and measured.step_s > 0.01:
        assert measured.power is not None
        assert 0 < measured.power.watts < 1.2 * measured.power.limit_watts
        assert 0 < measured.power.clock_mhz <= measured.power.max_clock_mhz
    parts = measured.data_s + measured.h2d_s + measured.compute_s + measured.comm_exposed_s
    parts += measured.host_s + measured.launch_s + measured.other_s
    assert parts == pytest.approx(measured.step_s, rel=1e-6)
    for name in ("matrix", "attention", "norm and element-wise", "optimizer", "loss"):
        assert measured.of_class(name).seconds > 0, name
    assert measured.of_class("matrix").precision == "bf16"
    assert measured.tensor_core_share is not None
    assert measured.tensor_core_share > 0.9
    assert measured.memory is not None
    assert 0 < measured.memory.peak_bytes < measured.memory.capacity_bytes
    assert seen.timeline
    assert judge(measured).evidence


def test_memory_of_captured_graphs_is_counted(tmp_path: Path) -> None:
    peaks = []
    for graphs in ("false", "true"):
        config = load_config(
            find_recipe("llama-text"),
            [
                "model.args.size=5m",
                "train.batch=64",
                "train.eval_samples=0",
                f"layout=precision=bf16,compile=true,graphs={graphs}",
            ],
        ).config
        recipe = tmp_path / f"{graphs}.yaml"
        recipe.write_text(dump_config(config))
        runner = Runner(recipe)
        runner.turn(4, 0)
        peaks.append(runner.turn(1, 2)["peak_bytes"])
        runner.close()
    assert peaks[1] > 0.7 * peaks[0]
