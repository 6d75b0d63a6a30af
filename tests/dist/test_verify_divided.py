"""A batch in parts beside the whole one: proofs of `accumulate` and `pp` that could not be of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ridgeline.config import RunConfig, find_recipe, load_config
from ridgeline.layout import Layout
from ridgeline.parallel.arranged import Arranged
from ridgeline.verify.run import Row, Verifier

CODE = """
import torch
from torch import nn

class Padded:
    '''Sequences of different lengths: what lies behind their end is no target.'''
    def __init__(self, split):
        self.split = split

    def __len__(self):
        return 40 if self.split == "train" else 8

    def __getitem__(self, index):
        tokens = torch.randint(1, 16, (9,), generator=torch.Generator().manual_seed(index))
        inputs, targets = tokens[:-1].clone(), tokens[1:].clone()
        targets[1 + index % 8:] = -100
        return inputs, targets

class Counted(Padded):
    def count_targets(self, indices):
        return (1 + indices % 8).astype(int)

class Counting(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.num_calls += 1
        return super().forward(x)

class Calls(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(16, 8), Counting(8, 8), nn.ReLU(), nn.Linear(8, 16))

class Words(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(16, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 16))
"""
LAYOUTS = tuple(
    map(Layout.parse, ("accumulate=2", "dp=2,accumulate=2", "pp=2,microbatches=2", "dp=2"))
)
WORDS = (
    "model={name: divided_code:Words}",
    "train.task=causal_lm",
    "data.augment={}",
    "train.target={}",
)


@pytest.fixture
def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Layout, tuple[str, ...]], Row]]:
    (tmp_path / "divided_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[Verifier] = []

    def run(layout: Layout, settings: tuple[str, ...]) -> Row:
        config: RunConfig = load_config(find_recipe("digits"), settings).config
        made.append(Verifier(config, [layout], steps=2))
        return made[-1].check(layout)

    yield run
    for verifier in made:
        verifier.close()


Check = Callable[[Layout, tuple[str, ...]], Row]


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_parts_of_a_mean_over_targets_differ_where_nobody_counts_those(
    check: Check, layout: Layout
) -> None:
    row = check(layout, (*WORDS, "data={source: divided_code:Padded}"))
    assert row.verdict == "differs", row
    assert "loss at step 1 by " in row.detail
    if layout.dp == 1:  # else the ranks' shares are off already
        assert "no mean over samples" in row.detail
        assert "count_targets" in row.detail


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_are_the_whole_where_targets_are_counted(check: Check, layout: Layout) -> None:
    row = check(layout, (*WORDS, "data={source: divided_code:Counted}"))
    assert row.verdict == "same", row
    assert not row.detail


def test_batch_norm_is_compared_with_one_device_that_takes_the_same_parts(check: Check) -> None:
    row = check(LAYOUTS[0], ("model.args.batch_norm=true",))
    assert row.verdict == "same", row
    assert "the model looks at its whole batch" in row.detail


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=str)
def test_what_counts_microbatches_is_no_weight(check: Check, layout: Layout) -> None:
    words = ("model={name: divided_code:Calls}", *WORDS[1:])
    row = check(layout, (*words, "data={source: divided_code:Counted}"))
    assert row.verdict == "same", row
    assert "1.num_calls is 4 and not 2: it counts calls of its module" in row.detail


def test_parts_that_are_weighed_wrongly_on_one_device_too_differ(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    def equal(self: Arranged, units: tuple[int, ...], index: int, share: float) -> float:
        return self.loss_scale / (len(units) * self.mesh.data_size)

    monkeypatch.setattr(Arranged, "weight_of", equal)
    row = check(LAYOUTS[0], ())
    assert row.verdict == "differs", row
    assert row.detail.endswith("from a batch that is not divided, on one device already")
