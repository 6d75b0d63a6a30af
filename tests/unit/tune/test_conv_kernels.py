"""Batch norms and max pools of `tune.conv_kernels`: what torch's own do, as plain torch on a CPU."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.config import DdpConfig
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.parallel import conv_ops
from ridgeline.parallel.apply import arrange
from ridgeline.parallel.batchnorm import SyncBatchNorm
from ridgeline.parallel.conv_layers import (
    KernelBatchNorm2d,
    KernelMaxPool2d,
    apply_conv_kernels,
    has_conv_kernel,
)
from ridgeline.parallel.conv_ops import PARTS_OP, POOL_BACKWARD_OP, POOL_OP, channel_moments
from ridgeline.parallel.mesh import build_mesh, close_mesh
from ridgeline.tuning import TuneConfig

COMPILED = Layout.parse("compile=true")
LAST = torch.channels_last


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).contiguous(memory_format=LAST)


def changed(module: nn.Module) -> nn.Module:
    other = copy.deepcopy(module)
    assert apply_conv_kernels(other, COMPILED) >= 1
    return other


def passed(call: Callable[..., Tensor], module: nn.Module, x: Tensor, grad: Tensor) -> list[Any]:
    """Outputs, gradients and buffers after two steps."""
    found: list[Any] = []
    for scale in (1.0, 3.0):
        leaf = (x * scale).detach().requires_grad_()
        out = call(leaf)
        out.backward(grad)
        found += [out.detach(), leaf.grad]
    found += [p.grad for p in module.parameters()]
    return found + [buffer.clone() for buffer in module.buffers()]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("tracked", [True, False])
def test_batch_norms_are_torchs(affine: bool, momentum: float | None, tracked: bool) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(5, 1e-3, momentum, affine, tracked).double()
    if affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    ours = changed(plain)
    assert type(ours) is KernelBatchNorm2d
    x, grad = image(3, 5, 7, 6).double() * 4 + 50, image(3, 5, 7, 6).double()
    found, true = (passed(m, m, x, grad) for m in (ours, plain))
    assert len(found) == len(true) == 4 + 2 * affine + 3 * tracked
    for one, other in zip(found, true, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-10)
    assert found[0].is_contiguous(memory_format=LAST)
    assert list(ours.state_dict()) == list(plain.state_dict())
    for module in (ours.eval(), plain.eval()):
        module.zero_grad()
    before = [buffer.clone() for buffer in ours.buffers()]
    assert torch.allclose(ours(x), plain(x), rtol=1e-9)
    assert all(map(torch.equal, before, ours.buffers()))  # an evaluation moves nothing


def test_batch_norms_of_bf16_are_as_good_as_torchs() -> None:
    """Under autocast the activations are bf16 and the parameters float32."""
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(8)
    nn.init.normal_(plain.weight)
    ours = changed(plain)
    x, grad = image(4, 8, 6, 6, dtype=torch.bfloat16), image(4, 8, 6, 6, dtype=torch.bfloat16)
    found, rough = (passed(m, m, x, grad) for m in (ours, copy.deepcopy(plain)))
    wide = plain.double()
    exact = passed(wide, wide, x.double(), grad.double())
    for one, other, true in zip(found, rough, exact, strict=True):
        assert one.dtype is other.dtype
        least = 1e-6 * true.double().abs().max()
        assert error(one, true) <= max(1.1 * error(other, true), least)


def error(one: Tensor, true: Tensor) -> float:
    return float((one.double() - true.double()).abs().max())


def test_backward_keeps_the_input_once_and_as_it_came() -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = image(4, 8, 6, 6, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        changed(nn.BatchNorm2d(8))(x)
        assert [t.dtype for t in kept if t.numel() > 8] == [torch.bfloat16]
        assert kept[0].data_ptr() == x.data_ptr()
        kept.clear()
        changed(nn.MaxPool2d(2))(x)
        assert [(t.dtype, t.shape[2]) for t in kept] == [(torch.uint8, 3)]


def test_moments_do_not_cancel() -> None:
    torch.manual_seed(0)
    x = image(4, 3, 9, 9) * 0.01 + 100
    mean, variance = channel_moments(x)
    true = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert torch.allclose(variance.double(), true[0], rtol=1e-3)
    assert torch.allclose(mean.double(), true[1], rtol=1e-6)
    assert float(channel_moments(torch.full_like(x, 7.7))[1].max()) < 1e-10


WINDOWS = [
    (3, 2, 1),
    (2, 2, 0),
    (3, 1, 1),
    (5, 1, 2),
    ((3, 2), (2, 1), (1, 0)),
    (2, 3, 1),
    (4, 3, 2),
]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("values", ["random", "ties", "nan", "nothing"])
def test_max_pools_are_torchs(window: tuple[Any, Any, Any], values: str) -> None:
    torch.manual_seed(0)
    x = image(2, 5, 9, 11)
    if values == "ties":
        x = x.round()
    elif values == "nan":
        x[torch.rand(x.shape) < 0.1] = torch.nan
    elif values == "nothing":
        x[torch.rand(x.shape) < 0.9] = -torch.inf
    plain = nn.MaxPool2d(*window)
    ours = changed(plain)
    assert type(ours) is KernelMaxPool2d
    grad = image(*plain(x).shape)
    leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in "ab"]
    found, true = ours(leaves[0]), plain(leaves[1])
    for out in (found, true):
        out.backward(grad)
    assert torch.equal(found.nan_to_num(99), true.nan_to_num(99))
    assert torch.equal(leaves[0].grad, leaves[1].grad)
    assert found.is_contiguous(memory_format=LAST)
    assert torch.equal(ours.eval()(x).nan_to_num(99), found.nan_to_num(99))


def test_what_has_no_kernel_is_left_to_torch() -> None:
    left = [
        nn.MaxPool2d(3, ceil_mode=True),
        nn.MaxPool2d(3, dilation=2),
        nn.MaxPool2d(3, return_indices=True),
        nn.MaxPool2d(9),
        nn.MaxPool2d(2, padding=2),
        nn.BatchNorm1d(3),
        nn.SyncBatchNorm(3),
        SyncBatchNorm(3),  # over all ranks
        type("Own", (nn.BatchNorm2d,), {})(3),
    ]
    assert not any(map(has_conv_kernel, left))
    assert apply_conv_kernels(nn.ModuleList(left), COMPILED) == 0
    x = torch.randn(2, 3, 8, 8)  # channels do not lie together
    norm, pool = changed(nn.BatchNorm2d(3)), changed(nn.MaxPool2d(2))
    assert torch.equal(norm(x), F.batch_norm(x, None, None, training=True))
    assert torch.equal(pool(x), F.max_pool2d(x, 2))
    assert pool(x).is_contiguous()
    assert pool(x[0]).shape == (3, 4, 4)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(image(1, 3, 1, 1))
    with pytest.raises(RuntimeError, match="too small"):
        pool(image(2, 3, 1, 1))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool, self.again = nn.MaxPool2d(3, 2, 1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.conv(x))))
        out: Tensor = F.relu(self.again(x) + x)
        return out


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_is_one_graph_and_the_same(backend: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = Small().to(memory_format=LAST)
    ours = changed(plain)
    call = torch.compile(ours, fullgraph=True, dynamic=False, backend=backend)
    x, grad = image(2, 3, 10, 8), image(2, 8, 5, 4)
    found, true = passed(call, ours, x, grad), passed(plain, plain, x, grad)
    for one, other in zip(found, true, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


def test_what_is_traced_does_not_look_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is Triton is found out by an import, which would end the graph on CUDA."""

    def asked(x: Tensor) -> bool:
        torch._dynamo.graph_break()
        return False

    monkeypatch.setattr(conv_ops, "has_kernel", asked)
    torch._dynamo.reset()
    call = torch.compile(changed(Small()), fullgraph=True, dynamic=False, backend="aot_eager")
    call(image(2, 3, 10, 8)).sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(4, 3, 9, 11), (2, 300, 16, 16), (64, 5, 1, 1), (2, 4, 1, 1)])
def test_parts_of_uneven_size_are_put_together(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], compiled: bool
) -> None:
    """As the kernel gives them; it is written in plain torch here."""

    def moments(x: Tensor, rows_each: int, num_splits: int, columns: int) -> Tensor:
        splits = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]).split(rows_each)
        assert len(splits) == num_splits
        origins = [rows[:2].mean(0) for rows in splits]
        shifts = [(rows - o).mean(0) for rows, o in zip(splits, origins, strict=True)]
        spreads = [((rows - rows.mean(0)) ** 2).sum(0) for rows in splits]
        return torch.stack([torch.stack(part) for part in (origins, shifts, spreads)])

    name = "ridgeline.parallel.conv_kernels"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(moments=moments))  # type: ignore[arg-type]
    monkeypatch.setattr(conv_ops, "has_kernel", lambda x: True)
    monkeypatch.setattr(conv_ops, "PROGRAMS", 7)
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = image(*shape) * 0.1 + 30
    call = torch.compile(channel_moments, fullgraph=True) if compiled else channel_moments
    mean, variance = call(x)
    true = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert torch.allclose(variance.double(), true[0], rtol=1e-5)
    assert torch.allclose(mean.double(), true[1], rtol=2e-7)


def test_the_compiler_is_told_what_comes_out() -> None:
    x = image(2, 5, 9, 11)
    window = ([3, 2], [2, 1], [1, 0])
    out, offsets = POOL_OP(x, *window)
    checks = ("test_schema", "test_faketensor")
    for operator, given in (
        (PARTS_OP, (x,)),
        (POOL_OP, (x, *window)),
        (POOL_BACKWARD_OP, (out, offsets, [9, 11], *window)),
    ):
        torch.library.opcheck(operator, given, test_utils=checks)


def arranged(model: nn.Module, layout: str) -> list[str]:
    parsed = Layout.parse(layout)
    mesh = build_mesh(read_rank_env({}), parsed, torch.device("cpu"))
    try:
        tune = TuneConfig(conv_kernels=True)
        return arrange(model, parsed, mesh, tune=tune, ddp=DdpConfig()).notes
    finally:
        close_mesh(mesh)


def test_the_setting_reaches_the_model_or_is_refused() -> None:
    model = Small()
    assert "3 batch norms and max pools" in " ".join(arranged(model, "compile=true"))
    assert type(model.norm) is type(model.again) is KernelBatchNorm2d
    assert type(model.pool) is KernelMaxPool2d
    with pytest.raises(UsageError, match="add compile=true"):
        arranged(Small(), "precision=fp32")
    with pytest.raises(UsageError, match="neither a 2-D batch norm nor"):
        arranged(nn.Linear(2, 2), "compile=true")
    for layout in ("tp=2,compile=true", "spatial=2x1,compile=true"):
        with pytest.raises(UsageError, match="do not compose"):
            apply_conv_kernels(Small(), Layout.parse(layout))
