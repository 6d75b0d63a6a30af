"""Batch norms and max pools of `tune.conv_kernels` on a CUDA device, beside torch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.layout import Layout
from ridgeline.parallel.conv_layers import apply_conv_kernels
from ridgeline.parallel.conv_ops import POOL_BACKWARD_OP, POOL_OP, channel_moments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
LAST = torch.channels_last
COMPILED = Layout.parse("compile=true")


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=LAST)


def changed(module: nn.Module) -> nn.Module:
    other = copy.deepcopy(module)
    assert apply_conv_kernels(other, COMPILED) >= 1
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(8, 64, 112, 112), (16, 256, 28, 28), (4, 2048, 7, 7), (3, 5, 6, 7), (9, 130, 1, 1)]
)
@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (100.0, 2.0)])
def test_moments_are_those_of_float64(
    shape: tuple[int, ...], dtype: torch.dtype, mean: float, spread: float
) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape, device="cuda") * spread + mean).to(dtype).contiguous(memory_format=LAST)
    x[0, :, 0, 0] += 50  # one that lies far out
    found = channel_moments(x)
    true = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert found[0].dtype is found[1].dtype is torch.float32
    assert torch.allclose(found[1].double(), true[0], rtol=1e-5)
    assert float(((found[0] - true[1]).abs() / true[0].sqrt()).max()) < 2e-5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norms_are_torchs(affine: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = nn.BatchNorm2d(48, affine=affine).cuda()
    if affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    ours = changed(plain)
    wide = copy.deepcopy(plain).double()
    call = torch.compile(ours, fullgraph=True, dynamic=False) if compiled else ours
    x, grad = image(6, 48, 17, 13) + 3, image(6, 48, 17, 13)
    leaves = [x.requires_grad_(), x.detach().double().requires_grad_()]
    outs = [call(leaves[0]), wide(leaves[1])]
    outs[0].backward(grad)
    outs[1].backward(grad.double())
    found = [outs[0], leaves[0].grad, *(p.grad for p in ours.parameters()), *ours.buffers()]
    true = [outs[1], leaves[1].grad, *(p.grad for p in wide.parameters()), *wide.buffers()]
    for one, other in zip(found, true, strict=True):
        assert relative(one, other) < 1e-5


def relative(found: Tensor, true: Tensor) -> float:
    found, true = found.detach().double(), true.detach().double()
    return float((found - true).norm() / true.norm())


WINDOWS: list[tuple[Any, Any, Any]] = [
    (3, 2, 1), (2, 2, 0), (3, 1, 1), (5, 1, 2), ((3, 2), (2, 1), (1, 0)), (2, 3, 1), (4, 3, 2),
]  # fmt: skip


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("values", ["random", "ties", "nan", "nothing"])
@pytest.mark.parametrize("shape", [(4, 64, 56, 56), (2, 5, 9, 11), (3, 70, 12, 13)])
def test_max_pools_are_torchs(
    window: tuple[Any, Any, Any], values: str, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = image(*shape, dtype=torch.bfloat16)
    if values == "ties":
        x = x.round()
    elif values == "nan":
        x[torch.rand(x.shape, device="cuda") < 0.1] = torch.nan
    elif values == "nothing":
        x[torch.rand(x.shape, device="cuda") < 0.9] = -torch.inf
    plain = nn.MaxPool2d(*window)
    # In windows of -inf alone torch's kernel for channels last names the corner of the whole image, and so
    # adds gradients to a place that is in none of them; what it does on a CPU is held to here.
    beside = x.cpu() if values == "nothing" else x
    leaves = [
        one.clone(memory_format=torch.preserve_format).requires_grad_() for one in (x, beside)
    ]
    found, true = changed(plain)(leaves[0]), plain(leaves[1])
    # Whole numbers, so that sums of a few of them are exact in any order and type.
    grad = torch.randint(-8, 9, true.shape, device="cuda").bfloat16().contiguous(memory_format=LAST)
    for out in (found, true):
        out.backward(grad.to(out.device))
    assert torch.equal(found.nan_to_num(99).cpu(), true.nan_to_num(99).cpu())
    assert torch.equal(leaves[0].grad.cpu(), leaves[1].grad.cpu())


def test_positions_beyond_32_bits() -> None:
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("takes 24 GB of the device")
    x = torch.zeros((1, 2**15, 260, 260), device="cuda", dtype=torch.bfloat16).contiguous(
        memory_format=LAST
    )
    x[0, :, -1, -1] = torch.arange(1, 2**15 + 1, device="cuda")
    window = ([2, 2], [2, 2], [0, 0])
    out, offsets = POOL_OP(x, *window)
    assert torch.equal(out[0, :, -1, -1], x[0, :, -1, -1])
    grad = POOL_BACKWARD_OP(out, offsets, [260, 260], *window)
    assert torch.equal(grad[0, :, -1, -1], x[0, :, -1, -1])
    true = (torch.arange(1, 2**15 + 1, device="cuda").bfloat16().double()) / 260**2
    assert torch.allclose(channel_moments(x)[0].double(), true, rtol=1e-4)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.pool, self.again = nn.MaxPool2d(3, 2, 1), nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.conv(x))))
        out: Tensor = F.relu(self.again(x) + x)
        return out


def test_a_compiled_model_in_bf16_trains_as_torchs_does() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = Small().cuda().to(memory_format=LAST)
    ours = changed(plain)
    begun = [p.detach().clone() for p in plain.parameters()]
    x = image(8, 3, 64, 64)
    found = []
    for model in (ours, plain):
        call = torch.compile(model, fullgraph=True, dynamic=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            with torch.autocast("cuda", torch.bfloat16):
                loss = call(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ways = [p.detach() - start for p, start in zip(model.parameters(), begun, strict=True)]
        found.append([loss, *model.buffers(), *ways])
    for one, other in zip(*found, strict=True):
        assert relative(one, other) < 0.05  # activations in bf16
