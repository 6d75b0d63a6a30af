"""Models that call torch's checkpoint themselves, in layouts that they know nothing of."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ridgeline.config import load_config
from ridgeline.launch.env import read_rank_env
from ridgeline.parallel.own_recompute import apply_own_recompute
from ridgeline.train.loop import train_loop
from ridgeline.train.setup import build_training


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        def inside(x: Tensor) -> Tensor:
            return F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training)

        def outside(x: Tensor) -> Tensor:
            kept = inside(x) if self.how != "nested" else checkpoint(inside, x, use_reentrant=False)
            return x + F.dropout(self.down(kept), 0.1, self.training)

        if self.how == "none":
            return outside(x)
        return checkpoint(outside, x, use_reentrant=self.how == "reentrant")


class Net(nn.Module):
    """Functions, not modules, that are recomputed, with dropout in them."""

    def __init__(self, how: str = "none") -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(Block(how) for _ in range(4))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def losses(how: str, layout: str) -> list[float]:
    config = load_config(
        None,
        [
            f"model.name={__name__}:Net",
            f"model.args={{how: {how}}}",
            "data.source=text",
            f"data.args={{path: {__file__}, seq_len: 8}}",
            "optim.name=adamw",
            "train.lr=0.02",
            "train.batch=4",
            "train.steps=4",
            "train.task=causal_lm",
            "train.eval_samples=0",
            "model.dtype=float64",
            "device=cpu",
            "threads=1",
            *([f"layout={layout}"] if layout else []),
        ],
    ).config
    training = build_training(config, read_rank_env())
    shares = torch.stack([result.loss_share for result in train_loop(training)])
    return training.mesh.sum_over_data(shares).tolist()


@pytest.mark.table(keep=10)
@pytest.mark.parametrize("how", ["plain", "reentrant", "nested"])
@pytest.mark.parametrize(
    "layout",
    ["tp=2", "tp=2,sp=true", "cp=2", "pp=2,microbatches=2", "dp=2", "tp=2,recompute=full"],
)
def test_same_as_without_on_one_device(ranks: Any, how: str, layout: str) -> None:
    expected = ranks(1, losses, "none", "")[0]
    assert expected[0] - expected[-1] > 0.1
    for found in ranks(2, losses, how, layout):
        assert found == pytest.approx(expected, rel=1e-10)


def test_a_copy_of_a_model_runs_itself() -> None:
    net = Net("plain").eval()
    apply_own_recompute(net, lambda: pytest.fail)
    other = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    tokens = torch.arange(5)[None]
    assert torch.equal(other(tokens), net(tokens))
    with torch.no_grad():
        other.head.weight.zero_()
        other.head.bias.zero_()
    assert not other(tokens).any()
    assert net(tokens).any()
