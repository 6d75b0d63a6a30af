"""Peak rates: the right row of the data sheets, or a quick measurement."""

from __future__ import annotations

import time

import pytest
import torch

from ridgeline.facts import MachineFacts, facts_from_dict
from ridgeline.machine.describe import datasheet_flops, describe_machine, measure_matmul_flops


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 19.5e12),
        ("NVIDIA A10", 125e12, 31.2e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989.4e12, 67e12),
        ("NVIDIA GH200 480GB", 989.4e12, 67e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA GB200", 2500e12, 80e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("Tesla T4", 8.1e12, 8.1e12),
        ("Tesla V100-SXM2-16GB", 15.7e12, 15.7e12),
        ("AMD Instinct MI300X", 1307e12, 163.4e12),
    ],
)
def test_rates_of_devices_as_torch_names_them(name: str, bf16: float, fp32: float) -> None:
    rates = datasheet_flops(name)
    assert rates["bf16"] == pytest.approx(bf16)
    assert rates["fp32"] == pytest.approx(fp32)


@pytest.mark.parametrize("name", ["", "NVIDIA", "NVIDIA A1000", "NVIDIA XH100", "NVIDIA T400"])
def test_a_device_that_is_not_in_the_table_has_no_rates(name: str) -> None:
    assert datasheet_flops(name) == {}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_measurement_is_positive_and_quick(precision: str) -> None:
    start = time.perf_counter()
    rate = measure_matmul_flops(torch.device("cpu"), precision)
    assert 1e6 < rate < 1e15
    assert time.perf_counter() - start < 30.0  # seconds, where a fixed large size takes minutes


def test_this_machine_in_plain_numbers() -> None:
    facts = describe_machine(torch.device("cpu"), "bf16", 2)
    assert facts.num_cores >= 1
    assert facts.memory_bytes > 2**28
    assert (facts.device_kind, facts.num_devices) == ("cpu", 2)
    assert facts.device_name
    assert set(facts.peak_flops) == {"bf16"}
    assert facts.peak_source == "measured"
    assert facts_from_dict(MachineFacts, {**facts.to_dict(), "newer": 1}) == facts
