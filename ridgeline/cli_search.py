"""`ridgeline search`: many runs of one recipe with other settings, the better ones trained further.

Added to the app by `cli.py`; needs no torch, which its trials import.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli_shared import check_before_start, may_have_gpu, num_cores, require_torch
from ridgeline.errors import RunError, UsageError, complain, say, unknown_word
from ridgeline.launch.env import said_threads

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
        typer.Option(
            help="Not here: on the nodes of the job around, on ray, or each trial as a job of slurm, lsf, "
            "pbs or flux."
        ),
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
    retry: Annotated[
        bool, typer.Option("--retry-failed", help="Of a search: its failed trials once more.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Only what is known of a search so far.")
    ] = False,
) -> None:
    """Search for the settings that train best, or go on with a search that was cut off."""
    from ridgeline.launch.lock import locked
    from ridgeline.search.request import resumed
    from ridgeline.search.trials import Journal, read_request, write_request

    folder = Path(recipe)
    known = (folder / "search.json").is_file()
    said = {
        "over": over, "schedule": schedule, "draw": draw, "metric": metric, "factor": factor,
        "first": first, "rounds": rounds, "seed": seed, "num-processes": ranks, "on": on, "job": job,
        "out": out,
    }  # fmt: skip
    given = [f"--{name}" for name, value in said.items() if value is not None] + (overrides or [])
    _check_words(folder, known, given, {"--show": show, "--retry-failed": retry})
    if show:
        _show(Journal(folder), read_request(folder))
        return
    require_torch("`ridgeline search`")
    if not known:
        new = _Asked(recipe, overrides or [], over or [], job or [], on, ranks, at_once)
        folder = new.prepare(
            out,
            trials=trials,
            schedule=schedule,
            draw=draw,
            metric=metric,
            seed=seed,
            factor=factor,
            first=first,
            rounds=rounds,
        )
    with locked(folder, f"look at it with `ridgeline search {shlex.quote(str(folder))} --show`"):
        request = resumed(read_request(folder), trials, at_once, retry, len(Journal(folder).trials))
        places = _places(request, _config(folder))
        write_request(folder, request)
        _run(folder, request, places, retry)


def _check_words(folder: Path, known: bool, given: list[str], of_search: dict[str, bool]) -> None:
    """What is said has to be about the folder of a search, or about a recipe."""
    from ridgeline.config import recipe_names

    for option, asked in of_search.items():
        if asked and not known:
            raise UsageError(
                f"{option} is for searches, and {folder} is none; give the folder of one"
            )
    if known and given:
        raise UsageError(
            f"{folder} is a search, and goes on as it began; leave {given[0]} out (--trials and --at-once "
            "may change)"
        )
    if not known and folder.is_dir() and str(folder) not in recipe_names():
        raise UsageError(
            f"{folder} is a folder and no search (it has no search.json); give a recipe, or the folder of "
            "a search"
        )


def _run(folder: Path, request: Request, places: Places, retry: bool) -> None:
    from ridgeline.rundir import RunDir
    from ridgeline.search.run import Search
    from ridgeline.search.trials import winner

    found = Search(folder, request, places, _Teller(request))
    say(f"{folder}: {_plan_text(request, found.schedule.shares)}")
    _tell_idle(request)
    try:
        found.run(retry)
    finally:
        with suppress(OSError):  # a full disk is told by what it stopped
            _show(found.journal, request)
        if RunDir(found.journal.folder).write_waiting():
            complain(RunError(f"the disk has not taken all results of {folder}; make room"))
    if winner(found.journal.trials, bool(found.journal.higher)) is None:
        failed = [one for one in found.journal.trials if one.failed]
        why = f"all failed, the last with: {failed[-1].failed}" if failed else "none gave a number"
        raise RunError(f"no trial has a result: {why}")


def _tell_idle(request: Request) -> None:
    """Of a search on one node of a job that has more."""
    from ridgeline.launch.nodes import job_around

    with suppress(UsageError):
        nodes = 1 if request.on else job_around()[1].num_nodes
        if nodes > 1:
            say(f"it trains on one of the {nodes} nodes of this job; --on nodes takes all of them")


@dataclass(frozen=True)
class _Asked:
    """A new search, before anything is made of it."""

    recipe: str
    overrides: list[str]
    over: list[str]
    job: list[str]
    on: str | None
    ranks: int | None
    at_once: int | None

    def prepare(self, out: Path | None, **said: Any) -> Path:
        """The folder, with a copy of the recipe that no later edit changes; where the same search was
        begun before, as a job that is put back into the queue has it, that one."""
        from ridgeline.config import dump_config, find_recipe, load_config
        from ridgeline.search.request import KEPT, make_request
        from ridgeline.search.run import RECIPE
        from ridgeline.search.space import fit_types, read_space
        from ridgeline.search.trials import write_request
        from ridgeline.train.checks import check_metric
        from ridgeline.typed import leaf_items, to_plain

        for text in self.overrides:
            if text.partition("=")[0].strip() in KEPT and not text.startswith("train.target"):
                raise UsageError(f"{text} is the search's own in every trial; leave it out")
        config = load_config(find_recipe(self.recipe), self.overrides).config
        values = dict(leaf_items(to_plain(config)))
        kind = self._kind()
        request = make_request(
            [one.text() for one in fit_types(read_space(self.over), values)],
            workdir=str(Path.cwd()),
            ranks=self._count_ranks(config, kind),
            at_once=self.at_once,
            on=kind,
            job=self.job,
            **said,
        )
        keys = [one.partition("=")[0].strip() for one in request.space]
        if not any(key == "train.task" or key.startswith("data.") for key in keys):
            check_metric(config, request.metric, "--metric")
        is_threads_said = config.threads is not None
        config = self._in_trials(config, request)
        _places(request, config)
        self._try_ends(request)
        name = f"{config.name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
        folder = out or Path("searches") / name
        text = dump_config(config)
        if folder.exists() and any(folder.iterdir()):
            _require_same(folder, request, config, is_threads_said)
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECIPE).write_text(text, encoding="utf-8")
        write_request(folder, request)
        return folder

    def _kind(self) -> str | None:
        from ridgeline.launch.nodes import KINDS, job_around, resolve_kind
        from ridgeline.search.trials import NODES

        if self.on == NODES:
            job_around()
            return NODES
        if self.on is not None and self.on not in ("auto", *KINDS):
            raise unknown_word("scheduler", self.on, ("auto", NODES, *KINDS), "--on")
        kind = None if self.on is None else resolve_kind(self.on, "--on")
        return None if kind == "local" else kind

    def _count_ranks(self, config: RunConfig, kind: str | None) -> int:
        """As many as the layout says, where nobody else does."""
        from ridgeline.layout import Layout, read_auto
        from ridgeline.search.trials import NODES

        is_elsewhere = kind not in (None, NODES)
        if self.ranks is not None or is_elsewhere or read_auto(config.layout) is not None:
            return self.ranks or 1
        return Layout.parse(config.layout, "layout").world_size

    def _in_trials(self, config: RunConfig, request: Request) -> RunConfig:
        """What all trials have, whatever the recipe says: none ends early, each knows the metric."""
        keep = "" if config.train.eval_samples == 0 else request.metric
        threads = config.threads
        # Sums depend on it to the last bit: whoever trains the best one again gets the same. What other
        # nodes than this have is not known yet, but for their cores.
        is_known = config.device == "cpu" or (not request.on and not _num_gpus())
        if threads is None and is_known and (not request.on or request.is_on_nodes):
            threads = said_threads() or _share_of_cores(request)
        return dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, target={}, stop_after=1.0),
            checkpoint=dataclasses.replace(config.checkpoint, keep=1, keep_best=keep),
            threads=threads,
        )

    def _try_ends(self, request: Request) -> None:
        """A key that is not known, or a value that is refused, is told before anything is made."""
        from ridgeline.config import find_recipe, load_config
        from ridgeline.search.space import overrides_of, read_space

        space = read_space(request.space)
        for one in space:
            ends = one.choices or (one.at(0.0), one.at(math.nextafter(1.0, 0.0)))
            for value in ends:
                load_config(
                    find_recipe(self.recipe), [*self.overrides, *overrides_of({one.key: value})]
                )
        if not request.train_options and not any(
            o.key.startswith(("layout", "train.batch")) for o in space
        ):
            config = load_config(find_recipe(self.recipe), self.overrides).config
            check_before_start(config, request.ranks)


def _require_same(folder: Path, request: Request, config: RunConfig, is_threads_said: bool) -> None:
    from ridgeline.config import dump_config
    from ridgeline.search.run import RECIPE
    from ridgeline.search.trials import read_request

    if not (folder / "search.json").is_file():
        raise UsageError(f"{folder} is there already and no search; choose another --out")
    before = read_request(folder)
    same = dataclasses.replace(before, trials=request.trials, at_once=request.at_once) == request
    kept = (folder / RECIPE).read_text(encoding="utf-8")
    if not is_threads_said:  # they come from the cores and nodes of the place where it was begun
        config = dataclasses.replace(config, threads=_config(folder).threads)
    if not same or kept != dump_config(config):
        raise UsageError(
            f"{folder} is another search: `ridgeline search {shlex.quote(str(folder))}` goes on with it; "
            "choose another --out for this one"
        )


def _places(request: Request, config: RunConfig) -> Places:
    from ridgeline.launch.env import visible_devices
    from ridgeline.search.places import build_places

    if request.is_on_nodes:
        from ridgeline.search.nodes import build_nodes

        return build_nodes(request.ranks, request.at_once, config.device != "cpu")
    on = request.on[1] if request.on[:1] == ("--on",) else None
    devices = [] if on is not None or config.device == "cpu" else visible_devices(_num_gpus())
    if devices and len(devices) < request.ranks * (request.at_once or 1):
        raise UsageError(
            f"--at-once {request.at_once or 1} trials of -n {request.ranks} ranks need more GPUs than the "
            f"{len(devices)} that are here; ask for fewer"
        )
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return build_places(on, request.at_once, request.ranks, devices, cores or range(num_cores()))


def _share_of_cores(request: Request) -> int:
    """What a rank has of a host's cores with the trials that run beside it."""
    from ridgeline.launch.nodes import job_around

    nodes, cores = 1, num_cores()
    if request.is_on_nodes:
        given = job_around()[1]
        nodes, cores = given.num_nodes, given.cpus_per_node or cores
    beside = -(-(request.at_once or 1) // nodes)
    return max(1, cores // (beside * request.ranks))


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

    def __init__(self, request: Request) -> None:
        self._request, self._began = request, time.monotonic()

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


def _write(journal: Journal, request: Request) -> Trial | None:
    """The best settings so far, and the page."""
    from ridgeline.report.searched import build_search_page
    from ridgeline.search.show import table_of, tell_best, way_of, write_best

    best = write_best(journal, request)
    headers, rows = table_of(journal, request)
    curves = {one.name: way_of(journal.trials, one) for one in journal.trials}
    keys = [text.partition("=")[0] for text in request.space]
    points = {
        key: [
            (one.name, one.settings[key], one.scores[one.share], one.share)
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
        said=tell_best(journal, request, best) if best is not None else ["No trial has a result."],
        reports={
            one.name: f"trials/{one.name}/report.html"
            for one in journal.trials
            if (journal.path(one) / "report.html").is_file()
        },
        curves=curves,
        points=points,
        log_keys=[text.partition("=")[0] for text in request.space if text.endswith(":log")],
    )
    return best


def _show(journal: Journal, request: Request) -> None:
    from ridgeline.search.show import show_table, table_of, tell_best

    for line in show_table(*table_of(journal, request)):
        say(line)
    best = _write(journal, request)
    for line in (
        tell_best(journal, request, best) if best is not None else ["no trial has a result"]
    ):
        say(line)
    say(f"page: {journal.folder / 'search.html'}")
