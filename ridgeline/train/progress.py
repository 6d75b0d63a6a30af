"""What rank 0 shows while it trains: a bar on a terminal, a line now and then elsewhere.

Called by `run.py` in plain calls; knows records and nothing of the trainer.
"""

from __future__ import annotations

import sys
import time
from typing import Protocol

from ridgeline.errors import say
from ridgeline.facts import ModelFacts
from ridgeline.rundir import EvalRecord, StepRecord

_LINE_EVERY_S = 5.0


class Progress(Protocol):
    def step(self, record: StepRecord) -> None: ...
    def evaluation(self, record: EvalRecord) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class Silence:
    """For every rank but the first."""

    def step(self, record: StepRecord) -> None: ...

    def evaluation(self, record: EvalRecord) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def describe_step(record: StepRecord, facts: ModelFacts) -> str:
    """loss, throughput and MFU of a step, as both the bar and the lines show them."""
    rate = record.samples_per_s * facts.units_per_sample
    mfu = f"  MFU {record.mfu:.1%}" if record.mfu is not None else ""
    return f"loss {record.loss:.4f}  {rate:,.0f} {facts.unit}/s{mfu}"


def describe_eval(record: EvalRecord) -> str:
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
    size = f"{record.num_samples} samples, {record.seconds:.1f} s"
    what = " of the averaged weights" if record.averaged else ""
    return f"evaluation{what} after step {record.step}: {metrics}  ({size})"


class Lines:
    """For logs and pipes: at most a line every few seconds, and one for each evaluation."""

    def __init__(self, num_steps: int, facts: ModelFacts) -> None:
        self._num_steps, self._facts = num_steps, facts
        self._last: float | None = None
        # Records come a window at a time, so the time left follows from what they say themselves.
        # The first step is left out: it may have compiled the model.
        self._num_timed, self._timed_s = 0, 0.0

    def step(self, record: StepRecord) -> None:
        now = time.monotonic()
        if self._last is not None:
            self._num_timed += 1
            self._timed_s += record.step_s
            if now - self._last < _LINE_EVERY_S and record.step < self._num_steps:
                return
        self._last = now
        done = self._num_timed
        left = (self._num_steps - record.step) * self._timed_s / done if done else 0.0
        eta = f"  ETA {left:.0f} s" if done else ""
        text = f"step {record.step}/{self._num_steps}  {describe_step(record, self._facts)}{eta}"
        say(text)

    def evaluation(self, record: EvalRecord) -> None:
        self._timed_s += record.seconds
        say(describe_eval(record))

    def note(self, text: str) -> None:
        say(text)

    def close(self) -> None: ...


class Bar:
    """For a terminal."""

    def __init__(self, num_steps: int, facts: ModelFacts) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        self._facts = facts
        self._bar = RichProgress(
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("train", total=num_steps, figures="starting")
        self._bar.start()

    def step(self, record: StepRecord) -> None:
        figures = describe_step(record, self._facts)
        self._bar.update(self._task, completed=record.step, figures=figures)

    def evaluation(self, record: EvalRecord) -> None:
        self._bar.console.print(describe_eval(record), highlight=False)

    def note(self, text: str) -> None:
        self._bar.console.print(text, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def build_progress(num_steps: int, facts: ModelFacts, is_main: bool) -> Progress:
    if not is_main:
        return Silence()
    return Bar(num_steps, facts) if sys.stdout.isatty() else Lines(num_steps, facts)
