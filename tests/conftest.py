"""Which cases run: all of them, or with `RIDGELINE_TABLES=reduced`, as CI sets it, some of each table.

`@pytest.mark.table(keep=3)` on a test with parameters: the reduced run takes three of its cases, evenly
spread from the first to the last. `@pytest.mark.thorough`: only the whole run takes it. `make test` is
the whole run.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

REDUCED = os.environ.get("RIDGELINE_TABLES") == "reduced"


def spread(length: int, keep: int) -> set[int]:
    """`keep` of `length` indices, the first and the last among them."""
    if keep >= length:
        return set(range(length))
    return {round(index * (length - 1) / max(keep - 1, 1)) for index in range(keep)}


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """What the reduced run does not take."""
    found, tables = set(), defaultdict(list)
    for item in items:
        table = item.get_closest_marker("table")
        if item.get_closest_marker("thorough") is not None:
            found.add(item)
        elif table is not None:
            name = getattr(item, "originalname", item.name)
            tables[item.path, name, table.kwargs["keep"]].append(item)
    for (_, _, keep), cases in tables.items():
        chosen = spread(len(cases), keep)
        found |= {case for index, case in enumerate(cases) if index not in chosen}
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not REDUCED:
        return
    dropped = left_out(items)
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]
