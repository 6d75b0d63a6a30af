"""Traces of a GPU, written by hand: gaps, copies, communication and products are told apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.doctor.kernels import class_of_kernel, class_of_op, on_tensor_cores, op_cost
from ridgeline.doctor.measure import fit_parts
from ridgeline.doctor.measured import (
    ATTENTION,
    CONVOLUTION,
    ELEMENTWISE,
    LOSS,
    MATRIX,
    OPTIMIZER,
)
from ridgeline.doctor.probe import WARMUP, Probe
from ridgeline.doctor.timeline import look_at_memory, take_apart
from ridgeline.doctor.trace import Sample, Trace, overlap, subtract, union

MAIN = 1
NS = 1_000


class Script:
    """Events of a trace, added one by one; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._id = 0

    def op(self, name: str, start: float, dur: float, dims: Any = None, kind: str = "float") -> int:
        self._id += 1
        args: dict[str, Any] = {"External id": self._id}
        if dims is not None:
            args |= {"Input Dims": dims, "Input type": [kind] * len(dims)}
        self._add("cpu_op", name, start, dur, args)
        return self._id

    def kernel(self, name: str, start: float, dur: float, launched: float, op: int = 0) -> None:
        self._launch("cudaLaunchKernel", launched, op)
        args = {"External id": op, "correlation": self._id, "stream": 7}
        self._add("kernel", name, start, dur, args)

    def copy(self, name: str, start: float, dur: float, launched: float, size: int) -> None:
        self._launch("cudaMemcpyAsync", launched, 0)
        self._add("gpu_memcpy", name, start, dur, {"correlation": self._id, "bytes": size})

    def runtime(self, name: str, start: float, dur: float, op: int = 0) -> None:
        self._add("cuda_runtime", name, start, dur, {"External id": op})

    def annotation(self, name: str, start: float, dur: float) -> None:
        self._add("user_annotation", name, start, dur, {})

    def _launch(self, name: str, start: float, op: int) -> None:
        self._id += 1
        self._add("cuda_runtime", name, start, 2, {"correlation": self._id, "External id": op})

    def _add(self, category: str, name: str, start: float, dur: float, args: Any) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "ts": start,
                "dur": dur,
                "tid": MAIN,
                "args": args,
            }
        )

    def trace(self, end: float, samples: list[Sample] | None = None, **spans: Any) -> Trace:
        values = {"traceEvents": self.events, "baseTimeNanoseconds": 0}
        return Trace(values, samples or [], (0, int(end * NS)), MAIN, **spans)


def test_spans() -> None:
    assert union([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]
    assert subtract([(0, 10)], [(2, 3), (5, 12)]) == [(0, 2), (3, 5)]
    assert overlap((1, 6), [(0, 2), (5, 9)]) == 2


def test_a_gap_after_a_wait_is_that_lines_doing() -> None:
    s = Script()
    s.kernel("ampere_sgemm", 0, 100, 0, s.op("aten::mm", 0, 2, [[8, 8], [8, 8]]))
    item = s.op("aten::item", 10, 95)
    s.runtime("cudaStreamSynchronize", 12, 90, item)
    s.kernel("elementwise_kernel", 180, 20, 170, s.op("aten::add", 168, 4, [[64], [64]]))
    line = Sample(50 * NS, "model.py:7 (forward)", "if loss.item() > 3:", "run")
    taken = take_apart(s.trace(200, [line]))
    assert taken.host_s == pytest.approx(80e-6)
    assert taken.num_syncs == 1
    ((where, what, _),) = taken.stalls
    assert where == "model.py:7 (forward)"
    assert "aten::item" in what
    assert taken.classes[MATRIX].seconds == pytest.approx(100e-6)
    assert taken.classes[ELEMENTWISE].seconds == pytest.approx(20e-6)


def test_only_the_allocations_of_the_steps_looked_at_are_theirs() -> None:
    s = Script()
    s.runtime("cudaFree", -500, 400)
    s.runtime("cudaMalloc", 10, 30)
    s.kernel("elementwise_kernel", 100, 20, 90, s.op("aten::add", 88, 4, [[64], [64]]))
    assert take_apart(s.trace(200)).retry_s == pytest.approx(30e-6)


def test_one_retry_of_the_allocator_in_every_step_is_one_a_step(monkeypatch) -> None:
    """Also of the steps that are profiled; those that warm up are not counted."""
    probe = Probe(torch.device("cpu"), steps=6)
    while not probe.step_done():
        torch.zeros(8).add_(1.0)
    retries = {"num_alloc_retries": probe.num_steps - WARMUP}
    monkeypatch.setattr(probe, "_cuda", True)
    monkeypatch.setattr(probe, "_step_times", lambda: [0.1])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: retries)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 0)
    assert probe.finish().num_retries == 1.0


def test_a_gap_while_the_host_launches_is_a_launch_gap() -> None:
    s = Script()
    for number in range(10):
        at = 20.0 * number
        op = s.op("aten::add", at, 18, [[4], [4]])
        s.kernel("elementwise_kernel", at + 16, 2, at + 12, op)
    taken = take_apart(s.trace(200))
    assert taken.launch_s == pytest.approx(180e-6, rel=0.05)
    assert taken.num_launches == 10
    assert taken.host_s == 0


def test_launches_of_the_optimizer_are_told_apart() -> None:
    s = Script()
    s.annotation("Optimizer.step#AdamW.step", 0, 200)
    for number in range(10):
        s.kernel("elementwise_kernel", 20.0 * number + 16, 2, 20.0 * number + 12)
    taken = take_apart(s.trace(200))
    assert taken.num_optimizer_launches == 10
    assert taken.classes[OPTIMIZER].num == 10
    assert taken.launch_in["optimizer"] > 0.9 * taken.launch_s


def test_a_gap_while_the_step_waits_for_data_is_datas() -> None:
    s = Script()
    s.kernel("k", 0, 50, 0)
    s.kernel("k", 1050, 50, 1040)
    taken = take_apart(s.trace(1100, data_ns=[(40 * NS, 1030 * NS)]))
    assert taken.data_s == pytest.approx(1000e-6, rel=0.02)
    taken = take_apart(s.trace(1100))
    assert taken.data_s == 0
    assert taken.host_s == pytest.approx(1000e-6, rel=0.02)


def test_torchs_own_loader_announces_its_waits() -> None:
    s = Script()
    s.kernel("k", 0, 50, 0)
    s.kernel("k", 1050, 50, 1040)
    s.annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 40, 995)
    assert take_apart(s.trace(1100)).data_s == pytest.approx(1000e-6, rel=0.02)


def test_communication_is_hidden_or_exposed() -> None:
    s = Script()
    s.kernel("gemm", 0, 100, 0, s.op("aten::mm", 0, 2, [[8, 8], [8, 8]]))
    s.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 100, 2)
    taken = take_apart(s.trace(150))
    assert taken.comm_hidden_s == pytest.approx(50e-6)
    assert taken.comm_exposed_s == pytest.approx(50e-6)


def test_copies_from_pageable_memory_are_counted() -> None:
    s = Script()
    s.copy("Memcpy HtoD (Pageable -> Device)", 100, 300, 20, 3000)
    s.copy("Memcpy HtoD (Pinned -> Device)", 400, 100, 30, 1000)
    s.kernel("gemm", 500, 100, 40)
    taken = take_apart(s.trace(600))
    assert taken.h2d_bytes == 4000
    assert taken.h2d_pageable_bytes == 3000
    assert taken.h2d_s >= 400e-6


def test_products_and_their_tensor_cores() -> None:
    s = Script()
    wide = [[4096, 768], [768, 50257]]
    s.kernel("ampere_sgemm_128x64", 0, 300, 0, s.op("aten::mm", 0, 2, wide))
    narrow = s.op("aten::mm", 4, 2, [[64, 64], [64, 64]], "c10::BFloat16")
    s.kernel("nvjet_tst_128x64", 300, 100, 5, narrow)
    taken = take_apart(s.trace(400))
    assert taken.products[(4096, 50257, 768), "fp32", False] == pytest.approx(300e-6)
    assert taken.products[(64, 64, 64), "bf16", True] == pytest.approx(100e-6)
    assert taken.tensor_core_s / taken.tensor_able_s == pytest.approx(0.25)
    assert taken.classes[MATRIX].flops == 2 * 4096 * 768 * 50257 + 2 * 64**3


def test_on_a_cpu_a_pause_after_a_collective_is_communication() -> None:
    s = Script()
    s.op("aten::mm", 0, 100, [[8, 8], [8, 8]])
    s.op("c10d::allreduce_", 100, 50)
    s.op("aten::add", 650, 100, [[8], [8]])
    alone, among = (take_apart(s.trace(750), num_ranks=n) for n in (1, 2))
    assert among.comm_exposed_s == pytest.approx(550e-6)
    assert alone.comm_exposed_s == pytest.approx(50e-6)
    assert alone.launch_s == pytest.approx(500e-6)


def test_one_rank_alone_waits_for_no_network() -> None:
    s = Script()
    s.op("aten::mm", 0, 100, [[8, 8], [8, 8]])
    s.op("aten::add", 1000, 100, [[8], [8]])
    seen = Sample(500 * NS, "loop.py:3 (step)", "dist.barrier()", "comm")
    alone, among = (take_apart(s.trace(1100, [seen]), num_ranks=n) for n in (1, 2))
    assert alone.comm_exposed_s == 0
    assert among.comm_exposed_s == pytest.approx(900e-6)


def test_on_a_cpu_a_pause_in_python_is_its_lines() -> None:
    s = Script()
    s.op("aten::mm", 0, 100, [[8, 8], [8, 8]])
    s.op("aten::add", 1000, 100, [[8], [8]])
    line = Sample(500 * NS, "loop.py:3 (log)", "json.dumps(x)", "run")
    taken = take_apart(s.trace(1100, [line]))
    assert taken.host_s == pytest.approx(900e-6)
    assert next(iter(taken.stalls))[0] == "loop.py:3 (log)"
    # The same pause in one step of three is not that line's doing.
    ends = [0, 1100 * NS, 2200 * NS, 3300 * NS]
    for at in (1100, 2200):
        s.op("aten::mm", at, 1100, [[8, 8], [8, 8]])
    assert take_apart(s.trace(3300, [line], step_ends_ns=ends)).host_s == 0


def test_on_a_cpu_a_long_pause_that_nobody_saw_is_not_explained() -> None:
    """Another process had the core: the thread that looks at the main one did not run either."""
    s = Script()
    s.op("aten::mm", 0, 100, [[8, 8], [8, 8]])
    s.op("aten::add", 9000, 100, [[8], [8]])
    parts = fit_parts(take_apart(s.trace(9100)), 1, 9100e-6)
    assert (parts["host_s"], parts["launch_s"]) == (0.0, 0.0)
    assert parts["other_s"] == pytest.approx(8900e-6)


@pytest.mark.parametrize(
    ("kernel", "ops", "wanted"),
    [
        ("nvjet_tst_256x128", ["aten::mm"], MATRIX),
        ("sm90_xmma_fprop_implicit_gemm_bf16", ["aten::cudnn_convolution"], CONVOLUTION),
        ("pytorch_flash::flash_fwd_kernel", ["aten::_flash_attention_forward"], ATTENTION),
        ("triton_poi_fused_gelu_3", [], ELEMENTWISE),
        ("triton_red_fused__log_softmax_nll_loss_forward_9", [], LOSS),
        ("triton_tem_fused_mm_2", [], MATRIX),
        ("multi_tensor_apply_kernel", [], OPTIMIZER),
        ("cunn_SoftMaxForward", ["aten::_log_softmax", "aten::cross_entropy_loss"], LOSS),
        ("vectorized_elementwise_kernel", ["aten::add"], ELEMENTWISE),
        ("cutlass_80_tensorop_s1688gemm", [], MATRIX),
    ],
)
def test_classes_of_kernels(kernel: str, ops: list[str], wanted: str) -> None:
    assert class_of_kernel(kernel, ops, False) == wanted
    assert class_of_kernel(kernel, ops, True) == OPTIMIZER


def test_classes_of_ops() -> None:
    assert class_of_op("aten::addmm") == MATRIX
    assert class_of_op("aten::mkldnn_convolution") == CONVOLUTION
    assert class_of_op("aten::_scaled_dot_product_flash_attention_for_cpu") == ATTENTION
    assert class_of_op("aten::nll_loss_backward") == LOSS
    assert class_of_op("aten::native_layer_norm") == ELEMENTWISE
    assert class_of_op("aten::as_strided") == ""
    assert class_of_op("gloo:all_reduce") == "communication"


def test_tensor_cores_by_name_and_type() -> None:
    assert on_tensor_cores("sm80_xmma_gemm_tf32f32", "fp32")
    assert not on_tensor_cores("ampere_sgemm_128x64_nn", "fp32")
    assert not on_tensor_cores("cutlass_80_simt_sgemm", "fp32")
    assert on_tensor_cores("some_new_name", "bf16")


def test_costs_of_ops() -> None:
    flops, size, precision = op_cost("aten::addmm", [[5], [2, 3], [3, 5]], ["float"] * 3, None)
    assert (flops, precision) == (60.0, "fp32")
    assert size == 4 * (5 + 6 + 15 + 10)
    shapes = [[2, 3, 8, 8], [4, 3, 3, 3], []]
    flops, _, _ = op_cost(
        "aten::convolution", shapes, ["float"] * 3, ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]"]
    )
    assert flops == 2.0 * (2 * 4 * 4 * 4) * 27
    many = [[[8, 8], [8]], [[8, 8], [8]]]
    assert op_cost("aten::_foreach_add_", many, ["TensorList"] * 2, None)[1] > 0


@pytest.mark.parametrize(
    ("name", "shape", "num_before", "factor"),
    [
        ("aten::_scaled_dot_product_flash_attention", [2, 4, 128, 64], 0, 4.0),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [2, 4, 128, 64], 0, 4.0),
        ("aten::_scaled_dot_product_cudnn_attention_backward", [2, 4, 128, 64], 1, 10.0),
        # What the kernels of CUDA are called with inside of these has the length before the heads.
        ("aten::_flash_attention_forward", [2, 128, 4, 64], 0, 4.0),
        ("aten::_flash_attention_backward", [2, 128, 4, 64], 1, 10.0),
        ("aten::_efficient_attention_forward", [2, 128, 4, 64], 0, 4.0),
        ("aten::_efficient_attention_backward", [2, 128, 4, 64], 1, 10.0),
    ],
)
def test_attention_costs_the_square_of_the_length(
    name: str, shape: list[int], num_before: int, factor: float
) -> None:
    shapes = [shape] * (num_before + 3)
    flops, _, _ = op_cost(name, shapes, ["c10::BFloat16"] * len(shapes), None)
    assert flops == factor * 2 * 4 * 128 * 128 * 64


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 8, 8)),
        (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 8, 8)),
        (nn.ConvTranspose2d(4, 6, 2, stride=2), (2, 4, 8, 8)),
        (
            nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
            (2, 4, 8, 8),
        ),
        (nn.ConvTranspose3d(4, 2, 2, stride=2), (1, 4, 4, 4, 4)),
    ],
)
def test_convolutions_cost_what_torch_counts(layer: nn.Module, size: tuple[int, ...]) -> None:
    """Beside torch's own count, from what its profiler notes; of backward, which torch counts without the
    groups, twice as much."""
    x = torch.randn(size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    with torch.profiler.profile(record_shapes=True) as profiler:
        layer(x).sum().backward()
    seen = {}
    for event in profiler.events():
        if event.name in ("aten::convolution", "aten::convolution_backward"):
            kinds = ["float"] * len(event.input_shapes)
            cost = op_cost(event.name, event.input_shapes, kinds, event.concrete_inputs)
            seen[event.name] = cost
    forward = counter.get_total_flops()
    assert [cost[0] for cost in seen.values()] == [forward, 2 * forward]
    read = 4 * (x.numel() + sum(p.numel() for p in layer.parameters()))
    assert seen["aten::convolution"][1] == read + 4 * layer(x).numel()


def test_memory_events_name_the_largest_tensor() -> None:
    s = Script()
    s.op("aten::linear", 10, 20)
    s.op("aten::relu", 40, 20)
    for at, size, address in ((15, 4000, 1), (45, 100, 2), (80, -4000, 1)):
        s.events.append(
            {
                "ph": "i",
                "name": "[memory]",
                "ts": at,
                "tid": MAIN,
                "args": {"Bytes": size, "Device Type": 0, "Addr": address},
            }
        )
    found = look_at_memory(s.trace(100))
    assert (found.largest_bytes, found.largest_what) == (4000, "aten::linear")
    assert len(found.timeline) == 3


def test_a_fused_update_reads_and_writes_its_lists() -> None:
    """As torch's profiler notes it: parameters, gradients and two moments; no maxima; numbers of steps."""
    shapes = [[64, 32], [7]]
    numbers = 64 * 32 + 7
    dims = [shapes, shapes, shapes, shapes, [], [[], []], []]
    types = ["TensorList"] * 6 + ["Scalar"]
    flops, moved, _ = op_cost("aten::_fused_adamw_", dims, types, [""] * 7)
    assert flops == 0
    assert moved == pytest.approx(4 * 7 * numbers, rel=1e-2)
    _, added, _ = op_cost("aten::_foreach_add_", [shapes, shapes], ["TensorList"] * 2, ["", ""])
    assert added == 4 * 3 * numbers


def test_nsight_is_given_steps_waits_and_updates_as_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[int, str] = {}
    seen: list[str] = []

    def start(name: str) -> int:
        opened[len(seen)] = name
        seen.append(name)
        return len(seen) - 1

    monkeypatch.setattr(torch.cuda.nvtx, "range_start", start)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", opened.pop)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
    probe = Probe(torch.device("cpu"), steps=2)
    probe._nvtx = True
    probe._open_range()
    probe._plan.clear()  # the ranges alone
    while True:
        assert list(opened.values()) == [f"step {probe.num_done + 1}"]
        with probe.waiting_for_data():
            pass
        with probe.updating():
            pass
        if probe.step_done():
            break
    assert not opened
    each = [[f"step {n}", "data", "optimizer"] for n in range(1, probe.num_steps + 1)]
    assert seen == [name for names in each for name in names]
