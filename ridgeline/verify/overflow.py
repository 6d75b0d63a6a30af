"""Steps whose gradients overflowed in fp16: on one device, in a layout, or in both, and what that proves.

Loss scaling starts high, leaves out a step that overflows and goes on with half the scale. So an overflow
is no difference where one device has the same one, from the same weights and with the same scale; but
then that step has no gradients to compare, and where no step has any nothing is proven. Called by `run.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from ridgeline.verify.compare import Comparison
from ridgeline.verify.record import Recording
from ridgeline.verify.rounding import Rounding, compare_rounded
from ridgeline.verify.step import is_finite

_REMEDY = "use precision=bf16, or more --steps: each overflow halves the loss scale"


def overflowed(recording: Recording) -> frozenset[int]:
    """Steps, from 1, with a gradient that is not finite."""
    steps = enumerate(recording.gradients, 1)
    return frozenset(step for step, gradients in steps if not is_finite(gradients))


@dataclass(frozen=True)
class _Overflows:
    layout: frozenset[int]
    device: frozenset[int]
    """Of one device that follows the layout, in any of the ways it may take a step."""
    always: frozenset[int]
    """In all of these ways."""


def compare_overflowed(
    exact: Recording, found: Recording, here: list[Recording], rounding: Rounding
) -> Comparison:
    """`compare_rounded` of a layout in fp16; `here` is what one device finds at each of its steps."""
    ways = [overflowed(one) for one in here]
    over = _Overflows(overflowed(found), frozenset.union(*ways), frozenset.intersection(*ways))
    every = frozenset(range(1, len(exact.losses) + 1))
    lost = over.layout & over.device
    if over.always == every and not all(rounding.distances.values()):
        # One device never had all gradients, so some have no bounds.
        lost = every - (over.layout - over.device)
    verdict = compare_rounded(exact, found, rounding, lost)
    if verdict.first is not None:
        return _explain(verdict, found, here, over)
    if only := over.always - over.layout:
        where = f"{_steps(only)} on one device and not in this layout, which took a step more"
        return replace(verdict, unclear=f"gradients overflowed in fp16 at {where}; {_REMEDY}")
    if lost == every:
        where = f"{_steps(lost)} on one device and in this layout, so none were compared"
        return replace(verdict, unclear=f"gradients overflowed in fp16 at {where}; {_REMEDY}")
    if lost and not verdict.unclear:
        note = (
            f"gradients overflowed in fp16 at {_steps(lost)} on one device too; both left that out"
        )
        return replace(verdict, note=note)
    return verdict


def _explain(
    verdict: Comparison, found: Recording, here: list[Recording], over: _Overflows
) -> Comparison:
    """Say it where the first difference is an overflow; one that both have is none."""
    first = verdict.first
    assert first is not None
    index = first.step - 1
    if first.kind == "loss" and not math.isfinite(found.losses[index]):
        what = f"the loss itself overflowed in fp16 at step {first.step} "
        if any(not math.isfinite(one.losses[index]) for one in here):
            text = f"{what}on one device and in this layout; use precision=bf16"
            return replace(verdict, first=None, unclear=text)
        return replace(verdict, note=f"{what}in this layout and not on one device")
    alone = over.layout - over.device
    if first.kind == "gradient" and first.step in alone:
        where = f"{_steps(alone)} in this layout and not on one device"
        return replace(verdict, note=f"gradients overflowed in fp16 at {where}; {_REMEDY}")
    return verdict


def _steps(steps: Collection[int]) -> str:
    names = [str(step) for step in sorted(steps)]
    return f"step {names[0]}" if len(names) == 1 else f"steps {', '.join(names)}"
