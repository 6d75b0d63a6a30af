"""`deepspeed.runtime.lr_schedules`: the schedules, for scripts that make them themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.optim import Optimizer

from ridgeline.compat.deepspeed.schedules import SCHEDULES, Schedule


def _made_by_scripts(name: str) -> Callable[..., Schedule]:
    build = SCHEDULES[name]

    @wraps(build)
    def make(
        optimizer: Optimizer, *args: Any, last_batch_iteration: int = -1, **params: Any
    ) -> Schedule:
        made = build(optimizer, *args, **params)
        if last_batch_iteration >= 0:
            made.load_state_dict({"last_batch_iteration": last_batch_iteration})
        return made

    return make


LRRangeTest = _made_by_scripts("LRRangeTest")
OneCycle = _made_by_scripts("OneCycle")
WarmupLR = _made_by_scripts("WarmupLR")
WarmupDecayLR = _made_by_scripts("WarmupDecayLR")
WarmupCosineLR = _made_by_scripts("WarmupCosineLR")
