"""What a device reaches, as plain numbers: arithmetic per precision, memory, the link to the host.

A roofline says how fast work of some intensity (FLOPs a byte) can be at best: as fast as memory brings
the bytes, or as fast as the arithmetic goes, whichever is less; the ridge is where the two meet. Made by
`compute.py`, kept in `machine.json` by `record.py`, read by the doctor; imports without torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.machine.picture import (
    COLOURS,
    INK,
    PALE,
    LogScale,
    amount,
    dot,
    duration,
    label,
    line,
    svg,
    whole_powers,
)

COMPUTE = "compute"
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


@dataclass(frozen=True)
class Product:
    """One shape in one precision, as it was measured."""

    kind: str
    """`matrix`, `batched` or `convolution`."""
    precision: str
    shape: tuple[int, ...]
    """(m, n, k), (batch, m, n, k), or (samples, channels, size, filters, kernel)."""
    flops: float
    bytes: float
    """Operands and result, each once."""
    seconds: float
    """The median of the repetitions."""
    spread: float = 0.0
    """Half the distance between the quartiles, as a share of the median."""

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds if self.seconds > 0 else 0.0

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def name(self) -> str:
        return f"{self.kind} {'x'.join(map(str, self.shape))}"


@dataclass(frozen=True)
class Sustained:
    """What the best product gives when it goes on for seconds, so that power and heat have their say."""

    flops_per_s: float
    watts: float
    clock_mhz: float
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class ComputeFacts:
    """One device, measured. Rates are None where there is nothing to measure."""

    host: str
    device_kind: str
    device_name: str
    time: float
    num_threads: int
    """Of this process; a CPU's figures hold for as many."""
    device_memory_bytes: int | None = None
    """Of a GPU; of a CPU the node's."""
    num_sms: int | None = None
    """Multiprocessors of a GPU."""
    peak_flops: dict[str, float] = field(default_factory=dict)
    """The best over the shapes, per precision."""
    products: tuple[Product, ...] = ()
    sustained: dict[str, Sustained] = field(default_factory=dict)
    """Per precision, of a GPU that says what it draws."""
    copy_bytes_per_s: float | None = None
    """Read and written bytes of a copy on the device."""
    triad_bytes_per_s: float | None = None
    """a = b + s * c: three arrays."""
    h2d_pinned_bytes_per_s: float | None = None
    h2d_pageable_bytes_per_s: float | None = None
    d2h_pinned_bytes_per_s: float | None = None
    d2h_pageable_bytes_per_s: float | None = None
    launch_s: float | None = None
    """From one small kernel to the next, when many are asked for in a row."""
    round_trip_s: float | None = None
    """One small kernel and the wait for its end."""
    measured_s: float = 0.0
    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""

    @property
    def memory_bytes_per_s(self) -> float | None:
        found = [r for r in (self.copy_bytes_per_s, self.triad_bytes_per_s) if r]
        return max(found) if found else None

    def ridge(self, precision: str) -> float | None:
        """FLOPs a byte at which arithmetic becomes the limit."""
        peak, memory = self.peak_flops.get(precision), self.memory_bytes_per_s
        return peak / memory if peak and memory else None

    def attainable(self, precision: str, intensity: float) -> float | None:
        """FLOP/s that work of this intensity can reach at best."""
        peak, memory = self.peak_flops.get(precision), self.memory_bytes_per_s
        if not peak:
            return None
        return min(peak, intensity * memory) if memory else peak

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def compute_from_dict(values: Mapping[str, Any]) -> ComputeFacts:
    """Back from JSON; keys of a newer version are passed over."""
    known = {f.name for f in dataclasses.fields(ComputeFacts)}
    kept = {key: value for key, value in values.items() if key in known}
    names = {f.name for f in dataclasses.fields(Product)}
    rows = [{k: v for k, v in row.items() if k in names} for row in kept.get("products", ())]
    kept["products"] = tuple(Product(**{**row, "shape": tuple(row["shape"])}) for row in rows)
    fields = {f.name for f in dataclasses.fields(Sustained)}
    kept["sustained"] = {
        name: Sustained(
            **{**{k: v for k, v in row.items() if k in fields}, "shape": tuple(row["shape"])}
        )
        for name, row in kept.get("sustained", {}).items()
    }
    kept["notes"] = tuple(kept.get("notes", ()))
    return ComputeFacts(**kept)


@dataclass(frozen=True)
class Mark:
    """Some work on the roofline: a class of kernels of a step."""

    name: str
    intensity: float
    flops_per_s: float
    note: str = ""


def draw_roofline(facts: ComputeFacts, marks: Sequence[Mark] = ()) -> str:
    """The picture: a roof a precision, the measured shapes as small dots, `marks` as large ones."""
    memory = facts.memory_bytes_per_s
    if not memory or not facts.peak_flops:
        return svg(
            640, 60, [label(20, 35, "nothing was measured to draw a roofline from")], "roofline"
        )
    width, height = 860.0, 520.0
    peaks = {p: facts.peak_flops[p] for p in PRECISIONS if p in facts.peak_flops}
    marks = [m for m in marks if m.intensity > 0 and m.flops_per_s > 0]
    products = [p for p in facts.products if p.intensity > 0 and p.flops_per_s > 0]
    ridges = [peak / memory for peak in peaks.values()]
    across = [*ridges, *(m.intensity for m in marks), *(p.intensity for p in products), 0.1]
    x = LogScale(*whole_powers([min(across), max(across) * 2]), 80, width - 150)
    up = [*peaks.values(), *(m.flops_per_s for m in marks), *(p.flops_per_s for p in products)]
    y = LogScale(*whole_powers(up), height - 60, 50)
    shapes = [label(80, 24, f"roofline of {facts.device_name}: {amount(memory, 'B/s')} of memory")]
    for tick in y.powers():
        shapes += [line(x.start, y(tick), x.stop, y(tick), PALE)]
        shapes += [label(x.start - 8, y(tick) + 4, amount(tick, ""), "end")]
    for tick in x.powers():
        shapes += [line(x(tick), y.start, x(tick), y.stop, PALE)]
        shapes += [label(x(tick), y.start + 18, f"{tick:g}", "middle")]
    shapes += [label((x.start + x.stop) / 2, height - 18, "FLOPs a byte", "middle")]
    shapes += [label(12, 34, "FLOP/s")]
    colour_of = {p: COLOURS[i % len(COLOURS)] for i, p in enumerate(PRECISIONS)}
    lowest = max(x.low, y.low / memory)
    top = max(peaks.values())
    shapes += [line(x(lowest), y(lowest * memory), x(top / memory), y(top), INK)]
    taken: list[float] = []
    for precision, peak in sorted(peaks.items(), key=lambda pair: pair[1]):
        at = y(peak)
        shapes += [line(x(peak / memory), at, x.stop, at, colour_of[precision])]
        while any(abs(at - other) < 13 for other in taken):
            at -= 13
        taken.append(at)
        text = f"{precision} {amount(peak, 'FLOP/s')}"
        shapes += [label(x.stop + 6, at + 4, text, fill=colour_of[precision])]
    for p in products:
        hint = f"{p.name} {p.precision}: {amount(p.flops_per_s, 'FLOP/s')} in {duration(p.seconds)}"
        shapes.append(dot(x(p.intensity), y(p.flops_per_s), colour_of[p.precision], hint, 2.5))
    for m in marks:
        hint = f"{m.name}: {amount(m.flops_per_s, 'FLOP/s')} at {m.intensity:.3g} FLOPs a byte {m.note}"
        shapes.append(dot(x(m.intensity), y(m.flops_per_s), INK, hint, 6))
        shapes.append(label(x(m.intensity) + 9, y(m.flops_per_s) + 4, m.name))
    return svg(width, height, shapes, f"roofline of {facts.device_name}")
