"""A loop of one's own that is cut off and goes on, on one rank and on several, and on another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from ridgeline.errors import UsageError
from ridgeline.parallel.gather import full_state
from ridgeline.train.job import Job, _arrangement_of, start


def train(folder: str, layout: str, stop_at: int | None, epochs: int = 3) -> Any:
    """The final weights and the losses of the steps of this start."""
    job = start(layout, seed=0, device="cpu")
    data = torch.Generator().manual_seed(5)
    inputs = torch.randn(50, 6, generator=data, dtype=torch.float64)
    dataset = TensorDataset(inputs, torch.randint(0, 3, (50,), generator=data))
    torch.manual_seed(1)
    first = nn.Linear(6, 16, bias=False)
    net = nn.Sequential(first, nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double()
    model = job.parallelize(net, sync_batch_norm=True)
    loader = job.loader(dataset, batch_size=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    saves = job.checkpoints(folder, model, optimizer, loader, every=4, also={"rates": rates})
    losses = {}
    for _ in saves.epochs(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            rates.step()
            saves.step()
            losses[saves.num_steps] = job.mean(loss)
            if saves.num_steps == stop_at:
                saves.close()
                return losses, None
    saves.close()
    return losses, full_state(_arrangement_of(model))


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (4, 2), (1, 4)])
def test_it_goes_on_where_it_was(ranks: Any, tmp_path: Path, before: int, after: int) -> None:
    whole, weights = ranks(1, train, str(tmp_path / "whole"), "", None)[0]
    ranks(before, train, str(tmp_path / "cut"), "", 10)
    losses, found = ranks(after, train, str(tmp_path / "cut"), "", None)[0]
    # Seven batches an epoch, three epochs. The checkpoint is of step 4, or of one up to the last: a
    # save that falls due while the disk still has the one before is done when that one is through.
    assert 5 <= min(losses) <= 11
    assert list(losses) == list(range(min(losses), 22))
    for step, loss in losses.items():
        assert loss == pytest.approx(whole[step], rel=1e-9)
    for name, value in weights.items():
        assert torch.allclose(value.double(), found[name].double(), rtol=1e-9, atol=1e-12), name


def change_the_batch(folder: str) -> None:
    job = start(device="cpu")
    model = job.parallelize(nn.Linear(2, 2))
    loader = job.loader(TensorDataset(torch.zeros(8, 2)), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.checkpoints(folder, model, optimizer, loader, every=1).save(wait=True)
    other = job.loader(TensorDataset(torch.zeros(8, 2)), batch_size=4)
    job.checkpoints(folder, model, optimizer, other, every=1)


def test_another_batch_is_refused(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises(ranks.Failure, match="batch_size=4 and had 2"):
        ranks(1, change_the_batch, str(tmp_path))


def test_fully_sharded_too(ranks: Any, tmp_path: Path) -> None:
    whole, _ = ranks(1, train, str(tmp_path / "whole"), "", None)[0]
    ranks(2, train, str(tmp_path / "cut"), "dp=2,zero=3", 10)
    losses, _ = ranks(1, train, str(tmp_path / "cut"), "", None)[0]
    assert list(losses) == list(range(min(losses), 22))
    assert all(loss == pytest.approx(whole[step], rel=1e-9) for step, loss in losses.items())


def test_a_model_of_nobody_s_is_refused(tmp_path: Path) -> None:
    job: Job = start(device="cpu")
    model = nn.Linear(2, 2)
    loader = job.loader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"not what job\.parallelize or job\.engine gave"):
        job.checkpoints(tmp_path, model, optimizer, loader, every=1)
