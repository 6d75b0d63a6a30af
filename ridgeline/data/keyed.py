"""Random numbers that are a function of a key and a sample's index, for a whole batch at once.

Augmentation and masking must not depend on the rank, the worker or the other samples of the batch,
so a stateful generator will not do, and one numpy Generator a sample costs more than the sample.
This is SplitMix64 (Steele, Lea and Flood 2014) as a counter-based generator: a few integer
operations a number, exact on every machine and numpy version. Called by `source.py` and `sources/`.
"""

from __future__ import annotations

import numpy as np

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, on an array the caller gives up."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    return x


def fold_key(key: tuple[int, ...]) -> int:
    """One 64-bit number from several, e.g. (seed, epoch); the order counts."""
    state = 0
    for part in key:
        mixed = _mix(np.array([(state + (part & _MASK) + _GOLDEN) & _MASK], dtype=np.uint64))
        state = int(mixed[0])
    return state


def keyed_bits(key: tuple[int, ...], indices: np.ndarray, num: int) -> np.ndarray:
    """`num` random uint64 for each index: shape (len(indices), num).

    Row r depends on `key` and `indices[r]` alone.
    """
    start = indices.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(fold_key(key))
    state = _mix(start)
    steps = np.arange(1, num + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _mix(state[:, None] + steps)


def keyed_uniform(key: tuple[int, ...], indices: np.ndarray, num: int) -> np.ndarray:
    """`num` random float64 in [0, 1) for each index: shape (len(indices), num)."""
    return (keyed_bits(key, indices, num) >> np.uint64(11)) * 2.0**-53
