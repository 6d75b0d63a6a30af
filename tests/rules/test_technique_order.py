"""What the layout table offers is what `arrange` can apply, and the other way round."""

from __future__ import annotations

from collections import Counter

from ridgeline.layout import AVAILABLE
from ridgeline.parallel.apply import ORDER
from ridgeline.verify.layouts import EXAMPLE, NOT_IN_FLOAT64, merge, pair_layouts, provable

# Techniques that are no change to the model: the step or the arithmetic is what differs.
NOT_APPLIED = {"accumulate", "graphs", "precision=tf32", "precision=bf16", "precision=fp16"}


def test_available_techniques_have_an_entry() -> None:
    covered = Counter(name for technique in ORDER for name in technique.covers)
    assert set(covered) == set(AVAILABLE) - NOT_APPLIED
    assert set(covered.values()) == {1}


def test_replication_comes_last_and_compile_before_sharding() -> None:
    order = [name for technique in ORDER for name in technique.covers]
    assert order.index("recompute=full") < order.index("compile") < order.index("zero=1")
    assert "dp" in ORDER[-1].covers


def test_every_available_technique_has_a_parity_case() -> None:
    assert set(EXAMPLE) == set(AVAILABLE) - NOT_IN_FLOAT64
    for name in provable():
        assert merge(name) is not None, name


def test_every_pair_that_composes_has_a_parity_case() -> None:
    from itertools import combinations

    from ridgeline.layout import check_layout, techniques

    covered = set()
    for layout in pair_layouts(8):
        assert not check_layout(layout)
        covered |= set(combinations(techniques(layout), 2))
    for pair in combinations(provable(), 2):
        if merge(*pair) is not None:
            assert pair in covered, pair
