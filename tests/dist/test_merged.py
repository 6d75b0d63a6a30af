"""Merged products on several ranks: the same losses as without them on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.config import load_config
from ridgeline.launch.env import read_rank_env
from ridgeline.parallel.merged import MergedFloat8Linear, MergedLinear
from ridgeline.train.loop import train_loop
from ridgeline.train.setup import build_training

SETTINGS = (
    "model.name=llama",
    "model.args={vocab: 256, width: 32, depth: 2, heads: 2, ffn: 64, max_seq: 32}",
    "data.source=text",
    "data.args={seq_len: 32, max_bytes: 20000}",
    "train.batch=8",
    "train.steps=6",
    "train.lr=0.003",
    "train.eval_samples=0",
    "data.prefetch=0",
    "device=cpu",
    "threads=1",
)


def losses(layout: str, merge: bool) -> tuple[list[float], int]:
    overrides = [*SETTINGS, f"layout={layout}", f"tune.merge={str(merge).lower()}"]
    training = build_training(load_config(None, overrides).config, read_rank_env())
    shares = torch.stack([result.loss_share for result in train_loop(training)])
    parts = [m for part in training.arranged.parts for m in part.modules()]
    num_merged = sum(isinstance(module, (MergedLinear, MergedFloat8Linear)) for module in parts)
    return training.mesh.sum_over_data(shares).tolist(), num_merged


@pytest.mark.parametrize(
    ("layout", "merged"),
    [
        ("dp=2", 10),
        ("dp=2,zero=2", 10),
        ("dp=2,zero=3", 10),
        ("dp=2,zero=3,recompute=selective", 10),
        ("pp=2,microbatches=2,recompute=full", 5),
    ],
)
def test_layouts_follow_one_device(ranks: Any, layout: str, merged: int) -> None:
    ((alone, none),) = ranks(1, losses, "dp=1", False)
    found = ranks(2, losses, layout, True)
    assert none == 0
    assert found[0][1] == merged
    assert alone[-1] < 0.95 * alone[0]
    for one, other in zip(alone, found[0][0], strict=True):
        assert other == pytest.approx(one, rel=1e-5)


def test_fp8_in_shards_follows_one_device(ranks: Any) -> None:
    ((alone, _),) = ranks(1, losses, "precision=fp8", False)
    found = ranks(2, losses, "dp=2,zero=3,precision=fp8", True)
    assert found[0][1] == 10
    for one, other in zip(alone, found[0][0], strict=True):
        assert other == pytest.approx(one, rel=5e-3)
