"""Reshaping of tiles.

What leaves the dims in pieces alone is the same operation on the tile; a reshape that splits or merges
one (as pixel shuffles and windows do) moves the borders first. One that mixes them with others is not
done here. Called by `dispatch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.parallel.spatial.grid import Span
from ridgeline.parallel.spatial.tensor import TileTensor, as_dim, like, refetch, wrap

# Reshape


@dataclass(frozen=True)
class _Run:
    """Neighbouring old dims that become neighbouring new dims; sizes of one are left out."""

    old: list[int]
    new: list[int]


def _match(old: Sequence[int], new: Sequence[int]) -> list[_Run]:
    """The finest such runs."""
    olds = [d for d, size in enumerate(old) if size != 1]
    news = [d for d, size in enumerate(new) if size != 1]
    runs, i, j = [], 0, 0
    while i < len(olds):
        run = _Run([olds[i]], [news[j]])
        a, b, i, j = old[olds[i]], new[news[j]], i + 1, j + 1
        while a != b:
            if a < b:
                a *= old[olds[i]]
                run.old.append(olds[i])
                i += 1
            else:
                b *= new[news[j]]
                run.new.append(news[j])
                j += 1
        runs.append(run)
    return runs


def reshape(func: Callable[..., Tensor], input: Any, *sizes: Any, **kwargs: Any) -> Any:
    if not isinstance(input, TileTensor) or kwargs:
        return NotImplemented
    given = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
    if not all(isinstance(n, int) for n in given):
        return NotImplemented
    return reshape_to(input, _fill(list(given), math.prod(input.sizes)))


def _fill(sizes: list[int], total: int) -> list[int]:
    if -1 in sizes:
        rest = -math.prod(sizes)
        sizes[sizes.index(-1)] = total // rest if rest else 0
    return sizes


def reshape_to(x: TileTensor, sizes: list[int]) -> Any:
    if math.prod(sizes) != math.prod(x.sizes) or 0 in sizes:
        return NotImplemented  # torch itself has the words for it
    runs = _match(x.sizes, sizes)
    local, axes = x.local, [None] * len(sizes)
    local_sizes = list(sizes)
    moves: list[tuple[_Run, int]] = []
    for run in runs:
        split = [d for d in run.old if x.is_split(d)]
        if split and split != run.old[:1]:
            return NotImplemented
        axis = x.axes[run.old[0]]
        if axis is not None:
            axes[run.new[0]] = axis  # type: ignore[call-overload]
            moves.append((run, axis))
    # One dim a run, so that borders can be moved, then the new dims.
    merged = [math.prod(local.shape[d] for d in run.old) for run in runs]
    flat = local.reshape(merged)
    for run, axis in moves:
        held, needed = _borders(x, run, sizes, axis)
        flat = refetch(flat, runs.index(run), axis, held, needed, x.grid)
        low, high = x.grid.own(axis, sizes[run.new[0]])
        local_sizes[run.new[0]] = high - low
    return wrap(flat.reshape(local_sizes), sizes, axes, x.grid)


def _borders(
    x: TileTensor, run: _Run, sizes: Sequence[int], axis: int
) -> tuple[list[Span], list[Span]]:
    old_step = math.prod(x.sizes[d] for d in run.old[1:])
    new_step = math.prod(sizes[d] for d in run.new[1:])
    held = x.grid.spans(axis, x.sizes[run.old[0]])
    needed = x.grid.spans(axis, sizes[run.new[0]])
    return [(a * old_step, b * old_step) for a, b in held], [
        (a * new_step, b * new_step) for a, b in needed
    ]


def flatten(func: Any, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not isinstance(input, TileTensor):
        return NotImplemented
    num = len(input.sizes)
    first, last = as_dim(start_dim, num), as_dim(end_dim, num)
    sizes = input.sizes
    return reshape_to(
        input, [*sizes[:first], math.prod(sizes[first : last + 1]), *sizes[last + 1 :]]
    )


def unflatten(func: Any, input: Any, dim: int, sizes: Sequence[int]) -> Any:
    if not isinstance(input, TileTensor) or not isinstance(dim, int):
        return NotImplemented
    at = as_dim(dim, len(input.sizes))
    inner = _fill(list(sizes), input.sizes[at])
    return reshape_to(input, [*input.sizes[:at], *inner, *input.sizes[at + 1 :]])


def pixel_shuffle(func: Any, input: Any, factor: int) -> Any:
    if not isinstance(input, TileTensor) or len(input.sizes) != 4 or input.axes[1] is not None:
        return NotImplemented
    batch, channels, height, width = input.sizes
    if channels % factor**2:
        return NotImplemented
    x = input.reshape(batch, channels // factor**2, factor, factor, height, width)
    x = x.permute(0, 1, 4, 2, 5, 3)
    return x.reshape(batch, channels // factor**2, height * factor, width * factor)


def pixel_unshuffle(func: Any, input: Any, factor: int) -> Any:
    if not isinstance(input, TileTensor) or len(input.sizes) != 4 or input.axes[1] is not None:
        return NotImplemented
    batch, channels, height, width = input.sizes
    if height % factor or width % factor:
        return NotImplemented
    x = input.reshape(batch, channels, height // factor, factor, width // factor, factor)
    x = x.permute(0, 1, 3, 5, 2, 4)
    return x.reshape(batch, channels * factor**2, height // factor, width // factor)


# The order and number of dims


def reorder(func: Callable[..., Tensor], input: Any, *args: Any, **kwargs: Any) -> Any:
    """permute, transpose and their like: dims of different sizes show where each one went."""
    if not isinstance(input, TileTensor):
        return NotImplemented
    probe = torch.empty([2 + d for d in range(len(input.sizes))], device="meta")
    order = [size - 2 for size in func(probe, *args, **kwargs).shape]
    return like(input.local.permute(order), input, order)


def unsqueeze(func: Any, input: Any, dim: int) -> Any:
    at = as_dim(dim, len(input.sizes) + 1)
    order = list(range(len(input.sizes)))
    order.insert(at, -1)
    return like(input.local.unsqueeze(at), input, order)


def squeeze(func: Any, input: Any, dim: Any = None) -> Any:
    num = len(input.sizes)
    given = range(num) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = [as_dim(d, num) for d in given if input.sizes[d] == 1]
    if not gone:
        return input
    return like(input.local.squeeze(tuple(gone)), input, [d for d in range(num) if d not in gone])


def expand(func: Any, input: Any, *sizes: Any) -> Any:
    if not isinstance(input, TileTensor):
        return NotImplemented
    given = list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes)
    new = len(given) - len(input.sizes)
    axes = [None] * new + list(input.axes)
    full = [input.sizes[d - new] if n == -1 else n for d, n in enumerate(given)]
    own = [input.grid.own(axis, n) for axis, n in zip(axes, full, strict=True)]
    return wrap(input.local.expand([b - a for a, b in own]), full, axes, input.grid)


def repeat(func: Any, input: Any, *sizes: Any) -> Any:
    if not isinstance(input, TileTensor):
        return NotImplemented
    given = list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes)
    new = len(given) - len(input.sizes)
    order = [-1] * new + list(range(len(input.sizes)))
    if any(
        n != 1 and d >= 0 and input.axes[d] is not None for n, d in zip(given, order, strict=True)
    ):
        return NotImplemented
    return like(input.local.repeat(given), input, order)


HANDLERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), reshape),
    "flatten": flatten,
    "unflatten": unflatten,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    **dict.fromkeys(
        ("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis"), reorder
    ),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "expand": expand,
    "repeat": repeat,
}
