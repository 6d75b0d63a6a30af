"""The profiler's trace of some steps: its events in order and nested, and arithmetic with spans of time.

Reads the JSON that torch's profiler writes. Made by `probe.py`, cut up by `timeline.py`; imports without
torch, so that recorded traces can be looked at anywhere.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ridgeline.doctor.kernels import (
    COMMUNICATION,
    class_of_op,
)
from ridgeline.doctor.measured import CLASSES

_LOADER = "enumerate(DataLoader)"
_OPTIMIZER_STEP = ("Optimizer.step#", "Optimizer.zero_grad#")
Span = tuple[float, float]


@dataclass
class Op:
    """One op, annotation or runtime call of the host."""

    name: str
    start: float
    end: float
    args: Mapping[str, Any]
    tid: Any
    parent: Op | None = None
    self_us: float = 0.0

    def ancestors(self) -> Iterable[Op]:
        op: Op | None = self
        while op is not None:
            yield op
            op = op.parent


@dataclass(frozen=True)
class Sample:
    """Where the main thread was at one moment."""

    ns: int
    where: str
    """file:line (function) of the innermost frame that is the user's own."""
    code: str
    state: str
    """`run`, `backward` (inside torch's engine), `comm` or `wait`."""


@dataclass
class Cost:
    """A sum over ops of one class."""

    seconds: float = 0.0
    num: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    by_precision: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def precision(self) -> str:
        known = {p: s for p, s in self.by_precision.items() if p}
        return max(known, key=lambda p: known[p]) if known else ""


@dataclass
class Allocations:
    """Memory over the window."""

    largest_bytes: float = 0.0
    largest_what: str = ""
    """The op that makes the largest tensor."""
    timeline: list[tuple[float, float, str, float]] = field(default_factory=list)
    """(seconds, bytes that came or went, phase, address)."""


@dataclass
class Taken:
    """A trace taken apart: seconds over the whole window."""

    window_s: float = 0.0
    num_steps: int = 1
    """Steps that the sums are over."""
    data_s: float = 0.0
    h2d_s: float = 0.0
    comm_exposed_s: float = 0.0
    comm_hidden_s: float = 0.0
    host_s: float = 0.0
    launch_s: float = 0.0
    launch_in: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    classes: dict[str, Cost] = field(default_factory=lambda: {c: Cost() for c in CLASSES})
    stalls: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    """(where, what, code) -> seconds, times."""
    num_launches: int = 0
    num_optimizer_launches: int = 0
    num_syncs: int = 0
    h2d_bytes: float = 0.0
    h2d_pageable_bytes: float = 0.0
    tensor_core_s: float = 0.0
    tensor_able_s: float = 0.0
    products: dict[tuple[tuple[int, ...], str, bool], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    """(sizes, precision, on tensor cores) -> seconds."""
    retry_s: float = 0.0

    def stall(self, where: str, what: str, code: str, seconds: float) -> None:
        row = self.stalls.setdefault((where, what, code), [0.0, 0.0])
        row[0] += seconds
        row[1] += 1


class Trace:
    """The events of a trace, in order and nested."""

    def __init__(
        self,
        values: Mapping[str, Any],
        samples: Sequence[Sample] = (),
        window_ns: tuple[int, int] | None = None,
        main_tid: int | None = None,
        data_ns: Sequence[tuple[int, int]] = (),
        optimizer_ns: Sequence[tuple[int, int]] = (),
        step_ends_ns: Sequence[int] = (),
    ) -> None:
        """`window_ns` and the others are times of the host's clock, in nanoseconds since 1970; without
        them the whole trace is looked at, and torch's own annotations tell the loader and the update."""
        self.base_ns = int(values.get("baseTimeNanoseconds", 0))
        self.ops: dict[Any, list[Op]] = defaultdict(list)
        self.runtime: list[Op] = []
        self.device: list[tuple[float, float, str, Mapping[str, Any], str]] = []
        self.memory: list[tuple[float, Mapping[str, Any], Any]] = []
        annotations: list[Op] = []
        for event in values.get("traceEvents", ()):
            self._take(event, annotations)
        self.main = main_tid if main_tid is not None else self._busiest()
        self.window = self._times_of([window_ns])[0] if window_ns else self._whole(annotations)
        here = [a for a in annotations if a.tid == self.main]
        loader = [(a.start, a.end) for a in here if a.name.startswith(_LOADER)]
        self.data = union(self._times_of(data_ns) or loader)
        steps = [(a.start, a.end) for a in annotations if a.name.startswith(_OPTIMIZER_STEP)]
        self.optimizer = union([*steps, *self._times_of(optimizer_ns)])
        self.talks = union(
            (a.start, a.end)
            for a in [*annotations, *self.all_ops()]
            if a.tid != self.main and class_of_op(a.name) == COMMUNICATION
        )
        self.device = [d for d in self.device if d[0] >= self.window[0]]
        pairs = list(pairwise(step_ends_ns))
        self.steps = self._times_of(pairs) or [self.window]
        low, high = self.window
        self.memory = [row for row in self.memory if low <= row[0] <= high]
        for ops in self.ops.values():
            _nest(ops)
        self.by_id = {
            op.args["External id"]: op for op in self.all_ops() if "External id" in op.args
        }
        self._samples = sorted(samples, key=lambda s: s.ns)
        self._times = [(s.ns - self.base_ns) / 1e3 for s in self._samples]

    def _take(self, event: Mapping[str, Any], annotations: list[Op]) -> None:
        category, start = str(event.get("cat", "")), event.get("ts")
        if start is None:
            return
        start, args = float(start), event.get("args", {})
        end = start + float(event.get("dur", 0.0))
        name, tid = str(event.get("name", "")), event.get("tid")
        if event.get("ph") == "i" and name == "[memory]":
            self.memory.append((start, args, tid))
        elif category == "cpu_op":
            self.ops[tid].append(Op(name, start, end, args, tid))
        elif category == "user_annotation":
            annotations.append(Op(name, start, end, args, tid))
        elif category in ("cuda_runtime", "cuda_driver"):
            self.runtime.append(Op(name, start, end, args, tid))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            self.device.append((start, end, name, args, category))

    def _times_of(self, spans: Sequence[tuple[int, int]]) -> list[Span]:
        return [((a - self.base_ns) / 1e3, (b - self.base_ns) / 1e3) for a, b in spans]

    def _busiest(self) -> Any:
        return max(self.ops, key=lambda tid: len(self.ops[tid]), default=None)

    def _whole(self, annotations: Sequence[Op]) -> Span:
        spans = [(op.start, op.end) for op in self.all_ops()] + [
            (a.start, a.end) for a in annotations
        ]
        spans += [(start, end) for start, end, *_ in self.device]
        return (min(s for s, _ in spans), max(e for _, e in spans)) if spans else (0.0, 0.0)

    def all_ops(self) -> Iterable[Op]:
        for ops in self.ops.values():
            yield from ops

    def samples_in(self, start: float, end: float) -> list[Sample]:
        first = bisect.bisect_left(self._times, start)
        return self._samples[first : bisect.bisect_right(self._times, end)]


def _nest(ops: list[Op]) -> None:
    """Fill in parents and the time that is no child's."""
    ops.sort(key=lambda op: (op.start, -op.end))
    stack: list[Op] = []
    for op in ops:
        while stack and stack[-1].end <= op.start:
            stack.pop()
        op.self_us = op.end - op.start
        if stack:
            op.parent = stack[-1]
            op.parent.self_us -= min(op.end, op.parent.end) - op.start
        stack.append(op)


def union(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What of `spans` is in none of `others`; both in order and apart."""
    left, at = [], 0
    for start, end in spans:
        while at < len(others) and others[at][1] <= start:
            at += 1
        here = at
        while here < len(others) and others[here][0] < end:
            if others[here][0] > start:
                left.append((start, others[here][0]))
            start = max(start, others[here][1])
            here += 1
        if start < end:
            left.append((start, end))
    return left


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)


def overlap(span: Span, others: Sequence[Span]) -> float:
    """How much of `span` is in `others`, which are in order and apart."""
    at = max(bisect.bisect_right(others, (span[0], float("inf"))) - 1, 0)
    found = 0.0
    for start, end in others[at:]:
        if start >= span[1]:
            break
        found += max(0.0, min(end, span[1]) - max(start, span[0]))
    return found


def clip(spans: Iterable[Span], window: Span) -> list[Span]:
    return union(
        (max(s, window[0]), min(e, window[1])) for s, e in spans if e > window[0] and s < window[1]
    )
