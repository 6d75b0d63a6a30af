"""Products of many matrices in one call (`torch.nn.functional.grouped_mm`): what they cost.

Experts side by side are computed so. `train/counted.py` counts with it, `trace.py` plans with it, and
`parallel/grouped.py` asks it which of them a device can take in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ALIGNED = 8
"""Sides of 16-bit operands have to be a multiple of this, 16 bytes; others stay in their own type."""


def is_aligned(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether operands of these shapes can be computed in 16 bits."""
    return not any(side % ALIGNED for side in (*a[1:], *b[1:]))


def grouped_flops(a: Sequence[int], b: Sequence[int]) -> int:
    """Where one operand is flat, its rows or columns are divided among the matrices of the other; where
    both are, what they have in common is.

    >>> grouped_flops((512, 96), (4, 96, 320)) == 2 * 512 * 96 * 320
    True
    >>> grouped_flops((4, 320, 96), (96, 512)) == 2 * 320 * 96 * 512
    True
    >>> grouped_flops((96, 512), (512, 320)) == 2 * 96 * 512 * 320
    True
    >>> grouped_flops((4, 64, 96), (4, 96, 320)) == 4 * 2 * 64 * 96 * 320
    True
    """
    rows = a[1:] if len(a) > len(b) else a
    return 2 * math.prod(rows) * b[-1]


def grouped_shape(a: Sequence[int], b: Sequence[int], groups: int) -> tuple[int, ...]:
    """Of the result.

    >>> grouped_shape((512, 96), (4, 96, 320), 4), grouped_shape((96, 512), (512, 320), 4)
    ((512, 320), (4, 96, 320))
    """
    sides = (a[-2], b[-1])
    return sides if len(a) != len(b) else (groups, *sides)


def grouped_sizes(a: Sequence[int], b: Sequence[int], groups: int) -> tuple[int, int, int, int]:
    """m, n, k and how many, as if every group had as much as the others.

    >>> grouped_sizes((512, 96), (4, 96, 320), 4), grouped_sizes((96, 512), (512, 320), 4)
    ((128, 320, 96, 4), (96, 320, 128, 4))
    """
    m, k, n = a[-2], a[-1], b[-1]
    if len(a) == len(b) == 2:
        return m, n, _share(k, groups), groups
    if len(a) == 2:
        return _share(m, groups), n, k, groups
    return m, n if len(b) == 3 else _share(n, groups), k, groups


def _share(side: int, groups: int) -> int:
    return max(1, round(side / groups))
