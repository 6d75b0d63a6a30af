"""What is known of the trials of a search, kept line by line, so that one that was cut off goes on.

`journal.jsonl` in the search's folder has a line for every trial that was begun, every share of its run
that was reached, and how it failed. A trial's run directory is `trials/NNN`. Nothing is taken back: a
member of a population that goes on from another's weights is a trial of its own. Imports without torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.rundir import RunDir
from ridgeline.search.space import Settings

JOURNAL = "journal.jsonl"
TRIALS = "trials"
NODES = "nodes"
"""The word behind `--on` for those of the job around."""


@dataclass
class Trial:
    """One run with settings of its own."""

    number: int
    settings: Settings
    parent: int | None = None
    """The trial whose weights it begins with."""
    begins: float = 0.0
    """The share of a run that the parent had trained then."""
    scores: dict[float, float] = field(default_factory=dict)
    """By the share of the run that was trained."""
    failed: str = ""
    """Why it ended before its time."""
    seconds: float = 0.0
    """That it was trained for."""
    running: float = 0.0
    """The share that it is being trained to; 0 where it is not."""
    idle: int = 0
    """Stretches in a row that ended before their time and trained nothing."""

    @property
    def share(self) -> float:
        return max(self.scores, default=self.begins)

    @property
    def last_score(self) -> float | None:
        return self.scores[self.share] if self.scores else None

    @property
    def has_finite_score(self) -> bool:
        return self.last_score is not None and math.isfinite(self.last_score)

    @property
    def name(self) -> str:
        return f"{self.number:03d}"


@dataclass(frozen=True)
class Request:
    """What a search was asked for; kept in `search.json`."""

    space: tuple[str, ...]
    metric: str
    draw: str
    schedule: str
    trials: int
    seed: int
    factor: int
    first: float
    rounds: int
    ranks: int
    at_once: int | None = None
    workdir: str = "."
    """Where it was begun: what recipes name by a path, or import, is found from there."""
    on: tuple[str, ...] = ()
    """Where a trial runs, as options."""

    @property
    def is_on_nodes(self) -> bool:
        """On those of the job around, where `ridgeline train` starts it as on any host."""
        return self.on[:2] == ("--on", NODES)

    @property
    def train_options(self) -> tuple[str, ...]:
        """Those of `ridgeline train`."""
        return () if self.is_on_nodes else self.on


class Journal:
    """The folder of one search."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials: list[Trial] = []
        self.higher: bool | None = None
        """Whether more of the metric is better; known once a trial has been evaluated."""
        for line in RunDir(folder).lines(JOURNAL):
            self._take(line)

    def path(self, trial: Trial) -> Path:
        return self.folder / TRIALS / trial.name

    def begin(self, settings: Settings, parent: int | None = None, begins: float = 0.0) -> Trial:
        number = len(self.trials)
        self._write(what="trial", number=number, settings=settings, parent=parent, begins=begins)
        return self.trials[-1]

    def reach(self, trial: Trial, share: float, score: float, seconds: float, higher: bool) -> None:
        self._write(
            what="reached",
            number=trial.number,
            share=share,
            # JSON has no word for them.
            score=score if math.isfinite(score) else None,
            seconds=round(seconds, 3),
            higher=higher,
        )

    def pause(self, trial: Trial, seconds: float) -> None:
        """It was stopped, and goes on from its newest checkpoint."""
        self._write(what="paused", number=trial.number, seconds=round(seconds, 3))

    def retry(self, trial: Trial) -> None:
        """It failed for a reason that is gone."""
        self._write(what="again", number=trial.number, seconds=0.0)

    def fail(self, trial: Trial, why: str, seconds: float) -> None:
        self._write(what="failed", number=trial.number, why=why, seconds=round(seconds, 3))

    def _write(self, **line: Any) -> None:
        RunDir(self.folder).append_line(JOURNAL, line)
        self._take(line)

    def _take(self, line: Mapping[str, Any]) -> None:
        if line["what"] == "trial":
            self.trials.append(
                Trial(line["number"], dict(line["settings"]), line["parent"], line["begins"])
            )
            return
        trial = self.trials[line["number"]]
        trial.seconds += line["seconds"]
        trial.running = 0.0
        if line["what"] != "reached":
            trial.failed = line.get("why", "")
            return
        self.higher = line["higher"]
        worst = -math.inf if self.higher else math.inf
        trial.scores[line["share"]] = worst if line["score"] is None else line["score"]


def best_first(trials: Iterable[Trial], share: float, higher: bool) -> list[Trial]:
    """Those that were trained that far and judged there, the best one first; of equals the older. One that
    failed later is among them, so that what was decided here stays so."""
    found = [one for one in trials if share in one.scores]
    return sorted(found, key=lambda t: (-t.scores[share] if higher else t.scores[share], t.number))


def winner(trials: Iterable[Trial], higher: bool) -> Trial | None:
    """The best of those that were trained furthest."""
    found = [one for one in trials if one.has_finite_score and not one.failed]
    furthest = max((one.share for one in found), default=0.0)
    return next(iter(best_first(found, furthest, higher)), None)


def lineage(trials: list[Trial], trial: Trial) -> list[Trial]:
    """It and those whose weights it has, the oldest first."""
    found = [trial]
    while (parent := found[0].parent) is not None:
        found.insert(0, trials[parent])
    return found


def write_request(folder: Path, request: Request) -> None:
    RunDir(folder).write_json("search.json", asdict(request))


def read_request(folder: Path) -> Request:
    path = folder / "search.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        lists = {name: tuple(values[name]) for name in ("space", "on")}
        return Request(**{**values, **lists})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} does not say what was searched: {error}") from error
