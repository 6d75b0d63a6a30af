"""The verdict in float64: the training as a whole, and where that parts, step by step.

Two right trainings agree to 1e-9 in float64 but for two things, which are looked for before a layout is
blamed. Adam divides a gradient by its own size, so that one whose true value is zero (the bias of keys, a
bias before a norm) becomes a step of its rounding: one device then does every step again from the layout's
own weights, and every update from the layout's own gradients, which leaves nothing of that and hides no
wrong update. And a model may cast to float32 by itself: how far that takes one device from itself is then
measured, and a layout may be off by a few times as much. Called by `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ridgeline.verify.compare import (
    NOISE_FACTOR,
    Comparison,
    compare,
    measure_noise,
)
from ridgeline.verify.record import Recording

_LITTLE = 1e-3
"""Rounding does not move a loss by more."""
_WAYS = ("reordered", "nudged")
"""Steps of one device that only rounding tells from the plain one; see `step.backward`."""


def compare_exact(
    reference: Recording,
    found: Recording,
    follow: Callable[[str], Recording],
    is_divided: bool = False,
) -> Comparison:
    """`follow` does the steps of `found` on one device, in the way that it is given; `is_divided`: `found`
    takes in several microbatches what `reference` takes whole."""
    whole = compare(reference, found, is_divided=is_divided)
    if whole.first is None:
        return whole
    exact = follow("plain")
    steps = compare(exact, found, is_divided=is_divided)
    if steps.first is None:
        said = f"step by step; in all, rounding that the optimizer made steps of adds up: {whole.first}"
        return replace(steps, note="; ".join(filter(None, (said, steps.note))))
    if not steps.sizes.loss <= _LITTLE:
        return steps
    noise = measure_noise(exact, [follow(way) for way in _WAYS])
    verdict = compare(exact, found, noise, is_divided)
    if verdict.first is not None or verdict.unclear:
        return verdict
    bounds = verdict.bounds
    said = (
        f"step by step, to {bounds.gradient:.1e} in gradients and {bounds.loss:.1e} in losses: the model "
        f"computes in less than float64 by itself, or its gradients cancel; that is {NOISE_FACTOR:g} times "
        "what rounding moves one device by"
    )
    return replace(verdict, note=said)
