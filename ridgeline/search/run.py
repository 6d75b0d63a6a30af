"""A search as it runs: asks the schedule what is next, starts it, and judges what comes back.

Every trial is a run directory that `ridgeline train` has made, and is known by that alone. Called by
`cli_search.py`; imports without torch.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ridgeline.checkpoint.manifest import list_checkpoints, read_manifest
from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.errors import Requeue, RunError, UsageError
from ridgeline.rundir import CHECKPOINTS, CONFIG, RunDir
from ridgeline.search.draw import build_draw
from ridgeline.search.places import STOP_S, Ended, Places, Running
from ridgeline.search.schedules import Work, build_schedule
from ridgeline.search.space import overrides_of, read_space
from ridgeline.search.trials import Journal, Request, Trial

RECIPE = "recipe.yaml"
_LOOK_S = 0.1
_HOPELESS, _IN_A_ROW = 3, 5
"""Trials that may fail one after the other, before and after any has come to a result."""
_IDLE = 2
"""How often a trial is started that is stopped each time before it has saved anything."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
Tell = Callable[[Trial, str], None]


@dataclass
class _Stretch:
    """A part of a trial's run that is being trained."""

    trial: Trial
    share: float
    running: Running
    began: float
    began_at: float
    """Seconds since 1970."""
    step: int
    """Of the newest checkpoint when it began."""


class Search:
    def __init__(self, folder: Path, request: Request, places: Places, tell: Tell) -> None:
        self.journal = Journal(folder.resolve())
        self.request, self._places, self._tell, self._folder = request, places, tell, folder
        space = read_space(request.space)
        draw = build_draw(request.draw, space, request.seed)
        self.schedule = build_schedule(request, space, draw)
        self._stretches: list[_Stretch] = []
        self._failures = 0
        """In a row."""

    def run(self, retry_failed: bool = False) -> None:
        """Until nothing is left to train; what it was cut off in is for the next call."""
        for trial in self.journal.trials if retry_failed else ():
            if trial.failed:
                self.journal.retry(trial)
        with _hearing() as heard:
            try:
                self._places.open(lambda: bool(heard))
                self._go(heard)
            finally:
                self._stop()
                self._places.close()
        if heard:
            again = f"`ridgeline search {shlex.quote(str(self._folder))}` goes on"
            name, left = signal.Signals(heard[0]).name, self._places.left
            if heard[0] in (signal.SIGTERM, signal.SIGUSR1):
                raise Requeue(f"stopped by {name}; {left}, and {again}", name)
            raise RunError(f"interrupted; {left}, and {again}")

    def _go(self, heard: list[int]) -> None:
        while not heard:
            while len(self._stretches) < self._places.count and (work := self._next()) is not None:
                self._start(work)
            if not self._stretches:
                return
            time.sleep(_LOOK_S)
            for one in list(self._stretches):
                ended = one.running.poll()
                if ended is not None:
                    self._stretches.remove(one)
                    self._finish(one, ended)

    def _next(self) -> Work | None:
        return self.schedule.next(self.journal.trials, bool(self.journal.higher))

    def _start(self, work: Work) -> None:
        if work.number is None:
            assert work.settings is not None
            trial = self.journal.begin(work.settings, work.parent, work.begins)
        else:
            trial = self.journal.trials[work.number]
        path = self.journal.path(trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        if has_reached(path, work.share):  # while nobody looked on: a job needs no search around it
            self._judge(trial, work.share, 0.0)
            return
        try:
            self._inherit(trial, path)
        except (UsageError, RunError) as error:
            self._fail(trial, str(error), 0.0)
            return
        trial.running = work.share
        log = path.with_suffix(".log")
        running = self._places.start(
            self.words(trial, work.share, path), path, log, self.request.workdir
        )
        step = newest_step(path)
        now = time.monotonic()
        self._stretches.append(_Stretch(trial, work.share, running, now, time.time(), step))

    def words(self, trial: Trial, share: float, path: Path) -> list[str]:
        """The command that trains it that far."""
        return [
            "train",
            str(self.journal.folder / RECIPE),
            *overrides_of(trial.settings),
            f"train.stop_after={share!r}",
            "--run",
            str(path),
            "-n",
            str(self.request.ranks),
            *self.request.train_options,
        ]

    def _inherit(self, trial: Trial, path: Path) -> None:
        """The weights of its parent, where it has one."""
        if trial.parent is None or list_checkpoints(path / CHECKPOINTS):
            return
        parent = self.journal.path(self.journal.trials[trial.parent])
        saved = list_checkpoints(parent / CHECKPOINTS)
        if not saved:
            raise RunError(f"{parent} has no checkpoint to go on from")
        overrides = overrides_of(trial.settings)
        begin_from(saved[-1], path, load_config(self.journal.folder / RECIPE, overrides).config)

    def _finish(self, one: _Stretch, ended: Ended) -> None:
        trial, seconds = one.trial, time.monotonic() - one.began
        path = self.journal.path(trial)
        if has_reached(path, one.share):
            self._judge(trial, one.share, seconds)
            return
        if newest_step(path) > one.step:
            trial.idle = 0
        elif not ended.is_taken:
            trial.idle += 1
        if ended.how == "failed" or trial.idle >= _IDLE:
            words = told_failure(path, one.began_at) or ended.words
            self._fail(trial, words or "it was stopped twice before it saved anything", seconds)
        else:  # is asked for again
            self.journal.pause(trial, seconds)

    def _judge(self, trial: Trial, share: float, seconds: float) -> None:
        score, higher = judge(self.journal.path(trial), self.request.metric)
        self.journal.reach(trial, share, score, seconds, higher)
        self._failures = 0
        self._tell(trial, "")

    def _fail(self, trial: Trial, why: str, seconds: float) -> None:
        self.journal.fail(trial, why, seconds)
        self._tell(trial, why)
        self._failures += 1
        most = _IN_A_ROW if any(t.scores for t in self.journal.trials) else _HOPELESS
        if self._failures >= most:
            log = self.journal.path(trial).with_suffix(".log")
            again = f"`ridgeline search {shlex.quote(str(self._folder))} --retry-failed`"
            raise RunError(
                f"{self._failures} trials failed one after the other, the last with: {why} ({log}); once "
                f"that is mended, {again} tries them again"
            )

    def _stop(self) -> None:
        """Whatever happened: nothing is left running that nobody looks after."""
        ending = [one.running for one in self._stretches if one.running.stop()]
        until = time.monotonic() + STOP_S
        for one in self._stretches:
            self.journal.pause(one.trial, time.monotonic() - one.began)
        for running in ending:
            while running.poll() is None and time.monotonic() < until:
                time.sleep(_LOOK_S)
            if running.poll() is None:
                running.kill()
        self._stretches.clear()


def begin_from(checkpoint: Path, path: Path, config: RunConfig) -> None:
    """A run directory that goes on from a checkpoint of another run."""
    RunDir.at(path).write_text(CONFIG, dump_config(config))
    # Aside first: one that is not whole is never gone on from.
    aside = path / f"{CHECKPOINTS}.part"
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(checkpoint, aside / checkpoint.name, copy_function=_link)
    aside.replace(path / CHECKPOINTS)


def judge(path: Path, metric: str) -> tuple[float, bool]:
    """The metric of a run's last evaluation, and whether more of it is better. Of one that is never
    evaluated, the mean of the last tenth of its losses."""
    run = RunDir(path)
    evals = run.evals()
    if not evals:
        if metric != "loss":
            raise UsageError(
                f"--metric {metric} is of evaluations, and this recipe has none; use --metric loss"
            )
        return mean_loss(run), False
    found = evals[-1].metrics
    if metric not in found:
        raise UsageError(
            f"--metric {metric} is no metric of this recipe; begin another search with one of "
            f"{', '.join(sorted(found))}"
        )
    saved = list_checkpoints(run.file(CHECKPOINTS))
    best = read_manifest(saved[-1]).state.get("best", {}) if saved else {}
    return found[metric], best.get("metric") == metric and bool(best.get("higher"))


def mean_loss(run: RunDir) -> float:
    """Of the last tenth of its steps."""
    losses = [one.loss for one in run.steps()]
    last = losses[-max(1, len(losses) // 10) :]
    return math.fsum(last) / len(last) if last else math.nan


def has_reached(path: Path, share: float) -> bool:
    """Whether it ended there, or further on, by itself; a later stretch may be under way."""
    reached = 0.0
    for event in RunDir(path).events():
        if event.event == "end":
            reached = 1.0
        elif event.event == "stopped":
            reached = max(reached, float(event.details.get("share") or 0.0))
    return reached >= share - 1e-9


def told_failure(path: Path, since: float) -> str:
    """What the run says of how it failed."""
    said = [e for e in RunDir(path).events() if e.event == "failed" and e.time >= since]
    return str(said[-1].details.get("message", "")).splitlines()[0] if said else ""


def newest_step(path: Path) -> int:
    saved = list_checkpoints(path / CHECKPOINTS)
    return int(saved[-1].name.rpartition("-")[2]) if saved else 0


def _link(source: str, target: str) -> None:
    """Files of a checkpoint never change, so that a second name is enough where the disk has that."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def _hearing() -> Iterator[list[int]]:
    """Signals that ask for an end, noted; what is ignored, as under `nohup`, stays so."""
    heard: list[int] = []

    def hear(number: int, _: FrameType | None) -> None:
        heard.append(number)

    known = [n for n in _ENDING if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in known}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            with suppress(TypeError):
                signal.signal(number, handler)
