"""A layout that a model cannot take is one sentence on every rank, before any training, never a hang."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.config import load_config
from ridgeline.errors import RunError, UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.parallel.context import check_sequences
from ridgeline.parallel.tensor.plan import plan_tensor
from ridgeline.train.setup import build_training


class Branching(nn.Module):
    """Which layer runs depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        x = self.one(x) if bool(x.sum() > 0) else self.other(x)
        return self.head(x)


class OneConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3))


class NoMatrices(nn.Module):
    """Nothing that tensor parallelism could split."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :10] * self.scale


class Skipping(nn.Module):
    """Leaves a block out when there is anything to see; the example is all zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        left_out = int(os.environ["LEFT_OUT"]) if bool(x.abs().sum() > 0) else -1
        for index, block in enumerate(self.blocks):
            if index != left_out:
                x = block(x).relu()
        return self.head(x)


class Blurring(nn.Module):
    """A kernel wider than two tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 32)
        self.norm, self.head = nn.BatchNorm1d(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(self.first(x.flatten(1)).relu())))


DIGITS = ("data.source=digits", "train.batch=8", "train.steps=1", "train.eval_samples=0")
TEXT = ("data={source: text, args: {seq_len: 16}}", *DIGITS[1:])


def refusal(overrides: tuple[str, ...]) -> str:
    try:
        build_training(load_config(None, overrides).config, read_rank_env())
    except UsageError as error:
        return str(error)
    return ""


CASES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "too few blocks for the stages": (
        4,
        ("model={name: llama, args: {size: 1m, depth: 2, vocab: 256}}", *TEXT,
         "layout=pp=4,virtual=4,schedule=interleaved,microbatches=4"),
        ("Llama", "16 pipeline stages", "pp x virtual <= 5"),
    ),
    "image too small for the tiles": (
        4,
        (f"model.name={__name__}:OneConvolution",
         "data={source: synthetic, args: {shape: [1, 3, 8]}}", *DIGITS[1:], "layout=spatial=4"),
        ("3x8", "spatial=4x1", "spatial=3x1"),
    ),
    "control flow that depends on data": (
        2,
        (f"model.name={__name__}:Branching", *DIGITS, "layout=pp=2,microbatches=2"),
        ("Branching", "depends on the data", "use pp=1"),
    ),
    "nothing to split": (
        2,
        (f"model.name={__name__}:NoMatrices", *DIGITS, "layout=tp=2"),
        ("NoMatrices", "leave tp out"),
    ),
    "no sequence to cut in an image": (
        2,
        (f"model.name={__name__}:OneConvolution", *DIGITS, "layout=cp=2"),
        ("cp=2", "OneConvolution has no sequence to cut", "leave cp out"),
    ),
    "no sequence to cut beside tensor parallelism": (
        4,
        ("model={name: mlp}", *DIGITS, "layout=tp=2,cp=2"),
        ("cp=2", "MLP has no sequence to cut", "leave cp out"),
    ),
    "synchronised batch norm on split tensors": (
        4,
        (f"model.name={__name__}:Normed", *DIGITS, "ddp.sync_batch_norm=true", "layout=dp=2,tp=2"),
        ("ddp.sync_batch_norm=true", "dp=2,tp=2", "use ddp.sync_batch_norm=false"),
    ),
    "a batch that the microbatches do not divide": (
        2,
        ("model={name: mlp}", *DIGITS, "layout=pp=2,microbatches=3"),
        ("train.batch=8", "microbatches=3", "train.batch=6 or 9"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_rank_refuses_at_once(ranks: Any, case: str) -> None:
    num_ranks, overrides, words = CASES[case]
    sentences = ranks(num_ranks, refusal, overrides)
    for sentence in sentences:
        for word in words:
            assert word in sentence, f"{word!r} is not in {sentence!r}"
        assert "\n" not in sentence
    assert len(set(sentences)) == 1


def test_a_model_that_fails_alone_is_not_told_to_leave_tp_out() -> None:
    broken = nn.Sequential(nn.Linear(63, 16), nn.ReLU(), nn.Linear(16, 10))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        plan_tensor(broken, 2, (torch.zeros(2, 64),))


class Attending(nn.Module):
    """Patches of an image that look at each other: there is no sequence among the inputs."""

    def __init__(self, by_module: bool) -> None:
        super().__init__()
        self.cut, self.head = nn.Conv2d(1, 8, 2, stride=2), nn.Linear(8, 10)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True) if by_module else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2)
        if self.attend is not None:
            x, _ = self.attend(x, x, x, need_weights=False)
        else:
            x = nn.functional.scaled_dot_product_attention(x, x, x)
        return self.head(x.mean(1))


IMAGE, TOKENS = torch.zeros(2, 1, 8, 8), torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.parametrize(
    ("model", "example", "num_notes"),
    [
        (Attending(by_module=False), (IMAGE,), 0),
        (Attending(by_module=True), (IMAGE,), 1),
        (nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4)), (TOKENS,), 0),
        (nn.Linear(8, 8), {"input": torch.zeros(2, 5, 8)}, 0),
    ],
    ids=["patches", "module", "tokens", "features"],
)
def test_what_has_a_sequence_is_not_refused(model: nn.Module, example: Any, num_notes: int) -> None:
    plan = plan_tensor(model, 1, example)
    assert len(check_sequences(model, 2, plan, example)) == num_notes


def train_one_step(overrides: tuple[str, ...], left_out: int) -> str:
    os.environ["LEFT_OUT"] = str(left_out)
    training = build_training(load_config(None, overrides).config, read_rank_env())
    batch = next(iter(training.loader.epoch(0)))
    try:
        training.forward_backward(training.to_device(batch), training.clock)
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("left_out", [0, 1, 2, 3])
def test_a_block_that_is_left_out_is_named_on_every_rank(ranks: Any, left_out: int) -> None:
    """The example ran every block, so that the plan could not know; the block may be one that a stage
    begins or ends with."""
    overrides = (f"model.name={__name__}:Skipping", *DIGITS, "layout=pp=2,microbatches=2")
    sentences = ranks(2, train_one_step, overrides, left_out)
    assert len(set(sentences)) == 1
    for word in (f"where blocks.{left_out} should have been", "depends on the data", "use pp=1"):
        assert word in sentences[0], sentences[0]


def test_a_halo_of_several_tiles_is_no_refusal(ranks: Any) -> None:
    """Eight tiles of one row and a kernel that looks three rows up and down."""
    overrides = (f"model.name={__name__}:Blurring", *DIGITS, "layout=spatial=8")
    assert ranks(8, train_one_step, overrides, -1) == [""] * 8
