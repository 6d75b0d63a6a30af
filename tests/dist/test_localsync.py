"""Local synchronisation: replicas averaged every k steps, as one process simulates it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.errors import UsageError
from ridgeline.parallel import localsync
from ridgeline.parallel.localsync import LocalSync, reference_local_sync


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias before the norm: its gradient would be rounding noise only.
        self.first, self.norm = nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)).tanh()) * self.scale + self.table


def build_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if kind == "sgd" else 0)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """3 samples, 2 in odd steps on odd ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    num = 2 if step % 2 and rank % 2 else 3
    x = torch.randn(num, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (num,), generator=generator)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    moments = [
        value
        for p in model.parameters()
        for value in optimizer.state.get(p, {}).values()
        if isinstance(value, Tensor)
    ]
    return [t.detach().clone().numpy() for t in (*model.state_dict().values(), *moments)]


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def train(kind: str, every: int, num_steps: int, with_optimizer: bool, mb: float) -> list[Any]:
    model = build()
    if dist.get_rank():  # rank 0's weights are everybody's
        with torch.no_grad():
            for t in (*model.parameters(), model.norm.running_mean):
                t.add_(1.0)
    optimizer = build_optimizer(kind, model)
    sync = LocalSync(
        model,
        dist.group.WORLD,
        every,
        optimizer=optimizer if with_optimizer else None,
        bucket_mb=mb,
    )
    synced = []
    for step in range(1, num_steps + 1):
        x, y = batch(step, dist.get_rank())
        step_on(model, optimizer, x, y)
        synced.append(sync.after_step(step, len(x)))
    assert synced == [step % every == 0 for step in range(1, num_steps + 1)]
    assert sync.finish() == (num_steps % every != 0)
    assert not sync.finish()
    return state(model, optimizer)


def simulate(
    num_ranks: int, kind: str, every: int, num_steps: int, with_optimizer: bool
) -> list[list[Any]]:
    replicas = [build() for _ in range(num_ranks)]
    optimizers = [build_optimizer(kind, replica) for replica in replicas]
    weights = [0] * num_ranks
    for step in range(1, num_steps + 1):
        for rank, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            x, y = batch(step, rank)
            step_on(model, optimizer, x, y)
            weights[rank] += len(x)
        if step % every == 0 or step == num_steps:
            reference_local_sync(replicas, weights, optimizers if with_optimizer else None)
            weights = [0] * num_ranks
    return [state(*pair) for pair in zip(replicas, optimizers, strict=True)]


def gap(one: list[Any], other: list[Any]) -> float:
    assert len(one) == len(other)
    return max(
        float(abs(a - b).max() / max(abs(a).max(), 1e-30)) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("with_optimizer", [False, True], ids=["own-momentum", "momentum-averaged"])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equals_one_process(ranks: Any, num_ranks: int, kind: str, with_optimizer: bool) -> None:
    expected = simulate(num_ranks, kind, 2, 5, with_optimizer)
    num_shared = len(build().state_dict())
    for mb in (25.0, 0.0001):
        found = ranks(num_ranks, train, kind, 2, 5, with_optimizer, mb)
        for rank in range(num_ranks):
            assert gap(expected[rank], found[rank]) < 1e-9
            # After the last average the replicas are one, to the bit.
            num = len(found[0]) if with_optimizer else num_shared
            assert gap(found[0][:num], found[rank][:num]) == 0
    if not with_optimizer:
        assert gap(found[0][num_shared:], found[1][num_shared:]) > 1e-3


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).tanh())


def train_every_step() -> list[Any]:
    model = Plain().double()
    optimizer = build_optimizer("plain", model)
    sync = LocalSync(model, dist.group.WORLD, 1)
    for step in range(1, 6):
        x, y = batch(step, dist.get_rank())
        step_on(model, optimizer, x, y)
        assert sync.after_step(step, len(x))
    return [p.detach().numpy() for p in model.parameters()]


def test_every_step_with_plain_sgd_is_the_whole_batch(ranks: Any) -> None:
    """Uneven shares included: that is what the weights are for."""
    model = Plain().double()
    optimizer = build_optimizer("plain", model)
    for step in range(1, 6):
        parts = [batch(step, rank) for rank in range(4)]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        step_on(model, optimizer, x, y)
    expected = [p.detach().numpy() for p in model.parameters()]
    for found in ranks(4, train_every_step):
        assert gap(expected, found) < 1e-12


def idle_rank() -> list[float]:
    """Rank 1 has no samples: it counts nothing and takes what the others have."""
    model = nn.Linear(2, 1, bias=False)
    sync = LocalSync(model, dist.group.WORLD, 1)
    with torch.no_grad():
        model.weight.fill_(float(dist.get_rank() + 1))
    sync.after_step(1, 0 if dist.get_rank() == 1 else 3)
    first = model.weight.flatten().tolist()
    with torch.no_grad():
        model.weight.fill_(7.0)
    sync.after_step(2, 0)  # nobody has any
    return [*first, *model.weight.flatten().tolist()]


def test_a_rank_without_samples(ranks: Any) -> None:
    assert ranks(3, idle_rank) == [[2.0, 2.0, 7.0, 7.0]] * 3


def count_collectives(mb: float) -> tuple[int, int]:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))  # 16.25 KiB each
    sync = LocalSync(model, dist.group.WORLD, 2, bucket_mb=mb)
    counts = []
    all_reduce = dist.all_reduce

    def count(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return all_reduce(*args, **kwargs)

    localsync.dist.all_reduce = count
    try:
        for step in (1, 2):
            counts.append(0)
            sync.after_step(step)
    finally:
        localsync.dist.all_reduce = all_reduce
    return counts[0], counts[1]


def test_one_collective_a_bucket_and_none_between(ranks: Any) -> None:
    assert ranks(2, count_collectives, 25.0) == [(0, 1)] * 2
    assert ranks(2, count_collectives, 33 / 1024) == [(0, 4)] * 2


def low_precision() -> list[float]:
    """The average of bf16 weights is taken in float32 and rounded once."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    sync = LocalSync(model, dist.group.WORLD, 1)
    with torch.no_grad():
        model.weight.fill_([1.0, 1.0, 1.0, 1.015625][dist.get_rank()])
    sync.after_step(1, 100)
    return model.weight.flatten().tolist()


def test_low_precision_weights(ranks: Any) -> None:
    expected = torch.tensor((3 + 1.015625) / 4).bfloat16().item()
    assert ranks(4, low_precision) == [[expected]] * 4


def uneven_state() -> str:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = torch.optim.AdamW(model.parameters())
    sync = LocalSync(model, dist.group.WORLD, 1, optimizer=optimizer)
    used = model if dist.get_rank() else model[:1]
    sum(layer(torch.ones(2)).sum() for layer in used).backward()
    optimizer.step()
    with pytest.raises(UsageError) as caught:
        sync.after_step(1)
    return str(caught.value)


def test_state_that_not_all_ranks_have_is_an_error_on_all(ranks: Any) -> None:
    for message in ranks(2, uneven_state):
        assert "24 numbers on one rank and 12 on another" in message
        assert "optimizer=" in message


def test_a_reference_keeps_constants() -> None:
    replicas = [build(), build()]
    replicas[1].table.zero_()
    before = copy.deepcopy(replicas[1].table)
    reference_local_sync(replicas, [1, 3])
    assert torch.equal(replicas[1].table, before)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_a_bad_interval_is_refused(every: Any) -> None:
    with pytest.raises(UsageError, match=r"sync=local:8"):
        LocalSync(nn.Linear(1, 1), None, every)
