"""The command `ridgeline`: one Typer app, each command importing its room when it is called.

Nothing here needs torch until a run starts, so that `--help`, `config` and `report` work on a login
node that has none. Errors of ours become one line and an exit code: 2 for usage, 1 for failure.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline import cli_jobs as jobs
from ridgeline.cli_checkpoint import checkpoint_app
from ridgeline.cli_data import data_app
from ridgeline.cli_doctor import DoctorCommand, doctor
from ridgeline.cli_export import export
from ridgeline.cli_launch import launch_app
from ridgeline.cli_machine import machine_app
from ridgeline.cli_plan import plan_app
from ridgeline.cli_scale import scale_app
from ridgeline.cli_search import search
from ridgeline.cli_shared import (
    check_before_start,
    choose_for_ranks,
    may_have_gpu,
    num_cores,
    require_torch,
)
from ridgeline.cli_track import track
from ridgeline.cli_watch import watch
from ridgeline.errors import Requeue, RunError, UsageError, say
from ridgeline.launch.env import wants_traceback

if TYPE_CHECKING:
    from ridgeline.config import RunConfig
    from ridgeline.launch.env import Limits
    from ridgeline.launch.nodes import Place
    from ridgeline.launch.request import Wanted
    from ridgeline.launch.start import Starter
    from ridgeline.plan.auto import Chosen
    from ridgeline.rundir import RunDir

app = typer.Typer(
    help="Take a PyTorch model that trains on one device to the whole machine, and know why it is "
    "fast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(data_app, name="data")
app.add_typer(launch_app, name="launch")
app.add_typer(machine_app, name="machine")
app.add_typer(plan_app, name="plan")
app.add_typer(scale_app, name="scale")
app.command(cls=DoctorCommand)(doctor)
app.command()(export)
app.command()(search)
app.command()(track)
app.command()(watch)

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.lr=0.1")
]


@app.command()
@jobs.with_job_options
def train(
    recipe: Annotated[
        str,
        typer.Argument(help="A recipe's name, a YAML file, or a run directory to go on with."),
    ],
    job: jobs.JobOptions,
    overrides: Overrides = None,
    num_processes: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--num-processes",
            min=1,
            help="Ranks, on each node with --on; default: one a GPU, else 1.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where run directories are made.")] = Path("runs"),
    into: Annotated[
        Path | None,
        typer.Option(
            "--run", help="The run directory itself: made, or gone on with if it is there."
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over, and put what was there aside.")
    ] = False,
    restarts: Annotated[
        int | None, typer.Option(min=0, help="restart.times: restarts after a rank failed.")
    ] = None,
    min_ranks: Annotated[
        int | None, typer.Option(min=1, help="restart.min_ranks: go on with as few ranks as this.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(help="Not here: auto, slurm, lsf, pbs, flux, mpi, ssh or ray."),
    ] = None,
) -> None:
    """Train a recipe here or under a scheduler (--on), or go on with a run that was cut off."""
    wanted = job.wanted(num_processes)
    settings = {"restart.times": restarts, "restart.min_ranks": min_ranks}
    options = [f"{key}={value}" for key, value in settings.items() if value is not None]
    asked = _Asked(recipe, [*(overrides or []), *options], into, out, fresh)
    if on is None:
        on = "auto" if job.site is not None else None
    if on is None or on == "local":
        jobs.refuse_job_options(job, wanted)
        jobs.check_bind(job.bind)
        with asked.telling_places():
            _train_here(asked, num_processes, job.bind, wanted)
        return
    said = wanted
    kind, place, wanted = jobs.where_to(on, "--on", job, wanted)
    with asked.telling_places():
        if jobs.queued(kind, job.here):
            _submit(asked, kind, place, wanted, job.dry_run)
        else:
            jobs.refuse_queue_options(kind, job, said)
            _train_spread(asked, kind, place, wanted)


@dataclass(frozen=True)
class _Asked:
    """What to train, before anything is made of it."""

    recipe: str
    overrides: list[str]
    into: Path | None
    out: Path
    fresh: bool

    def load(self) -> tuple[RunConfig, Path | None]:
        """The configuration, and the run directory where one was named."""
        from ridgeline.config import load_config

        into = self.into
        if into is None and self._names_run():
            into = Path(self.recipe)
        return load_config(self._file(), self.overrides).config, into

    def telling_places(self) -> AbstractContextManager[None]:
        """Errors about a setting say where it was written."""
        from ridgeline.config import telling_places

        return telling_places(self._file(), self.overrides)

    def _names_run(self) -> bool:
        from ridgeline.rundir import CONFIG

        return (Path(self.recipe) / CONFIG).is_file()

    def _file(self) -> Path:
        """Where the settings are read from: a recipe, or the configuration of a run."""
        from ridgeline.config import find_recipe
        from ridgeline.rundir import CONFIG

        in_run = self.into is None and self._names_run()
        return find_recipe(str(Path(self.recipe) / CONFIG) if in_run else self.recipe)

    def before(self, into: Path | None) -> RunDir | None:
        """The run that is there already."""
        from ridgeline.rundir import CONFIG, RunDir

        return RunDir(into) if into is not None and (into / CONFIG).is_file() else None

    def for_index(self, index: str) -> _Asked:
        """One of an array: `{index}` in values is its number, and so is its run directory's name."""
        overrides = [text.replace("{index}", index) for text in self.overrides]
        into = None if self.into is None else self.into / index
        return replace(self, overrides=overrides, into=into)

    def for_first(self, array: str) -> _Asked:
        """To see whether an array can be trained at all."""
        from ridgeline.launch.script import read_array

        return self.for_index(str(read_array(array).first))


def _train_here(asked: _Asked, num_processes: int | None, bind: str, wanted: Wanted) -> None:
    from ridgeline.launch.start import Local

    config, into = asked.load()
    require_torch("training")
    before = asked.before(into)
    count = num_processes or _default_processes(config, before)
    chosen = choose_for_ranks(config, count, count, None if asked.fresh else before)
    check_before_start(chosen.config, count)
    limits = jobs.limits_here("local", wanted)
    _train_in(asked, chosen, into, Local(count, num_cores(), bind), limits)


def _train_spread(asked: _Asked, kind: str, place: Place, wanted: Wanted) -> None:
    """In the nodes of the job around, or on hosts that answer."""
    from ridgeline.launch.nodes import allocation_of, build_spread

    limits, given = jobs.limits_here(kind, wanted), allocation_of(kind)
    if limits.array and given is not None and given.array_index:
        asked = asked.for_index(given.array_index)
    config, into = asked.load()
    require_torch("training")
    spread = build_spread(kind, place)
    before = None if asked.fresh else asked.before(into)
    chosen = choose_for_ranks(config, spread.num_ranks, spread.per_node, before)
    check_before_start(chosen.config, spread.num_ranks)
    with jobs.put_back(kind):
        _train_in(asked, chosen, into, spread, limits)


def _train_in(
    asked: _Asked, chosen: Chosen, into: Path | None, starter: Starter, limits: Limits
) -> None:
    """The run directory, the ranks, the report."""
    from ridgeline.rundir import CONFIG, RunDir

    config = chosen.config
    if _says_past(asked, config, into):
        return
    known = into is not None and (into / CONFIG).is_file()
    with _leaving_no_folders(asked.out if into is None else into):
        run = RunDir.create(asked.out, config.name) if into is None else RunDir.at(into)
        _train_at(run, asked, chosen, starter, limits, known)
    report = _write_report(run)
    say(f"run directory: {run.path}\nreport: {report}")


@contextmanager
def _leaving_no_folders(path: Path) -> Iterator[None]:
    """Of a recipe that is refused nothing stays, also not the folders that were made for its run."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        yield
    except UsageError:
        for folder in made:
            with suppress(OSError):  # it is there no more, or something else is in it by now
                folder.rmdir()
        raise


def _train_at(
    run: RunDir, asked: _Asked, chosen: Chosen, starter: Starter, limits: Limits, known: bool
) -> None:
    """What the directory is given before the ranks, and they."""
    from ridgeline.config import dump_config
    from ridgeline.launch.lock import locked
    from ridgeline.rundir import CONFIG, PLAN

    config = chosen.config
    if asked.fresh:
        with locked(run.path):
            run.start_over()
    with locked(run.path):
        before = None
        if known and not asked.fresh:
            files = [run.file(name) for name in (CONFIG, PLAN)]
            before = {f.name: f.read_text(encoding="utf-8") for f in files if f.is_file()}
        run.write_text(CONFIG, dump_config(config))
        if chosen.plan is not None:
            run.write_json(PLAN, chosen.plan)
        else:
            run.file(PLAN).unlink(missing_ok=True)  # of a layout that it no longer has
        _run_ranks(config, starter, run, before, limits)


def _says_past(asked: _Asked, config: RunConfig, into: Path | None) -> bool:
    """Whether there is nothing to do for a run that was trained further than that; it stays as it is."""
    from ridgeline.train.checks import tell_past

    before = None if asked.fresh else asked.before(into)
    text = tell_past(config, before) if before is not None else ""
    if text:
        say(text)
    return bool(text)


def _submit(asked: _Asked, kind: str, place: Place, wanted: Wanted, dry_run: bool) -> None:
    """A job whose script trains, with the configuration as it is now in the run directory."""
    from ridgeline.config import dump_config
    from ridgeline.launch.lock import locked
    from ridgeline.rundir import CONFIG, RunDir

    if asked.fresh and wanted.array is not None:
        raise UsageError(
            "--fresh with --array would start over at every requeue; choose another --run"
        )
    config, into = asked.load() if wanted.array is None else asked.for_first(wanted.array).load()
    into = asked.into if wanted.array is not None else into
    count = (place.nodes or 1) * (place.per_node or 1)
    check_before_start(config, count)
    if _says_past(asked, config, into):
        return
    made = into is None and not dry_run
    if into is not None:
        path = into
    elif dry_run:
        path = asked.out / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    else:
        path = RunDir.create(asked.out, config.name).path
    words = ["train"]
    if wanted.array is None:
        words += [str(path.absolute())]
    else:
        words += [asked.recipe, *asked.overrides, "--run", str(path.absolute())]
    words += ["--on", kind, "--here", *jobs.place_options(place, wanted)]
    made_job = jobs.job_of(wanted, words, path, wanted.name or config.name)
    if not dry_run and wanted.array is None:
        run = RunDir(path) if made else RunDir.at(path)
        with locked(run.path):
            if asked.fresh:
                run.start_over()
            run.write_text(CONFIG, dump_config(config))
    jobs.hand_over(made_job, kind, wanted.chain, dry_run, "--on")


def _default_processes(config: RunConfig, before: RunDir | None) -> int:
    """As many ranks as the layout says, or as the run had before, else one a GPU, else one."""
    from ridgeline.layout import Layout, read_auto
    from ridgeline.rundir import LAYOUT

    auto = read_auto(config.layout) is not None
    said = 1 if auto else Layout.parse(config.layout, "layout").world_size
    if not auto and "dp" in config.layout:
        return said
    if before is not None and before.file(LAYOUT).is_file():
        last = Layout.parse(before.file(LAYOUT).read_text().strip(), LAYOUT)
        if last.world_size % said == 0:
            return last.world_size
    if config.device == "cpu" or not may_have_gpu():
        return said
    import torch

    devices: int = torch.cuda.device_count()
    return max(devices // said * said, said)


def _run_ranks(
    config: RunConfig,
    starter: Starter,
    run: RunDir,
    before: dict[str, str] | None,
    limits: Limits,
) -> None:
    """Start the ranks; whatever happens, the run directory says how it ended. `before` is the
    configuration, and the plan, of a run that was there already, by file."""
    from ridgeline.launch.logs import clear_failure, note_failure
    from ridgeline.launch.survive import newest_checkpoint, run_job
    from ridgeline.rundir import LAYOUT, PLAN

    signal.signal(signal.SIGINT, signal.default_int_handler)
    clear_failure(run.path)
    try:
        run_job(config, run, starter, limits)
    except Requeue:
        _show_cursor()
        _write_report(run)
        raise
    except KeyboardInterrupt:
        _add_event(run, "interrupted")
        _show_cursor()
        _write_report(run)
        saved = newest_checkpoint(run)
        goes_on = f"goes on from {saved}" if saved else "starts over, since nothing was saved yet"
        # How many there are is written with the layout, when the ranks have begun.
        is_known = run.file(LAYOUT).is_file() or starter.num_ranks == 1
        ranks = "" if is_known else f" -n {starter.num_ranks}"
        raise RunError(
            f"interrupted; what was recorded so far is in {run.path}, and `ridgeline train {run.path}"
            f"{ranks}` {goes_on}"
        ) from None
    except UsageError:
        # Nothing was trained: no directory is left behind for what was a slip of the pen.
        if before is None:
            shutil.rmtree(run.path, ignore_errors=True)
        else:
            run.file(PLAN).unlink(missing_ok=True)
            for name, text in before.items():
                run.write_text(name, text)
        raise
    except RunError as error:
        _add_event(run, "failed", message=str(error))
        with suppress(OSError):
            note_failure(run.path, error)
        _show_cursor()
        _write_report(run)
        raise RunError(f"{error}\n  run directory: {run.path}") from None


def _show_cursor() -> None:
    """A rank that was killed while its progress bar was up has left the cursor hidden."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")


def _write_report(run: RunDir) -> str:
    """The page, or why there is none: a run that trained is not a failure for want of a picture."""
    from ridgeline.report.build import build_report

    try:
        return str(build_report(run))
    except OSError as error:
        return f"not written ({error}); `ridgeline report {run.path}` makes it again"


def _add_event(run: RunDir, event: str, **details: str) -> None:
    """How a run ended, where that can still be written: the disk may be what failed."""
    with suppress(OSError):
        run.add_event(event, **details)


@app.command()
def verify(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    overrides: Overrides = None,
    layout: Annotated[
        list[str] | None, typer.Option("--layout", help="A layout to prove; may be given again.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every layout the table allows on up to -n processes.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            "-n",
            help="Processes: at most so many with --all (default 4); with --layout as in train, where "
            "a dp that is not said follows from it.",
            min=1,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps to compare.", min=1)] = 3,
    full: Annotated[
        bool, typer.Option("--full", help="Show refused layouts' reasons too.")
    ] = False,
) -> None:
    """Prove layouts: the same losses, gradients and weights as one device, or the first that differs."""
    from ridgeline.config import find_recipe, load_config, telling_places
    from ridgeline.layout import Layout, read_auto

    config = load_config(find_recipe(recipe), overrides or []).config
    if every and layout:
        raise UsageError("verify takes --layout (once or more) or --all, not both; leave one out")
    if not every and not layout:
        raise UsageError("verify needs either --layout (once or more) or --all")
    require_torch("`ridgeline verify`")
    from ridgeline.verify.layouts import all_layouts
    from ridgeline.verify.show import show_rows

    if every:
        chosen = all_layouts(processes or 4)
    elif processes is None:
        chosen = [Layout.parse(text, "--layout") for text in layout or []]
    else:
        chosen = [Layout.parse_for(text, processes, "--layout") for text in layout or []]
    wanted = (read_auto(config.layout) or Layout.parse(config.layout, "layout")).precision
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with telling_places(find_recipe(recipe), overrides or []):
            show_rows(config, chosen, steps, wanted, every, full)
    except KeyboardInterrupt:
        _show_cursor()
        raise RunError("interrupted; layouts without a row above were not proven") from None


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="One run directory, or several to compare.")],
    out: Annotated[
        Path | None, typer.Option(help="Where a comparison goes; default: comparison.html here.")
    ] = None,
) -> None:
    """Make the report of a run again, or compare several runs in one page."""
    from ridgeline.report.build import build_report, compare_runs
    from ridgeline.rundir import RunDir

    opened = [RunDir.open(path) for path in runs]
    if len(opened) == 1:
        if out is not None:
            raise UsageError("--out is for comparisons; one run's report goes into its directory")
        typer.echo(f"report: {build_report(opened[0])}")
    else:
        typer.echo(f"comparison: {compare_runs(opened, out or Path('comparison.html'))}")


@app.command()
def recipes() -> None:
    """List the recipes that come with the package."""
    from ridgeline.config import RECIPES, recipe_names

    for name in recipe_names():
        first = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        typer.echo(f"{name:<20} {first.removeprefix('# ')}")


@config_app.command("show")
def config_show(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    overrides: Overrides = None,
) -> None:
    """Print the resolved configuration, with where each value came from."""
    from ridgeline.config import find_recipe, load_config, show_config

    typer.echo(show_config(load_config(find_recipe(recipe), overrides or [])), nl=False)


@app.command()
def version() -> None:
    """Print the version."""
    from ridgeline import __version__

    typer.echo(__version__)


def main() -> None:
    """Entry point: our errors as one line on standard error, with their exit code."""
    # Until ranks are running there is nothing to put in order, and an interrupt in the middle of an
    # import can be lost: let Ctrl-C end the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        app()
    except (UsageError, RunError) as error:
        if wants_traceback():
            traceback.print_exc()
        from ridgeline.launch.failures import tell_once
        from ridgeline.train.said import is_said

        sys.exit(error.exit_code if is_said(str(error)) else tell_once(error))


if __name__ == "__main__":
    main()
