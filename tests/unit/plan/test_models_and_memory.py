"""Sizes, parameters, FLOPs and memory against closed forms and against this library's models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.errors import UsageError
from ridgeline.plan.activations import layer_activations
from ridgeline.plan.job import Job
from ridgeline.plan.known import MODELS, find_model, model_of_recipe
from ridgeline.plan.machine import load_machine, machine_names
from ridgeline.plan.memory import fits, predict_memory, stage_memory
from ridgeline.plan.software import MEGATRON_2021, RIDGELINE
from ridgeline.plan.transformer import Transformer

SELENE = load_machine("selene")


def test_llamas_are_those_of_the_models_room() -> None:
    torch = pytest.importorskip("torch")
    from ridgeline.models.build import build_model
    from ridgeline.models.llama_sizes import SIZES

    for name, config in SIZES.items():
        ours = MODELS[name]
        assert (ours.layers, ours.hidden, ours.heads) == (config.depth, config.width, config.heads)
        assert (ours.kv_heads, ours.ffn) == (config.num_kv_heads, config.ffn_width)
        assert (ours.vocab, ours.seq) == (config.vocab, config.max_seq)
        assert ours.tied == config.tie_embeddings
    with torch.device("meta"):
        for name in ("124m", "llama3.2-1b", "llama3-8b"):
            model = build_model("llama", size=name)
            assert MODELS[name].num_parameters == sum(p.numel() for p in model.parameters())


def test_gpt_counts_and_flops_are_the_published_ones() -> None:
    gpt = find_model("gpt-175b")
    assert gpt.num_parameters == pytest.approx(174.6e9, rel=0.001)
    b, s, layers, h, v = 1536, 2048, 96, 12288, 51200
    published = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert gpt.step_flops(b * s, "hardware") == pytest.approx(published, rel=1e-9)
    assert gpt.step_flops(b * s, "model") < published


def test_recipes_override_sizes() -> None:
    model = model_of_recipe("llama", {"size": "1m", "vocab": 256, "max_seq": 128}, None)
    assert (model.vocab, model.seq, model.hidden) == (256, 128, 128)
    wide = model_of_recipe("llama", {"size": "1m", "width": 192, "heads": 6}, 64)
    assert (wide.ffn, wide.kv_heads, wide.head_width, wide.seq) == (512, 6, 32, 64)


def korthikanti(tp: int, sp: bool, recompute: str) -> Job:
    model = Transformer("22b", 48, 6144, 64, 24576, 2048, 51200)
    return Job(
        model, SELENE, MEGATRON_2021, tp=tp, sp=sp, samples=4, recompute=recompute,
        precision="fp16",
    )  # fmt: skip


def test_activations_of_a_layer_are_korthikantis() -> None:
    s, b, h, a, t = 2048, 4, 6144, 64, 8
    plain = korthikanti(t, False, "none")
    assert layer_activations(plain) == pytest.approx(
        s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    )
    split = korthikanti(t, True, "none")
    assert layer_activations(split) == pytest.approx(s * b * h / t * (34 + 5 * a * s / h))
    # Figure 1 of that paper: 59.25 GiB without, 9.5625 with selective recompute and sp.
    assert 48 * layer_activations(plain) / 2**30 == pytest.approx(59.25, rel=1e-3)
    core = layer_activations(split, scores=False)
    assert 48 * core / 2**30 == pytest.approx(9.5625, rel=1e-3)


def test_parts_sum_up_and_sharding_divides() -> None:
    model = find_model("llama3-8b")
    h200 = load_machine("h200")
    held = []
    for zero in (1, 2, 3):
        job = Job(model, h200, RIDGELINE, dp=64, zero=zero)
        memory = stage_memory(job, 0)
        parts = (
            memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.logits,
            memory.working, memory.buffers, memory.rounding, memory.context,
        )  # fmt: skip
        assert sum(parts) == pytest.approx(memory.device)
        held.append(memory.weights + memory.gradients + memory.optimizer)
    count = model.num_parameters
    assert held[0] == pytest.approx(count * (4 + 12 / 64))
    assert held[2] == pytest.approx(count * 12 / 64)


def test_recompute_and_smaller_batches_need_less() -> None:
    base = Job(find_model("llama3-8b"), load_machine("h200"), RIDGELINE, dp=64, zero=3, samples=2)
    sizes = [
        predict_memory(base.replace(recompute=r)).allocated for r in ("none", "selective", "full")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert predict_memory(base.replace(samples=1)).allocated < sizes[0]


def test_stages_hold_fewer_microbatches_towards_the_end() -> None:
    model = replace(find_model("gpt-18b"))
    job = Job(model, SELENE, MEGATRON_2021, pp=4, tp=8, microbatches=16, recompute="full")
    kept = [stage_memory(job, rank).activations for rank in range(4)]
    assert kept[0] > kept[1] > kept[2] > kept[3]


def test_what_does_not_fit_is_said_not_to() -> None:
    job = Job(find_model("gpt-175b"), SELENE, MEGATRON_2021, tp=8, recompute="full")
    assert not fits(job, predict_memory(job))


@pytest.mark.parametrize("name", machine_names())
def test_profiles_load_and_are_physical(name: str) -> None:
    machine = load_machine(name)
    device = machine.device
    assert device.peak_flops["fp16"] > 0
    assert (device.peak_flops["bf16"] > 0) == ("V100" not in device.name)
    assert device.memory_bytes > 8e9
    for share in (
        device.sustained_clock, device.gemm_efficiency, device.memory_efficiency,
        device.flash_efficiency, machine.intra.efficiency, machine.inter.efficiency,
    ):  # fmt: skip
        assert 0 < share <= 1
    assert machine.source["device"]


def test_arguments_that_the_model_has_not_are_refused() -> None:
    """`ridgeline train` would refuse them, so a plan would be of something else."""
    with pytest.raises(UsageError, match=r"unknown argument 'layers' in model\.args of llama"):
        model_of_recipe("llama", {"size": "1m", "layers": 4}, None)
    assert model_of_recipe("llama", {"size": "1m", "rope_theta": 1e4, "norm_eps": 1e-5}, None)
