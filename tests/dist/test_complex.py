"""Models with complex weights: they stay complex, and train the same in every layout that takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline import rundir
from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.rundir import RunDir
from ridgeline.train.run import run_training
from ridgeline.train.setup import build_training
from ridgeline.verify.run import Verifier


class Mix(nn.Module):
    """Each channel of modes times a matrix; `in_pairs` holds the numbers as a model that hides them."""

    def __init__(self, in_pairs: bool) -> None:
        super().__init__()
        weight = torch.randn(4, 4, 3, dtype=torch.complex64) * 0.3
        self.weight = nn.Parameter(torch.view_as_real(weight).clone() if in_pairs else weight)
        self.register_buffer("turn", torch.exp(1j * torch.arange(3)))
        self.line = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        modes = torch.fft.rfft(x if x.dtype is torch.float64 else x.float())
        low = torch.einsum("bik,iok->bok", modes[..., :3] * self.turn, weight)
        out = torch.fft.irfft(F.pad(low, (0, 2)), n=8).to(x.dtype)
        return F.gelu(out + self.line(x))


class Spectral(nn.Module):
    def __init__(self, in_pairs: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mix(in_pairs) for _ in range(4))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(1))


def config_of(layout: str, *overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            f"model.name={__name__}:Spectral",
            "data.source=synthetic",
            "data.args={shape: [4, 8], classes: 5, samples: 32, distinct: 32, eval_samples: 8}",
            "optim.name=adamw",
            "train={batch: 8, steps: 3, lr: 0.02, clip: 0.5, eval_samples: 8}",
            "log.tensorboard=no",
            "device=cpu",
            "threads=1",
            f"layout={layout}",
            *overrides,
        ],
    ).config


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", "complex64"), ("float64", "complex128"), ("bfloat16", "complex64")],
)
def test_complex_weights_and_buffers_stay_complex(dtype: str, expected: str) -> None:
    model = build_training(config_of("dp=1", f"model.dtype={dtype}"), read_rank_env({})).model
    for value in (model.blocks[0].weight, model.blocks[0].turn):
        assert value.dtype is getattr(torch, expected)
        assert value.imag.any()
    assert model.head.weight.dtype is getattr(torch, dtype)


@pytest.fixture(scope="module")
def verifier() -> Any:
    layouts = [Layout.parse(text) for text in (*LAYOUTS, *REFUSED)]
    made = Verifier(config_of("dp=1"), layouts, steps=3)
    yield made
    made.close()


LAYOUTS = (
    "dp=2",
    "dp=2,zero=1",
    "dp=2,zero=2",
    "dp=2,sync=local:2",
    "pp=2,microbatches=2",
    "offload=optimizer",
    "recompute=full",
)
REFUSED = {"dp=2,zero=3": "cannot shard; use zero=2", "dp=2,compress=bf16": "leave compress out"}


@pytest.mark.table(keep=9)
@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("precision", ["float64", "bf16"])
def test_proved(verifier: Verifier, text: str, precision: str) -> None:
    row = verifier.check(Layout.parse(text), precision)
    assert row.verdict == "same", row


@pytest.mark.parametrize("text", REFUSED)
def test_refused_in_a_sentence(verifier: Verifier, text: str) -> None:
    row = verifier.check(Layout.parse(text))
    assert "complex" in row.refused
    assert REFUSED[text] in row.refused


@pytest.mark.parametrize(
    "overrides", [("layout=precision=fp16",), ("layout=precision=bf16", "tune.weights=bf16")]
)
def test_training_that_is_for_real_numbers_only(overrides: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"blocks\.0\.weight is complex, which"):
        build_training(config_of("dp=1", *overrides), read_rank_env({}))


def train(path: Path, steps: int, layout: str) -> dict[str, Tensor] | None:
    run, config = RunDir(path), config_of(layout, f"train.steps={steps}")
    env = read_rank_env()
    if env.rank == 0 and not run.file(rundir.CONFIG).exists():
        run.write_text(rundir.CONFIG, dump_config(config))
    run_training(config, env, run)
    return load_file(run.file(rundir.WEIGHTS)) if env.rank == 0 else None


@pytest.mark.parametrize("layout", ["dp=2", "dp=2,zero=2", "pp=2,microbatches=2"])
def test_saved_and_gone_on_from(ranks: Any, tmp_path: Path, layout: str) -> None:
    """A run in another layout goes on from a save, moments and imaginary parts included."""
    for name in ("parts", "whole"):
        (tmp_path / name / rundir.LOGS).mkdir(parents=True)
    ranks(2, train, tmp_path / "parts", 2, layout)
    found = ranks(1, train, tmp_path / "parts", 4, "dp=1")[0]
    expected = ranks(1, train, tmp_path / "whole", 4, "dp=1")[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-4), name
    assert expected["blocks.0.weight"].imag.any()


def test_pairs_that_a_stage_does_not_hold() -> None:
    config, layout = config_of("dp=1", "model.args={in_pairs: true}"), Layout.parse(LAYOUTS[4])
    verifier = Verifier(config, [layout], steps=2)
    try:
        assert verifier.check(layout).verdict == "same"
    finally:
        verifier.close()
