"""A simulated job as text and as JSON: what was measured, what was modelled, and what the planner said.

Called by `ridgeline plan simulate`; imports without torch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ridgeline.plan.machine import load_machine
from ridgeline.plan.own_machine import profile_of
from ridgeline.plan.recipe import predict_alone_s, predict_stage
from ridgeline.plan.show import table
from ridgeline.scaling.measured import RankMeasured
from ridgeline.scaling.simulate import PARTS, Simulated

Row = tuple[str, float, float | None]
"""What, here, predicted."""


def show_simulated(found: Simulated) -> list[str]:
    """Lines for people."""
    m = found.shown
    machine = found.machine
    lines = [
        f"rank {m.rank} of {found.world_size} in {found.layout}"
        + (f", stage {m.stage} of {found.layout.pp}" if found.layout.pp > 1 else "")
        + f", on {m.device_name}; the network is {machine.name}'s"
    ]
    same = same_device(found)
    if not same:
        lines.append(
            f"computing was measured here and is no figure of {machine.device.name}: times are not compared"
        )
    lines += ["", *_lines("seconds of a step", time_rows(found), _seconds, same)]
    lines += ["", *_lines(f"memory of rank {m.rank}", memory_rows(found, m), _bytes, True)]
    lines += ["", *_traffic(found)]
    if found.layout.pp > 1:
        lines += ["", *_places(found)]
    if found.predicted is None:
        lines += ["", f"no prediction: {found.why_not}"]
    notes = _notes(found)
    return [*lines, "", *notes] if notes else lines


def time_rows(found: Simulated) -> list[Row]:
    """Measured computation, modelled communication, played bubble, and their sum."""
    p = found.predicted
    exposed = sum(part.exposed_s for part in found.parts)
    alone = sent = None
    if p is not None:
        alone = predict_alone_s(p, busiest(found))
        sent = p.time.tensor_parallel + p.time.gathers + p.time.gradients
    rows: list[Row] = [("computing, measured", found.compute_s, alone)]
    rows.append(("communication not hidden, modelled", exposed, sent))
    if found.layout.pp > 1:
        rows.append(
            ("bubble and sends, played", found.bubble_s, p.time.bubble if p is not None else None)
        )
    rows.append(("step", found.step_s, p.seconds if p is not None else None))
    return rows


def memory_rows(found: Simulated, m: RankMeasured) -> list[Row]:
    said = predict_stage(found.predicted, m.stage) if found.predicted is not None else None
    weights = optimizer = held = peak = reserved = None
    if said is not None:
        weights, optimizer, reserved = said.weights, said.optimizer, said.reserved
        # Tensors of a CPU are counted without what libraries keep for themselves.
        besides = said.buffers if m.allocated_bytes is None else 0.0
        # Only ZeRO-1 keeps the place of its gradients from step to step.
        gone = 0.0 if found.layout.zero == 1 else said.gradients
        held, peak = said.held - besides - gone, said.allocated - besides
    rows: list[Row] = [
        ("weights", m.weights_bytes, weights),
        ("gradients, after backward", m.gradients_bytes, None),
        ("optimizer state", m.optimizer_bytes, optimizer),
        ("held between steps", m.held_bytes, held),
    ]
    if m.host_bytes:
        rows.append(("of it on the host", m.host_bytes, None))
    if m.allocated_bytes is None:
        rows.append(("made by a step, at its peak", m.step_bytes, None))
        # Compiled code takes and frees within itself, where nobody counts.
        seen = None if found.layout.compile else peak
        rows.append(("peak, by its tensors", m.peak_bytes, seen))
    else:
        rows.append(("peak allocated", m.allocated_bytes, peak))
        rows.append(("peak reserved", m.reserved_bytes or 0, reserved))
    return rows


def busiest(found: Simulated) -> int:
    """The place in the pipeline that computes longest."""
    return max(found.ranks, key=lambda m: m.step_s).stage


def same_device(found: Simulated) -> bool:
    """Whether the ranks ran on what the machine has."""
    m, device = found.shown, found.machine.device
    if m.device_kind != "cuda":
        return device.name == "CPU"
    profile = profile_of(m.device_name)
    return profile is not None and load_machine(profile).device.name == device.name


def to_dict(found: Simulated) -> dict[str, Any]:
    """For programs."""
    m = found.shown
    return {
        "layout": str(found.layout),
        "world_size": found.world_size,
        "machine": found.machine.name,
        "same_device": same_device(found),
        "step_s": found.step_s,
        "time": [_row(row) for row in time_rows(found)],
        "memory": [_row(row) for row in memory_rows(found, m)],
        "communication": [dataclasses.asdict(part) for part in found.parts],
        "rank": m.rank,
        "stage": m.stage,
        "ranks": [dataclasses.asdict(one) for one in found.ranks],
        "why_no_prediction": found.why_not,
    }


def _row(row: Row) -> dict[str, Any]:
    name, here, said = row
    error = said / here - 1 if said is not None and here else None
    return {"name": name, "here": here, "predicted": said, "error": error}


def _lines(title: str, rows: list[Row], text: Any, compared: bool) -> list[str]:
    cells = []
    for name, here, said in rows:
        shown = text(said) if said is not None else "-"
        error = f"{100 * (said / here - 1):+.1f} %" if said and here and compared else "-"
        cells.append((name, text(here), shown, error))
    return table((title, "here", "predicted", "difference"), cells)


def _traffic(found: Simulated) -> list[str]:
    if not found.parts:
        return ["nothing is sent"]
    cells = [
        (PARTS[p.name], str(p.num_calls), _bytes(p.num_bytes), _seconds(p.seconds),
         "in the bubble" if p.name == "stages" else _seconds(p.exposed_s))
        for p in found.parts
    ]  # fmt: skip
    return table(("communication of a step", "calls", "bytes", "takes", "not hidden"), cells)


def _places(found: Simulated) -> list[str]:
    cells = []
    for m in found.ranks:
        alike = sum(kind == m.stage_kinds[m.stage] for kind in m.stage_kinds)
        cells.append((
            str(m.stage), str(alike), _seconds(sum(m.forward_s)),
            _seconds(sum((*m.backward_chunk_s, *m.weight_s))), _bytes(m.peak_bytes),
        ))  # fmt: skip
    return table(("stage", "like it", "forward", "backward", "peak"), cells)


def _notes(found: Simulated) -> list[str]:
    notes = []
    if found.shown.allocated_bytes is None:
        notes.append(
            "a CPU keeps no count of its own: bytes are those of tensors, without what kernels, libraries "
            "and Python take"
        )
        if found.layout.compile:
            notes.append(
                "of compiled code only what goes in and comes out is counted: its peak is compared on a "
                "GPU, or here without compile"
            )
    if found.layout.sync != "every":
        notes.append(
            f"sync={found.layout.sync}: the step shown is one in which replicas do not meet"
        )
    return notes


def _seconds(value: float) -> str:
    return f"{value:.4f} s" if value >= 0.1 else f"{1e3 * value:.3f} ms"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3f} {unit}"
    return f"{value:.0f} B"
