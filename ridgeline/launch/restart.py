"""Whether ranks that failed are started again: rules over what happened so far, and nothing else.

A restart repeats the work since the last checkpoint, so it has to have a chance: not for what was asked
wrongly, not when the same thing happened twice in the same place. Called by `survive.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_TIMES = 3
"""Restarts where there is a checkpoint to go on from and nobody said how many."""
_QUEUED_IN_A_ROW = 5
"""How often a job goes back into the queue without a step in between. A scheduler takes minutes to see that
a node is gone, and may give a job the same one again."""


@dataclass(frozen=True)
class Failed:
    """One attempt that ended badly."""

    rank: int
    slot: int
    """The device that the rank was on, counted on its host."""
    step: int | None
    """The last step that was done; None when none was."""
    checkpoint: str
    """The newest checkpoint there is; empty when there is none."""
    lost: bool = False
    """Whether the device itself no longer answers."""
    node_gone: str = ""
    """What was said of its node, where that is gone."""


def why_give_up(history: Sequence[Failed], times: int | None) -> str | None:
    """None: start again. Otherwise why not; empty when restarts are simply not asked for."""
    last = history[-1]
    allowed = times if times is not None else (DEFAULT_TIMES if last.checkpoint else 0)
    if not allowed:
        return ""
    before = history[-2] if len(history) > 1 else None
    if before is not None and last.step is None and before.step is None:
        return "it failed twice before its first step, so another start would too"
    if (
        before is not None
        and (before.step, before.checkpoint) == (last.step, last.checkpoint)
        and last.step is not None
    ):
        return f"it failed twice after step {last.step}, with no checkpoint in between"
    since = count_restarts(history)
    if since > allowed:
        return f"it was started again {allowed} times since the last checkpoint"
    return None


def why_elsewhere(history: Sequence[Failed], times_before: int = 0) -> str:
    """What was said of a node that is gone, when steps were done before: the same work has a chance on
    other nodes. Empty: it has none that is known of, and a queue would only start it over and over.
    `times_before` is how often the job went back for that since its last step."""
    worked = times_before > 0 or any(failed.step is not None for failed in history)
    told = [failed.node_gone for failed in history if failed.node_gone]
    return told[0] if worked and told and times_before < _QUEUED_IN_A_ROW else ""


def count_restarts(history: Sequence[Failed]) -> int:
    """Failures in a row that left the same checkpoint behind, the last one included."""
    same = 0
    for failed in reversed(history):
        if failed.checkpoint != history[-1].checkpoint:
            break
        same += 1
    return same


def bad_slot(history: Sequence[Failed]) -> int | None:
    """The device to go on without: it failed twice in a row, or is lost."""
    last = history[-1]
    twice = len(history) > 1 and history[-2].slot == last.slot
    return last.slot if last.lost or twice else None
