"""A tile with the rows and columns around it that a windowed operation needs.

Rows are exchanged first and columns after, of tile and row halo together, so that corners come along.
Pieces are kept apart as they arrived: an operation cuts out the windows it wants, and the tile itself
is not copied where it need not be. Used by convolution, pooling and interpolation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.parallel.spatial.comm import Exchange
from ridgeline.parallel.spatial.grid import Span, overlap
from ridgeline.parallel.spatial.tensor import TileTensor, route

Piece = tuple[Tensor, Span]


class Halo:
    """`begin`, then `advance` until it says it is done, with work of one's own in between.

    `needed` maps split dims to what each rank needs of them, clipped to the image.
    """

    def __init__(self, x: TileTensor, needed: Mapping[int, Sequence[Span]]) -> None:
        self._x = x
        self._routes = [route(x, dim, spans) for dim, spans in sorted(needed.items())]
        self._pieces: list[list[Piece]] = []
        """Along the first dim, all of the tile; along the second, only what lies beside it."""
        self._parts = [x.local]
        self._exchange: Exchange | None = None
        self._begin()

    @property
    def num_phases(self) -> int:
        return len(self._routes) - len(self._pieces)

    def _begin(self) -> None:
        if self.num_phases:
            index = len(self._pieces)
            beside = self._routes[0].dim
            self._exchange = Exchange(self._routes[index], self._parts, beside).begin()

    def advance(self) -> None:
        """Wait for the exchange under way, and begin the next if there is one."""
        index = len(self._pieces)
        current = self._routes[index]
        assert self._exchange is not None
        parts, lower, higher = self._exchange.finish()
        before, after = self._spans(index)
        if index == 0:
            low, high = current.mine
            own = narrow(parts[0], current.dim, current.held[current.rank][0], (low, high))
            pieces = [*zip(lower, before, strict=True), (own, (low, high))]
            pieces += zip(higher, after, strict=True)
            self._parts = [piece for piece, _ in pieces]
        else:
            first = self._pieces[0]
            self._pieces[0] = [(p, span) for p, (_, span) in zip(parts, first, strict=True)]
            pieces = [*zip(lower, before, strict=True), *zip(higher, after, strict=True)]
        self._pieces.append(pieces)
        self._begin()

    def _spans(self, index: int) -> tuple[list[Span], list[Span]]:
        current = self._routes[index]
        spans = current.receives()
        before = [span for peer, span in spans if peer < current.rank]
        return before, [span for peer, span in spans if peer > current.rank]

    def complete(self) -> Halo:
        while self.num_phases:
            self.advance()
        return self

    def cut(self, window: Mapping[int, Span], value: float = 0.0) -> Tensor:
        """The window, in coordinates of the image, filled with `value` outside the image."""
        x, dims = self._x, [r.dim for r in self._routes]
        inside = {dim: overlap((0, x.sizes[dim]), window[dim]) for dim in dims}
        if not dims:
            block = x.local
        else:
            block = _cut_along(self._pieces[0], dims[0], inside[dims[0]])
        if len(dims) == 2:
            block = self._cut_columns(block, dims, inside)
        padding = [0] * (2 * len(x.sizes))
        for dim in dims:
            low, high = window[dim]
            place = 2 * (len(x.sizes) - 1 - dim)
            padding[place] = max(0, min(high, 0) - low)
            padding[place + 1] = max(0, high - max(low, x.sizes[dim]))
        return F.pad(block, padding, value=value) if any(padding) else block

    def _cut_columns(self, block: Tensor, dims: list[int], inside: dict[int, Span]) -> Tensor:
        """Put what came from beside the tile to the middle block, which has the rows already."""
        columns = self._routes[1]
        low, high = columns.held[columns.rank]
        middle = overlap((low, high), inside[dims[1]])
        pieces = [(narrow(block, dims[1], low, middle), middle)]
        first_row = self._routes[0].needed[self._routes[0].rank][0]
        for piece, span in self._pieces[1]:
            if overlap(span, inside[dims[1]])[0] < overlap(span, inside[dims[1]])[1]:
                rows = narrow(piece, dims[0], first_row, inside[dims[0]])
                pieces.append((rows, span))
        pieces.sort(key=lambda entry: entry[1])
        return _cut_along(pieces, dims[1], inside[dims[1]])


def narrow(x: Tensor, dim: int, origin: int, span: Span) -> Tensor:
    """`span` of a dim that begins at `origin`; the tensor itself where that is all of it."""
    low, high = span
    if high - low == x.shape[dim]:
        return x
    return x.narrow(dim, low - origin, high - low)


def _cut_along(pieces: Sequence[Piece], dim: int, span: Span) -> Tensor:
    chosen = []
    for piece, held in pieces:
        shared = overlap(held, span)
        if shared[0] < shared[1]:
            chosen.append(narrow(piece, dim, held[0], shared))
    if not chosen:  # a window that lies in the padding alone
        return pieces[0][0].narrow(dim, 0, 0)
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim)
