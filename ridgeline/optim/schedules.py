"""Learning-rate schedules as pure functions of the step, and the rules for large batches.

A schedule here is a function step -> factor with no state, so that a resumed run needs only its step
number. Called by `train/setup.py`; the rate of every step is printed and recorded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ridgeline.config import ScheduleConfig
from ridgeline.errors import unknown_word

Factor = Callable[[int], float]
"""Maps a step, counted from 0, to the share of the peak rate it uses."""


def _constant(config: ScheduleConfig, steps: int, per_epoch: int) -> Factor:
    return lambda step: 1.0


def _linear(config: ScheduleConfig, steps: int, per_epoch: int) -> Factor:
    return lambda step: 1.0 - (1.0 - config.floor) * _progress(config, steps, step)


def _cosine(config: ScheduleConfig, steps: int, per_epoch: int) -> Factor:
    def factor(step: int) -> float:
        wave = 0.5 * (1.0 + math.cos(math.pi * _progress(config, steps, step)))
        return config.floor + (1.0 - config.floor) * wave

    return factor


def _step(config: ScheduleConfig, steps: int, per_epoch: int) -> Factor:
    starts = [epoch * per_epoch for epoch in config.step_epochs]
    return lambda step: config.factor ** sum(step >= start for start in starts)


SCHEDULES: dict[str, Callable[[ScheduleConfig, int, int], Factor]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "step": _step,
}


def _progress(config: ScheduleConfig, steps: int, step: int) -> float:
    """How far along the part after warm-up a step is, 0 to 1; the last step of the run is at 1."""
    after = max(steps - config.warmup_steps - 1, 1)
    return min(max((step - config.warmup_steps) / after, 0.0), 1.0)


def build_schedule(config: ScheduleConfig, steps: int, per_epoch: int) -> Factor:
    """The factor of each step: a linear warm-up, then the named shape over the remaining steps."""
    if config.name not in SCHEDULES:
        raise unknown_word("schedule", config.name, SCHEDULES, "schedule.name")
    shape = SCHEDULES[config.name](config, steps, per_epoch)

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / (config.warmup_steps + 1)
        return shape(step)

    return factor


def fit_warmup(config: ScheduleConfig, steps: int) -> tuple[ScheduleConfig, list[str]]:
    """A warm-up as long as the run or longer, as when a recipe is tried for a few steps, is cut to
    half the run; the second value is the sentence that says so."""
    if config.warmup_steps == 0 or config.warmup_steps < steps:
        return config, []
    shorter = steps // 2
    note = f"warm-up cut from {config.warmup_steps} to {shorter} steps: the run has only {steps}"
    return dataclasses.replace(config, warmup_steps=shorter), [note]


def scale_lr(lr: float, batch: int, reference_batch: int | None, rule: str) -> tuple[float, str]:
    """The rate for `batch` when `lr` was found at `reference_batch`, and a sentence that says so."""
    if rule not in ("none", "linear", "sqrt"):
        raise unknown_word("learning-rate rule", rule, ("none", "linear", "sqrt"), "train.lr_rule")
    if reference_batch is None or rule == "none" or reference_batch == batch:
        return lr, f"learning rate {lr:g} as given (batch {batch})"
    ratio = batch / reference_batch
    scaled = lr * (ratio if rule == "linear" else math.sqrt(ratio))
    power = "" if rule == "linear" else "^0.5"
    return scaled, (
        f"learning rate {scaled:g} = {lr:g} x ({batch}/{reference_batch}){power}: "
        f"{rule} rule from the reference batch {reference_batch}"
    )
