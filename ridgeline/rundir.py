"""The run directory: the one contract between what runs and what looks at a run.

The trainer writes here and nothing else does; `report`, and later the doctor, the scaling curves and
the search, read from here and never from a live trainer. Records are small frozen dataclasses, kept
one JSON object a line, so that a run killed in the middle of a write loses at most that line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.errors import UsageError

CONFIG = "config.yaml"
LAYOUT = "layout.txt"
PLAN = "plan.json"
FACTS = "facts.json"
BLOCKS = "blocks.json"
"""Seconds of the model's blocks, by which a pipeline was cut: a run that goes on is cut the same."""
ENV = "env.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
REPORT = "report.html"
TRACES = "traces"
PIPELINE = "pipeline"
"""In `TRACES`, one step of a pipeline as a picture and for Perfetto."""
LOGS = "logs"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
RESOURCES = "resources"
"""One file a node, of what its cores, memory, disks, links and GPUs did."""
WEIGHTS = "weights.safetensors"
LIVE_WEIGHTS = "weights-live.safetensors"

SPLIT = ("data_s", "h2d_s", "forward_s", "backward_s", "bubble_s", "comm_s", "optimizer_s")
"""The parts a step's time is split into, in the order in which they happen."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step as rank 0 saw it; `loss` and `grad_norm` are those of the global batch."""

    step: int
    """Counts optimizer steps from 1."""
    epoch: int
    """Counts from 0."""
    time: float
    """When the record was made, in seconds since 1970."""
    loss: float
    lr: float
    num_samples: int
    """Samples in the global batch."""
    step_s: float
    """Wall-clock time from the end of the step before to the end of this one."""
    data_s: float = 0.0
    """Waiting for the loader."""
    h2d_s: float = 0.0
    """Copying the batch from the host to the device."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    """Backward arithmetic; communication hidden behind it is inside this figure."""
    comm_s: float = 0.0
    """Communication that nothing hides: from the last local gradient to the last reduced one."""
    optimizer_s: float = 0.0
    """Clipping, the update and clearing the gradients."""
    grad_norm: float | None = None
    mfu: float | None = None
    """Counted model FLOPs over the devices' peak, 0 to 1."""
    memory_bytes: int | None = None
    """Peak device memory so far on rank 0 (resident set size where the device is the CPU)."""
    bubble_s: float = 0.0
    """In a pipeline: between microbatches, waiting for other stages and for what they send."""

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True)
class EvalRecord:
    """The metrics of one pass over the evaluation split, exact over all ranks."""

    step: int
    epoch: int
    time: float
    num_samples: int
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)
    averaged: bool = False
    """Whether they are of the moving average of the weights (`optim.ema`)."""


@dataclass(frozen=True)
class RankRecord:
    """What one rank measured over a stretch of steps; the spread between ranks shows stragglers."""

    rank: int
    host: str
    device: str
    num_steps: int
    step_s: float
    """Median over the steps."""
    step_p95_s: float
    split_s: dict[str, float] = field(default_factory=dict)
    """Median of each part of `SPLIT`."""
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class GpuUse:
    """One GPU at one moment; None is what its driver does not tell."""

    index: int
    """As the driver counts those of the node."""
    utilization_percent: float | None = None
    """Share of the last moments in which some kernel ran: not how well it used the device."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    watts: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None


@dataclass(frozen=True)
class ResourceRecord:
    """One node at one moment; rates are over the time since the record before. None: not known here."""

    time: float
    host: str
    cpu_count: int
    """Hardware threads that the ranks of this node may use."""
    cpu_percent: float | None = None
    """How busy those were, with whatever ran on them; 100 is all of them."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    """Of the node, or of the job where the scheduler gave it less."""
    rss_bytes: int | None = None
    """Resident memory of the node's ranks and the processes they started; shared pages count in each. None
    until all ranks of the node are known."""
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    """Of the node's own disks."""
    net_sent_bytes_per_s: float | None = None
    net_received_bytes_per_s: float | None = None
    """Of its network interfaces, without the loopback."""
    fabric_sent_bytes_per_s: float | None = None
    fabric_received_bytes_per_s: float | None = None
    """Of InfiniBand and RoCE adapters, whose traffic passes the interfaces by."""
    gpus: tuple[GpuUse, ...] = ()


@dataclass(frozen=True)
class Event:
    """Something that happened once: start, end, failed, interrupted, stopped, restart, straggler."""

    time: float
    event: str
    details: dict[str, Any] = field(default_factory=dict)


def waits_s(rank: RankRecord) -> float:
    """What of its median step a rank waits for others, in communication and in a pipeline."""
    return rank.split_s.get("comm_s", 0.0) + rank.split_s.get("bubble_s", 0.0)


Record = StepRecord | EvalRecord | RankRecord
_T = TypeVar("_T")

_KINDS: dict[str, type[StepRecord] | type[EvalRecord] | type[RankRecord]] = {
    "step": StepRecord,
    "eval": EvalRecord,
    "rank": RankRecord,
}
_STATUS = {
    "start": "running",
    "restart": "running",
    "end": "finished",
    "failed": "failed",
    "interrupted": "interrupted",
    "stopped": "stopped",
}
_USUAL_LINE = 500
"""Bytes of a line about a node."""
_KIND_OF = {cls: kind for kind, cls in _KINDS.items()}


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Each whole JSON line of a file; a last line cut off by a kill is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                value = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(value, dict):
                yield value


def _read_some_lines(path: Path, most: int) -> Iterator[dict[str, Any]]:
    """As above; of a file of far more lines than `most` so many all over it, and all of its last part."""
    size = path.stat().st_size if path.exists() else 0
    if size <= 2 * most * _USUAL_LINE:
        yield from _read_lines(path)
        return
    tail = size - most * _USUAL_LINE // 4
    places = [*(place * tail // most for place in range(most)), tail]
    with path.open("rb") as file:
        done = 0
        for place in places:
            file.seek(max(place, done))
            if file.tell() > done:
                file.readline()  # the rest of a line
            lines = file if place == tail else [file.readline()]
            for line in lines:
                with suppress(ValueError):
                    value = json.loads(line)
                    if isinstance(value, dict):
                        yield value
            done = file.tell() if place != tail else size


def _build(cls: type[_T], values: Mapping[str, Any]) -> _T | None:
    """A record from the fields this version knows, so that a newer run directory can still be read;
    None when one that it needs is missing."""
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    try:
        return cls(**{key: value for key, value in values.items() if key in names})
    except TypeError:
        return None


_UNWRITTEN: dict[Path, bytes] = {}
"""Lines that a full disk did not take, by file; they go first when there is room again."""
_MOST_UNWRITTEN = 64 * 2**20
_PARTS: dict[Path, int] = {}
"""The length of a file that was seen to end in part of a line; 0 after a whole line of this process."""
_WRITING = threading.Lock()
"""A save writes what waits from a thread of its own, beside the loop that makes new lines."""


def _append_line(path: Path, value: Mapping[str, Any]) -> None:
    """A disk that is full, or gone for a moment, does not end a run: what it did not take is kept and
    written before the next line, or by `RunDir.write_waiting`."""
    line = (json.dumps(value, allow_nan=True, separators=(", ", ": ")) + "\n").encode()
    with _WRITING:
        _write(path, _UNWRITTEN.pop(path, b"") + line)


def _ends_in_part(path: Path, descriptor: int) -> bool:
    """Whether the last line has no end; not while another process is in the middle of writing it."""
    size = _PARTS.get(path, -1)
    while True:
        before, size = size, os.fstat(descriptor).st_size
        if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
            return False
        if size == before:
            _PARTS[path] = size
            return True
        time.sleep(0.05)


def _write(path: Path, lines: bytes) -> None:
    """One `write` call, so that lines of several processes never interleave; keeps what was not taken.

    A line of which the disk took a part is written again as a whole, on a line of its own: another
    process may have written behind the part, and one that was killed never writes the rest of its own.
    """
    taken = 0
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            behind_part = _PARTS.get(path) != 0 and _ends_in_part(path, descriptor)
            data = b"\n" + lines if behind_part else lines
            taken = max(0, os.write(descriptor, data) - behind_part)
        finally:
            os.close(descriptor)
    except OSError:
        # Also where only `close` failed: that is how a network's disk says that it kept nothing.
        taken = 0
    if taken == len(lines):
        _PARTS[path] = 0
        return
    if _PARTS.get(path) == 0:
        del _PARTS[path]
    # A line that lacks nothing but its end is there: whoever writes next sets the end before its own.
    is_whole = lines[taken : taken + 1] == b"\n"
    left = lines[taken + 1 if is_whole else lines.rfind(b"\n", 0, taken) + 1 :]
    if len(left) > _MOST_UNWRITTEN:
        left = left[left.find(b"\n", len(left) - _MOST_UNWRITTEN) + 1 :]
    if left:
        _UNWRITTEN[path] = left


def _append_or_drop(path: Path, value: Mapping[str, Any]) -> None:
    """A line that nobody waits for: what the disk does not take is gone. Takes no part in the lock above,
    so that a disk that hangs holds up its own thread alone. One writer a file."""
    line = (json.dumps(value, separators=(", ", ": ")) + "\n").encode()
    try:
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            is_part = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, b"\n" + line if is_part else line)
        finally:
            os.close(descriptor)
    except OSError:
        return


def build_record(value: Mapping[str, Any]) -> Record | None:
    """A line of `metrics.jsonl`; None for one that this version does not know."""
    cls = _KINDS.get(str(value.get("kind", "")))
    return _build(cls, value) if cls is not None else None


def build_event(value: Mapping[str, Any]) -> Event | None:
    """A line of `events.jsonl`."""
    return _build(Event, value)


def build_resources(value: Mapping[str, Any]) -> ResourceRecord | None:
    """A line of a file in `resources/`."""
    gpus = value.get("gpus")
    built = [
        _build(GpuUse, g) for g in (gpus if isinstance(gpus, list) else []) if isinstance(g, dict)
    ]
    record = _build(ResourceRecord, value)
    if record is None:
        return None
    return dataclasses.replace(record, gpus=tuple(gpu for gpu in built if gpu is not None))


def status_after(events: Iterable[Event], status: str = "running") -> str:
    """How a run ended, by what happened after it had that status: see `RunDir.status`."""
    for event in events:
        status = _STATUS.get(event.event, status)
    return status


def newest_stretch(steps: Sequence[StepRecord], events: Sequence[Event]) -> list[StepRecord]:
    """Steps since the run has had the layout and the number of ranks that it last started with: others took
    another time. All, where it had no others, or no step since."""
    begun = math.inf
    starts = [event for event in events if event.event == "start"]
    for event in reversed(starts):
        if any(event.details.get(k) != starts[-1].details.get(k) for k in ("layout", "num_ranks")):
            return [s for s in steps if s.time >= begun] or list(steps)
        begun = event.time
    return list(steps)


def newest_ranks(ranks: Sequence[RankRecord], events: Sequence[Event]) -> list[RankRecord]:
    """None of them, where it last started with another number of ranks, which have said nothing yet."""
    numbers = [e.details.get("num_ranks") for e in events if e.event == "start"]
    return list(ranks) if not numbers or numbers[-1] in (None, len(ranks)) else []


def safe_host(host: str) -> str:
    """A host's name as a file may be called.

    >>> safe_host("nid001/a b"), safe_host("..")
    ('nid001_a_b', 'host')
    """
    return re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip(".")[:200] or "host"


def fair_share(num_nodes: int) -> int:
    """Records that are kept of each of so many nodes, so that a thousand do not fill the memory."""
    return max(50, min(2000, 60_000 // max(1, num_nodes)))


def thin_out(items: list[_T], most: int) -> None:
    """Drop every second one of what is older than the newest `most`, where there are more than twice as
    many: a long run is kept from its first, coarser where it is longer ago. Changes the list."""
    if len(items) > 2 * most:
        del items[1 : len(items) - most : 2]


@dataclass(frozen=True)
class RunDir:
    """Paths inside one run directory and the records kept there."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str) -> RunDir:
        """A new directory `root/name-DATE-TIME`; a number is added when that one exists."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        for attempt in range(1, 1000):
            suffix = "" if attempt == 1 else f"-{attempt}"
            path = root / f"{name}-{stamp}{suffix}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise UsageError(
                    f"cannot make a run directory under {root} ({error.strerror}); "
                    "choose another place with --out DIR"
                ) from error
            (path / LOGS).mkdir()
            return cls(path)
        raise UsageError(f"a thousand runs named {name}-{stamp} exist under {root}; choose another")

    @classmethod
    def at(cls, path: Path) -> RunDir:
        """The directory `path` itself, made if it is not there; a requeued job finds its run again."""
        if path.is_dir() and any(path.iterdir()) and not (path / CONFIG).exists():
            raise UsageError(
                f"{path} holds something that is no run (no {CONFIG}); choose another directory"
            )
        try:
            (path / LOGS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot make the run directory {path} ({error.strerror}); choose another place"
            ) from error
        return cls(path)

    def start_over(self) -> None:
        """Put aside what a run has left here, so that the next begins at step 0; nothing is deleted."""
        left = [path for path in self.path.iterdir() if not path.name.startswith("before-")]
        if [path.name for path in left] == [LOGS]:
            return
        aside = self.path / f"before-{datetime.now().strftime('%Y%m%d-%H%M%S-%f')}"
        aside.mkdir()
        for path in left:
            path.rename(aside / path.name)
        (self.path / LOGS).mkdir()

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run directory; one that holds no configuration is none."""
        if not path.is_dir():
            raise UsageError(
                f"no run directory at {path}; `ridgeline train` prints where its runs are"
            )
        if not (path / CONFIG).exists():
            raise UsageError(f"{path} is not a run directory: it holds no {CONFIG}")
        return cls(path)

    def file(self, name: str) -> Path:
        return self.path / name

    def write_text(self, name: str, text: str) -> Path:
        """Write aside and rename, so that a reader never sees half a file."""
        target = self.file(name)
        aside = target.with_name(target.name + ".part")
        aside.write_text(text, encoding="utf-8")
        aside.replace(target)
        return target

    def write_json(self, name: str, value: Any) -> Path:
        return self.write_text(name, json.dumps(value, indent=2, sort_keys=False) + "\n")

    def read_json(self, name: str) -> Any:
        """The content of a JSON file of this run, or None when there is no such file."""
        path = self.file(name)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def append(self, record: Record) -> None:
        value = {"kind": _KIND_OF[type(record)], **dataclasses.asdict(record)}
        _append_line(self.file(METRICS), value)

    def append_line(self, name: str, value: Mapping[str, Any]) -> None:
        """One JSON line more in a file of this run."""
        _append_line(self.file(name), value)

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The whole JSON lines of a file of this run."""
        return _read_lines(self.file(name))

    def num_unwritten(self) -> int:
        """Bytes of this run's records that the disk has not taken so far."""
        with _WRITING:
            return sum(
                len(lines) for path, lines in _UNWRITTEN.items() if self.path in path.parents
            )

    def write_waiting(self) -> int:
        """Try once more to write what the disk has not taken; bytes that it does not take now either."""
        with _WRITING:
            for path in [path for path in _UNWRITTEN if self.path in path.parents]:
                _write(path, _UNWRITTEN.pop(path))
        return self.num_unwritten()

    def add_event(self, event: str, **details: Any) -> None:
        _append_line(
            self.file(EVENTS), dataclasses.asdict(Event(time.time(), event, dict(details)))
        )

    def records(self) -> Iterator[Record]:
        """Every record of `metrics.jsonl`, in the order it was written."""
        for value in _read_lines(self.file(METRICS)):
            record = build_record(value)
            if record is not None:
                yield record

    def steps(self) -> list[StepRecord]:
        """One record a step, in their order; where a run went back to a checkpoint or to its beginning,
        nothing of what it did after that before."""
        return self.history()[0]

    def evals(self) -> list[EvalRecord]:
        """The same of evaluations."""
        return self.history()[1]

    def history(self) -> tuple[list[StepRecord], list[EvalRecord], list[RankRecord]]:
        """Steps, evaluations and ranks, read once."""
        steps: list[StepRecord] = []
        evals: list[EvalRecord] = []
        ranks: dict[int, RankRecord] = {}
        was_rank = False
        for record in self.records():
            if isinstance(record, RankRecord):
                if not was_rank:
                    ranks = {}  # there may have been more of them before
                ranks[record.rank] = record
            elif isinstance(record, StepRecord):
                if steps and record.step <= steps[-1].step:
                    steps = [r for r in steps if r.step < record.step]
                    evals = [r for r in evals if r.step < record.step]
                steps.append(record)
            else:
                if evals and record.step <= evals[-1].step:
                    evals = [r for r in evals if r.step < record.step]
                evals.append(record)
            was_rank = isinstance(record, RankRecord)
        return steps, evals, [ranks[rank] for rank in sorted(ranks)]

    def ranks(self) -> list[RankRecord]:
        """What the ranks said of themselves when they last did, by rank."""
        return self.history()[2]

    def events(self) -> list[Event]:
        built = (build_event(value) for value in _read_lines(self.file(EVENTS)))
        return [event for event in built if event is not None]

    def append_resources(self, record: ResourceRecord) -> None:
        """What a node did; lost where the disk does not take it, which is no harm."""
        path = self.file(RESOURCES) / f"{safe_host(record.host)}.jsonl"
        _append_or_drop(path, dataclasses.asdict(record))

    def resource_files(self) -> list[Path]:
        """One a node, by name."""
        return sorted(self.file(RESOURCES).glob("*.jsonl"))

    def resources(self, most: int | None = None) -> dict[str, list[ResourceRecord]]:
        """By host, in the order of time: the newest ones, and of a long run about `most` of each host from
        its beginning on, without reading the rest."""
        files = self.resource_files()
        most = fair_share(len(files)) if most is None else most
        found: dict[str, list[ResourceRecord]] = {}
        for path in files:
            for value in _read_some_lines(path, most):
                record = build_resources(value)
                if record is not None:
                    found.setdefault(record.host, []).append(record)
        return found

    def status(self) -> str:
        """How the run ended: its closing event, or `running` (or killed) when none came after the
        last start. A run that `stopped` was asked to, and can go on."""
        return status_after(self.events())
