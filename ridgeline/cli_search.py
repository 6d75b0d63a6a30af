"""`ridgeline search`: many runs of one recipe with other settings, the better ones trained further.

Added to the app by `cli.py`; needs no torch, which its trials import.
"""

from __future__ import annotations

import dataclasses
import math
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline import cli_jobs as jobs
from ridgeline.cli_shared import may_have_gpu, num_cores, require_torch
from ridgeline.errors import UsageError, say

if TYPE_CHECKING:
    from ridgeline.config import RunConfig
    from ridgeline.search.places import Places
    from ridgeline.search.trials import Journal, Request, Trial


def search(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe's name, a YAML file, or the folder of a search to go on with."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="The same in all trials.")
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="What is searched: LOW..HIGH, LOW..HIGH:log, or a list A,B,C; may be given again.",
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Settings to try; default 16, with --draw grid all.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="halving (default; the better ones further), population (PBT), or full."),
    ] = None,
    draw: Annotated[
        str | None, typer.Option(help="spread (default), random, grid, or tpe (Optuna).")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Of an evaluation: loss (default), accuracy, ...")
    ] = None,
    factor: Annotated[
        int | None,
        typer.Option(min=2, help="halving: one in 3 goes on, 3 times as long; or in so many."),
    ] = None,
    first: Annotated[
        float | None,
        typer.Option(min=0.001, max=1.0, help="halving: share of a run that all get; default 0.1."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="population: looks at each other; default 10.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of what is drawn; default 0.")] = None,
    at_once: Annotated[
        int | None,
        typer.Option(min=1, help="Trials at a time; default: as many as there are GPUs for, or 1."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("-n", "--num-processes", min=1, help="Ranks of a trial; default 1."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(help="Not here: each trial as a job of slurm, lsf, pbs or flux, or on ray."),
    ] = None,
    job: Annotated[
        list[str] | None,
        typer.Option(
            "--job",
            help="An option of train --on for each, e.g. --job=--time=2h; may be given again.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The search's folder; default: searches/NAME-DATE.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Only what is known of a search so far.")
    ] = False,
) -> None:
    """Search for the settings that train best, or go on with a search that was cut off."""
    from ridgeline.launch.lock import locked
    from ridgeline.search.request import extended, make_request
    from ridgeline.search.trials import Journal, read_request, write_request

    folder = Path(recipe)
    known = (folder / "search.json").is_file()
    said = {
        "over": over, "schedule": schedule, "draw": draw, "metric": metric, "factor": factor,
        "first": first, "rounds": rounds, "seed": seed, "num-processes": ranks, "on": on, "job": job,
        "out": out,
    }  # fmt: skip
    given = [f"--{name}" for name, value in said.items() if value is not None] + (overrides or [])
    if show and not known:
        raise UsageError(f"--show is for searches, and {recipe} is none; give the folder of one")
    if known and given:
        raise UsageError(
            f"{folder} is a search, and goes on as it began; leave {given[0]} out (--trials and --at-once "
            "may change)"
        )
    if show:
        request = read_request(folder)
        _write(Journal(folder), request)
        _show(Journal(folder), request)
        return
    require_torch("`ridgeline search`")
    if not known:
        request = make_request(
            over or (),
            workdir=str(Path.cwd()),
            trials=trials,
            schedule=schedule,
            draw=draw,
            metric=metric,
            seed=seed,
            ranks=ranks,
            on=on,
            job=job or (),
            factor=factor,
            first=first,
            rounds=rounds,
        )
        folder = _prepare(recipe, overrides or [], request, out, at_once)
    with locked(folder):
        if known:
            request = extended(read_request(folder), trials, len(Journal(folder).trials))
            write_request(folder, request)
        _run(folder, request, at_once)


def _run(folder: Path, request: Request, at_once: int | None) -> None:
    from ridgeline.search.run import Search

    found = Search(folder, request, _places(request, folder, at_once), _Teller(folder, request))
    say(f"{folder}: {_plan_text(request, found.schedule.shares)}")
    try:
        found.run()
    finally:
        _write(found.journal, request)
    _show(found.journal, request)


def _prepare(
    recipe: str, overrides: list[str], request: Request, out: Path | None, at_once: int | None
) -> Path:
    """The folder of a new search, with a copy of the recipe that no later edit changes."""
    from ridgeline.config import dump_config, find_recipe, load_config
    from ridgeline.launch.schedulers.table import SCHEDULERS
    from ridgeline.search.run import RECIPE
    from ridgeline.search.space import overrides_of, read_space
    from ridgeline.search.trials import write_request

    config = load_config(find_recipe(recipe), [*overrides, *_same(request)]).config
    if config.threads is None and not request.on and (config.device == "cpu" or not _num_gpus()):
        # Sums depend on it to the last bit: whoever trains the best one again gets the same.
        each = max(1, num_cores() // ((at_once or 1) * request.ranks))
        config = dataclasses.replace(config, threads=each)
    # A key that is not known, or a value that is too small, is told before anything is made.
    for one in read_space(request.space):
        ends = one.choices or (one.at(0.0), one.at(math.nextafter(1.0, 0.0)))
        for value in ends:
            load_config(find_recipe(recipe), [*overrides, *overrides_of({one.key: value})])
    if request.on[:1] == ("--on",) and request.on[1] not in SCHEDULERS:
        jobs.where_to(request.on[1], "--on", jobs.JobOptions(), jobs.JobOptions().wanted(None))
    folder = out or Path("searches") / f"{config.name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is there already and no search; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECIPE).write_text(dump_config(config), encoding="utf-8")
    write_request(folder, request)
    return folder


def _same(request: Request) -> list[str]:
    """What all trials need, whatever the recipe says: none ends early, and each knows the metric."""
    keep = [] if request.metric == "loss" else [f"checkpoint.keep_best={request.metric}"]
    return ["train.target={}", "train.stop_after=1.0", "checkpoint.keep=1", *keep]


def _places(request: Request, folder: Path, at_once: int | None) -> Places:
    import os

    from ridgeline.launch.env import visible_devices
    from ridgeline.search.places import build_places

    on = request.on[1] if request.on[:1] == ("--on",) else None
    config = _config(folder)
    devices = [] if on is not None or config.device == "cpu" else visible_devices(_num_gpus())
    if devices and len(devices) < request.ranks * (at_once or 1):
        raise UsageError(
            f"--at-once {at_once or 1} trials of -n {request.ranks} ranks need more GPUs than the "
            f"{len(devices)} that are here; ask for fewer"
        )
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return build_places(on, at_once, request.ranks, devices, cores or range(num_cores()))


def _config(folder: Path) -> RunConfig:
    from ridgeline.config import load_config
    from ridgeline.search.run import RECIPE

    return load_config(folder / RECIPE).config


def _num_gpus() -> int:
    if not may_have_gpu():
        return 0
    import torch

    count: int = torch.cuda.device_count()
    return count


def _plan_text(request: Request, shares: tuple[float, ...]) -> str:
    from ridgeline.search.show import share_text

    text = f"{request.trials} trials over {', '.join(request.space)}"
    if len(shares) > 1:
        text += f", judged by {request.metric} after {', '.join(share_text(s) for s in shares)}"
    return text + (f", drawn by {request.draw}" if request.draw != "spread" else "")


class _Teller:
    """A line for each result."""

    def __init__(self, folder: Path, request: Request) -> None:
        self._folder, self._request, self._began = folder, request, time.monotonic()

    def __call__(self, trial: Trial, failed: str) -> None:
        from ridgeline.search.show import share_text
        from ridgeline.search.space import overrides_of

        settings = " ".join(overrides_of(trial.settings))
        score = trial.last_score
        what = (
            f"failed: {failed}"
            if failed or score is None
            else f"{self._request.metric} {score:.5g} after {share_text(trial.share)}"
        )
        took = time.monotonic() - self._began
        say(f"[{took:6.0f} s] trial {trial.name}: {what} ({settings})")


def _write(journal: Journal, request: Request) -> None:
    """The best settings so far, and the page."""
    from ridgeline.report.searched import build_search_page
    from ridgeline.search.show import table_of, write_best

    best = write_best(journal, request)
    headers, rows = table_of(journal, request)
    curves = {
        one.name: [
            (share, score) for share, score in sorted(one.scores.items()) if math.isfinite(score)
        ]
        for one in journal.trials
    }
    keys = [text.partition("=")[0] for text in request.space]
    points = {
        key: [
            (one.settings[key], one.scores[one.share], one.share)
            for one in journal.trials
            if one.has_finite_score
        ]
        for key in keys
    }
    build_search_page(
        journal.folder / "search.html",
        title=f"search of {journal.folder.name}",
        metric=request.metric,
        headers=headers,
        rows=rows,
        best=best.name if best is not None else "",
        curves=curves,
        points=points,
        log_keys=[text.partition("=")[0] for text in request.space if text.endswith(":log")],
    )


def _show(journal: Journal, request: Request) -> None:
    from ridgeline.search.show import show_table, table_of, tell_best, write_best

    for line in show_table(*table_of(journal, request)):
        say(line)
    best = write_best(journal, request)
    for line in (
        tell_best(journal, request, best) if best is not None else ["no trial has a result"]
    ):
        say(line)
    say(f"page: {journal.folder / 'search.html'}")
