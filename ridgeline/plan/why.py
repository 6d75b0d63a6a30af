"""Why the best layout is the best: what its time is, what each technique gains, what the runner-up lacks,
and what another machine would change.

Every answer is a search, so that what takes a technique's place is the best that can. Plain lines;
`cli_plan.py` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ridgeline.plan.kinds import Model
from ridgeline.plan.machine import Machine, read_place
from ridgeline.plan.search import TIE, Found, Looked, Planned, Wanted, choose, look
from ridgeline.plan.show import TIME_PARTS

PLAIN: Final[dict[str, Wanted]] = {
    "tp": lambda layout: layout.tp == 1,
    "cp": lambda layout: layout.cp == 1,
    "spatial": lambda layout: layout.spatial == (1, 1),
    "pp": lambda layout: layout.pp == 1,
    "zero": lambda layout: layout.zero == 0,
    "recompute": lambda layout: layout.recompute == "none",
    "offload": lambda layout: layout.offload == "none",
}
"""Techniques, and whether a layout does without."""


def show_why(
    found: Found,
    model: Model,
    machine: Machine,
    batch: int,
    precision: str,
    sample_bytes: float = 0.0,
    said: Mapping[str, Any] | None = None,
) -> list[str]:
    """What limits the best layout, what the runner-up lacks, what each technique gains, and what another
    machine would."""
    best = found.best[0]
    lines = [f"best: {best.layout}"]
    parts = {words: float(getattr(best.time, name)) for name, words in TIME_PARTS.items()}
    longest = sorted(parts, key=lambda w: -parts[w])[:3]
    lines += [f"  {100 * parts[words] / best.seconds:.0f} % {words}" for words in longest]
    lines += [_runner_up(best, other) for other in found.best[1:2]]

    def look_at(place: Machine, wanted: Wanted | None = None) -> Looked:
        devices = best.job.devices
        return look(model, place, devices, batch, precision, None, sample_bytes, said, wanted)

    here = look_at(machine)
    first = _fastest(here)
    if first is not None and best.seconds < first.seconds * (1.0 + TIE):
        # Of what was chosen for its memory, time says nothing.
        for name, is_plain in PLAIN.items():
            if not is_plain(best.layout):
                left = replace(here, candidates=[c for c in here.candidates if is_plain(c[3])])
                other = _fastest(left) or _fastest(look_at(machine, is_plain))
                lines.append(f"  without {name}: {_without(best, other)}")
    for words, change in _other_machines(best, machine).items():
        now = first
        if machine.tables:
            # What was measured of a link goes with it: then both are taken as their links say.
            as_said = {name: read_place(machine, name) for name in change}
            now = _fastest(look_at(machine.replace(**as_said)))
        then = _fastest(look_at(machine.replace(**change)))
        lines.append(f"  with {words}: " + _compare(now, then))
    return lines


def _fastest(looked: Looked) -> Planned | None:
    return next(iter(choose(looked, 1).best), None)


def _runner_up(best: Planned, other: Planned) -> str:
    slower = 100 * (other.seconds / best.seconds - 1)
    more_gb = (other.memory.device - best.memory.device) / 1e9
    if abs(slower) < 100 * TIE:
        return (
            f"second: {other.layout} is as good ({slower:+.1f} % time, {more_gb:+.1f} GB); the simpler is "
            "first"
        )
    if slower < 0:  # the best is that of memory
        return f"second: {other.layout} is {-slower:.1f} % faster and takes {more_gb:.1f} GB more"
    differences = {
        words: float(getattr(other.time, name)) - float(getattr(best.time, name))
        for name, words in TIME_PARTS.items()
    }
    worst = max(differences, key=lambda w: differences[w])
    most = f"{worst} ({differences[worst]:+.3f} s)"
    return f"second: {other.layout} is {slower:.1f} % slower, most of it {most}"


def _other_machines(best: Planned, machine: Machine) -> dict[str, dict[str, float]]:
    """What one might ask for, in words, and as changes of the machine."""
    changes: dict[str, dict[str, float]] = {}
    if best.time.storage > 0.01 * best.seconds:
        changes["twice the rate of storage"] = {"storage_bandwidth": 2 * machine.storage_bandwidth}
    if best.job.devices > machine.reach:
        changes["twice the bandwidth between nodes"] = {
            "inter.bandwidth": 2 * machine.inter.bandwidth
        }
    memory, peak = machine.device.memory_bytes, machine.device.gemm_efficiency
    changes["40 GB more memory a device"] = {"device.memory_bytes": memory + 40e9}
    changes["a tenth more of the products' peak"] = {
        "device.gemm_efficiency": min(0.99, 1.1 * peak)
    }
    return changes


def _compare(now: Planned | None, then: Planned | None) -> str:
    if now is None or then is None:
        return "nothing fits" if then is None else f"{then.layout} fits"
    gain = 100 * (now.seconds / then.seconds - 1)
    if gain < 100 * TIE:
        return "no change"
    same = "the same layout" if then.layout == now.layout else str(then.layout)
    return f"{gain:.0f} % faster ({then.seconds:.3f} s, {same})"


def _without(best: Planned, then: Planned | None) -> str:
    if then is None:
        return "nothing fits"
    slower = 100 * (then.seconds / best.seconds - 1)
    if slower < 100 * TIE:
        return f"as good ({then.layout})"
    return f"{slower:.0f} % slower ({then.seconds:.3f} s, {then.layout})"
