"""Which layouts to prove: every technique the table has, every pair of techniques that composes.

Read off `layout.py`, so that a technique that is added there has a row here, or a test fails. Called by
`run.py` for `--all`, and by the parity tests. Imports no torch.
"""

from __future__ import annotations

import itertools

from ridgeline.layout import AVAILABLE, TECHNIQUES, Layout, check_layout, techniques

EXAMPLE: dict[str, dict[str, object]] = {
    "dp": {"dp": 2},
    "zero=1": {"dp": 2, "zero": 1},
    "zero=2": {"dp": 2, "zero": 2},
    "zero=3": {"dp": 2, "zero": 3},
    "shard": {"dp": 4, "zero": 3, "shard": 2},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sp": True},
    "cp": {"cp": 2},
    "pp": {"pp": 2, "microbatches": 2},
    "schedule=gpipe": {"pp": 2, "microbatches": 2, "schedule": "gpipe"},
    "schedule=interleaved": {"pp": 2, "microbatches": 2, "schedule": "interleaved", "virtual": 2},
    "schedule=zerobubble": {"pp": 2, "microbatches": 2, "schedule": "zerobubble"},
    "spatial": {"spatial": (2, 1)},
    "ep": {"dp": 2, "ep": 2},
    "recompute=selective": {"recompute": "selective"},
    "recompute=full": {"recompute": "full"},
    "offload=optimizer": {"offload": "optimizer"},
    "offload=params": {"dp": 2, "zero": 3, "offload": "params"},
    "offload=activations": {"offload": "activations"},
    "compile": {"compile": True},
    "accumulate": {"accumulate": 2},
    "compress": {"dp": 2, "compress": "powersgd:2"},
    "sync=local": {"dp": 2, "sync": "local:2"},
}
"""The smallest layout that uses each technique, as the fields it sets."""

# Arithmetic of other precisions is not the same arithmetic; verification runs it apart, against a
# bound of its own. CUDA graphs need a CUDA device.
NOT_IN_FLOAT64 = frozenset(
    {"precision=tf32", "precision=bf16", "precision=fp16", "precision=fp8", "graphs"}
)

ROUNDED = ("bf16", "fp16", "fp8")
"""The precisions of those that every device can show; tf32 is CUDA's."""


def provable() -> list[str]:
    """The techniques of this release that a proof in float64 is about, in the table's order."""
    return [name for name in TECHNIQUES if name in AVAILABLE and name not in NOT_IN_FLOAT64]


def merge(*names: str) -> Layout | None:
    """The smallest layout that uses all these techniques; None when they do not compose."""
    fields: dict[str, object] = {}
    for name in names:
        for field, value in EXAMPLE[name].items():
            known = fields.get(field, value)
            if field in ("dp", "microbatches"):
                fields[field] = max(known, value)  # type: ignore[type-var]
            elif field == "zero" and "shard" in names:
                # Hybrid sharding is of any stage; the other technique says which.
                fields[field] = value if name != "shard" else known
            elif known != value:
                return None
            else:
                fields[field] = value
    layout = Layout(**fields)  # type: ignore[arg-type]
    if check_layout(layout) or not set(names) <= set(techniques(layout)):
        return None
    return layout


def single_layouts(largest: int) -> list[Layout]:
    """One layout for each technique, on at most `largest` processes."""
    found = (merge(name) for name in provable())
    return _unique(x for x in found if x is not None and x.world_size <= largest)


def pair_layouts(largest: int) -> list[Layout]:
    """One layout for each pair of techniques that composes, on at most `largest` processes."""
    pairs = itertools.combinations(provable(), 2)
    found = (merge(*pair) for pair in pairs)
    return _unique(x for x in found if x is not None and x.world_size <= largest)


def rounded_layouts(largest: int) -> list[Layout]:
    """Every technique in each low precision that it composes with, on at most `largest` processes."""
    singles = single_layouts(largest)
    found = [layout.replace(precision=name) for name in ROUNDED for layout in singles]
    return [layout for layout in found if not check_layout(layout)]


def factored_layouts(num_ranks: int) -> list[Layout]:
    """Every way to spread `num_ranks` processes over the axes, plain and with each stage of ZeRO."""
    found = []
    for dp, tp, cp, pp, rows, columns in _factors(num_ranks, 6):
        parts = 2 * pp if pp > 1 else 1
        base = Layout(dp=dp, tp=tp, cp=cp, pp=pp, spatial=(rows, columns), microbatches=parts)
        for zero in range(4) if dp > 1 else (0,):
            for sp in (False, True) if tp > 1 else (False,):
                layout = base.replace(zero=zero, sp=sp)
                usable = set(techniques(layout)) <= AVAILABLE | {"dp"}
                if not check_layout(layout) and usable:
                    found.append(layout)
    return _unique(found)


def all_layouts(num_ranks: int) -> list[Layout]:
    """What `--all -n N` proves: the spreads of N, and on up to N processes every technique and pair."""
    return _unique([*factored_layouts(num_ranks), *pair_layouts(num_ranks)])


def _factors(number: int, count: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(number,)]
    return [
        (first, *rest)
        for first in range(1, number + 1)
        if number % first == 0
        for rest in _factors(number // first, count - 1)
    ]


def _unique(layouts: object) -> list[Layout]:
    return list(dict.fromkeys(layouts))  # type: ignore[call-overload]
