"""The CRC32 of a file from those of its blocks, which different ranks have read.

A CRC is a remainder of polynomials over GF(2): a block that is followed by n more bytes counts times
x^(8n). zlib has the function but Python does not show it. Called by `held.py` when a copy is finished.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1: the bits are in reverse order, as in the CRC itself."""


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC32 of the parts one after another; each is its own CRC32 and its length.

    >>> from zlib import crc32
    >>> combine([(crc32(b"ridge"), 5), (crc32(b"line"), 4)]) == crc32(b"ridgeline")
    True
    """
    whole = 0
    for crc, length in parts:
        whole = _times(_shift(length), whole) ^ crc
    return whole


@cache
def _shift(num_bytes: int) -> int:
    """x^(8 num_bytes), by repeated squaring."""
    result, power, left = _ONE, _ONE >> 8, num_bytes
    while left:
        if left & 1:
            result = _times(power, result)
        power = _times(power, power)
        left >>= 1
    return result


def _times(one: int, other: int) -> int:
    """The product of two polynomials, modulo the CRC's."""
    product, bit = 0, _ONE
    while bit:
        if one & bit:
            product ^= other
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
        bit >>= 1
    return product
