"""The reduced parity table, and that the whole one leaves nothing out."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline.layout import TECHNIQUES, check_layout, techniques
from ridgeline.verify.layouts import ROUNDED, merge, provable


def _load() -> Any:
    path = Path(__file__).with_name("table.py")
    spec = importlib.util.spec_from_file_location("ridgeline_parity_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ridgeline_parity_table"] = module
    spec.loader.exec_module(module)
    return module


table = _load()


@pytest.mark.slow
@pytest.mark.parametrize("kind", table.REDUCED)
def test_reduced_table_is_the_same_as_one_device(kind: str) -> None:
    if reason := table.missing(kind):
        pytest.skip(f"NOT SHOWN: {reason}")
    for row in table.prove(kind, table.rows(reduced=True)[kind]):
        print(f"{kind} {row.layout}: {row.comparison}")
        assert row.verdict == "same", f"{kind} in {row.layout} {row.verdict}: {row.detail}"


def test_the_reduced_table_is_large_enough() -> None:
    layouts = {layout for found in table.rows(reduced=True).values() for layout in found}
    assert len(layouts) >= 24
    used = {name for layout in layouts for name in techniques(layout)}
    # The compiler takes half a minute a layout: in the whole table only.
    assert set(provable()) - used == {"compile"}


def test_the_whole_table_has_a_row_for_everything_that_composes() -> None:
    covered: set[tuple[str, ...]] = set()
    for layouts in table.rows(reduced=False).values():
        for layout in layouts:
            covered |= {(name,) for name in techniques(layout)}
            covered |= set(itertools.combinations(techniques(layout), 2))
    for count in (1, 2):
        for names in itertools.combinations(provable(), count):
            if merge(*names) is not None:
                assert names in covered, names


def test_the_parts_are_the_whole_table_and_alike() -> None:
    whole = table.rows(reduced=False)
    rows = [(kind, layout) for kind, layouts in whole.items() for layout in layouts]
    parts = [table.part_of(whole, index, 4) for index in (1, 2, 3, 4)]
    dealt = [[(k, x) for k, found in part.items() for x in found] for part in parts]
    assert sorted(map(str, (row for part in dealt for row in part))) == sorted(map(str, rows))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert table.read_part("2/4") == (2, 4)
    for wrong in ("0/4", "5/4", "2", "a/b", "-1/2"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not I/N"):
            table.read_part(wrong)


NEED_CUDA = {"precision=tf32", "graphs"}


def test_every_technique_has_a_row_in_every_precision_it_composes_with() -> None:
    """What is split, reduced or kept in few bits is not the arithmetic that float64 has shown."""
    covered = {
        pair
        for layouts in table.rows(reduced=False).values()
        for layout in layouts
        for pair in itertools.combinations(techniques(layout), 2)
    }
    precisions = {name for name in TECHNIQUES if name.startswith("precision=")} - NEED_CUDA
    assert precisions == {f"precision={name}" for name in ROUNDED}
    for name in provable():
        alone = merge(name)
        assert alone is not None
        for precision in precisions:
            layout = alone.with_field("precision", precision.partition("=")[2])
            if not check_layout(layout):
                pair = tuple(x for x in TECHNIQUES if x in (name, precision))
                assert pair in covered, pair


def test_ci_shows_every_precision() -> None:
    found = [x for kind in table.rows(reduced=True).values() for x in kind if x.precision != "fp32"]
    used = {name for layout in found for name in techniques(layout)}
    assert {"precision=bf16", "precision=fp16", "precision=fp8"} <= used
    assert {"zero=3", "pp", "spatial"} <= used
