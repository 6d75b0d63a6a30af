"""Cuts that are no plain cut of a dim: each of its equal runs is cut, and a rank has a piece of each.

Two things are so. A fused projection's output holds queries, keys and values side by side, of each of
which a rank has some heads. And a sequence that is cut stays cut when code flattens (batch, sequence)
into one dim, where every sample is a run. Such a tensor is a DTensor with `Shard(dim)` and a number of
runs a mesh axis (`view.runs`), 1 where the cut is plain. To move one, its dim is taken apart into
(runs, length of a run), where the cut is plain again. Called by `view.py` and `views.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ridgeline.parallel.tensor.move import Placements, enter, leave, local_shape, plain_gradient
from ridgeline.parallel.tensor.shapes import view_groups

Runs = tuple[int, ...]
"""For each mesh axis, of how many runs the dim consists that is cut over it."""


def cut_dims(placements: Placements, runs: Runs) -> dict[int, int]:
    """Number of runs of every dim that is cut."""
    pairs = zip(placements, runs, strict=True)
    return {place.dim: num for place, num in pairs if isinstance(place, Shard)}


def local_runs(
    x: DTensor, have: Runs, placements: Placements, grads: Placements, want: Runs
) -> Tensor:
    """`leave` for a tensor cut by `have` that is wanted cut by `want`."""
    if have == want and (x.placements == placements or max(have) == 1):
        return leave(x, placements, grads)
    before, after = cut_dims(x.placements, have), cut_dims(placements, want)
    apart = {dim: max(before.get(dim, 1), after.get(dim, 1)) for dim in before | after}
    apart = {dim: num for dim, num in apart.items() if num > 1}
    if any(cut.get(dim, num) != num for dim, num in apart.items() for cut in (before, after)):
        x = whole_dims(x, have, set(apart))
        return local_runs(x, (1,) * len(have), placements, grads, want)
    local = leave(_take_apart(x, apart), _shifted(placements, apart), _shifted(grads, apart))
    return local.reshape(local_shape(x.shape, x.device_mesh, placements, want))


def whole_dims(x: DTensor, runs: Runs, dims: set[int]) -> DTensor:
    """`x` with `dims` whole on every rank, where all cuts of other dims are plain."""
    places = tuple(
        Replicate() if isinstance(p, Shard) and p.dim in dims else p for p in x.placements
    )
    local = local_runs(x, runs, places, places, (1,) * len(runs))
    return enter(local, x.device_mesh, places, x.shape)


def _take_apart(x: DTensor, apart: dict[int, int]) -> DTensor:
    shape: list[int] = []
    for dim, length in enumerate(x.shape):
        num = apart.get(dim, 1)
        shape += [num, length // num] if dim in apart else [length]
    places = _shifted(x.placements, apart)
    local = leave(x, x.placements, plain_gradient(x.placements))
    local = local.reshape(local_shape(shape, x.device_mesh, places))
    return enter(local, x.device_mesh, places, shape)


def _shifted(placements: Placements, apart: dict[int, int]) -> Placements:
    """The same cuts where every dim of `apart` has become two, of which the second is cut."""
    return tuple(
        Shard(p.dim + sum(dim <= p.dim for dim in apart)) if isinstance(p, Shard) else p
        for p in placements
    )


def follow_cut(
    before: Sequence[int], after: Sequence[int], dim: int, runs: int, num_pieces: int
) -> tuple[int, int] | None:
    """The dim, and its number of runs, as which a view shows a dim that is cut; None if as none.

    >>> follow_cut([2, 6, 12], [12, 12], 1, 1, 3), follow_cut([12, 8], [2, 6, 8], 0, 2, 3)
    ((0, 2), (1, 1))
    """
    if 0 in before or 0 in after:
        return None
    length = before[dim] // runs
    apart = [*before[:dim], runs, length, *before[dim + 1 :]]
    for first, second in view_groups(apart, after):
        if dim + 1 not in first:
            continue
        slower = prod(apart[d] for d in first if d <= dim)
        passed = 1
        for to in second:
            num, rest = divmod(slower, passed)
            if rest:
                return None
            if after[to] % num == 0 and after[to] > num:
                found = after[to] // num
                even = length % num_pieces == 0 and found % num_pieces == 0
                return (to, num) if even or found == length else None
            passed *= after[to]
    return None


def part_indices(
    shape: Sequence[int], mesh: DeviceMesh, placements: Placements, runs: Runs
) -> list[range | list[int]]:
    """Which elements of each dim this rank has."""
    found: list[range | list[int]] = [range(length) for length in shape]
    for dim, num in cut_dims(placements, runs).items():
        length = shape[dim] // num
        part = range(length)
        for axis, place in enumerate(placements):
            if place == Shard(dim):
                part = _chunk(part, mesh.size(axis), mesh.get_local_rank(axis))
        found[dim] = part if num == 1 else [run * length + i for run in range(num) for i in part]
    return found


def _chunk(part: range, num: int, rank: int) -> range:
    step = -(-len(part) // num)
    return part[step * rank : step * (rank + 1)]
