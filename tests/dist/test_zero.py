"""ZeRO 1, 2, 3, hybrid sharding and offload: the same training as on one device, in float64."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import ridgeline
from ridgeline.models.cnn import CifarCNN
from ridgeline.models.llama import Llama
from ridgeline.parallel.blocks import find_blocks
from ridgeline.parallel.flat import plan_buckets
from ridgeline.parallel.fsdp import apply_fsdp, full_gradients, full_parameters
from ridgeline.parallel.offload import apply_activation_offload
from ridgeline.parallel.zero import FlatZero

GLOBAL_BATCH = 8
NUM_STEPS = 5
TOLERANCE = 1e-9
SMALL_BUCKETS_MB = 0.008
"""So that a tiny model has several."""


# Models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Odd(nn.Module):
    """Tied weights across blocks, frozen, unused and tiny parameters, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.blocks[2].linear.weight = self.blocks[0].linear.weight
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.rand(1))
        self.never = nn.Linear(4, 3)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.rand(7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.shift
        for block in self.blocks:
            x = self.frozen(block(x))
        return self.last(x) * self.scale


class Strange(Odd):
    """What only stages 1 and 2 take, complex and of another type; without dimensions, and empty."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(7, 2, dtype=torch.complex128))
        self.gain = nn.Parameter(torch.rand(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain * (self.wave @ self.wave.mH).imag.square().mean()


class Objective(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, nn.CrossEntropyLoss()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.model(inputs).flatten(0, -2), targets.flatten())


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "llama":
        model: nn.Module = Llama(
            vocab=37, width=12, depth=2, heads=2, kv_heads=1, ffn=20, max_seq=9
        )
    elif name == "cnn":
        model = CifarCNN(in_channels=3, num_classes=5, image_size=8, width=3)
        model = model.to(memory_format=torch.channels_last)
    else:
        model = {"odd": Odd, "strange": Strange}[name]()
    return Objective(model.double())


def batch(name: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    if name == "llama":
        tokens = torch.randint(37, (GLOBAL_BATCH, 10), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (3, 8, 8) if name == "cnn" else (5,)
    x = torch.randn(GLOBAL_BATCH, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (GLOBAL_BATCH,), generator=generator)


# Training


@dataclass(frozen=True)
class Case:
    stage: int
    shard: int | None = None
    accumulate: int = 1
    offload: str = "none"
    clip: float | None = None
    reshard: bool = True


@dataclass
class Trace:
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    norms: list[float]


@cache
def groups(shard: int) -> tuple[Any, Any]:
    """This rank's shard group and its copies group, for shards of that many ranks."""
    world = dist.get_world_size()
    mine: list[Any] = [None, None]
    rows = [list(range(start, start + shard)) for start in range(0, world, shard)]
    columns = [list(range(start, world, shard)) for start in range(shard)]
    for place, sets in enumerate((rows, columns)):
        for members in sets:
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine[place] = group
    return mine[0], mine[1] if shard < world else None


@cache
def mesh_of(shard: int) -> DeviceMesh:
    world = dist.get_world_size()
    if shard == world:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("copies", "shard"))


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=0.01, weight_decay=0.1, **options)


def train_alone(name: str, clip: float | None = None) -> Trace:
    objective = build(name)
    optimizer = adamw(p for p in objective.parameters() if p.requires_grad)
    trace = Trace([], [], {}, [])
    for step in range(NUM_STEPS):
        loss = objective(*batch(name, step))
        loss.backward()
        if clip is not None:
            trained = [p for p in objective.parameters() if p.requires_grad]
            trace.norms.append(nn.utils.clip_grad_norm_(trained, clip).item())
        named = objective.named_parameters()
        trace.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})
        trace.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {n: p.detach() for n, p in objective.named_parameters()}
    return trace


def parts(name: str, step: int, accumulate: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's microbatches."""
    inputs, targets = batch(name, step)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [x.chunk(world)[rank].chunk(accumulate) for x in (inputs, targets)]
    return list(zip(*mine, strict=True))


def forward_backward(objective: nn.Module, case: Case, name: str, step: int) -> float:
    """The loss of the global batch."""
    total = torch.zeros((), dtype=torch.float64)
    pieces = parts(name, step, case.accumulate)
    for inputs, targets in pieces:
        loss = objective(inputs, targets) / len(pieces)
        total += loss.detach()
        loss.backward()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def different_start(objective: nn.Module) -> nn.Module:
    """As ranks would have it that were seeded differently: those of rank 0 have to win."""
    with torch.no_grad():
        for tensor in [*objective.parameters(), *objective.buffers()]:
            tensor.add_(dist.get_rank())
    return objective


def train_flat(name: str, case: Case) -> Trace:
    shard, copies = groups(case.shard or dist.get_world_size())
    objective = different_start(build(name))
    strides = {n: p.stride() for n, p in objective.named_parameters()}
    objects = dict(objective.named_parameters())
    if case.offload == "activations":
        apply_activation_offload(objective, find_blocks(objective).values(), min_bytes=0)
    zero = FlatZero(
        objective, case.stage, shard, copies, None, SMALL_BUCKETS_MB, case.offload == "optimizer"
    )
    assert all(p is objects[n] for n, p in objective.named_parameters())
    optimizer = adamw(piece.parameter for piece in zero.pieces)
    trace = Trace([], [], {}, [])
    for step in range(NUM_STEPS):
        trace.losses.append(forward_backward(objective, case, name, step))
        zero.finish_gradients()
        if case.clip is not None:
            grads = [p.parameter.grad for p in zero.pieces if p.parameter.grad is not None]
            square = torch.stack([g.double().square().sum() for g in grads]).sum()
            dist.all_reduce(square, group=shard)
            trace.norms.append(square.sqrt().item())
            factor = min(1.0, case.clip / (trace.norms[-1] + 1e-6))
            for piece in zero.pieces:
                if piece.parameter.grad is not None:
                    piece.parameter.grad.mul_(factor)
        trace.gradients.append(zero.full_gradients())
        optimizer.step()
        zero.after_step()
        zero.clear_gradients()
    assert {n: p.stride() for n, p in objective.named_parameters()} == strides
    trace.weights = {n: p.detach() for n, p in objective.named_parameters()}
    for key, value in zero.full_weights().items():
        assert torch.equal(value, trace.weights[key])
    return trace


def train_fsdp(name: str, case: Case) -> Trace:
    objective = different_start(build(name))
    mesh = mesh_of(case.shard or dist.get_world_size())
    blocks = list(find_blocks(objective).values())
    if case.offload == "activations":
        apply_activation_offload(objective, blocks, min_bytes=0)
    apply_fsdp(objective.model, blocks, mesh, None, case.reshard, case.offload == "params")
    optimizer = adamw(p for p in objective.parameters() if p.requires_grad)
    trace = Trace([], [], {}, [])
    inputs, _ = batch(name, 0)
    for step in range(NUM_STEPS):
        with torch.no_grad():  # an evaluation of the inner model comes first, and between steps
            objective.model(inputs)
        trace.losses.append(forward_backward(objective, case, name, step))
        trace.gradients.append(full_gradients(objective))
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(p, DTensor) for p in objective.parameters())
    trace.weights = full_parameters(objective)
    return trace


def gap(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def largest_gap(name: str, case: Case) -> dict[str, float]:
    """Against one process: relative differences of losses, gradients and weights."""
    one = train_alone(name, case.clip)
    many = train_fsdp(name, case) if case.stage == 3 else train_flat(name, case)
    for mine, theirs in zip(many.gradients, one.gradients, strict=True):
        assert mine.keys() == theirs.keys()
    assert many.weights.keys() == one.weights.keys()
    steps = list(zip(many.gradients, one.gradients, strict=True))
    pairs = list(zip(many.losses + many.norms, one.losses + one.norms, strict=True))
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in pairs),
        "gradient": max(gap(a[n], b[n]) for a, b in steps for n in b),
        "weight": max(gap(many.weights[n], one.weights[n]) for n in one.weights),
    }


def hold(ranks: Any, num_ranks: int, name: str, case: Case) -> None:
    for gaps in ranks(num_ranks, largest_gap, name, case):
        assert max(gaps.values()) <= TOLERANCE, gaps


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["llama", "cnn", "odd"])
def test_stages(ranks: Any, num_ranks: int, stage: int, name: str) -> None:
    hold(ranks, num_ranks, name, Case(stage))


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_torch_cannot_shard(ranks: Any, stage: int) -> None:
    hold(ranks, 4, "strange", Case(stage))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["cnn", "odd"])
def test_hybrid_sharding(ranks: Any, stage: int, name: str) -> None:
    hold(ranks, 4, name, Case(stage, shard=2, accumulate=2))


def test_accumulation_of_stage_3(ranks: Any) -> None:
    hold(ranks, 2, "llama", Case(3, accumulate=4))


@pytest.mark.parametrize("stage", [1, 2])
def test_accumulation(ranks: Any, stage: int) -> None:
    hold(ranks, 2, "cnn", Case(stage, accumulate=4))


def test_without_resharding(ranks: Any) -> None:
    hold(ranks, 2, "llama", Case(3, reshard=False))


@pytest.mark.parametrize("stage", [1, 2])
def test_global_norm(ranks: Any, stage: int) -> None:
    hold(ranks, 4, "odd", Case(stage, shard=2, clip=0.1))


OFFLOADS = [
    Case(1, offload="optimizer"),
    Case(2, offload="optimizer", accumulate=2),
    Case(3, offload="params"),
    Case(1, offload="activations"),
    Case(2, offload="activations"),
    Case(3, offload="activations"),
]


@pytest.mark.parametrize("case", OFFLOADS, ids=lambda case: f"{case.stage}-{case.offload}")
def test_offload(ranks: Any, case: Case) -> None:
    hold(ranks, 2, "llama", case)


# What does not show in the numbers of a whole training


class Choosy(nn.Module):
    """Each rank uses another half of it; rank 0 in the first step only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.halves = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)).double()
        self.none = nn.Linear(6, 6).double()

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.halves[which](x).square().sum()


def choose(stage: int) -> list[dict[str, Tensor]]:
    zero = FlatZero(Choosy(), stage, groups(2)[0], None, None, bucket_mb=1e-4)
    model, found = zero.module, []
    optimizer = adamw(piece.parameter for piece in zero.pieces)
    for _ in range(2):
        for _ in range(2):
            model(torch.ones(1, 6, dtype=torch.float64), dist.get_rank()).backward()
        zero.finish_gradients()
        found.append({n: g.clone() for n, g in zero.full_gradients().items()})
        optimizer.step()
        zero.after_step()
        zero.clear_gradients()
    assert not any(name.startswith("none") for name in found[0])
    assert torch.equal(model.none.weight, Choosy().none.weight)  # not even decayed
    return found


def choose_sharded() -> list[dict[str, Tensor]]:
    model, found = apply_fsdp(Choosy(), [], mesh_of(2), None), []
    optimizer = adamw(model.parameters())
    for _ in range(2):
        for _ in range(2):
            model(torch.ones(1, 6, dtype=torch.float64), dist.get_rank()).backward()
        found.append(full_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(full_parameters(model)["none.weight"], Choosy().none.weight)
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_use_other_parameters_do_not_hang(ranks: Any, stage: int) -> None:
    model = Choosy()
    for which in range(2):
        model(torch.ones(1, 6, dtype=torch.float64), which).backward()
    for rank in ranks(2, choose, stage) if stage < 3 else ranks(2, choose_sharded):
        assert set(rank[0]) == {n for n, p in model.named_parameters() if p.grad is not None}
        for name, gradient in rank[0].items():
            # Twice a step, averaged over two ranks of which one has it.
            torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def stage_2_frees() -> tuple[list[bool], list[int]]:
    """Whether a gradient is left after backward, and reductions begun before the last gradient."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    zero = FlatZero(model, 2, groups(2)[0], None, None, bucket_mb=16 * 17 * 4 / 2**20)
    begun: list[int] = []
    start = zero._flights.start

    def counted(*args: Any) -> None:
        begun.append(sum(p.grad is not None for p in model.parameters()))
        start(*args)

    zero._flights.start = counted
    left: list[int] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda _: left.append(len(begun)))
    model(torch.ones(2, 16)).sum().backward()
    return [p.grad is not None for p in model.parameters()], [*left, len(begun)]


def test_stage_2_reduces_while_backward_runs_and_frees(ranks: Any) -> None:
    for grads, (before_last, total) in ranks(2, stage_2_frees):
        assert not any(grads)
        assert total >= 6
        assert before_last >= total - 2


def by_hand() -> float:
    """Gradients without a hook, as in a pipeline that computes those of weights apart."""
    gaps = []
    for stage in (1, 2):
        model = nn.Linear(5, 3).double()
        zero = FlatZero(model, stage, groups(2)[0], None, None)
        x = torch.full((2, 5), 1.0 + dist.get_rank(), dtype=torch.float64)
        model(x).sum().backward()
        weights = list(model.parameters())
        extra = torch.autograd.grad(model(x).sum(), weights)
        for weight, gradient in zip(weights, extra, strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
        zero.finish_gradients()
        found = zero.full_gradients()
        gaps.append(gap(found["weight"], torch.full((3, 5), 6.0, dtype=torch.float64)))
        gaps.append(gap(found["bias"], torch.full((3,), 4.0, dtype=torch.float64)))
    return max(gaps)


def test_gradients_put_there_by_hand(ranks: Any) -> None:
    assert max(ranks(2, by_hand)) < 1e-15


def zeroed_by_the_user(stage: int) -> list[float]:
    """`zero_grad` of the module in between, and no `clear_gradients`: the next step starts anew."""
    model = nn.Linear(3, 1, bias=False).double()
    zero = FlatZero(model, stage, groups(2)[0], None, None)
    sums = []
    for step, to_none in enumerate((True, False, True)):
        model(torch.full((1, 3), step + 1.0, dtype=torch.float64)).sum().backward()
        zero.finish_gradients()
        sums.append(zero.full_gradients()["weight"].sum().item())
        model.zero_grad(set_to_none=to_none)
    return sums


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_starts_anew(ranks: Any, stage: int) -> None:
    assert ranks(2, zeroed_by_the_user, stage) == [[3.0, 6.0, 9.0]] * 2


def tiny() -> list[int]:
    """Fewer elements than ranks: torch's optimizers refuse an empty list, so nobody has one."""
    model = nn.Linear(1, 1, bias=False).double()
    for stage in (1, 2):
        zero = FlatZero(model, stage, groups(4)[0], None, None)
        optimizer = torch.optim.SGD([p.parameter for p in zero.pieces], lr=1.0)
        with torch.no_grad():
            model.weight.fill_(3.0)
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        zero.finish_gradients()
        optimizer.step()
        zero.after_step()
        assert model.weight.item() == 2.0
    return [piece.stop - piece.start for piece in zero.pieces]


def test_fewer_elements_than_ranks(ranks: Any) -> None:
    assert sorted(map(sum, ranks(4, tiny))) == [0, 0, 0, 1]


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 3, sparse=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).square().sum()


def sparse_gradient(stage: int) -> float:
    model, alone = Sparse(), Sparse()
    zero = FlatZero(model, stage, groups(2)[0], None, None)
    for tokens in ([1, 2, 2], [4]):
        x = torch.tensor(tokens) + dist.get_rank()
        model(x).backward()
        for rank in range(2):
            (alone(torch.tensor(tokens) + rank) / 2).backward()
    zero.finish_gradients()
    return gap(zero.full_gradients()["embed.weight"], alone.embed.weight.grad.to_dense())


@pytest.mark.parametrize("stage", [1, 2])
def test_sparse_gradients(ranks: Any, stage: int) -> None:
    assert max(ranks(2, sparse_gradient, stage)) < 1e-15


def test_buckets_follow_backward_and_waste_little() -> None:
    model = Llama(vocab=1000, width=64, depth=4, heads=2, max_seq=8)
    buckets = plan_buckets(model, torch.bfloat16, 4, 50_000)
    order = [slot.index for bucket in buckets for slot in bucket.slots]
    assert order == sorted(order, reverse=True)
    assert len(buckets) > 5
    size, numel = sum(b.size for b in buckets), sum(p.numel() for p in model.parameters())
    assert numel <= size < 1.01 * numel
    assert [b.start for b in buckets[1:]] == [b.start + b.size for b in buckets[:-1]]


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_dropped_is_freed(stage: int) -> None:
    """Hooks are held where Python's collector does not look."""
    model = Odd()
    zero = FlatZero(model, stage, None, None, torch.bfloat16, SMALL_BUCKETS_MB)
    optimizer = adamw(piece.parameter for piece in zero.pieces)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(2, 5)).sum().backward()
    zero.finish_gradients()
    optimizer.step()
    zero.after_step()
    watched = [weakref.ref(x) for x in (model, zero, model.first.weight, zero.pieces[0].parameter)]
    del model, zero, optimizer
    gc.collect()
    assert [reference() for reference in watched] == [None] * 4


# Mixed precision


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def train_mixed(stage: int, offload: bool = False) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of a model with batch norm, in bf16 with float32 master weights."""
    objective: nn.Module = Objective(Normed())
    frozen = objective.model.head.bias.detach().clone().fill_(0.7)  # which bf16 cannot hold
    objective.model.head.bias.data = frozen.clone()
    world = dist.get_world_size()
    zero: FlatZero | None = None
    if stage == 3:
        apply_fsdp(objective.model, [], mesh_of(world), torch.bfloat16, True, offload)
        optimizer = adamw((p for p in objective.parameters() if p.requires_grad), fused=True)
    else:
        zero = FlatZero(
            objective, stage, groups(world)[0], None, torch.bfloat16, offload_optimizer=offload
        )
        assert objective.model.conv.weight.dtype == torch.bfloat16
        assert objective.model.norm.weight.dtype == torch.float32
        assert all(piece.parameter.dtype == torch.float32 for piece in zero.pieces)
        optimizer = adamw((piece.parameter for piece in zero.pieces), fused=True)
    losses = []
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(4, 3, 6, 6, generator=generator)  # the same everywhere, as is its norm
    for _ in range(6):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=stage != 3):
            loss = objective(x, torch.arange(4))
        loss.backward()
        if zero is not None:
            zero.finish_gradients()
        optimizer.step()
        if zero is not None:
            zero.after_step()
            zero.clear_gradients()
        optimizer.zero_grad()
        losses.append(loss.item())
    full = full_parameters(objective) if zero is None else zero.full_weights()
    given = (
        full_parameters(objective)["model.head.bias"] if stage == 3 else objective.model.head.bias
    )
    assert torch.equal(given, frozen), "what is not trained stays as it was given"
    return losses, [full[name].float() for name in sorted(full) if name != "model.head.bias"]


def test_mixed_precision(ranks: Any) -> None:
    """Stages 1 and 2 do the same arithmetic, bit for bit, also with the optimizer on the host."""
    losses, weights = ranks(2, train_mixed, 1)[0]
    assert losses[-1] < losses[0]
    for stage, offload in ((1, True), (2, False), (2, True)):
        for same_losses, same_weights in ranks(2, train_mixed, stage, offload):
            assert same_losses == losses
            for found, expected in zip(same_weights, weights, strict=True):
                assert torch.equal(found, expected)
    for offload in (False, True):
        for other_losses, other_weights in ranks(2, train_mixed, 3, offload):
            assert other_losses == pytest.approx(losses, rel=0.02)
            for found, expected in zip(other_weights, weights, strict=True):
                torch.testing.assert_close(found, expected, atol=0.03, rtol=0.05)


def small_updates_survive(stage: int) -> tuple[float, float]:
    """Steps too small for bf16 add up in the master weights, and a loaded weight reaches them."""
    model = nn.Linear(64, 2, bias=False)
    zero = FlatZero(model, stage, groups(2)[0], None, torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    zero.after_load()
    optimizer = torch.optim.SGD([piece.parameter for piece in zero.pieces], lr=1e-4)
    for _ in range(100):
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        zero.finish_gradients()
        optimizer.step()
        zero.after_step()
        zero.clear_gradients()
    return zero.full_weights()["weight"].mean().item(), model.weight.float().mean().item()


@pytest.mark.parametrize("stage", [1, 2])
def test_master_weights(ranks: Any, stage: int) -> None:
    for master, weight in ranks(2, small_updates_survive, stage):
        assert master == pytest.approx(0.99, abs=1e-5)
        assert weight == pytest.approx(0.99, abs=0.004)


# Stage 3


def ties_stay() -> bool:
    model = apply_fsdp(Odd().double(), [], mesh_of(2), None)
    blocks = list(model.blocks)
    again = apply_fsdp(Odd().double(), list(Odd().blocks), mesh_of(2), None)
    assert again.blocks[0].linear.weight is again.blocks[2].linear.weight
    return blocks[0].linear.weight is blocks[2].linear.weight


def test_ties_stay(ranks: Any) -> None:
    assert all(ranks(2, ties_stay))


class Twice(nn.Module):
    """One block that runs twice, and one that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = Block(6).double()
        shared = Block(6).double()
        self.here, self.there = shared, shared
        self.end = nn.Linear(6, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.here(self.again(x)))
        return self.end(self.there(x)).square().mean()


def run_twice() -> float:
    x = torch.linspace(0, 1, 24, dtype=torch.float64).view(4, 6)
    alone, model = Twice(), Twice()
    alone(x).backward()
    model = apply_fsdp(model, [model.again, model.here], mesh_of(2), None)
    model(x.chunk(2)[dist.get_rank()]).backward()
    found = full_gradients(model)
    return max(gap(found[n], p.grad) for n, p in alone.named_parameters())


def test_a_block_that_runs_twice(ranks: Any) -> None:
    assert max(ranks(2, run_twice)) < TOLERANCE


# Bad input


def refuse(stage: int, make: Callable[[], nn.Module]) -> str:
    try:
        if stage == 3:
            apply_fsdp(make(), [], mesh_of(2), None)
        else:
            FlatZero(make(), stage, groups(2)[0], None, None)
    except ridgeline.UsageError as error:
        return str(error)
    return "no error"


def on_meta() -> nn.Module:
    return nn.Linear(2, 2, bias=False, device="meta")


def two_types() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


@pytest.mark.parametrize(
    ("stage", "make", "words"),
    [
        (4, Odd, ["zero=4", "1 or 2"]),
        (1, nn.Identity, ["Identity", "no trainable parameter"]),
        (2, on_meta, ["weight", "meta"]),
        (3, Strange, ["wave", "complex", "zero=2"]),
        (3, two_types, ["0.weight", "1.weight", "float64", "zero=2"]),
    ],
    ids=["stage", "nothing", "meta", "complex", "types"],
)
def test_refusals_name_the_place_and_the_remedy(
    ranks: Any, stage: int, make: Callable[[], nn.Module], words: list[str]
) -> None:
    for message in ranks(2, refuse, stage, make):
        assert "\n" not in message
        for word in words:
            assert word in message


# Activations


def watch_saved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    from ridgeline.parallel import offload

    sent: list[Tensor] = []
    original = offload._Saved.__init__

    def record(self: Any, call: Any, tensor: Tensor) -> None:
        sent.append(tensor)
        original(self, call, tensor)

    monkeypatch.setattr(offload._Saved, "__init__", record)
    return sent


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_are_never_sent_and_a_tensor_only_once(
    monkeypatch: pytest.MonkeyPatch, autocast: bool
) -> None:
    sent = watch_saved(monkeypatch)
    model = Llama(vocab=16, width=8, depth=2, heads=2, max_seq=8)
    apply_activation_offload(model, find_blocks(model).values(), min_bytes=0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = model(torch.arange(8)[None]).float().square().mean()
    places = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    shapes = {p.shape for p in model.parameters() if p.dim() > 1}
    shapes |= {torch.Size(reversed(shape)) for shape in shapes}
    assert sent
    for tensor in sent:
        assert tensor.untyped_storage().data_ptr() not in places
    if (
        autocast
    ):  # nor what autocast made of a weight; activations here have three dimensions or 8 rows
        assert not [t.shape for t in sent if t.shape in shapes and t.shape[0] != 8]
    keys = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t._version) for t in sent]
    assert len(keys) == len(set(keys))
    loss.backward()


def test_small_ones_stay_and_nothing_is_kept_after_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = watch_saved(monkeypatch)
    model = nn.Sequential(Block(4), Block(4))
    apply_activation_offload(model, model, min_bytes=4 * 4 * 64)
    model(torch.ones(63, 4)).sum().backward()
    assert not sent
    x = torch.ones(64, 4, requires_grad=True)
    model(x).sum().backward()
    assert sent
    with torch.no_grad():
        count = len(sent)
        model(x)
        assert len(sent) == count
    sent.clear()
    from ridgeline.parallel import offload

    gc.collect()
    assert not [o for o in gc.get_objects() if isinstance(o, (offload._Saved, offload._Call))]


def test_a_value_changed_after_it_was_saved_is_still_the_old_one() -> None:
    """The copy was made in time; without it autograd would refuse."""

    class InPlace(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x * y).sum()

    model = InPlace()
    apply_activation_offload(model, [model], min_bytes=0)
    x = torch.ones(3, requires_grad=True)
    y = torch.full((3,), 2.0)
    out = model(x, y)
    y.zero_()
    out.backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
