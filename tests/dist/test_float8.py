"""fp8 on several ranks: the same losses as on one, to the rounding of fp8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.config import load_config
from ridgeline.launch.env import read_rank_env
from ridgeline.parallel.float8 import Float8Linear
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


def losses(layout: str) -> tuple[list[float], int]:
    config = load_config(None, [*SETTINGS, f"layout={layout}"]).config
    training = build_training(config, read_rank_env())
    shares = torch.stack([result.loss_share for result in train_loop(training)])
    parts = [m for part in training.arranged.parts for m in part.modules()]
    num_changed = sum(isinstance(module, Float8Linear) for module in parts)
    return training.mesh.sum_over_data(shares).tolist(), num_changed


@pytest.mark.parametrize(
    ("layout", "changed"),
    [
        ("dp=2", 14),
        ("dp=2,zero=1", 14),
        ("dp=2,zero=3", 14),
        ("dp=2,recompute=full", 14),
        ("pp=2,microbatches=2", 7),
    ],
)
def test_layouts_follow_one_device(ranks: Any, layout: str, changed: int) -> None:
    ((alone, _),) = ranks(1, losses, "precision=fp8")
    found = ranks(2, losses, f"{layout},precision=fp8")
    assert found[0][1] == changed
    assert alone[-1] < 0.95 * alone[0]
    for one, other in zip(alone, found[0][0], strict=True):
        assert other == pytest.approx(one, rel=5e-3)
