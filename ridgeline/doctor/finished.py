"""A finished run, measured from what it left: the same parts of a step, by its own records.

The records do not tell kernels apart, so the classes are two: forward and backward, and the optimizer. Nor
do they tell what the host does: what is none of their parts is not explained. Called by `ridgeline doctor
RUNDIR`; imports without torch.
"""

from __future__ import annotations

import statistics
from typing import Any

from ridgeline.doctor.measured import (
    FORWARD_BACKWARD,
    OPTIMIZER,
    ClassTime,
    Measured,
    Memory,
    RankTime,
    pipelined,
    quartile_spread,
)
from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.machine.roofline import ComputeFacts
from ridgeline.rundir import (
    FACTS,
    LAYOUT,
    SPLIT,
    RunDir,
    StepRecord,
    newest_ranks,
    newest_stretch,
    waits_s,
)

_SKIPPED = 5
"""Steps at the beginning that compile, search for kernels and fill memory."""


def measure_run(run: RunDir) -> Measured:
    """What the records of a run say of its steps."""
    (steps, _, ranks), events = run.history(), run.events()
    steps, ranks = newest_stretch(steps, events), newest_ranks(ranks, events)
    if len(steps) < 2:
        raise UsageError(
            f"{run.path} has records of {len(steps)} steps; the doctor needs two or more of them"
        )
    steady = steps[min(_SKIPPED, len(steps) // 2) :]
    step_s = statistics.median(s.step_s for s in steady)
    split = {part: _mean_share(steady, part) * step_s for part in SPLIT}
    facts = run.read_json(FACTS) or {}
    machine, model = facts.get("machine", {}), facts.get("model", {})
    layout = read_layout(run)
    num_ranks = max(len(ranks), layout.world_size)
    samples = statistics.median(s.num_samples for s in steady)
    flops = float(model.get("train_flops_per_sample", 0.0)) * samples / num_ranks
    compute_s = split["forward_s"] + split["backward_s"]
    known = sum(split.values())
    return Measured(
        source=f"run {run.path.name}",
        device_kind=str(machine.get("device_kind", "")),
        device_name=str(machine.get("device_name", "an unknown device")),
        step_s=step_s,
        num_ranks=num_ranks,
        num_steps=len(steady),
        spread=quartile_spread([s.step_s for s in steady]),
        batch=int(samples) // layout.dp,
        data_s=split["data_s"],
        h2d_s=split["h2d_s"],
        compute_s=compute_s + split["optimizer_s"],
        comm_exposed_s=split["comm_s"] + split["bubble_s"],
        other_s=max(step_s - known, 0.0),
        classes=(
            ClassTime(FORWARD_BACKWARD, compute_s, flops=flops, precision=layout.precision),
            ClassTime(OPTIMIZER, split["optimizer_s"]),
        ),
        memory=_memory(steady, machine),
        pipeline=pipelined(layout, split["bubble_s"]),
        ranks=tuple(
            RankTime(r.rank, r.step_s, r.split_s.get("data_s", 0.0), waits_s(r)) for r in ranks
        ),
        roofline=_peaks(machine),
        notes=_notes(run),
    )


def _mean_share(steps: list[StepRecord], part: str) -> float:
    """Of all the time, so that a loader that stalls one step in ten is seen."""
    total = sum(s.step_s for s in steps)
    return sum(getattr(s, part) for s in steps) / total if total > 0 else 0.0


def read_layout(run: RunDir) -> Layout:
    """What its ranks were arranged in, all of them counted."""
    path = run.file(LAYOUT)
    return Layout.parse(path.read_text().strip(), LAYOUT) if path.is_file() else Layout()


def _memory(steps: list[StepRecord], machine: dict[str, Any]) -> Memory | None:
    known = [s.memory_bytes for s in steps if s.memory_bytes]
    capacity = machine.get("device_memory_bytes")
    return Memory(float(capacity), float(max(known))) if known and capacity else None


def _peaks(machine: dict[str, Any]) -> ComputeFacts | None:
    peaks = machine.get("peak_flops")
    if not peaks:
        return None
    return ComputeFacts(
        host=str(machine.get("host", "")),
        device_kind=str(machine.get("device_kind", "")),
        device_name=str(machine.get("device_name", "")),
        time=0.0,
        num_threads=0,
        peak_flops=dict(peaks),
    )


def _notes(run: RunDir) -> tuple[str, ...]:
    lines = [
        "from the records of a run, which do not tell kernels apart: `ridgeline doctor` with its "
        "recipe measures them"
    ]
    for event in run.events():
        if event.event == "straggler":
            details = event.details
            who = "the network" if details.get("rank") is None else f"rank {details['rank']}"
            lines.append(
                f"at step {details.get('step')} {who} cost {details.get('excess', 0.0):.0%} of the step "
                f"({details.get('part')})"
            )
        elif event.event in ("restart", "failed"):
            lines.append(
                f"{event.event}: {event.details.get('cause') or event.details.get('message')}"
            )
    return tuple(lines[:12])
