"""A device's own name leads to its profile, to one that is told to be only like it, or to none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.config import find_recipe, load_config
from ridgeline.errors import UsageError
from ridgeline.plan.auto import Place, find_machine
from ridgeline.plan.machine import Machine, load_machine
from ridgeline.plan.measured import load_measured
from ridgeline.plan.own_machine import PROFILES, mentioned_device, named_device, profile_of

NEAR = (
    "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM-64GB", "Tesla V100-SXM2-32GB",
    "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA B200", "NVIDIA A800-SXM4-80GB",
)  # fmt: skip
"""Devices that a profile is only like."""


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA A100-SXM4-80GB", "selene"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("Tesla V100-SXM2-16GB", "summit"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H20", None),
        ("", None),
        *((name, None) for name in NEAR),
    ],
)
def test_profiles_are_of_just_that_device(name: str, profile: str | None) -> None:
    assert profile_of(name) == profile


def test_every_profile_is_found_by_its_own_device() -> None:
    for device, profile in PROFILES.items():
        assert profile_of(device) == profile
        assert load_machine(profile).device.name == device


def test_the_nearest_profile_of_other_devices() -> None:
    for name in NEAR:
        near = named_device(name)
        assert near is not None
        assert near.is_other or near.device == "a800"
    assert named_device("NVIDIA A100-PCIE-40GB").profile == "a100-40g"  # type: ignore[union-attr]
    wide = named_device("Tesla V100-SXM2-32GB")
    assert wide is not None
    assert wide.memory_bytes == pytest.approx(34.1e9, rel=0.01)  # as its driver tells


def test_rates_of_bandwidth_are_no_memory() -> None:
    named = named_device("A100 80GB, NVLink 600 GB/s, 2039 GBps")
    assert named is not None
    assert (named.memory_bytes, named.is_other, named.is_vague) == (0.0, False, False)


def test_a_device_in_a_longer_text() -> None:
    found = mentioned_device("results of 700 GB text on dgx_a100_40gb.json")
    assert found is not None
    assert found.profile == "a100-40g"
    assert mentioned_device("an A100 and an H100") is None
    assert mentioned_device("a laptop") is None


@pytest.mark.parametrize("name", NEAR)
def test_a_layout_is_not_chosen_for_another_device_in_silence(name: str) -> None:
    config = load_config(find_recipe("llama-text"), ("layout=auto",)).config
    near = named_device(name)
    if near is None:
        with pytest.raises(UsageError, match=r"has no profile.*plan\.machine"):
            find_machine(config, Place(8, 8, 64, name))
        return
    machine, origin = find_machine(config, Place(8, 8, 64, name))
    assert origin == f"profile {near.profile}, the nearest to {name}; plan.machine names another"
    if near.memory_bytes:
        assert machine.device.memory_bytes == near.memory_bytes


def test_a_layout_is_chosen_for_the_memory_that_the_name_states() -> None:
    config = load_config(find_recipe("llama-text"), ("layout=auto",)).config
    machine, origin = find_machine(config, Place(4, 4, 64, "NVIDIA A100-PCIE-40GB"))
    assert machine.device.memory_bytes < 44e9
    assert "the nearest to NVIDIA A100-PCIE-40GB" in origin


def machine(tmp_path: Path, name: str, **facts: Any) -> Machine:
    network = {"device_kind": "cuda", "device_name": name, "ranks_per_node": [4], "timings": []}
    row = {"device_kind": "cuda", "device_name": name, "peak_flops": {"bf16": 2e14}, **facts}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"compute": [row] if facts else [], "network": [network]}))
    return load_measured(path)


def test_a_measured_device_without_a_profile_is_made_of_the_one_it_is_like(tmp_path: Path) -> None:
    found = machine(tmp_path, "NVIDIA A100-PCIE-40GB", device_memory_bytes=42.4e9)
    assert (found.device.memory_bytes, found.device.peak_flops["bf16"]) == (42.4e9, 2e14)
    assert "as a100-40g: " in found.source["assumed"]
    told = machine(tmp_path, "Tesla V100-SXM2-32GB")
    assert told.device.memory_bytes == pytest.approx(34.1e9, rel=0.01)
    assert "the device itself, as summit's" in told.source["assumed"]
    other = machine(tmp_path, "NVIDIA L4", device_memory_bytes=24e9)
    assert "as h100: " in other.source["assumed"]
