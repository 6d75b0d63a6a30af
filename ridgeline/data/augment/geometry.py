"""Crops and flips: which pixels of a sample each pixel of the result is made of.

That is decided on the host, in whole numbers and float64, for rows and columns apart; on the device it is
two gathers and a blend for each. So the places are exactly the same on every device, and each value is
within 6 * 2**-24 * max|x| of the blend in exact arithmetic. Called by `apply.py`.

Shapes: N samples, C channels, H and W of the sample, Y and X of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Lines:
    """For each line (row or column) of the result the two of the sample it lies between."""

    low: np.ndarray
    """int64 (N, lines); one outside the sample is padding, and only where nothing is resized."""
    high: np.ndarray
    weight: np.ndarray
    """float32 (N, lines): the share of `high`."""
    nearest: np.ndarray


@dataclass(frozen=True)
class Places:
    """Where the pixels of a batch come from."""

    rows: Lines
    columns: Lines
    resizes: bool


def random_boxes(
    draws: np.ndarray,
    size: tuple[int, int],
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths (N, 2) of boxes in an image of `size`, four draws each.

    The area is uniform and the ratio log-uniform; a box that would stick out is cut to the image, not
    drawn again.
    """
    height, width = size
    pixels = height * width * (area[0] + (area[1] - area[0]) * draws[:, 0])
    low, high = np.log(ratio)
    shape = np.exp(low + (high - low) * draws[:, 1])
    sides = np.stack([np.sqrt(pixels / shape), np.sqrt(pixels * shape)], axis=1)
    lengths = np.clip(np.rint(sides).astype(np.int64), 1, size)
    return random_starts(draws[:, 2:4], np.array(size) - lengths), lengths


def random_starts(draws: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Whole numbers from 0 to `room`, each as likely as the others."""
    starts: np.ndarray = np.floor(draws * (room + 1)).astype(np.int64)
    return starts


def centre_box(
    size: tuple[int, int], wanted: tuple[int, int], area: float
) -> tuple[np.ndarray, np.ndarray]:
    """Start and length (1, 2) of the largest box in the shape of `wanted`, then its share `area`."""
    factor = min(size[0] / wanted[0], size[1] / wanted[1]) * np.sqrt(area)
    lengths = np.clip(np.rint(np.array(wanted) * factor).astype(np.int64), 1, size)
    return ((np.array(size) - lengths) // 2)[None], lengths[None]


def blended_lines(
    starts: np.ndarray, lengths: np.ndarray, count: int, flipped: np.ndarray
) -> Lines:
    """`count` lines spread over stretches of a sample, pixel centres on pixel centres."""
    at = (np.arange(count) + 0.5) * (lengths / count)[:, None]
    last = (lengths - 1)[:, None]
    nearest = np.minimum(np.floor(at).astype(np.int64), last)
    at = np.clip(at - 0.5, 0.0, last)
    low = np.floor(at).astype(np.int64)
    weight = (at - low).astype(np.float32)
    first = starts[:, None]
    found = (first + low, first + np.minimum(low + 1, last), weight, first + nearest)
    return Lines(*(_flip(lines, flipped) for lines in found))


def whole_lines(starts: np.ndarray, count: int, flipped: np.ndarray) -> Lines:
    """`count` lines as they are, from `starts` on, which may be outside the sample."""
    low = _flip(starts[:, None] + np.arange(count), flipped)
    return Lines(low, low, np.zeros(low.shape, dtype=np.float32), low)


def rolled_lines(lines: Lines, shifts: np.ndarray, count: int) -> Lines:
    """Whole lines moved by `shifts` in a ring of `count`."""
    low = (lines.low + shifts[:, None]) % count
    return Lines(low, low, lines.weight, low)


def _flip(lines: np.ndarray, flipped: np.ndarray) -> np.ndarray:
    lines = np.broadcast_to(lines, (len(flipped), lines.shape[1]))
    return np.where(flipped[:, None], lines[:, ::-1], lines)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A small table for the device; from pinned memory the copy does not block the host."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


Put = Callable[[np.ndarray, torch.device], Tensor]
"""How a table gets to the device: `to_device`, or `KeptTables`."""


class KeptTables:
    """`to_device` that gives the same tensor for the same table. A program that is traced then has its
    tables among its constants, on the device, in place of a copy from the host in every call."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], Tensor] = {}

    def __call__(self, array: np.ndarray, device: torch.device) -> Tensor:
        key = (array.dtype.str, array.shape, array.tobytes(), device)
        if key not in self._kept:
            self._kept[key] = to_device(array, device)
        return self._kept[key]


def take(x: Tensor, places: Places, put: Put = to_device) -> Tensor:
    """The nearest pixels of (N, C, H, W), in the type they have; padding is 0.

    The tensor itself comes back where every pixel stays.
    """
    # Types of 16 bits without a sign have no gather: as good as signed while nothing is computed.
    stored, x = x.dtype, x.view(torch.int16) if x.dtype == torch.uint16 else x
    for dim, lines in ((2, places.rows.nearest), (3, places.columns.nearest)):
        stays = np.arange(x.shape[dim])
        if lines.shape[1] == len(stays) and (lines == stays).all():
            continue
        inside = (lines >= 0) & (lines < x.shape[dim])
        index = np.where(inside, lines, 0)
        x = _lines_of(x, dim, put(index, x.device))
        if not inside.all():
            x = x.masked_fill(~_along(put(inside, x.device), dim), 0)
    return x.view(stored) if stored == torch.uint16 else x


def blend(x: Tensor, places: Places, put: Put = to_device) -> Tensor:
    """Bilinear: the pixels of (N, C, H, W) between the lines, as float32."""
    for dim, lines in ((2, places.rows), (3, places.columns)):
        low, high = (put(table, x.device) for table in (lines.low, lines.high))
        weight = _along(put(lines.weight, x.device), dim)
        first = widen(_lines_of(x, dim, low))
        step = widen(_lines_of(x, dim, high)).sub_(first)
        # Not lerp: a device may round that once and another twice.
        x = step.mul_(weight).add_(first)
    return x


def widen(x: Tensor) -> Tensor:
    """Stored values as float32, in memory of its own."""
    return x.to(torch.float32, copy=True)


def _lines_of(x: Tensor, dim: int, lines_NL: Tensor) -> Tensor:
    if x.dtype == torch.uint16:
        return _lines_of(x.view(torch.int16), dim, lines_NL).view(torch.uint16)
    shape = list(x.shape)
    shape[dim] = lines_NL.shape[1]
    return x.gather(dim, _along(lines_NL, dim).expand(shape))


def _along(lines_NL: Tensor, dim: int) -> Tensor:
    return lines_NL[:, None, :, None] if dim == 2 else lines_NL[:, None, None, :]
