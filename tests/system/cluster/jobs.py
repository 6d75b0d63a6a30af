"""What the tests of all launchers share: a training that every one of them must reproduce, and commands."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ridgeline.rundir import RunDir

from .hosts import wait_until

TRAINING = (
    "digits",
    "model={name: 'tests.system.cluster.slow:Net', args: {}}",
    "schedule={name: constant}",
    "train.target={}",
    "train.eval_samples=0",
    "log.every=1",
    "log.tensorboard=no",
    "log.weights=false",
    "threads=1",
    "device=cpu",
)
"""With a constant rate, the losses of a shorter run are the first of a longer one."""
LONGEST = 120
"""Steps of the reference that others are compared with."""
ENDLESS = ("train.epochs=100000", "checkpoint.minutes=0")


def ridgeline(*words: object) -> list[str]:
    """The command line that a user would type."""
    return [sys.executable, "-m", "ridgeline.cli", *map(str, words)]


def losses(run: Path) -> list[float]:
    """The loss of each step, which must be there once, in order."""
    steps = list(RunDir.open(run).steps())
    assert [record.step for record in steps] == list(range(1, len(steps) + 1)), "steps are missing"
    return [record.loss for record in steps]


def reached(run: Path, step: int) -> Callable[[], bool]:
    """Whether a run has done so many steps."""

    def look() -> bool:
        metrics = run / "metrics.jsonl"
        return metrics.is_file() and metrics.read_text().count('"kind": "step"') >= step

    return look


def submit(cluster: Any, *words: object, **options: Any) -> tuple[str, Path]:
    """Give a job to the queue through a command; its id and its folder."""
    done = cluster.run(ridgeline(*words), check=True, **options)
    match = re.search(r"^job (\S+): (\S.*)$", done.stdout, re.MULTILINE)
    assert match is not None, done.stdout + done.stderr
    return match.group(1), Path(match.group(2))


def write_script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def rank_logs(folder: Path, num: int) -> list[str]:
    """What each rank wrote, by rank."""
    return [(folder / "logs" / f"rank-{rank}.out").read_text() for rank in range(num)]


def gone(cluster: Any, words: Sequence[str], timeout_s: float = 75) -> None:
    """Wait until no host has a process with one of these words in its command."""
    left: dict[str, Any] = {}

    def none() -> bool:
        left.clear()
        for word in words:
            left.update(cluster.matching(word))
        return not left

    try:
        wait_until("processes to end", none, timeout_s, 0.25)
    except TimeoutError as error:
        raise AssertionError(f"{error}; left: {left}") from None
