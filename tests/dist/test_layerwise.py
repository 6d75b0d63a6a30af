"""LARS and LAMB: what their papers say on one device, and the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline import rundir
from ridgeline.config import OptimConfig, RunConfig, dump_config, load_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.optim.build import build_optimizer
from ridgeline.parallel.gather import full_state
from ridgeline.rundir import RunDir
from ridgeline.train.loop import train_loop
from ridgeline.train.run import run_training
from ridgeline.train.setup import build_training
from ridgeline.verify.run import Verifier


class Block(nn.Module):
    def __init__(self, width: int, size: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        with torch.no_grad():
            self.down.weight.mul_(size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Layers whose weights differ in size, so that one rate does not do for all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Block(12, size) for size in (0.1, 1.0, 10.0, 0.01))
        self.classes = nn.Linear(12, 5)
        self.heat = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.heat * self.classes(x)


OPTIMIZERS = {
    "lars": "optim={name: lars, momentum: 0.9, weight_decay: 0.01, trust: 0.02}",
    "lamb": "optim={name: lamb, weight_decay: 0.01, decay_norms: false}",
}
RATES = {"lars": "train.lr=1.0", "lamb": "train.lr=0.02"}


def config_of(name: str, layout: str, *overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            f"model.name={__name__}:Net",
            "data.source=synthetic",
            "data.args={shape: [8], classes: 5, samples: 37, distinct: 37, eval_samples: 8}",
            OPTIMIZERS[name],
            "train={batch: 9, steps: 5, clip: 0.5, eval_samples: 8}",
            RATES[name],
            "log.tensorboard=no",
            "device=cpu",
            "threads=1",
            f"layout={layout}",
            *overrides,
        ],
    ).config


# On one device


def step_by_the_book(
    name: str, config: OptimConfig, lr: float, weight: Tensor, grad: Tensor, state: dict[str, Any]
) -> Tensor:
    """One parameter's next value, written as the papers have it."""
    scales = weight.dim() > 1
    decay = config.weight_decay if scales or config.decay_norms else 0.0
    if name == "lars":
        ratio = 1.0
        if scales and weight.norm() > 0 and grad.norm() > 0:
            below = grad.norm() + decay * weight.norm() + config.eps
            ratio = float(config.trust * weight.norm() / below)
        move = ratio * (grad + decay * weight)
        state["v"] = config.momentum * state.get("v", torch.zeros_like(weight)) + move
        return weight - lr * (
            move + config.momentum * state["v"] if config.nesterov else state["v"]
        )
    state["t"] = state.get("t", 0) + 1
    first, second = config.betas
    state["m"] = first * state.get("m", 0.0) + (1 - first) * grad
    state["v"] = second * state.get("v", 0.0) + (1 - second) * grad.square()
    mean, square = state["m"] / (1 - first ** state["t"]), state["v"] / (1 - second ** state["t"])
    move = mean / (square.sqrt() + config.eps) + decay * weight
    if scales and weight.norm() > 0 and move.norm() > 0:
        move = move * (weight.norm() / move.norm())
    return weight - lr * move


@pytest.mark.parametrize(
    "config",
    [
        OptimConfig("lars", 0.01, momentum=0.9, trust=0.02),
        OptimConfig("lars", 0.01, momentum=0.9, nesterov=True, decay_norms=False),
        OptimConfig("lars", momentum=0.0, trust=0.1),
        OptimConfig("lamb", 0.01, betas=(0.8, 0.95), eps=1e-6),
        OptimConfig("lamb", 0.01, decay_norms=False),
    ],
    ids=["lars", "nesterov", "no momentum", "lamb", "lamb, vectors spared"],
)
def test_as_the_papers_have_it(config: OptimConfig) -> None:
    torch.manual_seed(0)
    model = Net().double()
    with torch.no_grad():
        model.classes.weight.zero_()  # no ratio: it moves as the gradient says
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    states: dict[str, dict[str, Any]] = {name: {} for name in expected}
    optimizer = build_optimizer(model, config, 0.05)
    for step in range(6):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).double()
        F.cross_entropy(model(x), torch.arange(6) % 5).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            expected[name] = step_by_the_book(
                config.name, config, 0.05, expected[name], p.grad, states[name]
            )
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), expected[name], rtol=1e-10, atol=1e-12)


# In every layout

LAYOUTS = (
    "dp=2",
    "dp=3,zero=1",
    "dp=2,zero=2",
    "dp=2,zero=2,offload=optimizer",
    "dp=3,zero=3",
    "dp=4,zero=3,shard=2",
    "tp=2",
    "dp=2,zero=1,tp=2",
    "dp=2,zero=3,tp=2",
    "pp=2,microbatches=2",
    "dp=2,zero=2,pp=2,microbatches=2",
)


@pytest.fixture(scope="module", params=list(OPTIMIZERS))
def verifier(request: pytest.FixtureRequest) -> Any:
    layouts = [Layout.parse(text) for text in LAYOUTS]
    made = Verifier(config_of(request.param, "dp=1"), layouts, steps=4)
    yield made
    made.close()


@pytest.mark.table(keep=12)
@pytest.mark.parametrize("text", LAYOUTS)
def test_proved(verifier: Verifier, text: str) -> None:
    row = verifier.check(Layout.parse(text))
    assert row.verdict == "same", row


def train(path: Path, steps: int, name: str, layout: str) -> dict[str, Tensor] | None:
    config = config_of(name, layout, f"train.steps={steps}", "model.dtype=float64", "train.batch=8")
    run, env = RunDir(path), read_rank_env()
    if env.rank == 0 and not run.file(rundir.CONFIG).exists():
        run.write_text(rundir.CONFIG, dump_config(config))
    run_training(config, env, run)
    return load_file(run.file(rundir.WEIGHTS)) if env.rank == 0 else None


@pytest.mark.parametrize(
    ("name", "first", "then"), [("lars", "dp=2,zero=1", ""), ("lamb", "", "dp=2,zero=3")]
)
def test_saved_and_gone_on_from(
    ranks: Any, tmp_path: Path, name: str, first: str, then: str
) -> None:
    for part in ("parts", "whole"):
        (tmp_path / part / rundir.LOGS).mkdir(parents=True)
    world = [Layout.parse(text).world_size for text in (first, then)]
    ranks(world[0], train, tmp_path / "parts", 2, name, first)
    found = ranks(world[1], train, tmp_path / "parts", 4, name, then)[0]
    expected = ranks(1, train, tmp_path / "whole", 4, name, "")[0]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=1e-9, atol=1e-12), key


def wide_weights(name: str, bucket_mb: str) -> tuple[dict[str, Tensor], list[str]]:
    """After a few steps of a model that two ranks cannot halve; and in which order its shards lie."""
    made = build_training(
        config_of(
            name, "dp=2,zero=1,tp=2,precision=bf16", f"ddp.bucket_mb={bucket_mb}",
            f"model.name={__name__}:Odd", "train.batch=8",
        ),
        read_rank_env(),
    )  # fmt: skip
    for _ in train_loop(made):
        pass
    return full_state(made.arranged), [name for flat in made.arranged.flats for name in flat.names]


class Odd(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 37)
        self.blocks = nn.ModuleList(Block(37, size) for size in (0.1, 1.0))
        self.classes = nn.Linear(37, 5)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_buckets_that_are_cut_elsewhere_change_nothing(ranks: Any, name: str) -> None:
    """Uneven halves of the weights, and vectors of another type, come in another order on each rank."""
    expected, _ = ranks(4, wide_weights, name, "25")[0]
    every = ranks(4, wide_weights, name, "0.0164")
    assert len({tuple(names) for _, names in every}) > 1, "no case of what is tested here"
    for key, value in expected.items():
        torch.testing.assert_close(every[0][0][key], value, rtol=1e-6, atol=1e-7, msg=key)


def test_no_trust_is_no_training() -> None:
    with pytest.raises(UsageError, match=r"optim\.trust=0 would leave every matrix where it is"):
        build_optimizer(Net(), OptimConfig("lars", trust=0.0), 1.0)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_what_has_no_gradient_stays(name: str) -> None:
    model = Net()
    optimizer = build_optimizer(model, config_of(name, "").optim, 0.1)
    for used in (model.embed, model.classes):  # another set in each step
        before = [p.detach().clone() for p in model.parameters()]
        for p in used.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
        mine = {id(p) for p in used.parameters()}
        for p, was in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, was) == (id(p) not in mine)
