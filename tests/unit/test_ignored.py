"""A run says where ignored targets make a divided batch another training than the whole one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline import run_recipe

CODE = """
import torch
from torch import nn

class Padded:
    longest = 8

    def __init__(self, split):
        pass

    def __len__(self):
        return 16

    def __getitem__(self, index):
        tokens = torch.randint(1, 16, (9,), generator=torch.Generator().manual_seed(index))
        targets = tokens[1:].clone()
        targets[1 + index % self.longest:] = -100
        return tokens[:-1], targets

class Alike(Padded):
    longest = 1

class Counted(Padded):
    def count_targets(self, indices):
        return 1 + indices % 8

class Words(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(16, 8), nn.Linear(8, 16))
"""


@pytest.mark.parametrize(
    ("source", "layout", "task", "is_said"),
    [
        ("Padded", "accumulate=2", "causal_lm", True),
        ("Padded", "dp=1", "causal_lm", False),  # not divided
        ("Padded", "accumulate=2", "masked_lm", False),  # a mean over samples
        ("Alike", "accumulate=2", "causal_lm", False),
        ("Counted", "accumulate=2", "causal_lm", False),
    ],
)
def test_ignored_targets_that_nobody_counts_are_told_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    source: str,
    layout: str,
    task: str,
    is_said: bool,
) -> None:
    (tmp_path / "ignored_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    run_recipe(
        "digits",
        "model={name: ignored_code:Words}",
        f"data={{source: ignored_code:{source}}}",
        f"layout={layout}",
        f"train.task={task}",
        "train.batch=8",
        "train.steps=3",
        "train.target={}",
        "device=cpu",
        out=str(tmp_path / "runs"),
    )
    shown = " ".join("".join(capfd.readouterr()).split())
    assert shown.count("count_targets(indices)") == int(is_said), shown
    assert ("data.source=ignored_code:Padded gives targets of -100" in shown) is is_said
