"""The grid of ranks that share one image, and which rows and columns each of them holds.

The size of a dimension alone decides how it is cut: rank i of n holds [i*size//n, (i+1)*size//n), and
a dimension with fewer elements than ranks is held whole by all of them. So two tensors of equal size
are always cut alike, whatever they went through, and nobody has to negotiate. Made by the mesh, used
by every file of this package.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch.distributed as dist

from ridgeline.errors import UsageError
from ridgeline.parallel.fallbacks import Fallbacks
from ridgeline.parallel.random import Randomness

Span = tuple[int, int]
"""[low, high) of a dimension."""

ROWS, COLUMNS = 0, 1
"""Axes of the grid."""


def cut_evenly(size: int, num_ranks: int) -> tuple[Span, ...]:
    """Who holds what of a dimension of `size`; everybody everything when it is too small."""
    if size < num_ranks:
        return ((0, size),) * num_ranks
    bounds = [i * size // num_ranks for i in range(num_ranks + 1)]
    return tuple(itertools.pairwise(bounds))


def overlap(a: Span, b: Span) -> Span:
    """What two spans share; an empty span inside `a` when nothing."""
    low = min(max(a[0], b[0]), a[1])
    return low, max(low, min(a[1], b[1]))


@dataclass
class TileGrid:
    """The ranks around one image, from the place of this one."""

    rows: dist.ProcessGroup | None = None
    """The ranks along dim 2, in order; None when dim 2 is not cut."""
    columns: dist.ProcessGroup | None = None
    """The ranks along dim 3."""
    row_rank: int = 0
    row_size: int = 1
    column_rank: int = 0
    column_size: int = 1
    overlap: bool = True
    """Compute what needs no halo while the halo travels, where that is at least half of a tile."""
    randomness: Randomness | None = None
    """What dropout depends on; None: torch's generator."""
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    """Operations that had to gather the image first."""

    def size(self, axis: int) -> int:
        return self.row_size if axis == ROWS else self.column_size

    def rank(self, axis: int) -> int:
        return self.row_rank if axis == ROWS else self.column_rank

    def group(self, axis: int) -> dist.ProcessGroup:
        group = self.rows if axis == ROWS else self.columns
        assert group is not None
        return group

    def spans(self, axis: int, size: int) -> tuple[Span, ...]:
        return cut_evenly(size, self.size(axis))

    def splits(self, axis: int | None, size: int) -> bool:
        """Whether a dimension of this size and axis is really in pieces."""
        return axis is not None and size >= self.size(axis) > 1

    def own(self, axis: int | None, size: int) -> Span:
        if axis is None:
            return 0, size
        return self.spans(axis, size)[self.rank(axis)]

    def __deepcopy__(self, memo: dict[int, object]) -> TileGrid:
        """Itself: a copy of a model is on the same ranks, and groups cannot be copied."""
        return self


def require_fits(grid: TileGrid, height: int, width: int) -> None:
    """An image must have a row and a column for every rank."""
    if height >= grid.row_size and width >= grid.column_size:
        return
    largest = f"{min(height, grid.row_size)}x{min(width, grid.column_size)}"
    raise UsageError(
        f"an image of {height}x{width} is too small for spatial={grid.row_size}x{grid.column_size}; "
        f"the largest such grid that works is spatial={largest}"
    )
