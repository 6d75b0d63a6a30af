"""Remedies that are tried as one: a pair whose halves need each other, and many small ones together.

A remedy that promises one or two per cent drowns in the noise of the turns when it is measured by itself,
and five of them cost five starts; together they are told from noise by one. Called by `choice.py`; imports
without torch.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from pathlib import Path

from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.doctor.remedies.contract import Remedy, Step
from ridgeline.errors import UsageError
from ridgeline.layout import Layout, check_available, check_layout

SMALL = 1.05
"""A remedy that promises less is tried together with others like it first."""
NOT_TOO_SMALL = 1.005
"""One that promises less than this is as likely to harm, and is left to be tried by itself."""


def change_config(config: RunConfig, overrides: tuple[str, ...]) -> RunConfig:
    """A configuration with overrides, checked as a recipe is."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(dump_config(config))
        file.flush()
        changed = load_config(Path(file.name), overrides).config
    layout = Layout.parse(changed.layout)
    for finding in [*check_layout(layout), *check_available(layout)]:
        raise UsageError(finding.reason)
    return changed


def pair(first: Remedy, feeding: Remedy, gain: float, reason: str) -> Remedy:
    """What makes the device faster, with what feeds it."""
    return Remedy(
        name=f"{first.name}, {feeding.name}",
        applies=lambda step, config: first.applies(step, config) and f"with it, {reason}",
        predicted_gain=lambda step, config: gain,
        change=lambda config: [*first.change(config), *feeding.change(config)],
        risk=first.risk,
        slow=first.slow or feeding.slow,
        feeds=True,  # which also says that it is no half of another pair
    )


def can_join(remedy: Remedy, gain: float) -> bool:
    """Whether it may be one of many: not what costs digits, so that a loss that moves has one reason;
    not what takes minutes to start, nor what shows its gain only in a step that waits for data."""
    apart = remedy.slow or remedy.feeds or remedy.repeats or remedy.costs_digits
    return NOT_TOO_SMALL <= gain < SMALL and not apart


def together(name: str, remedies: Iterable[Remedy], step: Step, config: RunConfig) -> Remedy | None:
    """One remedy for those that still apply when the others before them have; None for fewer than two."""
    members: list[Remedy] = []
    gains: list[float] = []
    changes: list[str] = []
    for remedy in remedies:
        if remedy.applies(step, config) is None:
            continue
        gain, more = remedy.predicted_gain(step, config), remedy.change(config)
        try:
            config = change_config(config, tuple(more))
        except UsageError:
            continue
        members.append(remedy)
        gains.append(gain)
        changes += more
    if len(members) < 2:
        return None
    names = tuple(remedy.name for remedy in members)
    return Remedy(
        name=name,
        applies=lambda step, config: f"{', '.join(names)}: each too small to be seen by itself",
        predicted_gain=lambda step, config: math.prod(gains),
        change=lambda config: list(changes),
        risk="order",  # at most: what rounds is in no group
        members=names,
    )
