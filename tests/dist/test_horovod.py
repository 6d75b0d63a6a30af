"""Scripts written for Horovod: the same training as on one device, and its collectives' answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ridgeline.compat.horovod as hvd
from ridgeline.errors import UsageError

SAMPLES = 24


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, 6, dtype=torch.float64), torch.arange(SAMPLES) % 4


class Net(nn.Module):
    """One branch is used by the first ranks alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(6, 9).double(), nn.Linear(9, 4).double()
        self.side = nn.Linear(6, 9).double()

    def forward(self, x: Tensor, side: bool) -> Tensor:
        hidden = self.first(x) + (self.side(x) if side else 0.0)
        return self.last(F.gelu(hidden))


def train(passes: int, clip: bool, fp16: bool) -> dict[str, Tensor]:
    """As the tutorials of Horovod have it."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    model = Net(seed=rank)  # different ones, made the same below
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    if rank == 0:
        optimizer.param_groups[0]["lr"] = 0.2  # the others are to have it from here
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if fp16 else hvd.Compression.none,
        backward_passes_per_step=passes,
    )
    assert isinstance(optimizer, torch.optim.SGD)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    x, y = data()
    mine = torch.arange(SAMPLES).chunk(size * passes)[rank * passes : (rank + 1) * passes]
    for _ in range(4):
        for part in mine:
            # The mean over this rank's passes and all ranks is that of all samples.
            side = int(part[0]) < SAMPLES // 2
            (F.cross_entropy(model(x[part], side), y[part]) / passes).backward()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    hvd.shutdown()
    return {name: value.detach() for name, value in model.state_dict().items()}


def train_alone(clip: bool) -> dict[str, Tensor]:
    model = Net(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    x, y = data()
    half = SAMPLES // 2
    for _ in range(4):
        for part, side in ((slice(0, half), True), (slice(half, None), False)):
            (F.cross_entropy(model(x[part], side), y[part]) / 2).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("size", "passes", "clip", "fp16"),
    [(2, 1, False, False), (4, 1, True, False), (2, 3, False, False), (2, 1, False, True)],
)
def test_trains_as_one_device_does(
    ranks: Any, size: int, passes: int, clip: bool, fp16: bool
) -> None:
    expected = train_alone(clip)
    for found in ranks(size, train, passes, clip, fp16):
        for name, value in expected.items():
            bound = 1e-3 if fp16 else 1e-12
            torch.testing.assert_close(found[name], value, rtol=bound, atol=bound, msg=name)


def collectives() -> dict[str, Any]:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    mine = torch.tensor([1.0, 2.0]) * (rank + 1)
    found: dict[str, Any] = {
        "place": (rank, size, hvd.local_size(), hvd.cross_size(), hvd.is_homogeneous()),
        "average": hvd.allreduce(mine),
        "sum": hvd.allreduce(mine, op=hvd.Sum),
        "older sum": hvd.allreduce(mine, average=False),
        "whole numbers": hvd.allreduce(torch.tensor([4 * rank, -4 * rank, 5])),
        "rounded down": hvd.allreduce(torch.tensor([4, -4]) * (rank == 0)),
        "scaled": hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25),
        "least": hvd.allreduce(mine, op=hvd.Min),
        "group": hvd.grouped_allreduce([mine, mine[:1]], op=hvd.Max),
        "rows": hvd.allgather(torch.full((rank, 2), float(rank))),
        "numbers": hvd.allgather(torch.tensor(rank)),
        "objects": hvd.allgather_object({"rank": rank}),
        "object": hvd.broadcast_object([rank] if rank == 1 else None, root_rank=1),
        "sent": hvd.broadcast(mine, root_rank=2),
        "all": hvd.alltoall(torch.arange(3) + 10 * rank),
        "some": hvd.alltoall(torch.arange(3) + 10 * rank, splits=[0, 1, 2]),
        "share": hvd.reducescatter(torch.arange(4.0) + rank, op=hvd.Sum),
    }
    handle = hvd.allreduce_async_(mine, op=hvd.Sum)
    found["in place"] = hvd.synchronize(handle) is mine and hvd.poll(handle)
    found["in place"] = (found["in place"], mine)
    hvd.barrier()
    weight = torch.tensor([float(rank)], requires_grad=True)
    hvd.allgather(weight * 2).square().sum().backward()
    found["gradient"] = weight.grad
    other = torch.tensor([float(rank)], requires_grad=True)
    (hvd.allreduce(other, op=hvd.Sum) * (rank + 1) + hvd.broadcast(other, 1)).sum().backward()
    found["gradients"] = other.grad
    found["is there"] = (hasattr(hvd, "allgather"), hasattr(hvd, "join"))
    hvd.shutdown()
    assert not hvd.is_initialized()
    return found


def test_collectives_answer_as_horovod_does(ranks: Any) -> None:
    every = ranks(3, collectives)
    lists = [
        {k: v.tolist() if isinstance(v, Tensor) else v for k, v in one.items()} for one in every
    ]
    for rank, one in enumerate(lists):
        assert one["place"] == (rank, 3, 3, 1, True)
        assert one["average"] == [2.0, 4.0]
        assert one["sum"] == one["older sum"] == [6.0, 12.0]
        assert one["whole numbers"] == [4, -4, 5]
        assert one["rounded down"] == [1, -2]
        assert one["scaled"] == [3.0, 6.0]
        assert one["least"] == [1.0, 2.0]
        assert [t.tolist() for t in one["group"]] == [[3.0, 6.0], [3.0]]
        assert one["rows"] == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert one["numbers"] == [0, 1, 2]
        assert one["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert one["object"] == [1]
        assert one["sent"] == [3.0, 6.0]
        assert one["all"] == [rank, 10 + rank, 20 + rank]
        assert (one["in place"][0], one["in place"][1].tolist()) == (True, [6.0, 12.0])
        # Each rank takes the sum of squares of all: three times the gradient of its own.
        assert one["gradient"] == [3 * 8.0 * rank]
        assert one["gradients"] == [6.0 + 3.0 * (rank == 1)]
        assert one["is there"] == (True, False)
    some, came = zip(*(one["some"] for one in lists), strict=True)
    assert [t.tolist() for t in some] == [[], [0, 10, 20], [1, 2, 11, 12, 21, 22]]
    assert [t.tolist() for t in came] == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    assert [one["share"] for one in lists] == [[3.0, 6.0], [9.0], [12.0]]


def in_between(with_closure: bool) -> tuple[list[float], float, int]:
    """A rank that uses a branch sends a bucket before the others do; meanwhile the script sums a number of
    its own. Afterwards the optimizer's state is sent from the first rank."""
    hvd.init()
    rank = hvd.rank()
    used, branch = (nn.Parameter(torch.ones(1)) for _ in range(2))
    model = nn.ParameterList([used, branch])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, gradient_predivide_factor=2.0)
    metric = []

    def backward() -> Tensor:
        loss = 10 * (rank + 1) * used + (branch * 4 if rank == 0 else 0)
        loss.backward()
        metric.append(float(hvd.allreduce(torch.tensor([100.0 + rank]), op=hvd.Sum)))
        return loss

    if with_closure:
        optimizer.step(backward)
    else:
        backward()
        optimizer.step()
    optimizer.zero_grad()
    if rank:
        optimizer.state.clear()  # as one that has not stepped: the first rank resumed, say
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    momenta = [float(optimizer.state[p]["momentum_buffer"]) for p in model]
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    optimizer.step()
    hvd.shutdown()
    return [*momenta, *(float(p.detach()) for p in model)], metric[0], len(steps)


@pytest.mark.parametrize("with_closure", [False, True])
def test_what_a_script_sends_in_between_is_its_own(ranks: Any, with_closure: bool) -> None:
    for numbers, metric, steps in ranks(2, in_between, with_closure):
        assert metric == 201.0
        assert numbers[:2] == [15.0, 2.0]
        assert steps == 1


def test_alone_it_is_the_optimizer_itself(ranks: Any) -> None:
    (seen,) = ranks(1, alone)
    assert seen == (None, 2.0)


def alone() -> tuple[Any, float]:
    hvd.init()
    used, unused = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0))
    for _ in range(2):  # as often as one likes
        used.sum().backward()
    optimizer.step()
    hvd.shutdown()
    return unused.grad, float(used.grad)


def mistakes() -> list[str]:
    hvd.init()
    model = nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    loss = lambda: model(torch.ones(1, 2)).sum()  # noqa: E731
    said = []

    def refused(call: Any) -> None:
        with pytest.raises(UsageError) as error:
            call()
        said.append(str(error.value))

    loss().backward()
    refused(optimizer.zero_grad)
    refused(lambda: loss().backward())
    optimizer.synchronize()
    optimizer.step()
    refused(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}))
    refused(lambda: hvd.DistributedOptimizer(optimizer))
    refused(lambda: hvd.allreduce(torch.ones(1), process_set=[0]))
    refused(lambda: hvd.broadcast(torch.ones(1), root_rank=7))
    refused(lambda: hvd.alltoall(torch.ones(3)))
    refused(lambda: hvd.elastic.run)
    hvd.shutdown()
    refused(hvd.rank)
    return said


def test_mistakes_are_said(ranks: Any) -> None:
    for said in ranks(2, mistakes):
        parts = (
            "between backward and step()", "backward ran more than 1 times", "out of the average",
            "give it torch's optimizer, once", "process_set= is not in", "root_rank=7 of 2 ranks",
            "3 rows over 2 ranks",
            "horovod's elastic is not in", "before hvd.init()",
        )  # fmt: skip
        assert len(said) == len(parts)
        for text, part in zip(said, parts, strict=True):
            assert part in text


SCRIPT = """
import torch
import ridgeline.compat.horovod as hvd

hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
spread = hvd.allreduce(model.weight, op=hvd.Max) - hvd.allreduce(model.weight, op=hvd.Min)
if hvd.rank() == 0:
    print("ranks", hvd.size(), "apart", float(spread.abs().max()))
"""


@pytest.mark.slow
def test_a_script_is_started_like_any_other(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ridgeline", "launch", "--scheduler", "local", "-n", "2", "--"]
    done = subprocess.run(
        [*command, sys.executable, str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "ranks 2 apart 0.0" in done.stdout
