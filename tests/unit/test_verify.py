"""Comparing recordings, choosing layouts, making a recipe small."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.config import find_recipe, load_config
from ridgeline.layout import Layout, check_layout, techniques
from ridgeline.verify import show
from ridgeline.verify.compare import Sizes, compare
from ridgeline.verify.layouts import all_layouts, factored_layouts, merge
from ridgeline.verify.overflow import compare_overflowed
from ridgeline.verify.record import Recording, to_numpy, unscaled
from ridgeline.verify.rounding import compare_rounded, measure
from ridgeline.verify.run import Row
from ridgeline.verify.small import shrink


def recording() -> Recording:
    rng = np.random.default_rng(0)
    steps = [{"a": rng.normal(size=(3, 4)), "b": rng.normal(size=5)} for _ in range(4)]
    return Recording([2.0, 1.5], steps[:2], steps[2:], {"accuracy": 0.5})


def test_the_same_is_the_same() -> None:
    found = compare(recording(), recording())
    assert found.same
    assert found.sizes == Sizes(0.0, 0.0, 0.0, 0.0)


def test_the_first_that_differs_is_named() -> None:
    other = recording()
    other.gradients[1]["b"][2] += 1e-3
    other.weights[1]["a"][0, 0] += 1.0
    first = compare(recording(), other).first
    assert first is not None
    assert (first.kind, first.name, first.step) == ("gradient", "b", 2)
    assert str(first).startswith("gradient b at step 2 by ")
    assert 1e-4 < first.size < 1e-2


@pytest.mark.parametrize("change", ["missing", "shape", "nan", "loss", "metric"])
def test_nothing_slips_through(change: str) -> None:
    other = copy.deepcopy(recording())
    if change == "missing":
        del other.gradients[0]["a"]
    elif change == "shape":
        other.weights[1]["b"] = other.weights[1]["b"][:-1]
    elif change == "nan":
        other.weights[0]["a"][1, 1] = math.nan
    elif change == "loss":
        other.losses[1] = math.nan
    else:
        other.metrics = {"loss": 1.0}
    found = compare(recording(), other)
    assert not found.same
    assert found.first is not None
    assert math.isinf(found.first.size)


def test_rounding_of_a_gradient_that_is_zero_is_no_difference() -> None:
    """A bias before a norm: its true gradient is 0, and each side has other dust."""
    one, other = recording(), recording()
    one.gradients[0]["b"][:] = 1e-19
    other.gradients[0]["b"][:] = -3e-19
    assert compare(one, other).same


@pytest.mark.parametrize(("compress", "is_same"), [("none", False), ("bf16", True)])
def test_what_is_sent_in_16_bits_may_be_rounded_to_either_neighbour(
    compress: str, is_same: bool
) -> None:
    """Also where one device has met no such number: it is one element in thousands."""
    other = recording()
    gradient = other.gradients[1]["a"]
    gradient[0, 0] *= 1 + 2.0**-7
    rounding = measure(recording(), [recording()], "fp32", compress)
    assert compare_rounded(recording(), other, rounding).same is is_same


@pytest.mark.parametrize(("on_one", "verdict"), [(True, "unclear"), (False, "differs")])
def test_a_loss_beyond_fp16_is_told_as_such(on_one: bool, verdict: str) -> None:
    """No loss scale helps there."""
    found, here = recording(), recording()
    for one in (found, here) if on_one else (found,):
        one.losses[1] = math.inf
        one.gradients[1]["a"][:] = math.nan
    rounding = measure(recording(), [recording()], "fp16")
    row = Row(Layout(), "fp16", compare_overflowed(recording(), found, [here], rounding))
    assert row.verdict == verdict
    assert row.detail.startswith("the loss itself overflowed in fp16 at step 2")
    assert ("on one device and in this layout" in row.detail) is on_one


def test_a_recording_holds_arrays_of_any_gradient() -> None:
    """Of a sparse embedding, and of a parameter that is one number."""
    sparse = torch.sparse_coo_tensor([[2]], [[1.0, 3.0]], (4, 2), check_invariants=True)
    assert to_numpy({"a": sparse})["a"].tolist() == [[0, 0], [0, 0], [1, 3], [0, 0]]
    training: Any = SimpleNamespace(precision=SimpleNamespace(scale=lambda: 2.0))
    found = unscaled(training, {"b": torch.tensor(3.0)})["b"]
    assert isinstance(found, np.ndarray)
    assert found == 1.5


def test_notes_of_a_layout_are_shown_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Told:
        def __init__(self, *_: object) -> None: ...

        def check(self, layout: Layout, precision: str) -> Row:
            found = compare(recording(), recording())
            return Row(layout, precision, found, notes=("head is left whole",))

        def close(self) -> None: ...

    monkeypatch.setattr(show, "Verifier", Told)
    config = load_config(find_recipe("digits"), []).config
    show.show_rows(config, [Layout.parse("tp=2")], 2, "fp32", survey=False, full=False)
    assert capsys.readouterr().out.count("  head is left whole\n") == 1


def test_every_listed_layout_can_be_run() -> None:
    for layout in all_layouts(4):
        assert check_layout(layout) == []
        assert layout.world_size <= 4
    assert {x.world_size for x in factored_layouts(4)} == {4}
    assert Layout.parse("dp=2,tp=2") in factored_layouts(4)


def test_merge_gives_both_or_nothing() -> None:
    both = merge("zero=2", "schedule=interleaved")
    assert both is not None
    assert {"zero=2", "schedule=interleaved"} <= set(techniques(both))
    assert merge("zero=1", "zero=2") is None
    assert merge("spatial", "tp") is None


def test_small_keeps_the_structure_and_fits_the_layouts() -> None:
    overrides = ["model.args.tie_embeddings=true", "model.args.kv_heads=2"]
    config = load_config(find_recipe("llama-text"), overrides).config
    layouts = [Layout.parse("dp=2,pp=3,microbatches=3"), Layout.parse("pp=8,microbatches=8")]
    small = shrink(config, layouts, 4)
    assert small.model.dtype == "float64"
    assert small.model.args["tie_embeddings"] is True
    assert small.model.args["kv_heads"] == 2
    assert small.model.args["depth"] == 8
    assert small.model.args["width"] < 64
    assert small.train.steps == 4
    assert small.train.batch % 6 == small.train.batch % 8 == 0
