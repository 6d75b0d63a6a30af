"""Batch norm over all ranks against torch's own on the whole batch, down to the gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.data.order import piece_bounds
from ridgeline.errors import UsageError
from ridgeline.parallel.batchnorm import SyncBatchNorm, apply_sync_batch_norm
from ridgeline.parallel.share import Share

NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    """Of the whole batch; ranks get pieces that differ by one sample, or none at all."""
    momentum: float | None = 0.1
    affine: bool = True
    track: bool = True
    dtype: torch.dtype = torch.float64
    """Of the input; parameters are float64 or, for lower inputs, float32."""
    steps: int = 3

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype is torch.float64 else torch.float32


def build(case: Case) -> nn.Module:
    norm = NORMS[len(case.shape)](
        case.shape[1],
        momentum=case.momentum,
        affine=case.affine,
        track_running_stats=case.track,
        dtype=case.wide,
    )
    if case.affine:
        torch.manual_seed(3)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


def data(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """A batch far from zero mean, where careless variances lose their digits, and a gradient."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(case.shape, generator=generator, dtype=torch.float64) * 2 + 5
    grad = torch.randn(case.shape, generator=generator, dtype=torch.float64)
    return x.to(case.dtype), grad.to(case.dtype)


def train(norm: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = norm(x)
    assert out.dtype == x.dtype
    out.backward(grad)
    assert x.grad is not None
    return out.detach(), x.grad


def compare(case: Case) -> dict[str, float]:
    """Largest differences between this rank's part and the same part of one process's answer."""
    rank, world = dist.get_rank(), dist.get_world_size()
    low, high = piece_bounds(case.shape[0], rank, world)
    share = Share()
    reference, norm = build(case), apply_sync_batch_norm(build(case), dist.group.WORLD, share)
    assert isinstance(norm, SyncBatchNorm)
    gaps: dict[str, float] = {}

    def note(name: str, mine: Tensor, whole: Tensor) -> None:
        gap = (mine.double() - whole.double()).abs().max().item() if mine.numel() else 0.0
        gaps[name] = max(gaps.get(name, 0.0), gap)

    for step in range(case.steps):
        x, grad = data(case, step)
        out, dx = train(reference, x, grad)
        share.num_real = high - low
        if high > low:
            my_out, my_dx = train(norm, x[low:high], grad[low:high])
            note("out", my_out, out[low:high])
            note("input grad", my_dx, dx[low:high])
        else:  # one borrowed sample, whose gradient counts for nothing
            _, my_dx = train(norm, x[:1], torch.zeros_like(grad[:1]))
            note("borrowed grad", my_dx, torch.zeros_like(my_dx))
    for (name, mine), whole in zip(norm.named_parameters(), reference.parameters(), strict=True):
        assert mine.grad is not None
        total = mine.grad.clone()
        dist.all_reduce(total)
        note(f"{name} grad", total, whole.grad)
    for (name, mine), whole in zip(norm.named_buffers(), reference.buffers(), strict=True):
        assert mine.dtype == whole.dtype
        note(name, mine, whole)
    x, _ = data(case, 99)
    if case.track:
        note("evaluation", norm.eval()(x), reference.eval()(x))
    return gaps


CASES = {
    "1d": Case((11, 3)),
    "1d-length": Case((10, 3, 5)),
    "2d": Case((9, 4, 3, 5)),
    "3d": Case((7, 2, 3, 2, 4)),
    "one-sample-a-rank-short": Case((3, 4, 2, 2)),
    "one-sample": Case((1, 4, 2, 2)),
    "cumulative": Case((9, 4, 3, 3), momentum=None),
    "no-affine": Case((9, 4, 3, 3), affine=False),
    "no-running-stats": Case((9, 4, 3, 3), track=False),
    "fp32": Case((9, 4, 3, 3), dtype=torch.float32),
    "fp32-cumulative": Case((9, 4, 3, 3), dtype=torch.float32, momentum=None),
    "bf16": Case((9, 4, 3, 3), dtype=torch.bfloat16),
}
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-5, torch.bfloat16: 0.05}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_like_torch_on_the_whole_batch(ranks: Any, name: str, num_ranks: int) -> None:
    case = CASES[name]
    for rank, gaps in enumerate(ranks(num_ranks, compare, case)):
        for what, gap in gaps.items():
            # Statistics and parameters are kept in the wide type whatever the input is.
            wide = what.startswith(("running", "weight", "bias"))
            kept = case.wide if wide else case.dtype
            assert gap < BOUNDS[kept], f"{what} on rank {rank}: {gap:.1e}"


def convert_model() -> tuple[bool, bool, list[str]]:
    """The same parameter objects, keys and mode, at any depth."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.BatchNorm2d(2), nn.ReLU())).eval()
    keys, weight = list(model.state_dict()), model[1][0].weight
    changed = apply_sync_batch_norm(model, dist.group.WORLD, Share())
    norm = changed[1][0]
    assert isinstance(norm, SyncBatchNorm)
    return norm.weight is weight, norm.training, sorted(set(keys) ^ set(changed.state_dict()))


def test_conversion_keeps_parameters_keys_and_mode(ranks: Any) -> None:
    assert ranks(2, convert_model) == [(True, False, [])] * 2


def all_borrow() -> tuple[bool, list[float], int]:
    share = Share(num_real=0)
    norm = apply_sync_batch_norm(nn.BatchNorm1d(2), dist.group.WORLD, share)
    out, grad = train(norm, torch.full((1, 2), 3.0), torch.zeros(1, 2))
    buffers = norm.running_mean.tolist() + norm.running_var.tolist()
    return bool(out.isfinite().all() and (grad == 0).all()), buffers, int(norm.num_batches_tracked)


def test_a_microbatch_without_samples_leaves_the_statistics_alone(ranks: Any) -> None:
    assert ranks(2, all_borrow) == [(True, [0.0, 0.0, 1.0, 1.0], 0)] * 2


def activate_in_place(affine: bool) -> list[float]:
    norm = apply_sync_batch_norm(nn.BatchNorm1d(2, affine=affine), dist.group.WORLD, Share())
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    F.relu_(norm(x * (1 + dist.get_rank()))).square().sum().backward()
    assert x.grad is not None
    return x.grad.flatten().tolist()


@pytest.mark.parametrize("affine", [True, False])
def test_an_activation_in_place_may_follow(ranks: Any, affine: bool) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    whole = torch.cat([x, x * 2])
    whole.retain_grad()
    F.relu_(nn.BatchNorm1d(2, affine=affine)(whole)).square().sum().backward()
    assert whole.grad is not None
    first, second = ranks(2, activate_in_place, affine)
    assert first == pytest.approx(whole.grad[:2].flatten().tolist(), abs=1e-5)
    assert second == pytest.approx((whole.grad[2:] * 2).flatten().tolist(), abs=1e-5)


def evaluate_alone() -> float:
    """Only rank 0 has samples to evaluate, and must not wait for the other."""
    norm = apply_sync_batch_norm(
        nn.BatchNorm1d(1, track_running_stats=False), dist.group.WORLD, Share()
    ).eval()
    if dist.get_rank() == 0:
        return norm(torch.tensor([[1.0], [3.0]])).abs().mean().item()
    return 1.0


def test_evaluation_without_running_statistics_does_not_wait(ranks: Any) -> None:
    assert ranks(2, evaluate_alone, timeout=60) == [pytest.approx(1.0, abs=1e-4)] * 2


class NormAndActivation(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def convert_odd_ones() -> tuple[str, bool]:
    group = torch.distributed.group.WORLD
    try:
        apply_sync_batch_norm(nn.Sequential(nn.Linear(2, 2), NormAndActivation(2)), group, Share())
        message = "no error"
    except UsageError as error:
        message = str(error)
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Linear(2, 2), norm)
    apply_sync_batch_norm(model, group, Share())
    return message, isinstance(model[0], SyncBatchNorm) and model[0] is model[2]


def test_norms_that_are_more_than_norms_and_norms_in_two_places(ranks: Any) -> None:
    for message, is_one in ranks(2, convert_odd_ones):
        assert "1 is a NormAndActivation" in message
        assert is_one
