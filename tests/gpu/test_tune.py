"""fp8 products, masters and attention back ends on a CUDA device, beside the same on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.config import OptimConfig
from ridgeline.optim.master import build_master_adamw
from ridgeline.parallel.float8 import build_scaling, has_fp8_products, linear
from ridgeline.parallel.float8_ops import cast, cast_both, cast_turned, largest
from ridgeline.parallel.tuned import prefer_attention
from ridgeline.tuning import TuneConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    gap = found.detach().double().cpu() - true.detach().double().cpu()
    return float(gap.norm() / true.detach().double().norm())


@pytest.mark.parametrize("kind", ["row", "mixed", "tensor", "careful"])
@pytest.mark.parametrize("gradients", ["e5m2", "e4m3"])
@pytest.mark.parametrize("compiled", [False, True])
def test_products_are_those_of_the_emulation(kind: str, gradients: str, compiled: bool) -> None:
    device = torch.device("cuda")
    if not has_fp8_products(device):
        pytest.skip("the device has no fp8 products")
    torch.manual_seed(0)
    x, weight, grad = torch.randn(256, 512), torch.randn(384, 512) / 20, torch.randn(256, 384)
    tune = TuneConfig(fp8_scaling=kind, fp8_gradients=gradients)
    found = []
    for place in (device, torch.device("cpu")):
        leaf = x.bfloat16().to(place).requires_grad_()
        matrix = weight.to(place).requires_grad_()
        scaling = build_scaling(tune, place)
        assert scaling.native == (place.type == "cuda")
        call = torch.compile(linear, dynamic=False) if scaling.native and compiled else linear
        out = call(leaf, matrix, None, scaling)
        out.backward(grad.bfloat16().to(place))
        found.append((out, leaf.grad, matrix.grad))
    for one, other in zip(*found, strict=True):
        assert relative(one, other) < 0.01  # bf16 results, and sums in the short register


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 384), (48, 80), (1, 16), (1000, 7)])
def test_the_kernel_casts_as_torch_does(
    kind: torch.dtype, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Any shape, a scale a row or one for all, either side: the same but for ties, which the last bit of
    a scale decides."""
    if not has_fp8_products(torch.device("cuda")):
        pytest.skip("the device has no fp8 products")
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[1])).to(dtype)
    x[0] = 0.0
    tops = largest(x, rows=True), largest(x.t(), rows=True), largest(x, rows=False)
    for top, top_turned in (tops[:2], (tops[2], tops[2]), (tops[0], tops[2])):
        there = cast_both(x.cuda(), top.cuda(), top_turned.cuda(), kind)
        here = cast_both(x, top, top_turned, kind)
        for one, other in zip(there, here, strict=True):
            assert one.shape == other.shape
            assert one.is_contiguous()
            assert_same_but_for_ties(one, other)
        assert_same_but_for_ties(cast(x.cuda(), top.cuda(), kind), here[0])
        turned = cast_turned(x.t().cuda().t(), top_turned.cuda(), kind)
        assert_same_but_for_ties(turned, here[1])


def assert_same_but_for_ties(one: torch.Tensor, other: torch.Tensor) -> None:
    found, true = (t.cpu().view(torch.uint8).int() for t in (one, other))
    assert int((found - true).abs().max()) <= 1  # the next number at most
    assert float((found != true).float().mean()) < 0.005


def test_masters_on_the_device_are_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(64, 32) for _ in range(5)]
    start = torch.randn(64, 32)
    found = []
    for place in ("cuda", "cpu"):
        layer = nn.Linear(32, 64, device=place)
        with torch.no_grad():
            layer.weight.copy_(start)
        optimizer = build_master_adamw(layer, OptimConfig(weight_decay=0.1), 1e-2)
        for gradient in gradients:
            layer.weight.grad = gradient.to(place).bfloat16()
            layer.bias.grad = torch.ones(64, device=place)
            optimizer.step()
        found.append(optimizer.state[layer.weight]["master"].cpu())
        assert torch.equal(layer.weight.cpu(), found[-1].bfloat16())
    assert (found[0] - found[1]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
def test_attention_back_ends_run(name: str) -> None:
    before = torch._C._get_sdp_priority_order()
    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    try:
        prefer_attention(name)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            torch.cuda.synchronize()
        kernels = " ".join(event.key for event in profile.key_averages()).lower()
        assert {"flash": "flash", "cudnn": "cudnn", "efficient": "fmha"}[name] in kernels
    finally:
        torch._C._set_sdp_priority_order(before)
    wide = F.scaled_dot_product_attention(*[q.float().cpu()] * 3, is_causal=True)
    assert relative(out, wide) < 0.01
