"""Whether a changed training still trains alike: its loss curve beside the baseline's.

Both start from the same weights and see the same samples. Some trainings are further from themselves than
the bound when nothing but a rounding of the first weights differs; how far is measured where it matters
(`wobble_of`), and the bound is widened by it. And where losses fall fast, as those of a first minute do, a
small share of a step is a large share of the loss: such curves are compared by steps (`steps_behind`). What
rounds coarsely learns a little less in a step: how much is seen over more steps (`judge_longer`). Used by
`climb.py`; imports without torch.
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
BEHIND = 0.05
"""Share of the compared steps by which a curve may be behind the baseline's or ahead of it."""
SURE = 3.0
"""Losses fall where their slope is so many times as large as its standard error."""

LONGER = 3
"""So many times as many steps are compared of a state that costs digits and has begun behind."""
FURTHEST = 20.0
"""Where its loss is off by no more than so many bounds by then; beyond, it computes something else."""


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
    if mine == theirs:
        return 0.0
    return (mine - theirs) / abs(theirs) if theirs else math.copysign(math.inf, mine - theirs)


def steps_behind(losses: list[float], baseline: list[float]) -> float:
    """How many steps later a curve is where the baseline's is: what it is higher at the end, over what the
    baseline falls in a step of its second half. Infinite where that does not fall beyond doubt.

    >>> falling = [8.0 - 0.5 * step for step in range(12)]
    >>> steps_behind([loss + 0.1 for loss in falling], falling)
    0.2
    >>> steps_behind([2.1] * 12, [2.0] * 12)
    inf
    """
    half = baseline[len(baseline) // 2 :]
    count = len(half)
    if count < 4 or not all(map(math.isfinite, (*half, *losses))):
        return math.inf
    slope, start = statistics.linear_regression(range(count), half)
    squares = sum((loss - start - slope * step) ** 2 for step, loss in enumerate(half))
    error = math.sqrt(squares / (count - 2) / (count * (count * count - 1) / 12))
    if not slope < -SURE * error:
        return math.inf
    later = (_end(losses, len(baseline)) - _end(baseline, len(baseline))) / -slope
    return round(later, 6)


def _is_alike(losses: list[float], baseline: list[float]) -> bool:
    return abs(steps_behind(losses, baseline)) <= BEHIND * len(baseline)


def _is_first_off(losses: list[float], baseline: list[float], effort: Effort) -> float:
    """By how much, where that is more than it may be; else 0."""
    first = abs(losses[0] - baseline[0]) / max(abs(baseline[0]), 1e-12)
    return first if first > FIRST_LOSS * effort.loss_bound else 0.0


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
    if first := _is_first_off(losses, baseline, effort):
        return f"the first loss is {first:.2%} off, so it computes something else"
    apart, bound = difference(losses, baseline), effort.loss_bound
    if abs(apart) <= WIDEST * bound and _is_alike(losses, baseline):
        return ""
    if abs(apart) > widen(bound, wobble):
        mine, theirs = _end(losses, len(baseline)), _end(baseline, len(baseline))
        return f"the loss is {apart:+.2%} off after {len(baseline)} steps ({mine:.4g} against {theirs:.4g})"
    return ""


def may_be_behind(losses: list[float], baseline: list[float], effort: Effort) -> bool:
    """Whether a curve that is judged wrong, but not wholly so, deserves a longer look."""
    finite = all(map(math.isfinite, losses))
    if not finite or _is_first_off(losses, baseline, effort):
        return False
    return abs(difference(losses, baseline)) <= FURTHEST * effort.loss_bound


def share_behind(losses: list[float], baseline: list[float]) -> float:
    """Of the steps, by which a curve is behind; 0 where it is not, or where that cannot be told.

    >>> falling = [8.0 - 0.1 * step for step in range(20)]
    >>> share_behind([loss + 0.1 for loss in falling], falling), share_behind([2.1] * 9, [2.0] * 9)
    (0.05, 0.0)
    """
    share = steps_behind(losses, baseline) / len(baseline)
    return max(0.0, share) if math.isfinite(share) else 0.0


def judge_longer(losses: list[float], before: list[float], behind: float) -> tuple[str, float]:
    """What is wrong with a state over more steps beside the one that was kept, which is itself the share
    `behind` of them behind the baseline; and the share by which the two are.

    >>> falling = [8.0 - 0.1 * step for step in range(60)]
    >>> judge_longer([loss + 0.15 for loss in falling], falling, 0.0)
    ('', 0.025)
    >>> judge_longer([loss + 0.15 for loss in falling], falling, 0.03)[0]
    'the loss is 1.5 steps behind after 60 steps, and with all that was kept 5.5% of them'
    """
    num = len(before)
    for step, loss in enumerate(losses):
        if not math.isfinite(loss) and math.isfinite(before[step]):
            return f"the loss is {loss} at step {step + 1}", 0.0
    share = steps_behind(losses, before) / num
    if not math.isfinite(share):
        return (
            f"the loss does not fall beyond doubt in {num} steps, so that it cannot catch up",
            0.0,
        )
    if abs(share) > BEHIND:
        where = "behind" if share > 0 else "ahead"
        return f"the loss is {abs(share) * num:.1f} steps {where} after {num} steps", share
    if behind + share > BEHIND:
        return (
            f"the loss is {share * num:.1f} steps behind after {num} steps, and with all that was kept "
            f"{behind + share:.1%} of them"
        ), share
    return "", share


def judge_whole(losses: list[float], baseline: list[float], effort: Effort) -> str:
    """What is wrong with a curve that is right beside another's: those may have come away from the
    baseline's one after the other, and all of them together may not by more than one alone."""
    apart = difference(losses, baseline)
    if abs(apart) <= WIDEST * effort.loss_bound:
        return ""
    return f"with all that was kept the loss is {apart:+.2%} off after {len(baseline)} steps"


def is_near(losses: list[float], baseline: list[float], effort: Effort) -> bool:
    """Whether a curve that is judged wrong would not be if the training wobbled enough."""
    return not judge_losses(losses, baseline, effort, math.inf)


def tell_losses(
    losses: list[float], baseline: list[float], effort: Effort, wobble: float, whose: str
) -> str:
    """Of a curve that is judged right: by how many steps it is off another's, where the bound alone would
    not let it pass."""
    if abs(difference(losses, baseline)) <= widen(effort.loss_bound, wobble):
        return ""
    later = steps_behind(losses, baseline)
    where = "behind" if later > 0 else "ahead of"
    return f"; its loss is {abs(later):.1f} steps {where} that of {whose or 'the baseline'}"
