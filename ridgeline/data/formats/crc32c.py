"""CRC-32C, which guards the records of TFRecord files, at the speed of memory without a library.

A CRC is the remainder of the data, taken as one polynomial over two elements, by the polynomial P of
CRC-32C. P divides x^5685 + x^1362 + x^426 + 1, and with it the same polynomial in x^8, x^16, ...: so a
byte may be taken out of the front if it is added (exclusive or) to the bytes 4323, 5259 and 5685 places
behind it, which whole slices do at once. What remains is looked up: every byte contributes what a table
says for its distance from the end.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import numpy as np

_POLYNOMIAL = 0x82F63B78
_DEGREE = 5685
_STEPS = (_DEGREE - 1362, _DEGREE - 426, _DEGREE)
_WIDE = 8
_BLOCK = 256
_NUM_BLOCKS = -(-_DEGREE // _BLOCK)
_SHORT = 128


@functools.cache
def _byte_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


@functools.cache
def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a byte within a block contributes to the block, and a block to the whole."""
    first = np.array(_byte_table(), dtype=np.uint32)
    # far[d]: a byte with d bytes behind it.
    far = np.empty((_BLOCK * _NUM_BLOCKS, 256), dtype=np.uint32)
    far[0] = first
    for distance in range(1, len(far)):
        before = far[distance - 1]
        far[distance] = first[before & 0xFF] ^ (before >> 8)
    within = far[_BLOCK - 1 :: -1][:_BLOCK].reshape(-1).copy()
    # The remainder of a block with m bytes behind it is as good as 4 bytes of which the first has m - 1.
    rows = [far[_BLOCK * n - 1 - np.arange(4)] for n in range(_NUM_BLOCKS - 1, 0, -1)]
    across = np.stack(rows).reshape(-1).copy()
    places = np.arange(_BLOCK, dtype=np.intp) * 256
    return within, across, places


def _crc_short(data: bytes | memoryview) -> int:
    table = _byte_table()
    crc = 0xFFFFFFFF
    for byte in bytes(data):
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _fold(rest: np.ndarray, scale: int) -> np.ndarray:
    """An array of at most `_DEGREE * scale` bytes with the same remainder; changes `rest`."""
    near, middle, far = (step * scale for step in _STEPS)
    start, last = 0, len(rest) - far
    while start < last:
        size = min(near, last - start)
        front = rest[start : start + size]
        for step in (near, middle, far):
            behind = rest[start + step : start + step + size]
            np.bitwise_xor(behind, front, out=behind)
        start += size
    return rest[start:]


def _crc_numpy(data: bytes | memoryview) -> int:
    if len(data) < _SHORT:
        return _crc_short(data)
    rest = np.frombuffer(data, dtype=np.uint8).copy()
    # A register that begins with ones is one that begins with zeros and other data.
    rest[:4] ^= 0xFF
    for scale in (_WIDE, 1):
        rest = _fold(rest, scale)
    within, across, places = _tables()
    # Zeros in front change nothing.
    num_blocks = -(-len(rest) // _BLOCK)
    flat = np.zeros(num_blocks * _BLOCK, dtype=np.intp)
    flat[len(flat) - len(rest) :] = rest
    blocks = flat.reshape(num_blocks, _BLOCK)
    blocks += places
    sums = np.bitwise_xor.reduce(within.take(blocks), axis=1)
    crc = int(sums[-1])
    if num_blocks > 1:
        parts = sums[:-1].astype("<u4").view(np.uint8).astype(np.intp)
        skip = len(across) - len(parts) * 256
        parts += np.arange(len(parts), dtype=np.intp) * 256 + skip
        crc ^= int(np.bitwise_xor.reduce(across.take(parts)))
    return crc ^ 0xFFFFFFFF


@functools.cache
def _fastest() -> Callable[[bytes], int]:
    """A library for it where there is one."""
    for module, name in (("google_crc32c", "value"), ("crc32c", "crc32c")):
        try:
            found: Callable[[bytes], int] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        return found
    return _crc_numpy


def crc32c(data: bytes | memoryview) -> int:
    """
    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    if len(data) < _SHORT:
        return _crc_short(data)
    return _fastest()(data)  # type: ignore[arg-type]
