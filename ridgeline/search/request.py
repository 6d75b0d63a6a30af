"""What a search is asked for, checked: options that mean something together, or one sentence.

Imports without torch; called by `cli_search.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.errors import UsageError
from ridgeline.search.draw import build_draw, count_grid
from ridgeline.search.schedules import build_schedule
from ridgeline.search.space import read_space
from ridgeline.search.trials import NODES, Request

TRIALS = 16
KEPT = ("train.target", "train.stop_after", "checkpoint.keep", "checkpoint.keep_best")
"""Settings that are the search's own in every trial."""
_ONLY = {"factor": "halving", "first": "halving", "rounds": "population"}
"""Options that one schedule alone knows."""


def make_request(
    over: Sequence[str],
    *,
    workdir: str,
    trials: int | None = None,
    schedule: str | None = None,
    draw: str | None = None,
    metric: str | None = None,
    seed: int | None = None,
    ranks: int = 1,
    at_once: int | None = None,
    on: str | None = None,
    job: Sequence[str] = (),
    **of_schedule: float | None,
) -> Request:
    """A new search; None is what nobody said."""
    schedule, draw = schedule or "halving", draw or "spread"
    for name, value in of_schedule.items():
        if value is not None and _ONLY[name] != schedule:
            raise UsageError(
                f"--{name} {value:g} is for --schedule {_ONLY[name]}, and this is {schedule}; leave it out"
            )
    if job and on is None:
        raise UsageError(f"--job {job[0]} is for jobs; say where with --on, e.g. --on slurm")
    if job and on == NODES:
        raise UsageError(f"--job {job[0]} is for jobs of their own; leave it out with --on {NODES}")
    space = read_space(over)
    for one in space:
        if one.key in KEPT:
            raise UsageError(f"--over {one.key} is the search's own in every trial; leave it out")
    made = Request(
        space=tuple(over),
        metric=metric or "loss",
        draw=draw,
        schedule=schedule,
        trials=trials or (count_grid(space) if draw == "grid" else TRIALS),
        seed=seed or 0,
        factor=int(of_schedule.get("factor") or 3),
        first=float(of_schedule.get("first") or 0.1),
        rounds=int(of_schedule.get("rounds") or 10),
        ranks=ranks,
        at_once=at_once,
        workdir=workdir,
        on=(*(("--on", on) if on else ()), *job),
    )
    _check(made)
    return made


def resumed(
    request: Request, trials: int | None, at_once: int | None, retry: bool, begun: int
) -> Request:
    """The same search, with more trials or others at a time."""
    if retry and request.schedule == "population":
        raise UsageError(
            "--retry-failed: a population has replaced its failed members; begin another search"
        )
    return replace(extended(request, trials, begun), at_once=at_once or request.at_once)


def extended(request: Request, trials: int | None, begun: int) -> Request:
    """The same search with more trials."""
    if trials is None or trials == request.trials:
        return request
    if request.schedule == "population":
        raise UsageError(
            f"--trials {trials}: a population stays as large as it began, {request.trials} members"
        )
    if trials < begun:
        raise UsageError(
            f"--trials {trials} is less than the {begun} that were begun; ask for more"
        )
    made = replace(request, trials=trials)
    _check(made)
    return made


def _check(request: Request) -> None:
    """Whatever a part of it refuses is told before anything is made."""
    space = read_space(request.space)
    build_schedule(request, space, build_draw(request.draw, space, request.seed))
    if request.draw == "grid" and request.trials > count_grid(space):
        raise UsageError(
            f"--trials {request.trials} is more than the {count_grid(space)} points of the grid"
        )
