"""What ran on whole tensors because a technique has no rule for it: noted as it happens, told once.

Such a function is right in any layout, but each rank gathers its arguments and computes all of it. The
global view and the tiles of images note here which function it was, in which module and how much was
gathered; after the first step `train/run.py` tells the user, who may want to write it another way.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import nn

_MOST_LINES = 5


@dataclass
class Fallback:
    """One function in one module, for one shape of its largest argument."""

    function: str
    module: nn.Module | None
    shape: tuple[int, ...]
    num_calls: int = 0
    num_bytes: int = 0
    """Gathered on each rank, in all calls."""


@dataclass
class Fallbacks:
    """Those of one technique, in the order in which they first happened."""

    found: list[Fallback] = field(default_factory=list)

    def note(self, function: str, shape: Iterable[int], num_bytes: int) -> None:
        module, shape = _running_module(), tuple(shape)
        for entry in self.found:
            if (entry.function, entry.shape) == (function, shape) and entry.module is module:
                break
        else:
            entry = Fallback(function, module, shape)
            self.found.append(entry)
        entry.num_calls += 1
        entry.num_bytes += num_bytes

    def add(self, other: Fallback) -> None:
        """What was noted elsewhere."""
        for entry in self.found:
            alike = (entry.function, entry.shape) == (other.function, other.shape)
            if alike and entry.module is other.module:
                entry.num_calls += other.num_calls
                entry.num_bytes += other.num_bytes
                return
        self.found.append(replace(other))

    @property
    def functions(self) -> list[str]:
        return list(dict.fromkeys(entry.function for entry in self.found))


def _running_module() -> nn.Module | None:
    """The module whose forward is running: found on the stack, since this is rare and a note of every
    call of every module would not be free."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


@dataclass(frozen=True)
class Gathered:
    """All calls of one function in a step, as a record without modules, which other ranks may read."""

    function: str
    modules: tuple[str, ...]
    """Paths in the model, numbers of repeated blocks as stars; the loss and others in words."""
    num_calls: int
    num_bytes: int

    def __str__(self) -> str:
        where = ", ".join(self.modules[:3]) + ", ..." * (len(self.modules) > 3)
        times = f"{self.num_calls} times a step" if self.num_calls > 1 else "once a step"
        return (
            f"{self.function} in {where} has no rule for tensors that are cut: every rank gathers "
            f"them and computes all of it, {times}, {self.num_bytes / 1e6:.3g} MB"
        )


def group_fallbacks(all_found: Iterable[Fallbacks], names: dict[nn.Module, str]) -> list[Gathered]:
    """By function, the most expensive first."""
    groups: dict[str, list[Fallback]] = {}
    for fallbacks in all_found:
        for entry in fallbacks.found:
            groups.setdefault(entry.function, []).append(entry)
    grouped = [
        Gathered(
            function,
            _places([entry.module for entry in entries], names),
            sum(entry.num_calls for entry in entries),
            sum(entry.num_bytes for entry in entries),
        )
        for function, entries in groups.items()
    ]
    return sorted(grouped, key=lambda found: -found.num_bytes)


def merge_gathered(ranks: Iterable[Iterable[Gathered]]) -> list[Gathered]:
    """What several ranks found: the same everywhere, or that of the stages of a pipeline."""
    merged: dict[tuple[str, tuple[str, ...]], Gathered] = {}
    for found in ranks:
        for one in found:
            merged.setdefault((one.function, one.modules), one)
    return sorted(merged.values(), key=lambda found: -found.num_bytes)


def describe_gathered(found: list[Gathered]) -> list[str]:
    """A handful of sentences."""
    lines = [str(one) for one in found[:_MOST_LINES]]
    if len(found) > _MOST_LINES:
        more = ", ".join(dict.fromkeys(one.function for one in found[_MOST_LINES:]))
        lines.append(f"gathered as well, but less: {more}")
    return lines


def _places(modules: list[nn.Module | None], names: dict[nn.Module, str]) -> tuple[str, ...]:
    """Paths of the modules, those that differ in a number as one."""
    alike: dict[str, set[str]] = {}
    for module in modules:
        path = names.get(module) if module is not None else "no module"
        path = path or f"{type(module).__name__} itself"
        alike.setdefault(re.sub(r"\b\d+\b", "*", path), set()).add(path)
    return tuple(min(paths) if len(paths) == 1 else star for star, paths in alike.items())
