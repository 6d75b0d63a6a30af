"""Linear layers in fp8: what they round to, which layers they are, and that training still works."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.config import load_config
from ridgeline.launch.env import read_rank_env
from ridgeline.models.build import build_model
from ridgeline.parallel.blocks import find_blocks
from ridgeline.parallel.float8 import (
    E4M3,
    E5M2,
    Float8Linear,
    Scaling,
    apply_float8,
    build_scaling,
    largest,
    linear,
    quantise,
)
from ridgeline.parallel.mesh import close_mesh
from ridgeline.train.loop import train_loop
from ridgeline.train.setup import build_training
from ridgeline.tuning import TuneConfig

KINDS = ("row", "mixed", "tensor", "careful")


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.detach().double() - true.double()).norm() / true.double().norm())


@pytest.mark.parametrize(("dtype", "digits"), [(E4M3, 4), (E5M2, 3)])
def test_rows_are_rounded_to_their_own_scale(dtype: torch.dtype, digits: int) -> None:
    torch.manual_seed(0)
    # Rows whose sizes are far apart: one scale for all would lose the small ones.
    x = torch.randn(64, 48) * torch.logspace(-6, 6, 64).unsqueeze(1)
    values, scale = quantise(x, dtype, largest(x, rows=True))
    assert values.dtype is dtype
    assert scale.shape == (64, 1)
    back = values.float() * scale
    top = x.abs().amax(1, keepdim=True)
    # Half a unit in the last place, or what is below the smallest number of the row.
    assert ((back - x).abs() <= x.abs() * 2.0**-digits + top * 2.0**-15).all()


def test_a_row_of_zeros_and_a_value_without_number() -> None:
    x = torch.zeros(2, 16)
    values, scale = quantise(x, E4M3, largest(x, rows=True))
    assert (values.float() * scale == 0).all()
    x[0, 3] = float("nan")
    values, scale = quantise(x, E4M3, largest(x, rows=True))
    assert (values.float() * scale)[0].isnan().any()
    assert (values.float() * scale)[1].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_near_the_exact_ones(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 24, 64)
    weight, bias = torch.randn(80, 64) * 0.1, torch.randn(80)
    grad = torch.randn(4, 24, 80) * 1e-5
    results = []
    for narrow in (True, False):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        scaling = build_scaling(TuneConfig(fp8_scaling=kind))
        out = linear(*leaves, scaling) if narrow else F.linear(*leaves)
        out.backward(grad)
        results.append([out, *(leaf.grad for leaf in leaves)])
    errors = [relative(a, b) for a, b in zip(*results, strict=True)]
    # A product of e4m3 values is off by about 2^-5, one with e5m2 by about 2^-4, of its norm.
    assert errors[0] < 0.05
    assert errors[1] < 0.08
    assert errors[3] == 0
    assert errors[2] < (1e-6 if kind == "careful" else 0.08)


def test_row_scales_keep_what_a_tensor_scale_loses() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64) * torch.logspace(-9, 0, 32).unsqueeze(1)
    weight = torch.randn(48, 64)
    exact = F.linear(x, weight)
    errors = {}
    for rows in (True, False):
        found = linear(x, weight, None, Scaling(rows=rows))
        errors[rows] = relative(found[0], exact[0])
    assert errors[True] < 0.1
    assert errors[False] > 0.9


def test_tokens_that_are_no_multiple_still_have_weight_gradients() -> None:
    x = torch.randn(7, 32)
    weight = torch.randn(16, 32, requires_grad=True)
    linear(x, weight, None, Scaling()).sum().backward()
    assert relative(weight.grad, torch.ones(16, 7) @ x) < 1e-6


class Odd(nn.Module):
    """A block whose layers are not all fit for it."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(32, 32)
        self.odd = nn.Linear(32, 33)
        self.back = nn.Linear(33, 32)
        self.special = nn.modules.linear.NonDynamicallyQuantizableLinear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.special(self.back(self.odd(self.good(x))))


def test_which_layers_change_and_why_others_do_not() -> None:
    model = nn.Sequential(nn.Linear(16, 32), Odd(), Odd(), Odd(), nn.Linear(32, 16))
    keys = list(model.state_dict())
    tune = TuneConfig(fp8_keep_last=1, fp8_keep=("2.good",))
    done = apply_float8(model, find_blocks(model), tune)
    assert done.changed == ("1.good",)
    assert list(model.state_dict()) == keys
    assert isinstance(model[1].good, nn.Linear)
    assert "multiples of 16" in done.kept["1.odd"]
    assert "NonDynamicallyQuantizableLinear" in done.kept["1.special"]
    assert "fp8_keep" in done.kept["2.good"]
    assert "block" in done.kept["3.good"]
    assert "outside" in done.kept["0"]
    assert "outside" in done.kept["4"]


def test_a_stage_changes_its_own_layers_by_their_place_in_the_whole() -> None:
    model = nn.Sequential(Odd(), Odd(), Odd(), Odd())
    paths = tuple(find_blocks(model))
    for child in (*model[0].modules(), *model[1].modules()):  # the stage before has these
        for name in list(child._parameters):
            child._parameters[name] = None
    blocks = {path: model.get_submodule(path) for path in paths[2:]}
    done = apply_float8(model, blocks, TuneConfig(fp8_keep_first=2, fp8_keep_last=1), paths)
    assert done.changed == ("2.good",)
    assert "block" in done.kept["3.good"]


def test_without_blocks_the_last_layer_is_kept_and_shared_weights_are() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    done = apply_float8(model, {}, TuneConfig())
    assert done.changed == ()
    assert done.kept == {
        "0": "it shares its weight",
        "1": "it shares its weight",
        "2": "it gives the outputs",
    }


def test_a_users_model_compiles() -> None:
    torch.manual_seed(0)
    model = build_model("llama", width=32, depth=2, heads=2, ffn=64, vocab=64)
    apply_float8(model, find_blocks(model), TuneConfig())
    assert isinstance(model.layers[0].attention.wq, Float8Linear)
    other = copy.deepcopy(model)
    tokens = torch.randint(0, 64, (2, 16))
    found = []
    for one in (model, torch.compile(other, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(one(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        found.append(loss.detach())
    assert torch.allclose(*found, rtol=1e-3)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert max(relative(b.grad, a.grad) for a, b in pairs) < 0.15


def losses(*overrides: str) -> list[float]:
    settings = (
        "model.name=llama",
        "model.args={width: 64, depth: 2, heads: 2, ffn: 128, vocab: 256, max_seq: 64}",
        "data.source=text",
        "data.args={seq_len: 64}",
        "train.batch=8",
        "train.steps=30",
        "train.lr=3e-3",
        "train.clip=1.0",
        "train.eval_samples=0",
        "device=cpu",
        "threads=1",
    )
    config = load_config(None, [*settings, *overrides]).config
    training = build_training(config, read_rank_env({}))
    found = [float(result.loss_share) for result in train_loop(training)]
    training.close_loaders()
    close_mesh(training.mesh)
    return found


@pytest.fixture(scope="module")
def bf16_losses() -> list[float]:
    return losses("layout.precision=bf16")


@pytest.mark.parametrize("kind", ["row", "mixed"])
def test_training_follows_bf16(kind: str, bf16_losses: list[float]) -> None:
    found = losses("layout.precision=fp8", f"tune.fp8_scaling={kind}")
    assert bf16_losses[-1] < 0.8 * bf16_losses[0]
    assert max(abs(a - b) / b for a, b in zip(found, bf16_losses, strict=True)) < 0.02


def test_exact_settings_follow_bf16_exactly(bf16_losses: list[float]) -> None:
    """Masters and chunks are the same arithmetic in another order."""
    found = losses("layout.precision=bf16", "tune.weights=bf16")
    assert max(abs(a - b) / b for a, b in zip(found, bf16_losses, strict=True)) < 2e-3
    assert found[0] == bf16_losses[0]
    found = losses("layout.precision=bf16", "tune.loss=chunked", "tune.loss_chunk=100")
    assert max(abs(a - b) / b for a, b in zip(found, bf16_losses, strict=True)) < 1e-2


def test_a_narrow_residual_follows_bf16(bf16_losses: list[float]) -> None:
    found = losses("layout.precision=bf16", "tune.residual=bf16")
    assert found != bf16_losses
    assert max(abs(a - b) / b for a, b in zip(found, bf16_losses, strict=True)) < 0.03
