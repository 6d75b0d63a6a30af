"""A search as it runs: asks the schedule what is next, starts it, and judges what comes back.

Every trial is a run directory that `ridgeline train` has made, and is known by that alone. Called by
`cli_search.py`; imports without torch.
"""

from __future__ import annotations

import math
import os
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
_HOPELESS = 3
"""Trials that may fail before any has come to a result."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
Tell = Callable[[Trial, str], None]


@dataclass
class _Stretch:
    """A part of a trial's run that is being trained."""

    trial: Trial
    share: float
    running: Running
    began: float
    step: int
    """Of the newest checkpoint when it began."""


class Search:
    def __init__(self, folder: Path, request: Request, places: Places, tell: Tell) -> None:
        self.journal = Journal(folder.absolute())
        self.request, self._places, self._tell, self._folder = request, places, tell, folder
        space = read_space(request.space)
        draw = build_draw(request.draw, space, request.seed)
        self.schedule = build_schedule(request, space, draw)
        self._stretches: list[_Stretch] = []

    def run(self) -> None:
        """Until nothing is left to train; what it was cut off in is for the next call."""
        with _hearing() as heard:
            try:
                self._go(heard)
            finally:
                self._stop()
        if heard:
            again = f"`ridgeline search {self._folder}` goes on"
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
        self._stretches.append(_Stretch(trial, work.share, running, time.monotonic(), step))

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
            *self.request.on,
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
        if ended.how == "failed":
            self._fail(trial, ended.words, seconds)
            return
        if ended.how == "stopped" or not has_reached(path, one.share):
            trial.running = 0.0
            trial.seconds += seconds
            if newest_step(path) <= one.step:
                self._fail(trial, ended.words or "it was stopped before it saved anything", 0.0)
            return  # is asked for again
        score, higher = judge(path, self.request.metric)
        self.journal.reach(trial, one.share, score, seconds, higher)
        self._tell(trial, "")

    def _fail(self, trial: Trial, why: str, seconds: float) -> None:
        self.journal.fail(trial, why, seconds)
        self._tell(trial, why)
        trials = self.journal.trials
        failed = [t for t in trials if t.failed]
        if len(failed) >= _HOPELESS and not any(t.scores for t in trials):
            log = self.journal.path(trial).with_suffix(".log")
            raise RunError(f"the first {len(failed)} trials failed, the last with: {why} ({log})")

    def _stop(self) -> None:
        """Whatever happened: nothing is left running that nobody looks after."""
        ending = [one.running for one in self._stretches if one.running.stop()]
        until = time.monotonic() + STOP_S
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
        losses = [one.loss for one in run.steps()]
        last = losses[-max(1, len(losses) // 10) :]
        return (math.fsum(last) / len(last) if last else math.nan), False
    found = evals[-1].metrics
    if metric not in found:
        raise UsageError(
            f"--metric {metric} is no metric of this recipe: {', '.join(sorted(found))}"
        )
    saved = list_checkpoints(run.file(CHECKPOINTS))
    best = read_manifest(saved[-1]).state.get("best", {}) if saved else {}
    return found[metric], bool(best.get("higher", False))


def has_reached(path: Path, share: float) -> bool:
    """Whether its last stretch was the one that is asked for, and came to its end."""
    run = RunDir(path)
    if not run.file(CONFIG).is_file() or run.status() not in ("finished", "stopped"):
        return False
    return load_config(run.file(CONFIG)).config.train.stop_after >= share


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
