"""Whether a changed training still trains alike: its loss curve beside the baseline's.

Both start from the same weights and see the same samples. Some trainings are further from themselves than
the bound when nothing but a rounding of the first weights differs; how far is measured where it matters
(`wobble_of`), and the bound is widened by it. Used by `climb.py`; imports without torch.
"""

from __future__ import annotations

import math
import statistics

from ridgeline.doctor.states import Effort
from ridgeline.errors import RunError

FIRST_LOSS = 4.0
"""The first loss is of the same weights and samples: it may be off by so many times the bound."""


NUDGE = 2.0**-9
"""Share by which each of the first weights is moved, up or down by chance: as far as bf16 rounds them."""
WOBBLES = 2.0
"""So many times what such a nudge moves a loss by may pass."""
WIDEST = 4.0
"""And never more than so many times the bound: beyond, loss curves say nothing of each other."""


def wobble_of(nudged: list[float], baseline: list[float]) -> float:
    """How far a training is from itself after a nudge: root mean square of the relative differences over
    the second half of the steps, which one step that happens to agree does not make small."""
    if len(nudged) != len(baseline):
        raise RunError(f"it had {len(nudged)} losses in {len(baseline)} steps")
    if nudged == baseline:
        raise RunError(
            "its losses are the same to the last bit, so its weights were set again later"
        )
    pairs = list(zip(nudged, baseline, strict=True))[len(baseline) // 2 :]
    apart = [(mine - theirs) / max(abs(theirs), 1e-12) for mine, theirs in pairs]
    found = math.sqrt(statistics.fmean(value * value for value in apart))
    if not math.isfinite(found):
        raise RunError("its losses are not finite")
    return found


def widen(bound: float, wobble: float) -> float:
    """
    >>> widen(0.005, 0.001), widen(0.005, 0.004), widen(0.005, 0.5)
    (0.005, 0.008, 0.02)
    """
    return max(bound, min(WOBBLES * wobble, WIDEST * bound))


def difference(losses: list[float], baseline: list[float]) -> float:
    """Of the means of the last quarters, relative."""
    mine, theirs = _end(losses, len(baseline)), _end(baseline, len(baseline))
    return (mine - theirs) / abs(theirs) if theirs else math.copysign(math.inf, mine - theirs)


def _end(losses: list[float], num_steps: int) -> float:
    """Mean of the last quarter."""
    return statistics.fmean(losses[-max(1, num_steps // 4) :])


def judge_losses(
    losses: list[float], baseline: list[float], effort: Effort, wobble: float = 0.0
) -> str:
    """What is wrong with a loss curve beside the baseline's; empty when nothing is."""
    losses = losses[: len(baseline)]
    for step, loss in enumerate(losses):
        if not math.isfinite(loss) and math.isfinite(baseline[step]):
            return f"the loss is {loss} at step {step + 1}"
    first = abs(losses[0] - baseline[0]) / max(abs(baseline[0]), 1e-12)
    if first > FIRST_LOSS * effort.loss_bound:
        return f"the first loss is {first:.2%} off, so it computes something else"
    apart = difference(losses, baseline)
    if abs(apart) > widen(effort.loss_bound, wobble):
        mine, theirs = _end(losses, len(baseline)), _end(baseline, len(baseline))
        return f"the loss is {apart:+.2%} off after {len(baseline)} steps ({mine:.4g} against {theirs:.4g})"
    return ""


def is_near(losses: list[float], baseline: list[float], effort: Effort) -> bool:
    """Whether a curve that is judged wrong would not be if the training wobbled enough."""
    return not judge_losses(losses, baseline, effort, math.inf)
