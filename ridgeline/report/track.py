"""Runs on their way to a service that keeps many of them, from their directories alone.

Compute nodes often reach no other network, and a training should wait for none: this runs where there is
one, beside the training or after it. What was sent is noted in the run directory, so that it is not sent
twice. Called by `cli_track.py`; needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridgeline import rundir
from ridgeline.errors import RunError
from ridgeline.report.follow import Followed
from ridgeline.report.summary import flatten_config
from ridgeline.report.trackers import Told, Tracker
from ridgeline.rundir import EvalRecord, RunDir, StepRecord, build_record
from ridgeline.train.board import scalars_of

Make = Callable[[Told, str | None], Tracker]
SETTLED = ("finished", "failed", "stopped", "interrupted")
"""Words of a run that nobody is training."""


class Tracked:
    """One run, as far as a service has it."""

    def __init__(self, run: RunDir, kind: str, project: str, make: Make) -> None:
        self.run, self._project, self._make = run, project, make
        self._kept = f"track-{kind}.json"
        self._followed = Followed(run.file(rundir.METRICS))
        self._seen = 0
        """Records of the file that were looked at."""
        self._tracker: Tracker | None = None
        self._sent: dict[str, Any] = {}
        """As it was noted when that was opened."""

    @property
    def where(self) -> str:
        return self._tracker.where if self._tracker is not None else ""

    @property
    def is_settled(self) -> bool:
        return self.run.status() in SETTLED

    def catch_up(self) -> int:
        """Send what is new; how many records that were."""
        news = self._followed.read()
        if news.starts_over:
            self.end()
        sent: dict[str, Any] = self.run.read_json(self._kept) or {}
        num = 0
        try:
            for value in news.values:
                record = build_record(value)
                if not self._seen and not self._is_of(sent, value):
                    sent = {"first": value.get("time"), "records": 0}
                is_new = self._seen >= sent.get("records", 0)
                if is_new and isinstance(record, StepRecord | EvalRecord):
                    tracker = self._open(sent, record.time)
                    tracker.log(record.step, record.time, scalars_of(record))
                    num += 1
                self._seen += 1
        except KeyboardInterrupt:
            self._note(num)
            raise
        self._note(num)
        return num

    def _note(self, num: int) -> None:
        """What is new has been sent."""
        if self._tracker is not None and num:
            self._tracker.flush()
            self._keep({**self._sent, "records": self._seen})

    def _is_of(self, sent: dict[str, Any], first: dict[str, Any]) -> bool:
        """Whether what was sent is of this training, and is where it is to be."""
        is_there = not self._project or sent.get("project") == self._project
        return is_there and sent.get("first") == first.get("time")

    def end(self) -> None:
        """Nothing more will be sent by this process, or for this training."""
        if self._tracker is not None:
            self._tracker.end(self.run.status() if self.is_settled else "running")
        self._tracker, self._seen = None, 0

    def _open(self, sent: dict[str, Any], began: float) -> Tracker:
        if self._tracker is None:
            text = self.run.file(rundir.CONFIG).read_text(encoding="utf-8")
            settings = flatten_config(text)
            name = self.run.path.resolve().name
            project = self._project or settings.get("name", name)
            told = Told(name, self.run.path, project, began, settings, text)
            self._tracker = self._make(told, sent.get("id"))
            self._sent = {**sent, "id": self._tracker.id, "project": project}
            # At once: what is sent and not noted would be another run's the next time.
            self._keep(self._sent)
        return self._tracker

    def _keep(self, value: dict[str, Any]) -> None:
        try:
            self.run.write_json(self._kept, value)
        except OSError as error:
            raise RunError(
                f"cannot write {self.run.file(self._kept)} ({error.strerror}), where it is noted what was "
                "sent; make room, or track a copy of the run"
            ) from error
