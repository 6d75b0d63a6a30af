"""Gradient compression: what ranks compute is what one process does, and no loss is silent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ridgeline.errors import UsageError
from ridgeline.parallel import compress
from ridgeline.parallel.compress import Compression, apply_compression, reference_compress

METHODS = ("fp16", "bf16", "powersgd:1", "powersgd:3")
SMALL_BUCKETS_MB = 0.004


class Net(nn.Module):
    """Matrices, a convolution, an embedding, vectors and a single number, in awkward sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 24)
        self.conv = nn.Conv1d(24, 31, 3, padding=1)
        self.hidden = nn.Linear(31, 37)
        self.norm = nn.LayerNorm(37)
        self.head = nn.Linear(37, 13)
        self.unused_rows = nn.Embedding(23, 37)  # most of its gradient is zero
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        x = self.norm(self.hidden(x.tanh())) + self.unused_rows(tokens)
        return self.head(x).mean(1) * self.temperature


def build(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().to(dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(11, (3, 5), generator=generator)
    return tokens, torch.randint(13, (3,), generator=generator)


def weights(model: nn.Module) -> dict[str, Any]:
    return {name: p.detach().double().numpy() for name, p in model.named_parameters()}


def train(
    how: str, dtype: torch.dtype, num_steps: int, bucket_mb: float, start_step: int = 0
) -> tuple[dict[str, Any], int]:
    model, optimizer = build(dtype)
    group = dist.group.WORLD
    ddp = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )
    apply_compression(ddp, how, group, start_step=start_step)
    for step in range(num_steps):
        tokens, targets = batch(step, dist.get_rank())
        F.cross_entropy(ddp(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    sizes = str(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"])
    return weights(model), len(sizes.split(","))


def simulate(
    num_ranks: int, how: str, dtype: torch.dtype, num_steps: int, start_step: int = 0
) -> dict[str, Any]:
    model, optimizer = build(dtype)
    state: list[Any] = []
    for step in range(num_steps):
        gradients = []
        for rank in range(num_ranks):
            tokens, targets = batch(step, rank)
            model.zero_grad()
            F.cross_entropy(model(tokens), targets).backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        reduced = reference_compress(gradients, how, state, start_step=start_step)
        for name, p in model.named_parameters():
            assert reduced[name].dtype == dtype
            p.grad = reduced[name]
        optimizer.step()
    return weights(model)


def relative_gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(
        float(abs(value - other[name]).max() / abs(value).max()) for name, value in one.items()
    )


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_equals_one_process(ranks: Any, how: str, num_ranks: int) -> None:
    expected = simulate(num_ranks, how, torch.float64, 5)
    (first, num_buckets), *others = ranks(num_ranks, train, how, torch.float64, 5, SMALL_BUCKETS_MB)
    assert num_buckets > 3
    assert relative_gap(expected, first) < 1e-9
    assert all(relative_gap(first, other) == 0 for other, _ in others)
    (in_one, num_buckets), *_ = ranks(num_ranks, train, how, torch.float64, 5, 25.0)
    assert num_buckets == 1
    assert relative_gap(first, in_one) < 1e-12


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_gradients(ranks: Any, how: str, dtype: torch.dtype) -> None:
    """Bit for bit, when the one process has the kernels of a rank."""
    (expected,) = ranks(1, simulate, 4, how, dtype, 3)
    (first, _), *others = ranks(4, train, how, dtype, 3, SMALL_BUCKETS_MB)
    assert relative_gap(expected, first) == 0
    assert all(relative_gap(first, other) == 0 for other, _ in others)


@pytest.mark.parametrize("how", METHODS)
def test_the_same_twice(ranks: Any, how: str) -> None:
    runs = [ranks(4, train, how, torch.float32, 3, SMALL_BUCKETS_MB)[0][0] for _ in range(2)]
    assert relative_gap(*runs) == 0


def test_first_steps_uncompressed(ranks: Any) -> None:
    expected = simulate(2, "powersgd:1", torch.float64, 5, start_step=3)
    (found, _), _ = ranks(2, train, "powersgd:1", torch.float64, 5, SMALL_BUCKETS_MB, 3)
    assert relative_gap(expected, found) < 1e-9
    exact = simulate(2, "powersgd:1", torch.float64, 3, start_step=3)
    assert relative_gap(exact, simulate(2, "powersgd:1", torch.float64, 3)) > 1e-3


# Single gradients, given


class Given(nn.Module):
    """A model whose gradient is what it is given."""

    def __init__(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.p, gradients, strict=True))


def reduce_given(how: str, per_rank: list[list[list[Any]]]) -> list[Any]:
    """Reduce gradients step by step: per_rank[rank][step][parameter]."""
    mine = per_rank[dist.get_rank()]
    first = [torch.as_tensor(g) for g in mine[0]]
    model = Given([tuple(g.shape) for g in first], first[0].dtype)
    ddp = DistributedDataParallel(model, process_group=dist.group.WORLD)
    apply_compression(ddp, how, dist.group.WORLD)
    found = []
    for gradients in mine:
        model.zero_grad(set_to_none=True)
        ddp([torch.as_tensor(g) for g in gradients]).backward()
        found.append([p.grad.clone().numpy() for p in model.p])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e6, 1e30, 1e-9, 1e-30])
def test_fp16_neither_overflows_nor_vanishes(ranks: Any, size: float, dtype: torch.dtype) -> None:
    """Large and tiny gradients, beside a parameter of ordinary ones, to the precision of fp16."""
    torch.manual_seed(0)
    steps = [
        [[(torch.randn(7, dtype=dtype) * size).numpy(), torch.randn(5, dtype=dtype).numpy()]]
        for _ in range(4)
    ]
    for (found,) in ranks(4, reduce_given, "fp16", steps):
        for index, mean in enumerate(found):
            exact = sum(torch.as_tensor(rank[0][index]).double() for rank in steps) / 4
            gap = (torch.as_tensor(mean).double() - exact).abs().max() / exact.abs().max()
            assert gap < 4 * 2**-11
            assert torch.as_tensor(mean).isfinite().all()


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen_by_all_and_forgotten(ranks: Any, how: str, bad: float) -> None:
    """A step that loss scaling would skip: every rank sees it, the next step is clean."""
    torch.manual_seed(0)
    per_rank: list[list[list[Any]]] = [
        [[torch.randn(12, 16).numpy()] for _ in range(3)] for _ in range(2)
    ]
    per_rank[1][1][0][3, 4] = bad
    for first, second, third in ranks(2, reduce_given, how, per_rank):
        assert torch.as_tensor(first[0]).isfinite().all()
        assert not torch.as_tensor(second[0]).isfinite().all()
        assert torch.as_tensor(third[0]).isfinite().all()


def test_powersgd_survives_zero_gradients(ranks: Any) -> None:
    torch.manual_seed(0)
    zero, some = torch.zeros(12, 16), torch.randn(12, 1) @ torch.randn(1, 16)
    steps = [[zero.numpy()], [zero.numpy()], [some.numpy()], [zero.numpy()]]
    for found in ranks(2, reduce_given, "powersgd:2", [steps, steps]):
        assert (found[0][0] == 0).all()
        # A matrix of rank 1 is in the range of two columns after one iteration.
        torch.testing.assert_close(torch.as_tensor(found[2][0]), some)
        assert abs(found[3][0]).max() < 1e-5


def test_powersgd_gives_back_what_it_left_out(ranks: Any) -> None:
    """With a constant gradient, error feedback makes the mean of what is applied tend to it."""
    torch.manual_seed(0)
    gradient = torch.randn(12, 16, dtype=torch.float64)
    num_steps = 60
    steps = [[gradient.numpy()]] * num_steps
    found = ranks(2, reduce_given, "powersgd:1", [steps, steps])[0]
    applied = sum(torch.as_tensor(step[0]) for step in found) / num_steps
    once = (torch.as_tensor(found[0][0]) - gradient).norm() / gradient.norm()
    assert once > 0.5
    assert (applied - gradient).norm() / gradient.norm() < 0.15


# Traffic, restart, words


def count_sent(how: str) -> tuple[int, int]:
    """Bytes handed to collectives in one step by this rank, and bytes of gradient."""
    sent = [0]
    shapes = [(64, 96), (96, 64), (64,)]
    model = Given(shapes, torch.float32)
    ddp = DistributedDataParallel(model, process_group=dist.group.WORLD)
    num_ranks = dist.get_world_size()
    all_to_all, all_gather = dist.all_to_all_single, compress.all_gather_single

    def count_all_to_all(out: Tensor, given: Tensor, **options: Any) -> Any:
        sent[0] += given.nbytes * (num_ranks - 1) // num_ranks
        return all_to_all(out, given, **options)

    def count_all_gather(out: Tensor, given: Tensor, **options: Any) -> Any:
        sent[0] += given.nbytes * (num_ranks - 1)
        return all_gather(out, given, **options)

    apply_compression(ddp, how, dist.group.WORLD)
    try:
        dist.all_to_all_single, compress.all_gather_single = count_all_to_all, count_all_gather
        ddp([torch.ones(shape) for shape in shapes]).backward()
    finally:
        dist.all_to_all_single, compress.all_gather_single = all_to_all, all_gather
    return sent[0], sum(p.nbytes for p in model.parameters())


def test_traffic_is_that_of_a_compressed_all_reduce(ranks: Any) -> None:
    for how in ("fp16", "bf16"):
        for sent, size in ranks(4, count_sent, how):
            assert sent == pytest.approx(2 * (3 / 4) * size / 2, rel=0.01)
    for sent, _ in ranks(4, count_sent, "powersgd:2"):
        numbers = 2 * (64 + 96) * 2 + 64
        assert sent == pytest.approx(2 * (3 / 4) * numbers * 4, rel=0.01)


def restart(how: str) -> bool:
    """Four steps in one go, and two and two with the state carried over."""

    def run(
        model: nn.Module, steps: range, state: dict[str, Any] | None
    ) -> tuple[nn.Module, Compression]:
        group = dist.group.WORLD
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=SMALL_BUCKETS_MB)
        hook = apply_compression(ddp, how, group)
        if state is not None:
            hook.load_state_dict(state)
        for step in steps:
            model.zero_grad()
            tokens, targets = batch(step, dist.get_rank())
            F.cross_entropy(ddp(tokens), targets).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        return model, hook

    whole, _ = run(build(torch.float32)[0], range(4), None)
    half, hook = run(build(torch.float32)[0], range(2), None)
    state = copy.deepcopy(hook.state_dict())
    resumed, _ = run(copy.deepcopy(half), range(2, 4), state)
    pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("how", METHODS)
def test_a_restart_changes_no_bit(ranks: Any, how: str) -> None:
    assert ranks(2, restart, how) == [True, True]


@pytest.mark.parametrize("how", ["fp8", "powersgd", "powersgd:0", "powersgd:x", ""])
def test_unknown_methods_are_refused(how: str) -> None:
    with pytest.raises(UsageError, match="powersgd:4"):
        reference_compress([{}], how, [])
