"""Parameters without dimensions, as a learned temperature: whole on each rank where others are shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ridgeline import rundir
from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.parallel.fsdp import apply_fsdp, full_gradients
from ridgeline.rundir import RunDir
from ridgeline.train.run import run_training
from ridgeline.verify.run import Verifier


class Gated(nn.Module):
    """A residual block that begins as the identity, and a factor that is not trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Parameter(torch.tensor(0.1))
        self.fixed = nn.Parameter(torch.tensor(0.7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.down(F.gelu(self.up(x)) * self.fixed)


class Tempered(nn.Module):
    """Compares unit vectors, as CLIP does, at a temperature that is learned; and one that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Gated(12) for _ in range(4))
        self.classes = nn.Linear(12, 5, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(2.66))
        self.never = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.logit_scale.exp() * self.classes(F.normalize(x, dim=-1))


def config_of(layout: str, *overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            f"model.name={__name__}:Tempered",
            "data.source=synthetic",
            "data.args={shape: [8], classes: 5, samples: 37, distinct: 37, eval_samples: 8}",
            "optim={name: adamw, weight_decay: 0.1}",
            "train={batch: 9, steps: 5, lr: 0.02, clip: 0.5, eval_samples: 8}",
            "log.tensorboard=no",
            "device=cpu",
            "threads=1",
            f"layout={layout}",
            *overrides,
        ],
    ).config


LAYOUTS = (
    "dp=2,zero=3",
    "dp=3,zero=3",
    "dp=2,zero=3,accumulate=3",
    "dp=4,zero=3,shard=2",
    "dp=2,zero=3,tp=2",
    "dp=2,zero=3,pp=2,microbatches=2",
    "dp=2,zero=3,recompute=full",
    "dp=2,zero=3,offload=params",
)


@pytest.fixture(scope="module")
def verifier() -> Any:
    """Batches of 9 of 37 samples: shares differ between ranks, and the last batch is one sample."""
    made = Verifier(config_of("dp=1"), [Layout.parse(text) for text in LAYOUTS], steps=5)
    yield made
    made.close()


@pytest.mark.table(keep=10)
@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("precision", ["float64", "bf16"])
def test_proved(verifier: Verifier, text: str, precision: str) -> None:
    row = verifier.check(Layout.parse(text), precision)
    assert row.verdict == "same", row


@pytest.mark.parametrize("text", ["dp=2,zero=3", "dp=4,zero=3,shard=2"])
def test_proved_with_momentum(text: str) -> None:
    """Shards and whole tensors in one optimizer for which torch has no kernel of shards."""
    config = config_of("dp=1", "optim={name: sgd, momentum: 0.9}", "train.lr=0.05")
    made = Verifier(config, [Layout.parse(text)], steps=3)
    try:
        row = made.check(Layout.parse(text))
    finally:
        made.close()
    assert row.verdict == "same", row


def train(path: Path, steps: int, layout: str) -> dict[str, Tensor] | None:
    config = config_of(layout, f"train.steps={steps}", "model.dtype=float64", "train.batch=8")
    run, env = RunDir(path), read_rank_env()
    if env.rank == 0 and not run.file(rundir.CONFIG).exists():
        run.write_text(rundir.CONFIG, dump_config(config))
    run_training(config, env, run)
    return load_file(run.file(rundir.WEIGHTS)) if env.rank == 0 else None


@pytest.mark.parametrize(
    ("first", "then"),
    [("dp=2,zero=3", ""), ("", "dp=2,zero=3"), ("dp=4,zero=3,shard=2", "dp=2,zero=3")],
)
def test_saved_and_gone_on_from(ranks: Any, tmp_path: Path, first: str, then: str) -> None:
    """Values and moments come through a checkpoint, from shards to one device and back."""
    for name in ("parts", "whole"):
        (tmp_path / name / rundir.LOGS).mkdir(parents=True)
    world = [Layout.parse(text).world_size for text in (first, then)]
    ranks(world[0], train, tmp_path / "parts", 2, first)
    found = ranks(world[1], train, tmp_path / "parts", 4, then)[0]
    expected = ranks(1, train, tmp_path / "whole", 4, "")[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name
    assert expected["logit_scale"] != 2.66
    assert expected["never"] == 3.0


class Choosing(nn.Module):
    """Which of its parameters have a part in the loss is said from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 1)
        self.one, self.other = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.double()

    def forward(self, x: Tensor, second: bool) -> Tensor:
        return self.line(x).mean() * (self.other if second else self.one)


def only_one_uses(here: bool) -> dict[str, float]:
    """The gradients of rank 1 using the second gate, or of nobody; two passes of one step."""
    torch.manual_seed(0)
    model = apply_fsdp(
        Choosing(), [], init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), None
    )
    x = torch.arange(3.0, dtype=torch.float64) + dist.get_rank()
    for _ in range(2):
        model(x, here and dist.get_rank() == 1).backward()
    return {name: float(value) for name, value in full_gradients(model).items() if not value.dim()}


def test_what_another_rank_used(ranks: Any) -> None:
    torch.manual_seed(0)
    line = Choosing().line
    inputs = [torch.arange(3.0, dtype=torch.float64) + rank for rank in range(2)]
    values = [line(x).item() for x in inputs]
    for found in ranks(2, only_one_uses, True):
        assert found == pytest.approx({"one": values[0], "other": values[1]}, rel=1e-12)
    for found in ranks(2, only_one_uses, False):
        assert found == pytest.approx({"one": sum(values)}, rel=1e-12)


class Lonely(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x


def own_loop(fused: bool) -> tuple[float, float, bool]:
    """As in a loop of the user's own: torch's clipping and optimizers take both kinds together."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    alone = apply_fsdp(Lonely(), [], mesh, None)
    alone(torch.tensor(float(dist.get_rank()))).backward()
    model = apply_fsdp(Choosing(), [], mesh, None)
    optimizer = torch.optim.AdamW(
        model.parameters(), fused=fused or None, foreach=not fused or None
    )
    model(torch.arange(3.0, dtype=torch.float64), False).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return float(whole), float(model.one), float(alone.gain.grad) == 0.5


@pytest.mark.parametrize("fused", [False, True])
def test_a_loop_of_the_users_own(ranks: Any, fused: bool) -> None:
    torch.manual_seed(0)
    model = Choosing()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(3.0, dtype=torch.float64), False).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    for found in ranks(2, own_loop, fused):
        assert found[:2] == pytest.approx((float(norm), float(model.one)), rel=1e-9)
        assert found[2]
