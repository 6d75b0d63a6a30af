"""Time and memory of a job together, since each has a say in the other.

`predict` is what everything above the models calls: validation, search and the commands. What kind of
model a job is of, `kinds.py` knows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ridgeline.plan.kinds import AnyJob, kind_of
from ridgeline.plan.memory import StepMemory
from ridgeline.plan.time import StepTime

PRESSED: Final = 0.88
"""Share of the device from which the allocator has to give blocks back and ask for others."""
FULL: Final = 0.94
"""Share beyond which a job that runs at all is no slower, or its memory was overestimated."""


@dataclass(frozen=True)
class Prediction:
    """One step of a job on the rank that is busiest, and on the one that holds most."""

    time: StepTime
    memory: StepMemory

    @property
    def seconds(self) -> float:
        return self.time.seconds


def predict(job: AnyJob, memory: StepMemory | None = None) -> Prediction:
    """Seconds and bytes of a step. A device that is nearly full is slower: memory that was cached is
    returned and asked for again, and both wait for the device."""
    kind = kind_of(job.model)
    memory = memory or kind.memory(job)
    time = kind.time(job)
    working_s = time.seconds - time.storage
    pressed = pressure(job, memory) * working_s
    # A step that waits for samples has room for it.
    waits = max(0.0, time.storage - pressed)
    return Prediction(replace(time, pressure=pressed, storage=waits), memory)


def pressure(job: AnyJob, memory: StepMemory) -> float:
    """By how much a device that is nearly full is slower."""
    used = memory.device / job.machine.device.memory_bytes
    return max(min(used, FULL) - PRESSED, 0.0) * job.software.pressure
