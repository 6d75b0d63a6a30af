"""Which layouts a loop of one's own takes, as docs/train.md says: those train as one process does, and the
others are refused in one sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from ridgeline.errors import UsageError
from ridgeline.train.job import start

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
TAKEN = {
    "dp": "dp=2",
    "zero=3": "dp=2,zero=3",
    "shard": "dp=4,zero=3,shard=2",
    "spatial": "spatial=2",
    "recompute": "dp=2,recompute=full",
    "compress": "dp=2,compress=bf16",
    "precision": "dp=2,precision=bf16",
}
REFUSED = {
    "pp": "pp=2,microbatches=2",
    "tp": "tp=2",
    "cp": "cp=2",
    "zero=1": "dp=2,zero=1",
    "zero=2": "dp=2,zero=2",
    "sync": "dp=2,sync=local:2",
    "accumulate": "dp=2,accumulate=2",
    "precision=fp16": "dp=2,precision=fp16",
    "offload=optimizer": "dp=2,offload=optimizer",
}


def train(layout: str) -> list[float]:
    """The mean losses of a few steps."""
    job = start(layout, seed=0, device="cpu")
    drawn = torch.Generator().manual_seed(5)
    images = torch.randn(16, 2, 8, 8, generator=drawn)
    dataset = TensorDataset(images, torch.randint(0, 3, (16,), generator=drawn))
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    model = job.parallelize(net, example_input=images[:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        for x, y in job.loader(dataset, batch_size=8):
            with job.autocast():
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(job.mean(loss))
    return losses


@pytest.mark.parametrize("name", TAKEN)
def test_taken(ranks: Any, name: str) -> None:
    alone = ranks(1, train, "")[0]
    layout = TAKEN[name]
    exact = "bf16" not in layout
    found = ranks(4 if "dp=4" in layout else 2, train, layout)[0]
    assert found == pytest.approx(alone, rel=1e-5 if exact else 2e-2)


def refuse(layout: str) -> str:
    try:
        start(layout, device="cpu").parallelize(nn.Linear(2, 2), example_input=torch.zeros(2, 2))
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks: Any, name: str) -> None:
    told = ranks(2, refuse, REFUSED[name])[0]
    assert "job.engine(model, optimizer)" in told
    assert "\n" not in told


def test_the_page_says_so() -> None:
    """Every name that is tested above, on the right side."""
    taken, refused = re.search(
        r"With `parallelize` a loop takes these layouts: (.*?) These are\s+refused (.*?)\n\n",
        PAGE,
        re.S,
    ).groups()  # type: ignore[union-attr]
    assert all(f"`{name}`" in taken for name in TAKEN)
    assert all(f"`{name}`" in refused for name in REFUSED)
