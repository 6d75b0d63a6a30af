"""Two checkpoints tensor by tensor, whatever layouts they were written in. Called by `ridgeline checkpoint
diff` and after a reshard.

Equal means bit for bit. One tensor of each is in memory at a time, and every byte is held against its
checksum, so that damage is not taken for a difference. Random generators and what else is one rank's own
are compared where both have the same layout, and mean nothing otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.checkpoint.damage import Advance
from ridgeline.checkpoint.files import Reader
from ridgeline.checkpoint.load import read_tensor
from ridgeline.checkpoint.manifest import RANK, REPLICA, Manifest, check_sizes, read_manifest
from ridgeline.errors import RunError

_BLOCK = 2**22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same in both."""

    name: str
    kind: str
    """values, dtype, shape, only in A, only in B, or state."""
    text: str
    num_different: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    num_not_finite: int = 0
    """Different values of which one is infinite or no number; `max_abs` leaves them out."""


@dataclass
class Comparison:
    num_equal: int = 0
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(a: Path, b: Path, advance: Advance = lambda _: None) -> Comparison:
    """Everything the two hold; `advance` hears of bytes of A."""
    left, right = _open(a), _open(b)
    found = Comparison()
    own = left.layout == right.layout and left.num_ranks == right.num_ranks
    if not own:
        found.notes.append(
            f"layouts differ ({left.layout or '-'} and {right.layout or '-'}): what is one rank's or "
            "one replica's own is not compared"
        )
    readers = Reader(a, check=True), Reader(b, check=True)
    for name in dict.fromkeys((*left.tensors, *right.tensors)):
        if not own and name.startswith((RANK, REPLICA)):
            continue
        if name not in left.tensors or name not in right.tensors:
            side = "A" if name in left.tensors else "B"
            found.differences.append(Difference(name, f"only in {side}", f"only in {side}"))
            continue
        shapes = left.tensors[name].shape, right.tensors[name].shape
        if shapes[0] != shapes[1]:
            text = f"shape {list(shapes[0])} in A and {list(shapes[1])} in B"
            found.differences.append(Difference(name, "shape", text))
            continue
        values = read_tensor(readers[0], left, name), read_tensor(readers[1], right, name)
        difference = compare_values(name, *values)
        if difference is None:
            found.num_equal += 1
        else:
            found.differences.append(difference)
        advance(left.tensors[name].num_bytes)
    found.differences += _compare_state(left.state, right.state)
    return found


def _open(path: Path) -> Manifest:
    manifest = read_manifest(path)
    for problem in check_sizes(path, manifest):
        raise RunError(f"{path} is not whole: {problem}")
    return manifest


def compare_values(name: str, a: Tensor, b: Tensor) -> Difference | None:
    """Of two tensors of one shape; None when all bits are the same."""
    count, not_finite, max_abs, max_rel = 0, 0, 0.0, 0.0
    a, b = a.reshape(-1), b.reshape(-1)
    for x, y in zip(a.split(_BLOCK), b.split(_BLOCK), strict=True):
        if a.dtype == b.dtype:
            unequal = _bits(x) != _bits(y)
        else:
            unequal = x.double() != y.double()
        if not unequal.any():
            continue
        x, y = x.double()[unequal], y.double()[unequal]
        gap = (x - y).abs()
        finite = gap.isfinite()
        count += len(gap)
        not_finite += int((~finite).sum())
        gap, size = gap[finite], torch.maximum(x.abs(), y.abs())[finite]
        if len(gap):
            max_abs = max(max_abs, float(gap.max()))
            max_rel = max(max_rel, float((gap / size.clamp(min=1e-300)).max()))
    if not count and a.dtype == b.dtype:
        return None
    text = f"{count} of {a.numel()} values differ, max abs {max_abs:.3g}, max rel {max_rel:.3g}"
    if not_finite:
        text += f", {not_finite} of them not finite"
    kind = "values"
    if a.dtype != b.dtype:
        kind, words = "dtype", [str(value.dtype).removeprefix("torch.") for value in (a, b)]
        text = f"{words[0]} in A and {words[1]} in B; {text if count else 'the same values'}"
    return Difference(name, kind, text, count, max_abs, max_rel, not_finite)


def _bits(values: Tensor) -> Tensor:
    return values.view(_BITS[values.element_size()])


def _compare_state(a: dict[str, Any], b: dict[str, Any]) -> list[Difference]:
    """The run's state that is no tensor: position in the data, loss scale."""
    return [
        Difference(key, "state", f"{a.get(key)} in A and {b.get(key)} in B")
        for key in dict.fromkeys((*a, *b))
        if a.get(key) != b.get(key)
    ]
