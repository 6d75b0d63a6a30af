"""Planned layouts as values for programs: what `ridgeline plan --json` prints. Seconds and bytes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ridgeline.plan.memory import fits
from ridgeline.plan.search import Found, Planned


def planned_record(planned: Planned, tokens: float | None = None) -> dict[str, Any]:
    """One layout with its step and memory, part by part; `tokens`: a goal, for days and cost."""
    time, memory = planned.time, planned.memory
    record: dict[str, Any] = {
        "layout": str(planned.layout),
        "fits": fits(planned.job, memory),
        "samples_per_microbatch": planned.job.samples,
        "microbatches": planned.job.microbatches,
        "step_s": planned.seconds,
        f"{planned.job.unit}_per_s": planned.tokens_per_s,
        "mfu": planned.mfu,
        "time_s": {part.name: getattr(time, part.name) for part in fields(time)},
        "memory_bytes": {
            part.name: getattr(memory, part.name) for part in fields(memory) if part.name != "host"
        },
        "host_bytes": memory.host,
        "allocated_bytes": memory.allocated,
        "reserved_bytes": memory.reserved,
        "device_bytes": memory.device,
    }
    if tokens:
        record |= {"days": planned.days(tokens), "cost": planned.cost(tokens) or None}
    return record


def found_record(found: Found, tokens: float | None = None) -> dict[str, Any]:
    """What a search saw."""
    return {
        "layouts": [planned_record(planned, tokens) for planned in found.best],
        "looked_at": found.looked_at,
        "too_large": found.too_large,
        "played": found.played,
    }
