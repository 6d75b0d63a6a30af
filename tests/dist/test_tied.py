"""One weight in several stages of a pipeline, on different ranks and on the same."""

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


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Thrice(nn.Module):
    """Reads its tokens at the beginning and half-way, as a decoder after an encoder does, with the weight
    that also makes the outputs. Of four stages on two ranks the second and the last are on one."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 12)
        self.blocks = nn.ModuleList(Block(12) for _ in range(depth))
        self.head = nn.Linear(12, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            if index == 2:
                x = x + self.embed(tokens.flip(-1))
            x = block(x)
        return self.head(x)


def config_of(layout: str, *overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            f"model.name={__name__}:Thrice",
            "data.source=synthetic",
            "data.args={task: causal_lm, shape: [10], vocab: 37, samples: 37}",
            "optim={name: adamw, weight_decay: 0.1}",
            "train={batch: 8, steps: 4, lr: 0.02, clip: 0.5, eval_samples: 0}",
            "log.tensorboard=no",
            "device=cpu",
            "threads=1",
            f"layout={layout}",
            *overrides,
        ],
    ).config


LOOP = "pp=2,microbatches=2,schedule=interleaved,virtual=2"
LAYOUTS = (
    LOOP,
    "pp=2,microbatches=4,schedule=zerobubble,virtual=2",
    f"dp=2,{LOOP}",
    f"dp=2,zero=1,{LOOP}",
    f"dp=2,zero=2,{LOOP}",
    f"tp=2,{LOOP}",
    f"{LOOP},offload=optimizer",
    f"{LOOP},recompute=full",
)


@pytest.fixture(scope="module")
def verifier() -> Any:
    made = Verifier(config_of("dp=1"), [Layout.parse(text) for text in LAYOUTS], steps=3)
    yield made
    made.close()


@pytest.mark.parametrize("text", LAYOUTS)
def test_proved(verifier: Verifier, text: str) -> None:
    row = verifier.check(Layout.parse(text))
    assert row.verdict == "same", row


def test_proved_in_two_types(verifier: Verifier) -> None:
    """Master weights and what is computed with."""
    row = verifier.check(Layout.parse(f"dp=2,zero=2,{LOOP}"), "bf16")
    assert row.verdict == "same", row


def test_a_stage_that_has_nothing_else() -> None:
    """With three blocks the last stage is the head."""
    layouts = [Layout.parse(text) for text in (f"dp=2,{LOOP}", f"dp=2,zero=1,{LOOP}")]
    made = Verifier(config_of("dp=1", "model.args={depth: 3}"), layouts, steps=2)
    try:
        for layout in layouts:
            row = made.check(layout)
            assert row.verdict == "same", row
    finally:
        made.close()


def stages_of(layout: str) -> tuple[list[tuple[int, ...]], int, int]:
    arranged = build_training(config_of(layout), read_rank_env()).arranged
    names = [t.name for t in arranged.trainables()]
    assert arranged.staged is not None
    ties = [tied.stages for tied in arranged.staged.plan.tied]
    return ties, names.count("embed.weight"), len(arranged.tied_in(arranged.parts[1]))


def test_a_rank_with_two_stages_of_it_steps_it_once(ranks: Any) -> None:
    (ties, first, _), (_, second, held) = ranks(2, stages_of, LOOP)
    assert ties == [(0, 1, 3)]
    assert (first, second, held) == (1, 1, 1)


def refusal(layout: str) -> str:
    try:
        build_training(config_of(layout), read_rank_env())
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("word", ["zero=3", "sync=local:2"])
def test_what_would_make_two_of_it_is_refused(ranks: Any, word: str) -> None:
    for sentence in ranks(4, refusal, f"dp=2,{LOOP},{word}"):
        assert "\n" not in sentence
        assert f"embed.weight is in two stages of one rank, which {word} cannot" in sentence
        assert "use virtual=1" in sentence


def train(path: Path, steps: int, layout: str) -> dict[str, Tensor] | None:
    config = config_of(layout, f"train.steps={steps}", "model.dtype=float64")
    run, env = RunDir(path), read_rank_env()
    if env.rank == 0 and not run.file(rundir.CONFIG).exists():
        run.write_text(rundir.CONFIG, dump_config(config))
    run_training(config, env, run)
    return load_file(run.file(rundir.WEIGHTS)) if env.rank == 0 else None


@pytest.mark.parametrize(
    ("first", "then"), [(LOOP, ""), ("", f"dp=2,zero=1,{LOOP}"), (f"dp=2,zero=1,{LOOP}", LOOP)]
)
def test_saved_and_gone_on_from(ranks: Any, tmp_path: Path, first: str, then: str) -> None:
    for name in ("parts", "whole"):
        (tmp_path / name / rundir.LOGS).mkdir(parents=True)
    world = [Layout.parse(text).world_size for text in (first, then)]
    ranks(world[0], train, tmp_path / "parts", 2, first)
    found = ranks(world[1], train, tmp_path / "parts", 4, then)[0]
    expected = ranks(1, train, tmp_path / "whole", 4, "")[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name
