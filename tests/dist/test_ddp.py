"""Replication: buckets, accumulation, looks, unused parameters, and the loop of the user's own."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ridgeline
from ridgeline.config import DdpConfig, load_config
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.parallel.apply import parallelize
from ridgeline.parallel.ddp import Replicated, skip_reduction, watch_last_gradient
from ridgeline.parallel.mesh import build_mesh
from ridgeline.train.loop import train_loop
from ridgeline.train.run import run_training
from ridgeline.train.setup import build_training


def replicate(model: nn.Module, **options: Any) -> nn.Module:
    env = read_rank_env()
    layout = Layout.parse_for("", env.world_size)
    mesh = build_mesh(env, layout, torch.device("cpu"))
    return parallelize(model, layout, mesh=mesh, ddp=DdpConfig(**options))


# Buckets and reductions


def count_reductions(bucket_mb: float, accumulate: int) -> tuple[int, list[int]]:
    """Buckets of the wrapped model, and all-reduces in each of three optimizer steps."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(8)]  # 16 KiB a weight
    model = replicate(nn.Sequential(*layers), bucket_mb=bucket_mb)
    assert isinstance(model, Replicated)
    seen = [0]

    def hook(state, bucket):  # torch looks at annotations, and not at postponed ones
        seen[0] += 1
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, hook)
    counts = []
    for _ in range(3):
        seen[0] = 0
        for _ in range(accumulate - 1):
            with skip_reduction(model):
                model(torch.ones(2, 64)).sum().backward()
        model(torch.ones(2, 64)).sum().backward()
        model.zero_grad(set_to_none=True)
        counts.append(seen[0])
    sizes = str(model._get_ddp_logging_data()["rebuilt_bucket_sizes"])
    return len(sizes.split(",")), counts


def test_bucket_size_decides_the_number_of_buckets(ranks: Any) -> None:
    """8 layers of 16.25 KiB: all in one bucket, or cut wherever 0.032 MiB are full."""
    found = {mb: ranks(2, count_reductions, mb, 1)[0] for mb in (25.0, 0.032, 0.004)}
    buckets = {mb: num for mb, (num, _) in found.items()}
    assert buckets[25.0] == 1
    assert buckets[25.0] < buckets[0.032] < buckets[0.004]
    for num, counts in found.values():
        assert counts[1:] == [num, num]  # the first step still has the buckets of the start


def test_accumulation_reduces_once_a_step(ranks: Any) -> None:
    num, counts = ranks(2, count_reductions, 0.032, 1)[0]
    assert ranks(2, count_reductions, 0.032, 4) == [(num, counts)] * 2


def count_in_loop(accumulate: int) -> list[int]:
    """All-reduces of a step of the real loop, found in the profiler's trace."""
    from torch.profiler import ProfilerActivity, profile

    config = load_config(
        None,
        [
            "device=cpu", "threads=1", "train.steps=4", "train.batch=16", "data.source=synthetic",
            "data.args={shape: [8], classes: 4, samples: 64}", "model.name=mlp",
            "model.args={in_features: 8, hidden: 8, out_features: 4}",
            f"layout=accumulate={accumulate}",
        ],
    ).config  # fmt: skip
    training = build_training(config, read_rank_env())
    counts = []
    steps = train_loop(training)
    next(steps)
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            next(steps)
        counts.append(sum(event.name == "gloo:all_reduce" for event in trace.events()))
    return counts


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_loop_reduces_once_a_step(ranks: Any, accumulate: int) -> None:
    assert ranks(2, count_in_loop, accumulate) == [[1, 1, 1]] * 2


# Looks


class Net(nn.Module):
    word = "a class attribute"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(1))
        self.note = {"a": 1}

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))

    def describe(self) -> str:
        return f"{self.word}, {self.first.in_features} in"


def look() -> None:
    plain = Net()
    keys, names = list(plain.state_dict()), [name for name, _ in plain.named_parameters()]
    model = replicate(plain)
    assert isinstance(model, Replicated)
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == names
    assert next(iter(model.parameters())) is plain.first.weight
    assert isinstance(model.first, nn.Linear)
    assert model.first is plain.first
    assert model.note == {"a": 1}
    assert model.word == "a class attribute"
    assert model.describe() == "a class attribute, 3 in"
    assert model.steps is plain.steps
    model.load_state_dict({key: torch.zeros_like(value) for key, value in keys_of(model)})
    assert plain.first.weight.abs().sum() == 0
    with pytest.raises(AttributeError, match="frist"):
        _ = model.frist
    model.eval()
    assert not plain.first.training


def keys_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.state_dict().items())


def test_a_replicated_module_looks_like_itself(ranks: Any) -> None:
    ranks(2, look)


def weights_of_rank_0() -> list[float]:
    torch.manual_seed(dist.get_rank())
    return replicate(nn.Linear(2, 2)).weight.flatten().tolist()


def test_weights_are_those_of_rank_0(ranks: Any) -> None:
    one, other = ranks(2, weights_of_rank_0)
    torch.manual_seed(0)
    assert one == other == nn.Linear(2, 2).weight.flatten().tolist()


# Unused parameters


class Forgetful(nn.Module):
    """Has a layer that the loss never sees."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(8, 4)
        self.forgotten = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def train_forgetful(find_unused: bool) -> list[float]:
    torch.manual_seed(0)
    model = replicate(Forgetful(), find_unused=find_unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_unused_parameters_are_named_with_the_remedy(ranks: Any) -> None:
    with pytest.raises(ranks.Failure) as caught:
        ranks(2, train_forgetful, False)
    assert isinstance(caught.value.error, ridgeline.UsageError)
    text = str(caught.value.error)
    assert "forgotten.weight" in text
    assert "forgotten.bias" in text
    assert "used.weight" not in text.replace("forgotten", "")
    assert "ddp.find_unused=true" in text
    assert "\n" not in text


def test_unused_parameters_are_fine_when_looked_for(ranks: Any) -> None:
    losses = ranks(2, train_forgetful, True)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def idle_on_one_rank() -> None:
    model = replicate(Forgetful())
    x = torch.ones(2, 8)
    extra = model.module.forgotten(x).sum() if dist.get_rank() else 0.0
    (model(x).sum() + extra).backward()
    model.require_gradients()
    dist.all_reduce(torch.zeros(()))  # the other rank would take it for the gradients it waits for


def test_a_rank_that_uses_less_says_so_before_it_goes_on(ranks: Any) -> None:
    with pytest.raises(ranks.Failure) as caught:
        ranks(2, idle_on_one_rank)
    assert isinstance(caught.value.error, ridgeline.UsageError)
    assert "forgotten.weight, forgotten.bias had no part" in str(caught.value.error)


@pytest.mark.parametrize("with_unused", [True, False], ids=["some-unused", "all-used"])
def test_the_last_gradient_is_the_last(with_unused: bool) -> None:
    """Once the first pass has shown the order, the call comes when every gradient is there."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if with_unused:
        model.extra = nn.Parameter(torch.zeros(2))  # the loss never sees it
    there: list[int] = []
    watch_last_gradient(
        model, lambda: there.append(sum(p.grad is not None for p in model.parameters()))
    )
    for _ in range(4):
        model[1](model[0](torch.ones(2, 3))).sum().backward()
        model.zero_grad(set_to_none=True)
    assert there
    assert set(there) == {4}


# A loop of the user's own

NUM_SAMPLES = 23
"""Batches of 8 leave 7; batches of 20 leave 3, so that a fourth rank has none."""


def own_loop(batch_size: int, batch_norm: bool = False) -> dict[str, Any]:
    job = ridgeline.start(seed=4)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (NUM_SAMPLES,), generator=generator)
    norm = nn.BatchNorm1d(6) if batch_norm else nn.Tanh()
    model = nn.Sequential(nn.Linear(5, 6), norm, nn.Linear(6, 3)).double()
    model = job.parallelize(model, sync_batch_norm=batch_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    gradients, losses, seen = [], [], []
    loader = job.loader(TensorDataset(x, y, torch.arange(NUM_SAMPLES)), batch_size)
    for _ in range(2):
        for inputs, targets, indices in loader:
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).clone())
            losses.append(job.mean(loss))
            seen.append((indices.tolist(), job._share.num_real))
            optimizer.step()
            optimizer.zero_grad()
    assert len(loader) == math.ceil(NUM_SAMPLES / batch_size)
    job.close()
    return {"gradients": torch.stack(gradients).numpy(), "losses": losses, "seen": seen}


@pytest.mark.parametrize("batch_size", [8, 20])
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
def test_own_loop_has_the_gradients_of_one_process(
    ranks: Any, batch_size: int, batch_norm: bool
) -> None:
    (one,) = ranks(1, own_loop, batch_size, batch_norm)
    for num_ranks in (2, 4):
        many = ranks(num_ranks, own_loop, batch_size, batch_norm)
        for rank in many:
            assert rank["losses"] == pytest.approx(one["losses"], rel=1e-12)
            gap = abs(rank["gradients"] - one["gradients"]).max()
            assert gap < 1e-12
        # Every sample of an epoch exactly once over all ranks.
        for epoch in (0, 1):
            steps = len(one["losses"]) // 2
            real: list[int] = []
            for rank in many:
                for indices, count in rank["seen"][epoch * steps : (epoch + 1) * steps]:
                    real += indices[:count]
            assert sorted(real) == list(range(NUM_SAMPLES))


def own_draws(layout: str) -> list[float]:
    job = ridgeline.start(layout=layout, seed=4)
    model = nn.Linear(3, 3)
    weights = model.weight.flatten().tolist()
    job.parallelize(model)
    drawn = torch.randn(2).tolist()
    job.close()
    return weights + drawn


def test_own_loops_draw_apart_where_samples_are(ranks: Any) -> None:
    """Weights are made alike; noise and dropout of a model are of each rank's own samples."""
    first, second = ranks(2, own_draws, "dp=2")
    assert first[:9] == second[:9]
    assert first[9:] != second[9:]
    (alone,) = ranks(1, own_draws, "")
    assert alone[9:] == first[9:]


def mean_outside() -> tuple[float, float]:
    """Without a loader every rank counts the same; after an epoch, again."""
    job = ridgeline.start()
    before = job.mean(float(job.rank))
    for _ in job.loader(TensorDataset(torch.arange(5.0)), 4):
        pass
    return before, job.mean(torch.tensor(float(job.rank)))


def test_mean_outside_a_loader(ranks: Any) -> None:
    assert ranks(4, mean_outside) == [(1.5, 1.5)] * 4


# Precision


def train_low(precision: str, clip: str) -> tuple[list[float], bool]:
    config = load_config(
        None,
        [
            "device=cpu", "threads=1", "train.steps=8", "train.batch=8", "train.lr=0.02",
            "data.source=synthetic", "data.args={shape: [8], classes: 4, samples: 8, distinct: 8}",
            "model.name=mlp", "model.args={in_features: 8, hidden: 16, out_features: 4}",
            f"train.clip={clip}", f"layout=precision={precision}",
        ],
    ).config  # fmt: skip
    training = build_training(config, read_rank_env())
    shares = torch.stack([result.loss_share for result in train_loop(training)])
    finite = all(bool(p.isfinite().all()) for p in training.model.parameters())
    return training.mesh.sum_over_data(shares.double()).tolist(), finite


@pytest.mark.parametrize("clip", ["null", "1.0"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_like_one_process(ranks: Any, precision: str, clip: str) -> None:
    ((one, _),) = ranks(1, train_low, precision, clip)
    assert one[-1] < one[0]
    for losses, finite in ranks(2, train_low, precision, clip):
        assert finite
        assert losses == pytest.approx(one, rel=0.02)


# A whole run inside the pool


def whole_run() -> tuple[int, float | None, dict[str, float]]:
    config = load_config(
        None,
        [
            "device=cpu", "threads=1", "train.steps=5", "train.batch=16", "data.source=synthetic",
            "data.args={shape: [8], classes: 4, samples: 70}", "model.name=mlp",
            "model.args={in_features: 8, hidden: 8, out_features: 4}", "model.dtype=float64",
        ],
    ).config  # fmt: skip
    summary = run_training(config, read_rank_env())
    return summary.num_steps, summary.final_loss, summary.metrics


def test_every_rank_hears_how_a_run_ended(ranks: Any) -> None:
    (one,) = ranks(1, whole_run)
    for many in ranks(4, whole_run):
        assert many[0] == one[0] == 5
        assert many[1] == pytest.approx(one[1], rel=1e-12)
        assert many[2] == pytest.approx(one[2], rel=1e-12)


# Ways around the reduction


class Detour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        # As position tables are often kept: a view whose elements share memory.
        self.register_buffer("ids", torch.arange(3.0)[None].expand(4, 3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).sum()

    def describe(self) -> str:
        return "a linear layer"


def go_round() -> str:
    model = replicate(Detour())
    assert model.describe() == "a linear layer"
    with torch.no_grad():
        model.loss(torch.ones(1, 3))  # nothing to reduce
    try:
        model.loss(torch.ones(1, 3))
    except ridgeline.UsageError as error:
        return str(error)
    return "no error"


def test_a_method_is_no_way_around_the_reduction(ranks: Any) -> None:
    for message in ranks(2, go_round):
        assert "model.loss(...)" in message
        assert "model(...)" in message


@dataclasses.dataclass
class Output:
    logits: Tensor
    name: str = "out"


class Boxed(nn.Module):
    """Returns its output bare, in a dataclass, or in something nobody can look into."""

    def __init__(self, box: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.box = nn.Linear(3, 2).double(), box

    def forward(self, x: Tensor) -> Any:
        out = self.linear(x)
        if self.box == "opaque":
            return SimpleNamespace(logits=out)
        return Output(out) if self.box == "dataclass" else out


def boxed_gradient(box: str) -> list[float] | str:
    """Of three samples in one batch of four: uneven on two ranks."""
    job = ridgeline.start(device="cpu")
    model = job.parallelize(Boxed(box))
    data = TensorDataset(torch.arange(9.0, dtype=torch.float64).view(3, 3))
    for (x,) in job.loader(data, batch_size=4, shuffle=False):
        try:
            out = model(x)
        except ridgeline.UsageError as error:
            return str(error)
        out = out if box == "tensor" else out.logits
        out.square().sum(1).mean().backward()
    return model.linear.weight.grad.flatten().tolist()


def test_an_uneven_batch_is_weighed_inside_a_dataclass(ranks: Any) -> None:
    alone = ranks(1, boxed_gradient, "tensor")[0]
    for box in ("tensor", "dataclass"):
        for found in ranks(2, boxed_gradient, box):
            assert found == pytest.approx(alone, rel=1e-12)
    for message in ranks(2, boxed_gradient, "opaque"):
        assert "SimpleNamespace" in message


def mean_around_another_loader() -> float:
    job = ridgeline.start(device="cpu")
    values = TensorDataset(torch.arange(3.0))
    means = []
    for (x,) in job.loader(values, batch_size=4, shuffle=False):
        for _ in job.loader(TensorDataset(torch.zeros(8)), batch_size=4):
            pass
        means.append(job.mean(x.mean()))
    return means[0]


def test_a_loader_inside_a_loop_leaves_the_weights_alone(ranks: Any) -> None:
    assert ranks(2, mean_around_another_loader) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("layout", ["accumulate=4", "precision=fp16"])
def test_what_an_own_loop_would_ignore_is_refused(layout: str) -> None:
    job = ridgeline.start(layout, device="cpu")
    for asked in (lambda: job.parallelize(nn.Linear(2, 2)), job.autocast, lambda: job.mean(1.0)):
        with pytest.raises(ridgeline.UsageError, match=rf"{layout} needs .*job\.engine"):
            asked()
