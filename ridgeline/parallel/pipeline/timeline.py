"""Which rank did which microbatch when, in one step: for the eye, and for the size of the bubble.

`Pipeline.record_next_step()` switches it on; the events of all ranks are gathered by
`Pipeline.timeline()`. Written to `traces/` in Chrome's trace format, drawn as SVG for the docs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, time
from typing import Any

import torch

from ridgeline.layout import ideal_bubble

KINDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
"""`B` is the whole backward pass, or its input gradients where `W` is done apart (zero bubble)."""

Mark = Callable[..., None]
"""Told which part of the step is over now: the clock that splits every step. A second argument says what
comes, in the words of the part before it."""

_PARTS = {"F": "forward_s", "B": "backward_s", "W": "backward_s"}

_COLOURS = {"F": "#4c78a8", "B": "#f2a154", "W": "#72b08a"}


@dataclass(frozen=True)
class Event:
    """One microbatch in one stage."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline, over all its ranks."""

    events: tuple[Event, ...]
    schedule: str
    num_ranks: int
    num_microbatches: int
    virtual: int

    @property
    def total_s(self) -> float:
        return max(e.end_s for e in self.events) - min(e.start_s for e in self.events)

    def bubbles(self) -> list[float]:
        """Per rank, the part of the step in which it computed nothing."""
        busy = [0.0] * self.num_ranks
        for event in self.events:
            busy[event.rank] += event.end_s - event.start_s
        return [1 - value / self.total_s for value in busy]

    @property
    def measured_bubble(self) -> float:
        """Mean over the ranks."""
        return sum(self.bubbles()) / self.num_ranks

    @property
    def ideal_bubble(self) -> float:
        """The same for stages of equal time."""
        return ideal_bubble(self.num_ranks, self.num_microbatches, self.virtual)

    def describe(self) -> str:
        p, m, v = self.num_ranks, self.num_microbatches, self.virtual
        ratio = f"(p-1)/{'m' if v == 1 else 'mv'} = {(p - 1) / (m * v):.3f}"
        fraction = f"(p-1)/({'m' if v == 1 else 'mv'}+p-1) = {self.ideal_bubble:.3f}"
        each = ", ".join(f"{value:.3f}" for value in self.bubbles())
        return (
            f"{self.schedule}, p={p}, m={m}" + (f", v={v}" if v > 1 else "") + ": "
            f"bubble {self.measured_bubble:.3f} of the step (per rank {each}); "
            f"{fraction}; of the work {ratio}"
        )


def no_mark(part: str, then: str = "") -> None:
    """Where nobody asks where a step's time goes."""


@dataclass
class Recorder:
    """Tells the step's clock where each piece of work begins and ends; takes the time of each while it is
    on, for which it waits for the device."""

    device: torch.device
    mark: Mark = no_mark
    is_on: bool = False
    spans: list[tuple[int, str, int, float, float]] = field(default_factory=list)

    def start(self) -> None:
        self.spans.clear()
        self.is_on = True

    @contextmanager
    def span(self, stage: int, kind: str, microbatch: int) -> Iterator[None]:
        self.mark("bubble_s")
        if not self.is_on:
            yield
        else:
            start = self._now()
            yield
            self.spans.append((stage, kind, microbatch, start, self._now()))
        self.mark(_PARTS[kind])

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Around what replicas of a stage exchange, which is no waiting for other stages."""
        self.mark("bubble_s", "backward_s")  # what comes is what comes after backward
        yield
        self.mark("comm_s")

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    def take(self, rank: int) -> list[Event]:
        """The events since `start`, on the clock that all ranks share."""
        self.is_on = False
        offset = time() - perf_counter()
        events = [Event(rank, s, k, m, a + offset, b + offset) for s, k, m, a, b in self.spans]
        self.spans.clear()
        return events


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """For chrome://tracing and Perfetto: one row a rank, microseconds from the step's beginning."""
    begin = min(event.start_s for event in timeline.events)
    rows: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": r, "args": {"name": f"rank {r}"}}
        for r in range(timeline.num_ranks)
    ]
    rows += [
        {
            "name": f"{event.kind}{event.microbatch}",
            "cat": KINDS[event.kind],
            "ph": "X",
            "pid": 1,
            "tid": event.rank,
            "ts": round(1e6 * (event.start_s - begin), 3),
            "dur": round(1e6 * (event.end_s - event.start_s), 3),
            "args": {"stage": event.stage, "microbatch": event.microbatch},
        }
        for event in sorted(timeline.events, key=lambda e: (e.rank, e.start_s))
    ]
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_chrome_trace(timeline: Timeline, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(timeline)))


def timeline_svg(events: Sequence[Event], width: int = 960, title: str = "") -> str:
    """The step as a picture: a row a rank, a box a piece of work with its microbatch's number."""
    row, left, top = 34, 64, 34 if title else 12
    num_ranks = 1 + max(event.rank for event in events)
    begin = min(event.start_s for event in events)
    scale = (width - left - 12) / (max(event.end_s for event in events) - begin)
    first_stage = {r: min(e.stage for e in events if e.rank == r) for r in range(num_ranks)}
    height = top + row * num_ranks + 38
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    if title:
        parts.append(f'<text x="{left}" y="20" font-size="14" fill="#222">{_escape(title)}</text>')
    for rank in range(num_ranks):
        y = top + row * rank
        parts.append(
            f'<rect x="{left}" y="{y}" width="{width - left - 12}" height="{row - 4}" '
            f'fill="#f1f1ef"/><text x="{left - 8}" y="{y + 19}" text-anchor="end" '
            f'fill="#444">rank {rank}</text>'
        )
    for event in events:
        x = left + scale * (event.start_s - begin)
        wide = max(scale * (event.end_s - event.start_s), 0.5)
        y = top + row * event.rank
        # Later stages of the same rank are paler.
        opacity = 1.0 if event.stage == first_stage[event.rank] else 0.6
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{row - 4}" rx="2" '
            f'fill="{_COLOURS[event.kind]}" fill-opacity="{opacity}" stroke="#fff">'
            f"<title>{event.kind}{event.microbatch}, stage {event.stage}</title></rect>"
        )
        if wide > 12:
            parts.append(
                f'<text x="{x + wide / 2:.1f}" y="{y + 19}" text-anchor="middle" '
                f'fill="#fff">{event.microbatch}</text>'
            )
    x, y = float(left), top + row * num_ranks + 10
    for kind in sorted({event.kind for event in events}, key=list(KINDS).index):
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="14" height="14" rx="2" fill="{_COLOURS[kind]}"/>'
            f'<text x="{x + 20:.0f}" y="{y + 12}" fill="#444">{KINDS[kind]}</text>'
        )
        x += 40 + 7 * len(KINDS[kind])
    return "\n".join([*parts, "</svg>"])


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
