"""A run while it goes on, from its directory alone: how far it is, how fast, and what its nodes do.

`LiveRun.refresh` takes in what has been written since the last time; the figures are computed from that.
What a run lacks is None here, never an error. Called by `terminal.py` and `served.py`; needs no torch.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ridgeline import rundir
from ridgeline.errors import RunError, UsageError
from ridgeline.report.follow import Followed
from ridgeline.report.summary import flatten_config, median_of, number
from ridgeline.rundir import (
    EvalRecord,
    Event,
    ResourceRecord,
    RunDir,
    StepRecord,
    build_event,
    build_record,
    build_resources,
    fair_share,
    status_after,
    thin_out,
)

MOST = 2000
"""The newest records that are kept of each kind; of older ones fewer and fewer."""
TAIL = 32 * 2**20
"""Bytes of what nodes recorded that are looked at first, over all nodes: about the last hours."""
RECENT = 50
"""Steps that the figures of the moment are medians of."""
SILENT_S = 30.0
"""Nodes that have recorded nothing for so long, and for much longer than usual, make a run silent."""
SILENT_UNRECORDED_S = 120.0
"""The same where nodes record nothing: an evaluation may take its time."""
SILENT_AT_START_S = 600.0
"""The same before its first step, where nothing tells how long that takes."""
ENDED = ("finished", "failed", "stopped", "interrupted")


@dataclass(frozen=True)
class State:
    """What a run is doing, in a word and in a sentence, which is empty where the word says it all."""

    word: str
    """waiting, running, silent, or how it ended."""
    sentence: str

    @property
    def has_ended(self) -> bool:
        return self.word in ENDED


class LiveRun:
    """One run directory that is looked at again and again."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.name = run, run.path.resolve().name
        self.steps: list[StepRecord] = []
        self.evals: list[EvalRecord] = []
        self.events: list[Event] = []
        self.num_events: Counter[str] = Counter()
        self.status = "running"
        self._start: Event | None = None
        self._nodes: dict[Path, list[ResourceRecord]] = {}
        self._metrics = Followed(run.file(rundir.METRICS), b'{"kind": "step"')
        self._events = Followed(run.file(rundir.EVENTS))
        self._resources: dict[Path, Followed] = {}
        self._small: dict[str, tuple[tuple[int, int], str]] = {}

    def refresh(self) -> None:
        """Take in what is new."""
        self._read_metrics()
        self._read_events()
        self._read_resources()

    def _read_metrics(self) -> None:
        news = self._metrics.read()
        if news.starts_over:
            self.steps, self.evals = [], []
        for value in news.values:
            record = build_record(value)
            if isinstance(record, StepRecord):
                # A run that went back to a checkpoint does those steps again.
                if self.steps and record.step <= self.steps[-1].step:
                    self.steps = [r for r in self.steps if r.step < record.step]
                    self.evals = [r for r in self.evals if r.step < record.step]
                self.steps.append(record)
                thin_out(self.steps, MOST)
            elif isinstance(record, EvalRecord):
                self.evals = [r for r in self.evals if r.step < record.step]
                self.evals.append(record)
                thin_out(self.evals, MOST)

    def _read_events(self) -> None:
        news = self._events.read()
        if news.starts_over:
            self.events, self.num_events = [], Counter()
            self.status, self._start = "running", None
        for value in news.values:
            event = build_event(value)
            if event is not None:
                self.events.append(event)
                self.num_events[event.event] += 1
                self.status = status_after([event], self.status)
                self._start = event if event.event == "start" else self._start
                thin_out(self.events, MOST)

    def _read_resources(self) -> None:
        files = self.run.resource_files()
        for path in [path for path in self._resources if path not in files]:
            del self._resources[path], self._nodes[path]  # the run has started over
        for path in files:
            records = self._nodes.setdefault(path, [])
            if path not in self._resources:
                self._resources[path] = Followed(path, tail=max(2**16, TAIL // len(files)))
            news = self._resources[path].read()
            if news.starts_over:
                records.clear()
            for value in news.values:
                record = build_resources(value)
                if record is not None:
                    records.append(record)
                    thin_out(records, fair_share(len(files)))

    @property
    def nodes(self) -> dict[str, list[ResourceRecord]]:
        """What each node recorded, by host: of a run that went on elsewhere, those that it is on now."""
        found = {records[-1].host: records for records in self._nodes.values() if records}
        begun = self._start.time if self._start is not None else 0.0
        return {host: r for host, r in found.items() if r[-1].time >= begun} or found

    def _text(self, name: str) -> str:
        """A small file of the run, read again when it has changed."""
        path = self.run.file(name)
        try:
            stat = path.stat()
            mark = (stat.st_mtime_ns, stat.st_size)
            if self._small.get(name, (None, ""))[0] != mark:
                self._small[name] = (mark, path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return ""
        return self._small[name][1]

    def _fact(self, kind: str, name: str) -> Any:
        with suppress(ValueError, AttributeError):
            return json.loads(self._text(rundir.FACTS)).get(kind, {}).get(name)
        return None

    def _setting(self, key: str) -> float | None:
        try:
            return float(flatten_config(self._text(rundir.CONFIG)).get(key, ""))
        except ValueError:
            return None

    @property
    def layout(self) -> str:
        return self._text(rundir.LAYOUT).strip()

    @property
    def num_ranks(self) -> int | None:
        found = self._last_start().get("num_ranks")
        return found if isinstance(found, int) else None

    @property
    def device_name(self) -> str:
        return str(self._fact("machine", "device_name") or "")

    @property
    def model_name(self) -> str:
        return str(self._fact("model", "name") or "")

    @property
    def unit(self) -> str:
        return str(self._fact("model", "unit") or "samples")

    @property
    def units_per_sample(self) -> float:
        return number(self._fact("model", "units_per_sample") or 1)

    def _last_start(self) -> dict[str, Any]:
        return self._start.details if self._start is not None else {}

    @property
    def step(self) -> int:
        return self.steps[-1].step if self.steps else 0

    @property
    def num_steps(self) -> int | None:
        """Of the whole run; the run says it when it starts."""
        found = self._last_start().get("num_steps")
        if not isinstance(found, int):
            said = self._setting("train.steps")
            return None if said is None else int(said)
        return found

    @property
    def recent(self) -> list[StepRecord]:
        """The newest steps of this start, without its first, which may have compiled the model."""
        begun = self._start.time if self._start is not None else 0.0
        since = [s for s in self.steps[-RECENT:] if s.time >= begun]
        return since[1:] if 1 < len(since) < RECENT else since

    @property
    def loss(self) -> float | None:
        return number(self.steps[-1].loss) if self.steps else None

    @property
    def rate(self) -> float | None:
        """`unit` a second."""
        found = median_of(s.samples_per_s for s in self.recent if s.step_s > 0)
        return None if found is None else found * self.units_per_sample

    @property
    def mfu(self) -> float | None:
        return median_of(s.mfu for s in self.recent)

    def share(self, *parts: str) -> float | None:
        """Of the step's time, over the recent steps."""
        whole = sum(s.step_s for s in self.recent)
        taken = sum(getattr(s, part) for s in self.recent for part in parts)
        return taken / whole if whole > 0 else None

    @property
    def memory_bytes(self) -> int | None:
        return self.steps[-1].memory_bytes if self.steps else None

    @property
    def eta_s(self) -> float | None:
        """Until the last step, evaluations and checkpoints at the share of time they took of late."""
        recent, of = self.recent, self.num_steps
        if of is None or len(recent) < 2:
            return None
        passed = recent[-1].time - recent[0].time
        steps = max(1, recent[-1].step - recent[0].step)
        pace_s = max(passed / steps, median_of(s.step_s for s in recent) or 0.0)
        return max(0, of - self.step) * pace_s

    @property
    def last_seen(self) -> float:
        """When anything was last written: by its own clock or the file system's, whichever is later."""
        newest = [s.time for s in self.steps[-1:]] + [e.time for e in self.events[-1:]]
        newest += [e.time for e in self.evals[-1:]]
        newest += [records[-1].time for records in self.nodes.values()]
        files = (self._metrics, self._events, *self._resources.values())
        for path in [*(f.path for f in files), self.run.file(rundir.CONFIG)]:
            with suppress(OSError):
                newest.append(path.stat().st_mtime)
        return max(newest, default=0.0)

    def state(self, now: float | None = None) -> State:
        """The status, and whether it can be believed: a run that was killed outright is `running` in its
        own records for ever."""
        now = time.time() if now is None else now
        if self.status in ENDED:
            return State(self.status, self._ending())
        if not self.events and not self.steps:
            return State("waiting", "has not started yet")
        silence_s, usual_s = now - self.last_seen, self._usual_gap_s()
        least_s = SILENT_S if self.nodes else SILENT_UNRECORDED_S
        limit_s = max(least_s, 5 * usual_s) if usual_s is not None else SILENT_AT_START_S
        if silence_s > limit_s:
            return State(
                "silent",
                f"silent for {span_text(silence_s)}: it was killed, or its nodes or its disk hang",
            )
        if not self.steps:
            return State("running", "before its first step")
        idle_s, step_s = now - self.steps[-1].time, median_of(s.step_s for s in self.recent) or 0.0
        if idle_s > max(60.0, 10 * step_s * (self._setting("log.every") or 10)):
            return State("running", f"alive, but no step has been recorded for {span_text(idle_s)}")
        return State("running", "")

    def _usual_gap_s(self) -> float | None:
        """Between two writes."""
        gaps = [
            median_of(b.time - a.time for a, b in pairwise(r[-10:]))
            for r in self.nodes.values()
            if len(r) > 1
        ]
        if found := [gap for gap in gaps if gap is not None]:
            return min(found)
        step_s = median_of(s.step_s for s in self.recent)
        return None if step_s is None else step_s * (self._setting("log.every") or 10)

    def _ending(self) -> str:
        closing = next((e for e in reversed(self.events) if e.event in _CLOSING), None)
        return tell_event(closing) if closing is not None else self.status

    @property
    def troubles(self) -> str:
        """How often what nobody wants has happened; empty where it has not."""
        names = {
            "restart": ("restart", "restarts"),
            "straggler": ("straggler", "stragglers"),
            "checkpoint-failed": ("failed checkpoint", "failed checkpoints"),
            "bad-batch": ("bad batch", "bad batches"),
            "skipped-sample": ("skipped sample", "skipped samples"),
        }
        counts = {event: self.num_events[event] for event in names if self.num_events[event]}
        return ", ".join(f"{count} {names[event][count > 1]}" for event, count in counts.items())


_CLOSING = ("end", "failed", "stopped", "interrupted")


def tell_event(event: Event) -> str:
    """What happened, as a sentence without its time."""
    d = event.details
    step = f" at step {d['step']}" if d.get("step") is not None else ""
    match event.event:
        case "start":
            return f"started on {d.get('num_ranks', '?')} ranks, {d.get('layout', '')}".rstrip(", ")
        case "resume":
            return f"went on from {d.get('checkpoint', 'a checkpoint')}"
        case "end":
            reached = ", target reached" if d.get("reached_target") else ""
            return f"finished after {d.get('steps', '?')} steps{reached}"
        case "failed":
            return f"failed: {_first_line(d.get('message')) or 'no reason was recorded'}"
        case "interrupted":
            return "interrupted"
        case "stopped":
            why = d.get("signal") or _first_line(d.get("cause"))
            return f"stopped{step}{f' ({why})' if why else ''}; it can go on"
        case "restart":
            rank = f"rank {d['rank']}: " if d.get("rank") is not None else ""
            return f"started again: {rank}{_first_line(d.get('cause')) or 'no cause was recorded'}"
        case "straggler":
            who = "the network" if d.get("rank") is None else f"rank {d['rank']} ({d.get('part')})"
            return f"{who} holds the others up by {100 * number(d.get('excess')):.0f} % of a step{step}"
        case "checkpoint":
            return f"checkpoint{step} in {number(d.get('seconds')):.2g} s"
        case "checkpoint-failed":
            return f"no checkpoint{step}: {_first_line(d.get('problem'))}"
        case "bad-batch":
            return f"bad batch{step}: {_first_line(d.get('reason'))}; {d.get('action')}"
        case "skipped-sample":
            return f"a sample was skipped{step}: {_first_line(d.get('sentence'))}"
        case "staged":
            return "data was staged to the nodes"
    return event.event


def _first_line(value: Any, limit: int = 160) -> str:
    text = str(value or "").strip().partition("\n")[0]
    return text if len(text) <= limit else text[:limit] + " …"


def span_text(seconds: float) -> str:
    """A time that passes while one looks on: 42 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    whole = int(max(0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def sparkline(values: list[float], width: int = 24) -> str:
    """The course of some numbers in one line of a terminal; each character a mean of its share."""
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) < 2:
        return ""
    width = min(width, len(finite))
    edges = [i * len(finite) // width for i in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    marks = "▁▂▃▄▅▆▇█"
    return "".join(marks[int((m - low) / (high - low) * 7.999) if high > low else 0] for m in means)


class Watched:
    """The runs that were asked for: those named, and those in the folders named, also ones that come
    while one looks on."""

    def __init__(self, places: list[Path]) -> None:
        self._places = places
        self._known: dict[Path, LiveRun] = {}
        self._names = " ".join(str(place) for place in places)
        for place in places:
            if not place.is_dir():
                raise UsageError(
                    f"no run directory at {place}; `ridgeline train` prints where its runs are"
                )
        if not find_runs(places):
            raise UsageError(
                f"no run directories in {self._names}; `ridgeline train` prints where its runs are"
            )

    def refresh(self) -> list[LiveRun]:
        """Newest activity first; without those that somebody has removed."""
        for path in find_runs(self._places):
            self._known.setdefault(path, LiveRun(RunDir(path)))
        self._known = {path: live for path, live in self._known.items() if path.is_dir()}
        if not self._known:
            raise RunError(f"nothing is left to watch: {self._names} was removed or renamed")
        for live in self._known.values():
            live.refresh()
        return sorted(self._known.values(), key=lambda live: live.last_seen, reverse=True)


def find_runs(places: list[Path]) -> list[Path]:
    """Run directories among `places` and up to two folders below them, where arrays put theirs, or in those
    of searches."""
    found: dict[Path, None] = {}
    for place in places:
        if (place / rundir.CONFIG).is_file():
            found[place] = None
            continue
        for pattern in ("*", "*/*", "*/trials/*"):
            for path in sorted(place.glob(f"{pattern}/{rundir.CONFIG}")):
                # What --fresh put aside is no run of its own.
                if not path.parent.name.startswith("before-"):
                    found[path.parent] = None
    return list(found)
