"""DeepSpeed's learning-rate schedules, by the names its configuration has for them.

They count updates from -1, so that the first two of a warm-up have its lowest rate; that is kept, since a
script's results depend on it. Held against DeepSpeed's own in `tests/unit/compat`. Called by `initialize`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from ridgeline.errors import UsageError, unknown_word

Rates = Callable[[int], list[float]]
"""Of each group, after so many updates."""
Betas = Callable[[int], list[tuple[float, float]]]


class Schedule:
    """Sets the rates of an optimizer's groups; `step()` after each update."""

    def __init__(self, optimizer: Optimizer, rates: Rates, betas: Betas | None = None) -> None:
        self.optimizer, self._rates, self._betas = optimizer, rates, betas
        self.last_batch_iteration = -1
        self._apply()

    def step(self, last_batch_iteration: int | None = None) -> None:
        after = self.last_batch_iteration + 1
        self.last_batch_iteration = after if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def get_lr(self) -> list[float]:
        return self._rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[tuple[float, float]] | None:
        return self._betas(self.last_batch_iteration) if self._betas is not None else None

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_batch_iteration = state["last_batch_iteration"]
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        for group, pair in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = pair


def _of_groups(optimizer: Optimizer, value: Any, name: str) -> list[float]:
    count = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [float(value)] * count
    if len(value) != count:
        raise UsageError(
            f"scheduler.params.{name} of deepspeed's configuration has {len(value)} values for {count} "
            "groups "
            "of parameters; give one, or one for each"
        )
    return [float(one) for one in value]


def _share(step: int, num_steps: int, kind: str) -> float:
    """How far a warm-up has come."""
    if kind == "linear":
        return step / num_steps
    return math.log(step + 1) / math.log(num_steps)


def _check_warmup(num_steps: Any, kind: str) -> int:
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise UsageError(
            f"scheduler.params.warmup_num_steps of deepspeed's configuration is {num_steps!r}; it is 1 or "
            "more"
        )
    if kind not in ("log", "linear"):
        raise unknown_word(
            "kind of warm-up", kind, ("log", "linear"), "scheduler.params.warmup_type"
        )
    return max(2, num_steps)


def warmup_lr(
    optimizer: Optimizer,
    warmup_min_lr: Any = 0.0,
    warmup_max_lr: Any = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    after: Callable[[int, int], float] = lambda step, warmup: 1.0,
) -> Schedule:
    warmup = _check_warmup(warmup_num_steps, warmup_type)
    if warmup_max_lr is None:
        warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
    least = _of_groups(optimizer, warmup_min_lr, "warmup_min_lr")
    most = _of_groups(optimizer, warmup_max_lr, "warmup_max_lr")

    def rates(step: int) -> list[float]:
        if step < 0:
            return least
        part = _share(step, warmup, warmup_type) if step < warmup else after(step, warmup)
        return [low + (high - low) * part for low, high in zip(least, most, strict=True)]

    return Schedule(optimizer, rates)


def warmup_decay_lr(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_lr: Any = 0.0,
    warmup_max_lr: Any = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Schedule:
    def after(step: int, warmup: int) -> float:
        return max(0.0, (total_num_steps - step) / max(1.0, total_num_steps - warmup))

    return warmup_lr(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, after)


def warmup_cosine_lr(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Schedule:
    warmup = _check_warmup(warmup_num_steps, warmup_type)
    peaks = [float(group["lr"]) for group in optimizer.param_groups]

    def ratio(step: int) -> float:
        if step < 0:
            return 0.0
        if step < warmup:
            return warmup_min_ratio + (1.0 - warmup_min_ratio) * _share(step, warmup, warmup_type)
        done = min(1.0, (step - warmup + 1) / max(1, total_num_steps - warmup))
        return max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)

    return Schedule(optimizer, lambda step: [peak * ratio(step) for peak in peaks])


def range_test(
    optimizer: Optimizer,
    lr_range_test_min_lr: Any = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> Schedule:
    least = _of_groups(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")

    def rates(step: int) -> list[float]:
        if step < 0:
            return least
        done = (step + 1) / lr_range_test_step_size
        factor = 1 + lr_range_test_step_rate * (
            math.floor(done) if lr_range_test_staircase else done
        )
        return [low * factor for low in least]

    return Schedule(optimizer, rates)


def one_cycle(
    optimizer: Optimizer,
    cycle_min_lr: Any,
    cycle_max_lr: Any,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: Any = 0.8,
    cycle_max_mom: Any = 0.9,
    decay_mom_rate: float = 0.0,
) -> Schedule:
    first = float(cycle_first_step_size)
    second = first if cycle_second_step_size is None else float(cycle_second_step_size)
    if first <= 0 or second < 0:
        raise UsageError(
            f"scheduler.params.cycle_first_step_size of deepspeed's configuration is {first:g}, and the "
            "second "
            f"{second:g}; the first is above 0, the second not below it"
        )
    total = first + second
    stairs = (
        cycle_first_stair_count,
        cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
    )
    least = _of_groups(optimizer, cycle_min_lr, "cycle_min_lr")
    most = _of_groups(optimizer, cycle_max_lr, "cycle_max_lr")

    def height(step: int) -> float:
        """Between the ends of the cycle."""
        at = (step + 1) % total
        rises = at <= first
        part = at / first if rises else (total - at) / second
        count = stairs[0] if rises else stairs[1]
        return math.floor(part * count) / count if count else part

    def rates(step: int) -> list[float]:
        if step < 0:
            return least
        if step < total:
            part = height(step)
            return [low + (high - low) * part for low, high in zip(least, most, strict=True)]
        if not decay_step_size or not decay_lr_rate:
            return least
        factor = 1 + decay_lr_rate * (step - total + 1) / decay_step_size
        return [low / factor for low in least]

    low_mom = _of_groups(optimizer, cycle_min_mom, "cycle_min_mom")
    high_mom = _of_groups(optimizer, cycle_max_mom, "cycle_max_mom")

    def betas(step: int) -> list[tuple[float, float]]:
        if step < 0:
            return [(low, 0.99) for low in low_mom]
        if step < total:
            part = height(step)
            pairs = zip(low_mom, high_mom, strict=True)
            return [(high - (high - low) * part, 0.99) for low, high in pairs]
        factor = 1.0
        if decay_step_size and decay_mom_rate:
            factor += decay_mom_rate * (step - total + 1) / decay_step_size
        return [(high * factor, 0.99) for high in high_mom]

    moves = cycle_momentum and "betas" in optimizer.defaults
    return Schedule(optimizer, rates, betas if moves else None)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "LRRangeTest": range_test,
    "OneCycle": one_cycle,
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
}


def build_schedule(name: str, params: dict[str, Any], optimizer: Optimizer) -> Schedule:
    if name not in SCHEDULES:
        raise unknown_word(
            "schedule", name, SCHEDULES, "scheduler.type of deepspeed's configuration"
        )
    build = SCHEDULES[name]
    known = [n for n in inspect.signature(build).parameters if n not in ("optimizer", "after")]
    params = {key: value for key, value in params.items() if key != "last_batch_iteration"}
    for key in params:
        if key not in known:
            raise unknown_word("setting", key, known, f"scheduler.params of {name}")
    try:
        return build(optimizer, **params)
    except TypeError as error:
        raise UsageError(f"scheduler.params of {name}: {error}") from None
