"""What was measured of a training, as plain numbers; all that the verdict and the pictures know of it.

Times are seconds of one step of one rank unless the name says otherwise, and the parts add up to the step.
Made by `measure.py` from a live training and by `finished.py` from a run directory; imports without
torch, so that a recorded measurement can be judged anywhere.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.layout import Layout
from ridgeline.machine.power import Power
from ridgeline.machine.roofline import ComputeFacts, compute_from_dict

MATRIX, ATTENTION, CONVOLUTION = "matrix", "attention", "convolution"
ELEMENTWISE, OPTIMIZER, LOSS = "norm and element-wise", "optimizer", "loss"
FORWARD_BACKWARD = "forward and backward"
"""All that a finished run's metrics tell of its kernels."""
CLASSES = (MATRIX, ATTENTION, CONVOLUTION, ELEMENTWISE, OPTIMIZER, LOSS)

PARTS = ("data_s", "h2d_s", "compute_s", "comm_exposed_s", "host_s", "launch_s", "other_s")
PART_NAMES = {
    "data_s": "waiting for data",
    "h2d_s": "copies to the device",
    "compute_s": "kernels",
    "comm_exposed_s": "communication nothing hides",
    "host_s": "host stalls",
    "launch_s": "launch gaps",
    "other_s": "not explained",
}


@dataclass(frozen=True)
class ClassTime:
    """One class of kernels."""

    name: str
    seconds: float
    num: int = 0
    """Kernels, or ops on a CPU."""
    flops: float = 0.0
    bytes: float = 0.0
    """Counted from the operands' shapes; 0 where these were not to be seen (compiled code)."""
    precision: str = ""
    """Of most of its time."""


@dataclass(frozen=True)
class Stall:
    """One line of code at which the host holds the device up, or waits for it."""

    where: str
    """file:line (function)."""
    seconds: float
    num: float = 0.0
    """Times a step."""
    what: str = ""
    """The call: cudaStreamSynchronize, aten::item, Python."""
    code: str = ""


@dataclass(frozen=True)
class Missed:
    """A matrix product that is not done on tensor cores."""

    shape: tuple[int, ...]
    seconds: float
    reason: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankTime:
    """One rank beside the others."""

    rank: int
    step_s: float
    data_s: float
    comm_s: float
    """Communication that nothing hides, and other waiting for ranks."""

    @property
    def own_s(self) -> float:
        return max(self.step_s - self.comm_s, 0.0)


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank's device."""

    capacity_bytes: float
    peak_bytes: float
    reserved_bytes: float = 0.0
    weights_bytes: float = 0.0
    gradients_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    largest_bytes: float = 0.0
    """The largest single tensor of a step."""
    largest_what: str = ""
    """The op that makes it."""
    num_retries: float = 0.0
    """Times a step that the allocator had to give memory back first and ask again."""
    retry_s: float = 0.0

    @property
    def fill(self) -> float:
        return self.peak_bytes / self.capacity_bytes if self.capacity_bytes else 0.0

    @property
    def activations_bytes(self) -> float:
        held = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return max(self.peak_bytes - held, 0.0)


@dataclass(frozen=True)
class Pipelined:
    """The pipeline that a rank is one of."""

    num_ranks: int
    microbatches: int
    virtual: int
    """Stages of each rank."""
    schedule: str
    bubble_s: float
    """What of the communication that nothing hides is waiting for other stages, by the step's own clock."""


@dataclass(frozen=True)
class Measured:
    """One rank's steps, explained."""

    source: str
    device_kind: str
    device_name: str
    step_s: float
    """The median without the profiler."""
    rank: int = 0
    num_ranks: int = 1
    num_steps: int = 0
    """Timed without the profiler."""
    num_profiled: int = 0
    spread: float = 0.0
    """Half the distance between the quartiles of the steps, as a share of the median."""
    overhead: float = 0.0
    """How much longer profiled steps took, as a share."""
    batch: int = 0
    """Samples of this rank's step; 0 where nobody said."""
    microbatches: int = 1
    data_s: float = 0.0
    h2d_s: float = 0.0
    compute_s: float = 0.0
    comm_exposed_s: float = 0.0
    host_s: float = 0.0
    launch_s: float = 0.0
    other_s: float = 0.0
    comm_hidden_s: float = 0.0
    classes: tuple[ClassTime, ...] = ()
    stalls: tuple[Stall, ...] = ()
    """Host stalls, the longest first."""
    reading: tuple[Stall, ...] = ()
    """Lines at which the loader was while the step waited for data."""
    data_busy: float | None = None
    """How much of the wait for data this process was computing, 0 to 1."""
    launch_in: dict[str, float] = field(default_factory=dict)
    """Launch gaps by where they are: optimizer, and the rest."""
    num_launches: float = 0.0
    """Kernels or ops a step."""
    num_optimizer_launches: float = 0.0
    num_syncs: float = 0.0
    """Times a step that the host waited for the device."""
    h2d_bytes: float = 0.0
    h2d_pageable: float = 0.0
    """Share of the copied bytes that came from memory that is not pinned."""
    tensor_core_share: float | None = None
    """Of matrix, attention and convolution time; None where the device has none."""
    missed: tuple[Missed, ...] = ()
    odd: tuple[str, ...] = ()
    """Dimensions of the products that do not suit the device, the costliest first."""
    odd_share: float = 0.0
    """Share of the step in products with such a dimension."""
    smallest_side: int = 0
    """The smallest dimension of the product that takes longest."""
    memory: Memory | None = None
    pipeline: Pipelined | None = None
    ranks: tuple[RankTime, ...] = ()
    roofline: ComputeFacts | None = None
    power: Power | None = None
    """Of a GPU that says it, while steps were timed."""
    notes: tuple[str, ...] = ()

    def share(self, seconds: float) -> float:
        return seconds / self.step_s if self.step_s > 0 else 0.0

    @property
    def bf16_rate(self) -> float:
        """How many times as fast products were in bf16 as in float32; 0 where that was not measured."""
        peaks = self.roofline.peak_flops if self.roofline is not None else {}
        return peaks["bf16"] / peaks["fp32"] if peaks.get("bf16") and peaks.get("fp32") else 0.0

    def of_class(self, name: str) -> ClassTime:
        return next((c for c in self.classes if c.name == name), ClassTime(name, 0.0))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def pipelined(layout: Layout, bubble_s: float) -> Pipelined | None:
    """None where there are no stages."""
    if layout.pp == 1:
        return None
    return Pipelined(layout.pp, layout.microbatches, layout.virtual, layout.schedule, bubble_s)


def measured_from_dict(values: Mapping[str, Any]) -> Measured:
    """Back from JSON; keys of a newer version are passed over."""
    known = {f.name for f in dataclasses.fields(Measured)}
    kept = {key: value for key, value in values.items() if key in known}
    rows: dict[str, Any] = {
        "classes": ClassTime,
        "stalls": Stall,
        "reading": Stall,
        "missed": Missed,
        "ranks": RankTime,
    }
    for key, cls in rows.items():
        kept[key] = tuple(_rebuild(cls, row) for row in kept.get(key, ()))
    for key in ("notes", "odd"):
        kept[key] = tuple(kept.get(key, ()))
    if kept.get("memory") is not None:
        kept["memory"] = _rebuild(Memory, kept["memory"])
    if kept.get("pipeline") is not None:
        kept["pipeline"] = _rebuild(Pipelined, kept["pipeline"])
    if kept.get("power") is not None:
        kept["power"] = _rebuild(Power, kept["power"])
    if kept.get("roofline") is not None:
        kept["roofline"] = compute_from_dict(kept["roofline"])
    return Measured(**kept)


def _rebuild(cls: Any, row: Mapping[str, Any]) -> Any:
    names = {f.name for f in dataclasses.fields(cls)}
    values = {key: value for key, value in row.items() if key in names}
    for key in ("shape", "layers"):
        if key in values:
            values[key] = tuple(values[key])
    return cls(**values)


def quartile_spread(times: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle if middle else 0.0
