"""Which boxes of a whole tensor a piece of memory is, however techniques have cut it. No torch.

A shard of ZeRO is a stretch of a parameter in memory order, which is a few boxes; a piece of a
tensor-parallel parameter is a slice along one dim whose runs may be laid out anew. What comes out are
boxes of the whole tensor with the place of each in the piece, so that saving and loading only copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The dims of a dense tensor from the slowest to the fastest in memory."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim)))


def stretch_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """A stretch of a row-major array as boxes, each with where it begins in the stretch."""
    if start >= stop:
        return
    if not shape:
        yield 0, Box((), ())
        return
    inner = math.prod(shape[1:])
    row, begin = start // inner, start
    while begin < stop:
        end = min(stop, (row + 1) * inner)
        if end - begin == inner:
            # As many whole rows as there are, in one box.
            rows = (stop - begin) // inner
            yield (
                begin - start,
                Box((row,) + (0,) * (len(shape) - 1), (rows, *shape[1:])),
            )
            row, begin = row + rows, begin + rows * inner
            continue
        low = begin - row * inner
        for place, box in stretch_boxes(shape[1:], low, low + end - begin):
            yield begin - start + place, Box((row, *box.offsets), (1, *box.sizes))
        row, begin = row + 1, end


@dataclass(frozen=True)
class Run:
    """Along one dim: `length` places of a piece from `local` on are those of the whole from `whole` on."""

    local: int
    whole: int
    length: int


def runs_of(
    low: int, length: int, whole_length: int, units: int, order: Sequence[int] | None
) -> Iterator[Run]:
    """The places `low` to `low + length` of a dim that was cut after its units were laid out anew.

    Entry i of `order` is the unit that stands at place i, or -1 for one of zeros, which the whole does
    not have. Neighbours that are neighbours in the whole as well come as one run.
    """
    if order is None:
        if length:
            yield Run(0, low, length)
        return
    size = whole_length // units
    at, found = low, None
    while at < low + length:
        place = at // size
        end = min((place + 1) * size, low + length)
        unit = order[place]
        if unit >= 0:
            start = unit * size + at - place * size
            if (
                found is not None
                and found.whole + found.length == start
                and (found.local + found.length == at - low)
            ):
                found = Run(found.local, found.whole, found.length + end - at)
            else:
                if found is not None:
                    yield found
                found = Run(at - low, start, end - at)
        at = end
    if found is not None:
        yield found
