"""Weights kept whole on every rank instead of gathered in each pass, where they fit."""

from __future__ import annotations

from ridgeline.config import RunConfig
from ridgeline.doctor.remedies.contract import (
    Remedy,
    Step,
    amdahl,
    exchange_s,
    layout_of,
    room_for,
    waits_for_ranks,
)
from ridgeline.layout import Layout, check_layout

SHARE = 1 / 3
"""Of the communication: weights are gathered twice and gradients reduced once, each as many bytes."""


def _whole(layout: Layout) -> Layout:
    return layout.replace(zero=2, shard=Layout().shard)


def _applies(step: Step, config: RunConfig) -> str | None:
    layout, why, room = layout_of(config), waits_for_ranks(step), room_for(step)
    if layout.zero != 3 or why is None or room is None or check_layout(_whole(layout)):
        return None
    return f"{why}, and zero=3 gathers the weights in every pass{room}"


REMEDY = Remedy(
    name="weights not sharded",
    applies=_applies,
    predicted_gain=lambda step, config: amdahl(step, SHARE * exchange_s(step)),
    change=lambda config: [f"layout={_whole(layout_of(config))}"],
    risk="order",
    of_ranks=True,
)
