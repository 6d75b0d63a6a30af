"""What the layout table offers is what `parallelize` can apply, and the other way round."""

from __future__ import annotations

from ridgeline.layout import AVAILABLE
from ridgeline.parallel.apply import ORDER

# Techniques that are no change to the model: the step or the arithmetic is what differs.
NOT_APPLIED = {"accumulate", "graphs", "precision=tf32", "precision=bf16", "precision=fp16"}
# Part of another technique's entry in the table, or asked for outside the layout.
NOT_IN_LAYOUT = {"sync_batch_norm"}


def test_available_techniques_have_an_entry() -> None:
    assert set(ORDER) - NOT_IN_LAYOUT == set(AVAILABLE) - NOT_APPLIED


def test_replication_comes_last_and_compile_before_it() -> None:
    names = list(ORDER)
    assert names.index("compile") < names.index("dp") == len(names) - 1
