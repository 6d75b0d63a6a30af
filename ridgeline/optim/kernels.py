"""AdamW of all parameters in one kernel, which moves its bytes about as fast as a copy does.

What a compiler makes of the same lines takes a start for every parameter, and as much time again for exact
quotients as for the bytes. Here a program has a tile of one parameter, which it reads 16 bytes at a time;
where the tensors of each parameter are comes in a table, so that one start is enough for a model. Called by
`narrow.py` on CUDA, where torch brings Triton along.

A row of the table: addresses of the wide weight, the gradient, the two moments and the narrow weight, then
the length and a seed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Elements of a program."""
WARPS = 4
FIELDS = 7
"""Numbers in a row of the table."""


@triton.jit  # type: ignore[misc,unused-ignore]
def _load(places, inside, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    if MASKED:
        found = tl.load(places, mask=inside, other=0.0)
    else:
        found = tl.load(places)
    return found


@triton.jit  # type: ignore[misc,unused-ignore]
def _store(places, values, inside, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    if MASKED:
        tl.store(places, values, mask=inside)
    else:
        tl.store(places, values)


@triton.jit  # type: ignore[misc,unused-ignore]
def _round_by_chance(values, places, seed):  # type: ignore[no-untyped-def]
    """As `chance` and `round_by_chance` of `narrow.py`."""
    x = places ^ seed
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    bits = (x ^ (x >> 16)) & 0xFFFF
    raw = values.to(tl.int32, bitcast=True)
    rounded = ((raw + bits) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where((raw & 0x7F800000) == 0x7F800000, values, rounded).to(tl.bfloat16)


@triton.jit  # type: ignore[misc,unused-ignore]
def _tile(
    wide, grads, means, squares, narrow, places, inside, seed, factor,
    shrink, size, root, share1, beta2, share2, eps,
    MASTER: tl.constexpr, CHANCE: tl.constexpr, MASKED: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Roots and quotients are off by a last digit or two, of an update that is a thousandth of a weight:
    the exact ones take more time than the memory does."""
    grad = _load(grads, inside, MASKED).to(tl.float32) * factor
    mean = _load(means, inside, MASKED)
    square = _load(squares, inside, MASKED)
    old = _load(wide, inside, MASKED).to(tl.float32)
    mean += (grad - mean) * share1
    square = square * beta2 + grad * grad * share2
    new = old - shrink * old
    new -= size * mean / (tl.sqrt(square) * root + eps)
    _store(means, mean, inside, MASKED)
    _store(squares, square, inside, MASKED)
    if CHANCE:
        _store(wide, _round_by_chance(new, places, seed), inside, MASKED)
    else:
        _store(wide, new, inside, MASKED)
    if MASTER:
        _store(narrow, new.to(tl.bfloat16), inside, MASKED)


@triton.jit  # type: ignore[misc,unused-ignore]
def _adamw(
    table, tiles, divisor_at, shrink, size, root, share1, beta2, share2, eps,
    MASTER: tl.constexpr, CHANCE: tl.constexpr, NARROW: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # type: ignore[no-untyped-def]  # fmt: skip
    mine = tiles + 2 * tl.program_id(0)
    row = table + tl.load(mine) * WIDTH
    begin = tl.load(mine + 1).to(tl.int64) * BLOCK
    if CHANCE:
        wide = tl.load(row).to(tl.pointer_type(tl.bfloat16))
    else:
        wide = tl.load(row).to(tl.pointer_type(tl.float32))
    if NARROW:
        grads = tl.load(row + 1).to(tl.pointer_type(tl.bfloat16))
    else:
        grads = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    means = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    squares = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    narrow = tl.load(row + 4).to(tl.pointer_type(tl.bfloat16))
    left = tl.load(row + 5) - begin
    seed = tl.load(row + 6).to(tl.int32)
    if ALIGNED:
        wide = tl.multiple_of(wide, 16)
        grads = tl.multiple_of(grads, 16)
        means = tl.multiple_of(means, 16)
        squares = tl.multiple_of(squares, 16)
        narrow = tl.multiple_of(narrow, 16)
    lanes = tl.arange(0, BLOCK)
    at = begin + lanes
    places = at.to(tl.int32)
    inside = lanes < left
    factor = 1.0 / tl.load(divisor_at)
    if left >= BLOCK:
        _tile(
            wide + at, grads + at, means + at, squares + at, narrow + at, places, inside, seed, factor,
            shrink, size, root, share1, beta2, share2, eps, MASTER, CHANCE, False,
        )  # fmt: skip
    else:
        _tile(
            wide + at, grads + at, means + at, squares + at, narrow + at, places, inside, seed, factor,
            shrink, size, root, share1, beta2, share2, eps, MASTER, CHANCE, True,
        )  # fmt: skip


def list_tiles(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """(tiles, 2): the row that each is of, and which of its tiles it is."""
    counts = torch.tensor([triton.cdiv(length, TILE) for length in lengths])
    rows = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    firsts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    numbers = torch.arange(len(rows)) - firsts
    return torch.stack((rows, numbers), 1).to(torch.int32).to(device)


def update(
    table: Tensor, tiles: Tensor, divisor: Tensor, numbers: tuple[float, ...],
    master: bool, chance: bool, narrow: bool, aligned: bool,
) -> None:  # fmt: skip
    """`numbers` are those of `Numbers`, its root inverted; `narrow`: gradients are bf16; `aligned`: every
    address is a multiple of 16."""
    _adamw[(len(tiles),)](
        table, tiles, divisor, *numbers, MASTER=master, CHANCE=chance, NARROW=narrow, ALIGNED=aligned,
        BLOCK=TILE, WIDTH=FIELDS, num_warps=WARPS,
    )  # fmt: skip
