"""Some tens of steps of a training, watched: first timed alone, then profiled, then their memory.

A probe is told when a step is over and when the step waits for data; nothing else of the training knows of
it. Steps are timed without the profiler, and the profile only says what they consist of, so that what the
profiler costs is no part of the result and can be stated. Used by `measure.py` and `script.py`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ridgeline.doctor.sampler import Sampler, SyncWatch
from ridgeline.doctor.trace import Trace
from ridgeline.machine.power import Power, PowerWatch, open_gauge

WARMUP = 4
"""Steps before the first that is timed: they compile, search for kernels and fill memory."""
_MOST_PROFILED = 12
_MEMORY_STEPS = 2
"""Steps whose allocations are recorded, which costs more than all the rest and so comes last."""


@dataclass
class Watched:
    """What a probe saw."""

    step_times: list[float]
    data_times: list[float]
    data_busy: float | None
    trace: Trace
    memory_trace: Trace
    num_profiled: int
    reading: list[tuple[tuple[str, str], int]]
    sync_places: list[tuple[tuple[str, str], int]]
    """Lines that wait for the device, and how often in a step."""
    peak_bytes: float = 0.0
    reserved_bytes: float = 0.0
    num_retries: float = 0.0
    trace_json: Path | None = None
    power: Power | None = None
    """While steps were timed."""

    @property
    def step_s(self) -> float:
        return statistics.median(self.step_times)


@dataclass
class _Stretch:
    """Spans of the host's clock, in nanoseconds."""

    data: list[tuple[int, int]] = field(default_factory=list)
    optimizer: list[tuple[int, int]] = field(default_factory=list)


class Probe:
    """Call `step_done` after every step until it says that it has seen enough, then `finish`.

    It must not be called while an op or an annotation of the profiler's is open: one that ends after the
    profiler was stopped writes to memory that is gone.
    """

    def __init__(
        self,
        device: torch.device,
        steps: int = 30,
        warmup: int = WARMUP,
        nvtx: bool = False,
        keep_trace: Path | None = None,
    ) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._nvtx = nvtx and self._cuda
        self._keep_trace = keep_trace
        self.num_profiled = max(2, min(_MOST_PROFILED, steps // 3))
        self.num_timed = max(2, steps - self.num_profiled)
        self._warmup = warmup
        first = warmup + self.num_timed
        # One step more than is looked at: the profiler's own start.
        self._plan = {
            warmup: self._begin_timing,
            first: self._begin_profile,
            first + 1: self._begin_window,
            first + 1 + self.num_profiled: self._end_window,
            first + 1 + self.num_profiled + _MEMORY_STEPS: self._end_memory,
        }
        self.num_steps = max(self._plan)
        self._done = 0
        self._timing = False
        self._marks: list[Any] = []
        self._data_s: list[float] = []
        self._waited = self._busy = 0.0
        self._spans = _Stretch()
        self._window = (0, 0)
        self._sampler = Sampler(threading.main_thread().ident or 0)
        self._profiler: profile | None = None
        self._syncs = SyncWatch()
        self._syncs_open = False
        self._values: dict[str, Any] = {}
        self._memory_values: dict[str, Any] = {}
        self._memory_from, self._memory_window = 0, (0, 0)
        self._range: int | None = None
        self._ends: list[int] = []
        """When each step was over, by the host's clock."""
        self._retries = 0
        self._power = PowerWatch(open_gauge(device))
        self._drawn: Power | None = None
        if self._nvtx:
            self._open_range()

    @property
    def num_done(self) -> int:
        return self._done

    @property
    def is_timing(self) -> bool:
        """Whether the step at hand is timed, and not profiled."""
        return self._timing

    @property
    def is_enough(self) -> bool:
        return self._done >= self.num_steps

    @property
    def main_tid(self) -> int:
        return threading.main_thread().native_id or 0

    def step_done(self) -> bool:
        """Whether that was the last step needed."""
        self._done += 1
        self._ends.append(time.time_ns())
        if self._timing:
            self._mark()
        action = self._plan.get(self._done)
        if action is not None:
            action()
        if self._nvtx:
            self._open_range()
        return self.is_enough

    def _open_range(self) -> None:
        """A step is a range for Nsight, which others in other threads may overlap."""
        if self._range is not None:
            torch.cuda.nvtx.range_end(self._range)
            self._range = None
        if not self.is_enough:
            self._range = torch.cuda.nvtx.range_start(f"step {self._done + 1}")

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        start, busy, wanted = time.time_ns(), time.process_time(), _wanted_s()
        self._sampler.in_data = True
        if self._nvtx:
            torch.cuda.nvtx.range_push("data")
        try:
            yield
        finally:
            if self._nvtx:
                torch.cuda.nvtx.range_pop()
            self._sampler.in_data = False
            end = time.time_ns()
            self._spans.data.append((start, end))
            if self._timing:
                self._waited += (end - start) / 1e9
                self._busy += max(time.process_time() - busy, _wanted_s() - wanted)

    @contextmanager
    def updating(self) -> Iterator[None]:
        start = time.time_ns()
        if self._nvtx:
            torch.cuda.nvtx.range_push("optimizer")
        try:
            yield
        finally:
            if self._nvtx:
                torch.cuda.nvtx.range_pop()
            self._spans.optimizer.append((start, time.time_ns()))

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def _mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _begin_timing(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            self._retries = torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)
        self._wait()
        self._power.start()
        self._timing = True
        self._mark()

    def _begin_profile(self) -> None:
        self._timing = False
        self._wait()
        self._drawn = self._power.stop()
        self._spans = _Stretch()
        self._profiler = profile(activities=self._profiler_kinds(), record_shapes=True)
        self._profiler.start()
        self._sampler.start()
        if self._cuda:  # in a step that is not looked at otherwise
            self._syncs.open()
            self._syncs_open = True

    def _begin_window(self) -> None:
        self._close_syncs()
        self._wait()
        self._window = (time.time_ns(), 0)

    def _close_syncs(self) -> None:
        if self._syncs_open:
            self._syncs.close()
            self._syncs_open = False

    def _end_window(self) -> None:
        assert self._profiler is not None
        self._window = (self._window[0], time.time_ns())
        self._wait()
        self._profiler.stop()
        self._sampler.stop()
        # Before the next one starts: the results of two at once share memory.
        self._values = _export(self._profiler, self._keep_trace)
        self._profiler = profile(activities=self._profiler_kinds(), profile_memory=True)
        self._profiler.start()
        self._memory_from = time.time_ns()

    def _end_memory(self) -> None:
        assert self._profiler is not None
        self._wait()
        self._memory_window = (self._memory_from, time.time_ns())
        self._profiler.stop()
        self._memory_values = _export(self._profiler, None)
        self._profiler = None

    def _profiler_kinds(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]

    def close(self) -> None:
        """End what is under way; for a training that failed or ended too early."""
        self._power.stop()
        self._close_syncs()
        if self._profiler is not None:
            self._profiler.stop()
            self._sampler.stop()
            self._profiler = None

    def finish(self) -> Watched:
        assert self.is_enough, "a probe is finished when it has seen enough"
        spans = self._spans
        last = len(self._ends) - _MEMORY_STEPS
        trace = Trace(
            self._values,
            self._sampler.samples,
            self._window,
            self.main_tid,
            spans.data,
            spans.optimizer,
            self._ends[last - 1 - self.num_profiled : last],
        )
        window, values = self._memory_window, self._memory_values
        memory = Trace(values, (), window, self.main_tid, spans.data, spans.optimizer)
        watched = Watched(
            step_times=self._step_times(),
            data_times=[self._waited / self.num_timed],
            data_busy=min(self._busy / self._waited, 1.0) if self._waited > 1e-6 else None,
            trace=trace,
            memory_trace=memory,
            num_profiled=self.num_profiled,
            reading=self._sampler.reading.most_common(4),
            sync_places=self._syncs.places.most_common(8),
            trace_json=self._keep_trace,
            power=self._drawn,
        )
        if self._cuda:
            stats = torch.cuda.memory_stats(self.device)
            watched.peak_bytes = float(torch.cuda.max_memory_allocated(self.device))
            watched.reserved_bytes = float(torch.cuda.max_memory_reserved(self.device))
            retries = stats.get("num_alloc_retries", 0) - self._retries
            # Counted from the first step that is timed on.
            watched.num_retries = retries / (self.num_steps - self._warmup)
        return watched

    def _step_times(self) -> list[float]:
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._cuda:
            torch.cuda.synchronize(self.device)
            return [float(a.elapsed_time(b)) / 1e3 for a, b in pairs]
        return [b - a for a, b in pairs]


def _wanted_s() -> float:
    """Seconds for which this thread had a core or stood in line for one; 0 where Linux does not say."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            on_core, in_line, *_ = file.read().split()
    except (OSError, ValueError):
        return 0.0
    return (int(on_core) + int(in_line)) / 1e9


def _export(profiler: profile, keep: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="ridgeline-doctor-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_text(encoding="utf-8", errors="replace")
    if keep is not None:
        keep.write_text(text, encoding="utf-8")
    values: dict[str, Any] = json.loads(text)
    return values
