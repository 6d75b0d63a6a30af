"""Models that take several inputs, by name or by position, in every way of splitting them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
import torch
from torch import nn
from torch.utils.data import Dataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Named(nn.Module):
    '''Tokens, which of them count, and a number for each sample; the last two by keyword only.'''

    def __init__(self):
        super().__init__()
        self.embed, self.scale = nn.Embedding(32, 16), nn.Linear(1, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(16, 5)

    def forward(self, input_ids, *, attention_mask, strength):
        x = self.embed(input_ids) + self.scale(strength)[:, None]
        for block in self.blocks:
            x = block(x)
        kept = attention_mask.unsqueeze(-1).to(x.dtype)
        return self.head(self.drop((x * kept).sum(1) / kept.sum(1)))


class Positional(Named):
    def forward(self, input_ids, attention_mask, strength):
        return super().forward(input_ids, attention_mask=attention_mask, strength=strength)


class Items(Dataset):
    def __init__(self, split, named=True):
        self.count, self.named = (37 if split == "train" else 11), named

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        made = torch.Generator().manual_seed(index)
        tokens = torch.randint(32, (12,), generator=made)
        mask = (torch.arange(12) < 4 + index % 8).long()
        strength = torch.randn(1, generator=made)
        target = torch.randint(5, (), generator=made)
        if self.named:
            return {"input_ids": tokens, "attention_mask": mask, "strength": strength}, target
        return (tokens, mask, strength), target


def summed(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


def named(split): return Items(split)
def positional(split): return Items(split, named=False)
def plain(split):
    class Dicts(Items):
        def __getitem__(self, index):
            inputs, target = super().__getitem__(index)
            return {**inputs, "labels": target}
    return Dicts(split)
"""
RECIPE = """
name: several
model: {{name: several:{model}}}
data: {{source: several:{source}}}
train: {{batch: 9, steps: 4, lr: 0.01, task: classify, eval_every: 4}}
optim: {{name: adamw}}
"""
LAYOUTS = (
    "dp=2", "dp=2,zero=3", "tp=2", "pp=2,microbatches=3", "accumulate=3", "recompute=full",
)  # fmt: skip
LAYOUTS_OF = {"named.yaml": LAYOUTS, "positional.yaml": LAYOUTS}
if os.environ.get("RIDGELINE_TABLES") == "reduced":  # as tests/conftest.py says
    LAYOUTS_OF["positional.yaml"] = ("tp=2", "pp=2,microbatches=3", "accumulate=3")


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "several.py").write_text(MODULE)
    for model, source in (("Named", "named"), ("Positional", "positional"), ("Named", "plain")):
        (folder / f"{source}.yaml").write_text(RECIPE.format(model=model, source=source))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "ridgeline.cli", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("recipe", ["named.yaml", "positional.yaml"])
def test_every_layout_computes_the_same_of_several_inputs(tmp_path: Path, recipe: str) -> None:
    """37 samples in batches of 9: the last one is uneven on any number of ranks."""
    layouts = [part for layout in LAYOUTS_OF[recipe] for part in ("--layout", layout)]
    done = run(tmp_path, "verify", recipe, *layouts, "--steps", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    count = 2 * len(LAYOUTS_OF[recipe])
    assert f"{count} of {count} same after 5 steps" in done.stdout


def test_a_sum_over_samples_does_not_add_up_in_parts(tmp_path: Path) -> None:
    done = run(
        tmp_path, "verify", "named.yaml", "--layout", "accumulate=3", "train.task=several:summed"
    )
    assert done.returncode == 1, done.stdout
    assert "the loss is no mean over samples" in done.stdout


def test_several_inputs_are_read_by_workers_and_evaluated(tmp_path: Path) -> None:
    for extra in ((), ("data.workers=1",), ("data.threads=1",)):
        done = run(tmp_path, "train", "named.yaml", *extra)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "accuracy" in done.stdout + done.stderr


def test_what_is_no_pair_is_refused_with_the_form_that_is(tmp_path: Path) -> None:
    done = run(tmp_path, "train", "plain.yaml")
    assert done.returncode == 2
    assert "collate to dict" in done.stderr
    assert "({'input_ids': ..., 'attention_mask': ...}, targets)" in done.stderr
    done = run(tmp_path, "train", "named.yaml", "data.augment.scale=[2.0]")
    assert done.returncode == 2
    assert "data.augment changes one input, and the samples of data.source have 3" in done.stderr
    done = run(tmp_path, "data", "pack", "recipe:named.yaml", "packed")
    assert done.returncode == 2, done.stdout
    assert "3 inputs, and packing is for one" in done.stderr


def test_spatial_without_an_image_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "train", "named.yaml", "-n", "2", "layout=spatial=2")
    assert done.returncode == 2, done.stdout
    assert "layout spatial=2x1 cuts images, and the model is given none" in done.stderr


def test_several_inputs_are_planned_from_their_shapes(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "facts", "named.yaml", "-o", "facts.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "input_ids=12:int64" in done.stdout
