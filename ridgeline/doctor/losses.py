"""Whether a changed training still trains alike: its loss curve beside the baseline's.

Both start from the same weights and see the same samples. Used by `climb.py`; imports without torch.
"""

from __future__ import annotations

import math
import statistics

from ridgeline.doctor.states import Effort

FIRST_LOSS = 4.0
"""The first loss is of the same weights and samples: it may be off by so many times the bound."""


def difference(losses: list[float], baseline: list[float]) -> float:
    """Of the means of the last quarters, relative."""
    last = max(1, len(baseline) // 4)
    mine, theirs = statistics.fmean(losses[-last:]), statistics.fmean(baseline[-last:])
    return (mine - theirs) / abs(theirs) if theirs else math.copysign(math.inf, mine - theirs)


def judge_losses(losses: list[float], baseline: list[float], effort: Effort) -> str:
    """What is wrong with a loss curve beside the baseline's; empty when nothing is."""
    losses = losses[: len(baseline)]
    for step, loss in enumerate(losses):
        if not math.isfinite(loss) and math.isfinite(baseline[step]):
            return f"the loss is {loss} at step {step + 1}"
    first = abs(losses[0] - baseline[0]) / max(abs(baseline[0]), 1e-12)
    if first > FIRST_LOSS * effort.loss_bound:
        return f"the first loss is {first:.2%} off, so it computes something else"
    apart = difference(losses, baseline)
    if abs(apart) > effort.loss_bound:
        return f"the loss is {apart:+.2%} off after {len(baseline)} steps"
    return ""
