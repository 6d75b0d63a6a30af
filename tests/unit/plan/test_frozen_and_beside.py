"""Weights that are not trained, communication beside computing, and numbers of 8 bits by their kind."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from ridgeline.cli_planned import change_machine
from ridgeline.config import RunConfig
from ridgeline.errors import UsageError
from ridgeline.plan import own_machine
from ridgeline.plan.activations import kept_activations, layer_activations
from ridgeline.plan.auto import Place, find_machine
from ridgeline.plan.job import Job
from ridgeline.plan.kernels import PLAIN_ATTENTION, flash_s
from ridgeline.plan.kinds import kind_of
from ridgeline.plan.machine import load_machine
from ridgeline.plan.memory import predict_memory
from ridgeline.plan.network import Group, collective_s, exposed_s, group_of, ring_bandwidth
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
    assert (whole.zero, sharded.zero) == (1, 3)
    assert sharded.software.name == "megatron-bridge"
    assert predict(sharded).time.gathers > 0
    assert predict_memory(sharded).weights < predict_memory(whole).weights / 60
    assert bridge(layout__fsdp=1).zero == bridge(layout__fsdp=0).zero == 1
    row = copy.deepcopy(BRIDGE)
    row["source"], row["layout"]["fsdp"] = {"repo": "somebody/else"}, 4
    assert read_row(row).job.software.name == "fsdp"


def test_a_bridge_does_what_its_recipes_do_unless_the_row_says_otherwise() -> None:
    """Its tables name neither the sharded optimizer, nor the split sequence, nor what is on the host."""
    split = {"layout__tp": 4, "layout__gpus": 64}
    usual = bridge(**split)
    assert (usual.zero, usual.sp, bridge().sp) == (1, True, False)
    assert not bridge(**split, layout__sp=False).sp
    assert bridge(**split, layout__zero=0).zero == 0
    # The communication of split layers goes on beside their products.
    apart = replace(usual, software=replace(usual.software, overlap_tp=False))
    assert 0 < predict(usual).time.tensor_parallel < 0.6 * predict(apart).time.tensor_parallel
    row = copy.deepcopy(BRIDGE)
    row["source"] = {"repo": "NVIDIA/Megatron-LM"}
    row["layout"] |= {"tp": 4, "gpus": 64}
    plain = read_row(row).job
    assert (plain.software.name, plain.zero, plain.sp) == ("megatron-core", 0, False)


def test_activations_of_some_layers_on_the_host() -> None:
    sharded = {
        "layout__gpus": 64,
        "layout__dp": 64,
        "layout__pp": 1,
        "layout__vp": 1,
        "layout__fsdp": 64,
    }
    away = bridge(**sharded)
    row = copy.deepcopy(BRIDGE)
    row["layout"] |= {"gpus": 64, "dp": 64, "pp": 1, "vp": 1, "fsdp": 64}
    assert (away.offload, away.offload_layers) == ("activations", 40)
    assert "40 layers are on the host" in read_row(row).guessed
    assert bridge(**sharded, hardware__gpu="DGX-GB300").offload_layers == 20
    assert bridge(**sharded, layout__precision="bf16").offload == "none"
    for said in (
        {"layout__act_offload": 0},
        {"layout__recompute": "full"},
        {"model__hidden": 4096},
    ):
        assert bridge(**sharded, **said).offload == "none"
    here = replace(away, offload="none")
    assert predict_memory(away).activations == pytest.approx(predict_memory(here).activations / 2)
    assert predict_memory(away).host == pytest.approx(predict_memory(away).activations)
    assert predict(here).time.host_link == 0
    assert predict(away).time.host_link > 0
    every = replace(away, offload_layers=0)
    # All of them take longer out than forward does, and that is waited for.
    assert predict(every).time.host_link > 79 / 40 * predict(away).time.host_link


def test_what_a_product_was_given_is_kept_in_eight_bits() -> None:
    narrow, wide = bridge(), bridge(layout__precision="bf16")
    h, kv, ffn = 8192, 1024, 28672
    # Norms' inputs, queries, keys, values, attention's result, both sides of the gate; and what products
    # were given, attention's result among them once more.
    inputs = 2 * h + h + ffn
    both = 2 * (2 * h + (2 * h + 2 * kv) + 2 * ffn)
    sums = 4 * 64
    assert layer_activations(narrow) == pytest.approx(4096 * (both + inputs + sums))
    other = replace(
        narrow, software=SOFTWARE["torchtitan"]
    )  # whose products cast what is kept wide
    assert layer_activations(other) == layer_activations(wide)
    assert layer_activations(wide) == pytest.approx(4096 * (both + 2 * (inputs - h) + sums))


def torchtitan(**layout: Any) -> Job:
    """Llama 3.1 8B as in torchtitan's table of December 2024."""
    row = {
        "source": {"repo": "pytorch/torchtitan"},
        "hardware": {"gpu": "H100 96GB HBM2e SXM (500W limit, 2.4 TB/s)", "gpus_per_node": 8},
        "model": {"name": "Llama3.1-8B", "arch": "llama", "layers": 32, "hidden": 4096, "heads": 32,
                  "kv_heads": 8, "ffn": 14336, "seq": 8192, "vocab": 128256},
        "layout": {"gpus": 128, "zero": 3, "fsdp": 2, "microbatch": 2, "recompute": "selective (op)",
                   "precision": "bf16", "compile": True, "global_batch": 256, **layout},
        "measured": {"tokens_per_s_per_gpu": 6514},
    }  # fmt: skip
    return read_row(row).job


def test_torchtitan_keeps_every_other_product_and_three_copies_of_logits() -> None:
    tokens, h, kv, ffn = 2 * 8192, 4096, 1024, 14336
    job = torchtitan()
    # The block's input, queries, values, attention's result, one side of the gate, the way down.
    assert kept_activations(job) == pytest.approx(2 * tokens * (h + h + kv + h + ffn + h))
    memory = predict(job).memory
    assert memory.logits == pytest.approx(12 * tokens * 128256, rel=0.02)
    # The table has 62.0 GiB on 128 devices, 77.0 on 8.
    assert memory.device / 2**30 == pytest.approx(62.0, rel=0.05)
    few = torchtitan(gpus=8, global_batch=16)
    assert predict(few).memory.device / 2**30 == pytest.approx(77.0, rel=0.05)
    # With the layers split, what was gathered for a product is kept whole.
    split = torchtitan(tp=8, sp=True, global_batch=32, recompute="none")
    sliced = replace(split, software=replace(split.software, keeps_gathered=False))
    apart = layer_activations(split) - layer_activations(sliced)
    assert apart == pytest.approx(2 * 2 * tokens * h * 7 / 8)


def test_links_that_go_beyond_a_node() -> None:
    rack = load_machine("gb200")
    alone = rack.replace(devices_per_domain=1)
    assert (rack.reach, alone.reach) == (72, 4)
    # As many nodes of each rack, and never a part of a node.
    assert [rack.reach_of(n) for n in (8, 64, 72, 76, 128, 256)] == [8, 64, 72, 40, 64, 64]
    assert [alone.reach_of(n) for n in (2, 8, 256)] == [2, 4, 4]
    assert group_of(rack, 64, 1) == Group(64, 64)
    assert group_of(rack, 64, 4) == Group(64, 16, 4)
    assert group_of(rack, 19, 4) == Group(19, 10, 4)
    assert group_of(alone, 64, 4) == Group(64, 1, 4)
    for first, second in ((1, 2), (2, 4), (4, 16)):  # more members in a rack have more of its NICs
        one, other = (ring_bandwidth(rack, Group(4 * n, n, 8)) for n in (first, second))
        assert one < other
    inside, across = (collective_s(m, "all_reduce", 1e9, group_of(m, 16, 1)) for m in (rack, alone))
    assert inside < across / 2
    # Beyond it, a rack has the NICs of all its nodes.
    assert ring_bandwidth(rack, Group(128, 64)) == pytest.approx(
        min(rack.intra.bandwidth * rack.intra.efficiency, 16 * rack.inter.bandwidth * 0.9)
    )
    stages = bridge(layout__gpus=256, layout__dp=16, layout__tp=4)
    assert [stages.crosses_nodes(rank) for rank in range(3)] == [True, True, True]
    small = bridge(layout__gpus=64, layout__dp=16)
    assert not any(small.crosses_nodes(rank) for rank in range(3))
    other = read_row(copy.deepcopy(BRIDGE) | {"hardware": {"gpu": "B200", "gpus_per_node": 8}})
    place = Place(16, 8, 16, "NVIDIA B200")
    for machine in (other.job.machine, find_machine(RunConfig(device="cuda"), place)[0]):
        assert (machine.reach, machine.host_link_bandwidth) == (8, 0.0)
    assert find_machine(RunConfig(device="cuda"), Place(16, 4, 16, "NVIDIA GB200"))[0].reach == 72
    with pytest.raises(UsageError, match="no multiple of the 4 devices"):
        change_machine(rack, ["devices_per_domain=10"])
    with pytest.raises(UsageError, match="board_bandwidth=0"):
        change_machine(load_machine("h100"), ["devices_per_board=4"])
    assert change_machine(rack, ["devices_per_domain=36"]).reach == 36


def test_what_was_measured_between_nodes_counts_in_a_rack_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rack = load_machine("gb200")
    monkeypatch.setattr(own_machine, "tables_of", lambda rows: ())
    monkeypatch.setattr(own_machine, "link_of", lambda tables, crosses, devices: rack.inter)
    measured, assumed = own_machine._with_links(rack, [{}], "gb200")
    assert (measured.reach, assumed) == (4, [])


def test_a_search_splits_layers_over_a_rack() -> None:
    """Over whole nodes, as far as keys and values can be split too."""
    model, rack = bridge().model, load_machine("gb200")
    many = replace(model, kv_heads=64)
    assert kind_of(model).choices(model, rack).tp == (1, 2, 4, 8)
    assert kind_of(many).choices(many, rack).tp == (1, 2, 4, 8, 16)
    assert kind_of(many).choices(many, load_machine("h100")).tp == (1, 2, 4, 8)


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


def bloom(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": "b", "set": "mine", "source": {"repo": "bigscience-workshop/bigscience"},
        "hardware": {"gpu": "A100-SXM4-80GB", "gpus_per_node": 8, "notes": "Jean Zay JZ3"},
        "model": {"arch": "gpt", "layers": 72, "hidden": 13824, "heads": 64, "seq": 2048,
                  "vocab": 250880},
        "layout": {"gpus": 384, "dp": 8, "tp": 4, "pp": 12, "zero": 1, "microbatch": 4,
                   "global_batch": 2048, "recompute": "full", "precision": "fp16"},
        "measured": {"iter_s": 111.89},
    }  # fmt: skip
    for place, value in changes.items():
        section, _, key = place.partition("__")
        row[section][key] = value
    return row


def test_layers_split_over_two_boards_of_a_node() -> None:
    machine = read_row(bloom()).job.machine
    assert (machine.name, machine.devices_per_board) == ("jean-zay", 4)
    whole = machine.replace(devices_per_board=1)
    for size, slower in ((4, False), (8, True)):
        boards, one = (
            collective_s(m, "all_reduce", 1e8, Group(size, size)) for m in (machine, whole)
        )
        assert (boards > 2 * one) == slower
        assert slower or boards == one
    # Two members are on two boards where they are four apart.
    assert ring_bandwidth(machine, group_of(machine, 2, 4)) < ring_bandwidth(machine, Group(2, 2))
    assert ring_bandwidth(machine, group_of(machine, 2, 2)) == ring_bandwidth(machine, Group(2, 2))
    # Between nodes the NICs are what a ring waits for.
    assert ring_bandwidth(machine, Group(64, 8)) == ring_bandwidth(whole, Group(64, 8))


def test_starts_of_kernels_that_wait_come_on_top() -> None:
    """As BLOOM's runs on Jean Zay were started; another's of the same program were not."""
    other = bloom(layout__framework="Megatron-DeepSpeed")
    other["source"] = {"repo": "somebody/else"}
    waits, ahead = (read_row(row).job for row in (bloom(), other))
    assert (waits.software.sharpness, ahead.software.sharpness) == (1.0, 4.0)
    assert predict(waits).seconds > 1.01 * predict(ahead).seconds


def test_heads_whose_width_tensor_cores_cannot_read() -> None:
    def attention(heads: int) -> float:
        return predict(read_row(bloom(model__heads=heads)).job).time.attention

    assert attention(96) < 1.5 * attention(64)  # 144 and 216 wide
    assert attention(128) > 4 * attention(64)  # 108 wide
    with pytest.raises(Unreadable, match="number of heads is not stated"):
        read_row(bloom(model__heads=None))
    said = bloom(model__heads=None, layout__args={"--num-attention-heads": 96})
    assert read_row(said).job.model.heads == 96
    assert bridge(model__heads=None).model.heads == 64  # where no scores are stored, it is guessed


def test_a_time_and_a_rate_of_other_work_are_refused() -> None:
    flops = read_row(bloom()).job.model.step_flops(2048 * 2048, "hardware x4")
    rate = flops / 111.89 / 384 / 1e12
    row = bloom(measured__tflops_per_gpu=rate, measured__tflops_kind="hardware x4 fwd")
    assert read_row(row).measured.tflops == pytest.approx(rate)
    row["layout"]["global_batch"] = 8192  # four times what was run
    with pytest.raises(Unreadable, match=r"of 0.25 times the work"):
        read_row(row)
