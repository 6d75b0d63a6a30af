"""One element-wise update of many parameters: compiled for several of one length at a time.

A compiled function that is called for each parameter costs the host some 100 us a call, most of it to look
at what it was given: with two hundred parameters that can be longer than the update itself takes. Given
several it looks at all of them at once. It always gets as many, all of one length, so that it is compiled
once for each kind of parameter, whatever the model. Used by `master.py` and `stochastic.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Row = tuple[Tensor | None, ...]
"""One parameter's own arguments, all flat; the first has its length."""

AT_ONCE = 8
"""Parameters a call: twice as many save little more and take twice as long to compile."""


class Together:
    """`update(*row, *common)` for every row, in any order: each changes its own tensors in place."""

    def __init__(self, update: Callable[..., None], compiles: bool) -> None:
        # On a CPU a compiler may not be there, and speed is not the point.
        self._compiles, self._one, self._several = compiles, update, update
        if compiles:
            self._one = torch.compile(update, dynamic=True, fullgraph=True)
            self._several = torch.compile(_several(update), dynamic=True, fullgraph=True)

    def __call__(self, rows: Iterable[Row], *common: Any) -> None:
        alike: dict[Any, list[Row]] = {}
        for row in rows:
            alike.setdefault(_kind(row), []).append(row)
        for members in alike.values():
            length = members[0][0].numel()  # type: ignore[union-attr]
            # For one element the compiler would make another function; what is left over goes one by one.
            whole = len(members) // AT_ONCE * AT_ONCE if self._compiles and length > 1 else 0
            for start in range(0, whole, AT_ONCE):
                self._several(members[start : start + AT_ONCE], *common)
            for row in members[whole:]:
                self._one(*row, *common)


def _several(update: Callable[..., None]) -> Callable[..., None]:
    def several(rows: list[Row], *common: Any) -> None:
        for row in rows:
            update(*row, *common)

    return several


def _kind(row: Row) -> tuple[Any, ...]:
    return tuple(None if value is None else (value.dtype, value.shape) for value in row)
