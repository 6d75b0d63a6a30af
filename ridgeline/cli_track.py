"""`ridgeline track`: runs to Weights & Biases or MLflow, from wherever these can be reached. Added to the
app by `cli.py`; needs no torch.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli_shared import ended_in_order
from ridgeline.errors import UsageError, say, unknown_word

if TYPE_CHECKING:
    from ridgeline.report.track import Tracked


def track(
    places: Annotated[
        list[Path], typer.Argument(metavar="RUN|FOLDER...", help="Run directories, or folders.")
    ],
    to: Annotated[str, typer.Option(help="wandb or mlflow.")],
    project: Annotated[
        str, typer.Option(help="Project or experiment there; default: the recipe's name.")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until all runs have ended, or Ctrl-C.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=1.0, help="With --follow: seconds between two looks.")
    ] = 10.0,
) -> None:
    """Send runs to a tracker of experiments, while they go on or later; nothing is sent twice."""
    from ridgeline.report.live import find_runs
    from ridgeline.report.track import Tracked
    from ridgeline.report.trackers import TRACKERS
    from ridgeline.rundir import RunDir

    if to not in TRACKERS:
        raise unknown_word("tracker", to, TRACKERS, "--to")
    known: dict[Path, Tracked] = {}

    def look() -> list[Tracked]:
        for path in find_runs(places):
            if path not in known:
                known[path] = Tracked(RunDir(path), to, project, TRACKERS[to])
        return list(known.values())

    missing = next((place for place in places if not find_runs([place])), None)
    if missing is not None:
        raise UsageError(
            f"no run directory at {missing}; `ridgeline train` prints where its runs are"
        )
    try:
        with suppress(KeyboardInterrupt), ended_in_order():
            while True:
                runs = look()
                # Before they are read: what comes between the two is of a run that has not ended.
                is_over = not follow or all(one.is_settled for one in runs)
                _send(runs)
                if is_over:
                    break
                time.sleep(every)
    finally:
        for one in known.values():
            one.end()


def _send(runs: list[Tracked]) -> None:
    for one in runs:
        was_there = bool(one.where)
        num = one.catch_up()
        where = f", {one.where}" if one.where and not was_there else ""
        if num or not was_there:
            say(f"{one.run.path}: {num} records{where}")
