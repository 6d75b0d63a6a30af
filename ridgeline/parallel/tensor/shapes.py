"""Where each dim of a tensor goes under a view, a permutation or an index: pure shape arithmetic.

The rules ask it which dim of the result is still cut over the ranks, and the planner which dim still
holds the features of a projection. Called by `rules.py`, `views.py` and `trace.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

Group = tuple[tuple[int, ...], tuple[int, ...]]


def view_groups(before: Sequence[int], after: Sequence[int]) -> list[Group]:
    """The smallest runs of dims that a view turns into each other: [(dims before, dims after)].

    >>> view_groups([2, 6, 12], [2, 6, 3, 4])
    [((0,), (0,)), ((1,), (1,)), ((2,), (2, 3))]
    """
    if 0 in before or 0 in after:
        return [(tuple(range(len(before))), tuple(range(len(after))))]
    groups: list[Group] = []
    i = j = 0
    while i < len(before) and j < len(after):
        first, second = [i], [j]
        have, want = before[i], after[j]
        i, j = i + 1, j + 1
        while have != want:
            if have < want:
                have *= before[i]
                first.append(i)
                i += 1
            else:
                want *= after[j]
                second.append(j)
                j += 1
        groups.append((tuple(first), tuple(second)))
    if groups:  # what is left over is of size 1
        first_dims, second_dims = groups[-1]
        groups[-1] = (
            (*first_dims, *range(i, len(before))),
            (*second_dims, *range(j, len(after))),
        )
    return groups


def follow_view(before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """The dim after a view that runs as `dim` ran before, slowest of its run; None if there is none.

    A cut of `dim` in equal pieces is then a cut of the found dim, if both divide by their number.
    """
    for first, second in view_groups(before, after):
        if dim in first:
            slower = [before[d] for d in first if d < dim]
            if prod(slower) != 1:
                return None
            return next((d for d in second if after[d] != 1), None)
    return None


def meta_like(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(tuple(shape), device="meta", dtype=dtype)


def follow_strides(
    shape: Sequence[int], call: Callable[[torch.Tensor], Any]
) -> list[tuple[tuple[int, ...], list[int | None]]] | None:
    """Shapes of the results of a function that only rearranges, and where each dim comes from.

    Told by strides: a dim of a contiguous tensor is known by its own. For each result, its shape and
    for each of its dims the dim before, or None for one that was made, cut or has size 1.
    """
    probe = meta_like(shape)
    try:
        results = call(probe)
    except Exception:  # the caller takes another way, where torch says what is wrong
        return None
    home = {probe.stride(d): d for d in range(len(shape)) if shape[d] > 1}
    results = results if isinstance(results, (tuple, list)) else [results]
    found = []
    for result in results:
        if not isinstance(result, torch.Tensor) or result._base is not probe:
            return None
        origin: list[int | None] = []
        for d in range(result.dim()):
            source = home.get(result.stride(d)) if result.shape[d] > 1 else None
            whole = source is not None and result.shape[d] == shape[source]
            origin.append(source if whole else None)
        found.append((tuple(result.shape), origin))
    return found
