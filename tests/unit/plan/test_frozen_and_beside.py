"""Weights that are not trained, communication beside computing, and numbers of 8 bits by their kind."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from ridgeline.plan.job import Job
from ridgeline.plan.kernels import PLAIN_ATTENTION, flash_s
from ridgeline.plan.machine import load_machine
from ridgeline.plan.memory import predict_memory
from ridgeline.plan.network import exposed_s
from ridgeline.plan.predict import predict
from ridgeline.plan.rows import Unreadable, read_row
from ridgeline.plan.software import SOFTWARE

BRIDGE: dict[str, Any] = {
    "id": "a", "set": "mine", "source": {"repo": "NVIDIA-NeMo/Megatron-Bridge", "task": "Pre-Training"},
    "hardware": {"gpu": "DGX-GB200", "gpus_per_node": 4},
    "model": {"name": "Llama3.1-70B", "arch": "llama", "layers": 80, "hidden": 8192, "heads": 64,
              "kv_heads": 8, "ffn": 28672, "seq": 4096, "vocab": 128256},
    "layout": {"gpus": 16, "dp": 4, "tp": 1, "pp": 4, "vp": 5, "cp": 1, "microbatch": 1,
               "global_batch": 128, "precision": "FP8"},
    "measured": {"tokens_per_s_per_gpu": 4000},
}  # fmt: skip


def bridge(**changes: Any) -> Job:
    row = copy.deepcopy(BRIDGE)
    for place, value in changes.items():
        section, _, key = place.partition("__")
        row[section][key] = value
    return read_row(row).job


def test_a_lora_has_no_gradients_of_matrices_and_no_optimizer() -> None:
    whole, lora = bridge(), bridge(source__task="LoRA Performance")
    assert not whole.model.frozen
    assert lora.model.frozen
    assert bridge(layout__peft="lora").model.frozen
    # Two products of three are left, and next to nothing of the gradients' way and of the update.
    assert 0.6 < predict(lora).seconds / predict(whole).seconds < 0.75
    assert lora.model.step_flops(1e6, "6n") / whole.model.step_flops(1e6, "6n") == pytest.approx(
        2 / 3, abs=0.03
    )
    memory = predict_memory(lora)
    assert memory.gradients == memory.optimizer == 0
    assert memory.weights == predict_memory(whole).weights


def test_adapters_that_are_not_modelled_are_said() -> None:
    with pytest.raises(Unreadable, match="QLoRA"):
        bridge(layout__peft="qlora")
    with pytest.raises(Unreadable, match="from the module itself"):
        bridge(layout__peft="lora", layout__framework="ridgeline")


def test_block_scales_are_written_by_kernels_of_their_own() -> None:
    plain, blocks = bridge(), bridge(layout__precision="MXFP8")
    assert plain.precision == blocks.precision == "fp8"
    assert plain.software.fp8_casts == 0
    assert blocks.software.fp8_casts == 1
    assert predict(blocks).seconds > 1.02 * predict(plain).seconds


def test_sharded_megatron_is_megatron() -> None:
    layout = {"layout__gpus": 64, "layout__dp": 64, "layout__pp": 1, "layout__vp": 1}
    whole, sharded = bridge(**layout), bridge(**layout, layout__fsdp=64)
    assert (whole.zero, sharded.zero) == (0, 3)
    assert sharded.software.name == "megatron-core"
    assert predict(sharded).time.gathers > 0
    assert predict_memory(sharded).optimizer < predict_memory(whole).optimizer / 60
    assert bridge(layout__fsdp=1).zero == bridge(layout__fsdp=0).zero == 0
    row = copy.deepcopy(BRIDGE)
    row["source"], row["layout"]["fsdp"] = {"repo": "somebody/else"}, 4
    assert read_row(row).job.software.name == "fsdp"


def test_communication_takes_from_what_computes_and_not_the_other_way_round() -> None:
    machine = load_machine("selene").replace(overlap_cost=0.3)
    assert exposed_s(machine, 2.0, 100.0) == pytest.approx(0.6)
    # What it waits for is the network: with little to compute beside it, it takes what it takes alone.
    for computing in (0.0, 0.5, 1.0, 1.4):
        assert computing + exposed_s(machine, 2.0, computing) == pytest.approx(2.0)
    steps = [computing + exposed_s(machine, 2.0, computing) for computing in (1.0, 1.4, 1.5, 3.0)]
    assert steps == sorted(steps)


def test_attention_in_float32_has_a_rate_of_its_own() -> None:
    device = load_machine("h200").device
    args = (8, 12, 1024, 1024, 64, True, "fp32")
    flops = 4.0 * 8 * 12 * 1024 * 1024 * 64 / 2
    said = flash_s(device, *args, False) - device.kernel_s
    assert said == pytest.approx(flops / (PLAIN_ATTENTION * device.peak_flops["fp32"]))
    # Of 12 layers of this on an H200: 4.57 ms forward and 13.80 backward.
    assert 12 * said == pytest.approx(4.57e-3, rel=0.1)
    assert 12 * flash_s(device, *args, True) == pytest.approx(13.80e-3, rel=0.1)
    assert flash_s(device, *args[:-1], "tf32", False) == flash_s(device, *args, False)
    # A host has no other kernels for other types.
    cpu = load_machine("cpu-node").device
    assert flash_s(cpu, *args, False) > flops / cpu.peak_flops["fp32"] / PLAIN_ATTENTION


def test_compiling_changes_nothing_in_float32_attention() -> None:
    model = replace(bridge().model, layers=8)
    ours = SOFTWARE["ridgeline"]
    jobs = [
        Job(model, load_machine("h200"), replace(ours, compiled=compiled), precision="tf32")
        for compiled in (False, True)
    ]
    eager, compiled = (predict(job).time.attention for job in jobs)
    assert compiled == pytest.approx(eager, rel=0.05)
