"""What is easily left out of a price: each is compared with what it has to be more or less than."""

from __future__ import annotations

import pytest

from ridgeline.layout import Layout
from ridgeline.plan.job import Job, job_from_layout
from ridgeline.plan.known import find_model
from ridgeline.plan.machine import load_machine
from ridgeline.plan.memory import predict_memory
from ridgeline.plan.network import collective_s, group_of
from ridgeline.plan.own import GATHER_KERNELS, REDUCE_KERNELS, own_wire
from ridgeline.plan.predict import predict
from ridgeline.plan.software import MEGATRON_CORE
from ridgeline.plan.time import lower_bound_s, parameters_of, predict_time, rank_alone_s

H200 = load_machine("h200")
MODEL = find_model("llama3-8b")


def job(layout: str, batch: int = 64, machine: str = "h200", devices: int = 8) -> Job:
    text = Layout.parse_for(layout, devices, "test")
    return job_from_layout(MODEL, load_machine(machine), text, batch)


def test_fp8_is_for_products_alone() -> None:
    """Attention stays in bf16 and costs what it does there; so does what is kept for backward."""
    eight, sixteen = (job(f"zero=1,accumulate=8,precision={p}") for p in ("fp8", "bf16"))
    narrow, wide = predict_time(eight), predict_time(sixteen)
    assert narrow.attention == pytest.approx(wide.attention)
    assert narrow.products < 0.7 * wide.products
    assert wide.elementwise < narrow.elementwise
    assert narrow.seconds < wide.seconds
    assert predict_memory(eight).allocated == pytest.approx(predict_memory(sixteen).allocated)


@pytest.mark.parametrize("virtual", [1, 2])
def test_zero_bubble_does_all_of_backward(virtual: int) -> None:
    text = f"tp=2,pp=4,schedule=zerobubble,virtual={virtual},microbatches=16,precision=bf16"
    found = job(text)
    time = predict_time(found)
    assert time.bubble >= 0.0
    assert time.seconds >= lower_bound_s(found)
    other = "interleaved" if virtual > 1 else "1f1b"
    plain = predict_time(job(text.replace("zerobubble", other)))
    assert time.products == pytest.approx(plain.products)
    assert 0.85 * plain.seconds < time.seconds < 1.02 * plain.seconds


def test_zero_bubble_holds_activations_until_weights_have_their_gradients() -> None:
    text = "pp=8,schedule={},microbatches=32,precision=bf16"
    late = predict_memory(job(text.format("zerobubble")))
    plain = predict_memory(job(text.format("1f1b")))
    assert late.activations >= plain.activations


def test_chunks_of_one_stage_are_all_done() -> None:
    """A row may state several chunks where there is one stage."""
    one = job("dp=8,accumulate=8,precision=bf16")
    two = one.replace(virtual=2)
    assert predict_time(two).seconds == pytest.approx(predict_time(one).seconds, rel=1e-3)


@pytest.mark.parametrize("zero", [1, 2])
def test_new_weights_are_waited_for(zero: int) -> None:
    """This library gathers them after the update, and begins no step before."""
    found = job(f"zero={zero},accumulate=4,precision=bf16", 256, "perlmutter", 64)
    gather = collective_s(
        found.machine, "all_gather", 2.0 * parameters_of(found, 0), found.dp_group()
    )
    assert gather > 0.1
    # Stage 2 has reduced its gradients in every backward already.
    assert predict_time(found).gradients >= gather


def test_experts_send_their_own_tokens_once_and_reduce_their_gradients() -> None:
    sparse = find_model("llama3-8b").__class__(
        **{**find_model("llama3-8b").__dict__, "experts": 8, "top_k": 2, "expert_ffn": 14336}
    )
    layout = Layout(dp=8, precision="bf16", accumulate=1)
    plain = job_from_layout(sparse, H200, layout, 8, MEGATRON_CORE)
    spread = plain.replace(ep=8)
    local = 2.0 * spread.samples * sparse.seq * sparse.top_k * sparse.hidden
    once = collective_s(H200, "all_to_all", local, group_of(H200, 8, 1))
    times = predict_time(plain), predict_time(spread)
    # There and back, forward and backward, in every layer.
    assert times[1].tensor_parallel - times[0].tensor_parallel == pytest.approx(
        4 * once * sparse.layers, rel=0.01
    )
    # Spread over all ranks each expert is held once; held by all, their gradients are summed.
    dense = predict_time(job_from_layout(MODEL, H200, layout, 8, MEGATRON_CORE))
    assert times[0].gradients > dense.gradients
    assert times[1].gradients < times[0].gradients


def test_an_optimizer_without_state_takes_no_memory_for_it() -> None:
    from dataclasses import replace

    layout = Layout(dp=8, zero=1, precision="bf16", accumulate=8)
    adam = job_from_layout(MODEL, H200, layout, 64)
    sgd = job_from_layout(replace(MODEL, optimizer_slots=0), H200, layout, 64)
    count = parameters_of(adam, 0)
    there, here = predict_memory(adam), predict_memory(sgd)
    assert there.optimizer - here.optimizer == pytest.approx(8.0 * count / 8)
    assert predict(sgd).time.optimizer < predict(adam).time.optimizer


def test_gathering_weights_costs_the_host() -> None:
    """`fully_shard` goes block by block in Python, forward and backward: small microbatches wait for it."""
    host_s = 1e-3
    slow = H200.replace(**{"device.host_kernel_s": host_s})
    plain, sharded = (
        job(f"{text}accumulate=4,precision=bf16", 32).replace(machine=slow)
        for text in ("dp=8,", "dp=8,zero=3,")
    )
    blocks = 4 * MODEL.layers * (2 * GATHER_KERNELS + REDUCE_KERNELS)
    more = blocks * host_s * sharded.software.host_share
    assert rank_alone_s(sharded) - rank_alone_s(plain) == pytest.approx(more, rel=0.05)
    assert predict_time(sharded).host - predict_time(plain).host == pytest.approx(more, rel=0.05)


def test_a_sharded_stage_is_gathered_whole_once_a_step() -> None:
    """In a pipeline `fully_shard` keeps a stage gathered, and adds its gradients up, until the end."""
    found = job("dp=2,zero=3,pp=4,microbatches=16,precision=bf16")
    there = predict_memory(found)
    stage = MODEL.num_parameters / 4
    assert there.working > 0.9 * (2 + 4) * stage
    alone = predict_memory(job("dp=8,zero=3,accumulate=8,precision=bf16"))
    assert alone.working < 2 * stage
    once = predict_time(found).gathers
    assert once == pytest.approx(predict_time(found.replace(microbatches=32)).gathers, rel=0.1)


@pytest.mark.parametrize(("precision", "weight"), [("bf16", 2.0), ("fp32", 4.0), ("fp8", 2.0)])
def test_gradients_of_shards_are_added_up_in_float32(precision: str, weight: float) -> None:
    assert own_wire(3, precision) == (weight, 4.0)
    assert own_wire(2, precision) == (weight, weight)
