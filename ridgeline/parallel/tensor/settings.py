"""What a block's code may read of its modules, to compare and to put back: values, and what objects hold.

A compiled block is right as long as these are what they were when it was traced. Used by `compiled.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.parallel.random import Node, Randomness

SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_CHANGING = (set, deque, bytearray, np.ndarray)


class Refused(Exception):
    """Why a block cannot be a program."""


class GivenUp(Refused):
    """The same where trying again would only cost."""


class _Same:
    """Something that is only the same as itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _is_object(value: Any) -> bool:
    """Whether code may keep settings in it, as in a configuration."""
    known = (nn.Module, Tensor, Node, Randomness, dist.ProcessGroup, type)
    return hasattr(value, "__dict__") and not isinstance(value, known) and not callable(value)


def setting(value: Any, known: dict[int, Any]) -> Any:
    """What to compare it by; `known` are objects that have been looked at, or are being."""
    if isinstance(value, SIMPLE):
        return type(value), value
    if isinstance(value, _CHANGING):
        raise Refused(f"its modules hold a {type(value).__name__}, whose changes are not seen")
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = _Same(value)
    if isinstance(value, (tuple, list)):
        found: Any = type(value), tuple(setting(one, known) for one in value)
    elif isinstance(value, dict):
        found = dict, tuple((setting(k, known), setting(v, known)) for k, v in value.items())
    elif _is_object(value):
        held = tuple((name, setting(one, known)) for name, one in vars(value).items())
        found = _Same(value), held
    else:
        found = _Same(value)
    known[id(value)] = found
    return found


def remember(value: Any, inner: dict[int, tuple[Any, Any]]) -> None:
    """Lists and dictionaries that it is or holds, with copies."""
    holds = vars(value) if _is_object(value) else value
    if not isinstance(holds, (list, dict)) or id(holds) in inner:
        return
    inner[id(holds)] = holds, holds.copy()
    for one in list(holds) if isinstance(holds, list) else list(holds.values()):
        remember(one, inner)


def differ(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are not the very same things."""
    return len(some) != len(others) or any(a is not b for a, b in zip(some, others, strict=True))
