"""`ridgeline doctor`: what holds a job back, from a recipe, a script of your own, or a finished run.

A recipe or script is run for some tens of steps on as many ranks as asked, in processes of their own;
nothing of it is kept but the measurement. A run directory is judged by its records, without torch. With
--climb the remedies are then tried one after the other, and what helps is kept. Added to the app by
`cli.py`.

The flow: `doctor` reads the command line; `_judge_run` or `_judge_training` measures; `_conclude` judges,
writes and tells; `_climb` goes on from there.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ridgeline.cli_shared import choose_for_ranks, ended_in_order, num_cores, require_torch
from ridgeline.errors import RunError, UsageError

if TYPE_CHECKING:
    from ridgeline.config import RunConfig
    from ridgeline.doctor.measured import Measured
    from ridgeline.doctor.states import Effort
    from ridgeline.plan.kept import Compared
    from ridgeline.rundir import RunDir

DOCTOR = "doctor.json"
STEPS = 30
BUDGET_S, LOSS_BOUND, ROUNDS = 1800.0, 0.005, 5
"""Of a climb where nothing else is said."""

What = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|SCRIPT|RUNDIR", help="A recipe, a script of your own, or a finished run."
    ),
]
Rest = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="For a recipe; for a script: its own arguments, after --."
    ),
]
NumProcesses = Annotated[
    int, typer.Option("-n", "--num-processes", min=1, help="Ranks on this machine.")
]
Steps = Annotated[int, typer.Option(min=6, help="Steps that are timed and profiled.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Where doctor.json and the pictures go; default: the run, or runs/doctor-*."),
]
Machine = Annotated[
    Path | None,
    typer.Option(help="machine.json of `ridgeline machine compute`; else a quick measurement."),
]
Trace = Annotated[
    bool, typer.Option("--trace", help="Keep the profile too, as trace.json for Perfetto.")
]
Nvtx = Annotated[bool, typer.Option("--nvtx", help="Mark steps, data and updates for Nsight.")]
Climbs = Annotated[
    bool,
    typer.Option("--climb", help="Try the remedies, and keep those that are faster and right."),
]
Budget = Annotated[
    float, typer.Option(min=1, help="With --climb: begin no remedy after so many seconds of it.")
]
LossBound = Annotated[
    float,
    typer.Option(min=0, help="With --climb: how far the loss may be off, as a share of it."),
]
Rounds = Annotated[
    int, typer.Option(min=1, help="With --climb: turns of each two states that are compared.")
]
Without = Annotated[
    list[str] | None,
    typer.Option(help="With --climb: a remedy that is not to be tried, by name; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


class DoctorCommand(TyperCommand):
    """Tells of `--` where an option is the script's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", "")
            if type(error).__name__ != "NoSuchOption":
                raise
            script = next((n for n, word in enumerate(given) if word.endswith(".py")), len(given))
            place = next((n for n, w in enumerate(given) if w.partition("=")[0] == option), 0)
            if place <= script:
                raise
            like = ", ".join(getattr(error, "possibilities", None) or ())
            raise UsageError(
                f"{option} is no option of the doctor's{f' (but {like} is)' if like else ''}; a script's "
                f"own arguments come after --: ridgeline doctor {given[script]} -- {given[place]} ..."
            ) from None


@dataclass(frozen=True)
class Asked:
    """The command line."""

    what: str
    rest: list[str]
    num_processes: int
    steps: int
    out: Path | None
    machine: Path | None
    trace: bool
    nvtx: bool
    as_json: bool
    effort: Effort | None
    """Of the climb; None where none was asked for."""


def doctor(
    what: What,
    rest: Rest = None,
    num_processes: NumProcesses = 1,
    steps: Steps = STEPS,
    out: Out = None,
    machine: Machine = None,
    trace: Trace = False,
    nvtx: Nvtx = False,
    climbs: Climbs = False,
    budget: Budget = BUDGET_S,
    loss_bound: LossBound = LOSS_BOUND,
    rounds: Rounds = ROUNDS,
    without: Without = None,
    as_json: Json = False,
) -> None:
    """Say what holds a training back, with the evidence, and what would help."""
    from ridgeline.doctor.states import Effort
    from ridgeline.rundir import CONFIG

    chosen = {"--budget": budget != BUDGET_S, "--loss-bound": loss_bound != LOSS_BOUND}
    chosen |= {"--rounds": rounds != ROUNDS, "--without": bool(without)}
    for option in (name for name, is_chosen in chosen.items() if is_chosen and not climbs):
        raise UsageError(f"{option} is for a climb, and none was asked for; add --climb")
    left_out = _left_out(without or [])
    effort = Effort(rounds=rounds, loss_bound=loss_bound, budget_s=budget, without=left_out)
    asked = Asked(
        what, rest or [], num_processes, steps, out, machine, trace, nvtx, as_json,
        effort if climbs else None,
    )  # fmt: skip
    is_run = (Path(what) / CONFIG).is_file()
    if out is not None:
        _check_out(out)
    value = _judge_run(asked) if is_run else _judge_training(asked)
    if as_json:
        typer.echo(json.dumps(value, indent=1))


def _check_out(out: Path) -> None:
    """Before anything is measured for it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write into {out} of --out ({error.strerror}); name another"
        ) from error


def _left_out(without: list[str]) -> tuple[str, ...]:
    """Remedies that are not to be tried, looked at before anything is measured."""
    from ridgeline.doctor.choice import check_names
    from ridgeline.doctor.remedies.table import REMEDIES, SCRIPT_REMEDIES

    check_names(without, {**REMEDIES, **SCRIPT_REMEDIES})
    return tuple(dict.fromkeys(without))


def _judge_run(asked: Asked) -> dict[str, Any]:
    """A finished run, by its records."""
    from ridgeline.config import load_config
    from ridgeline.doctor.finished import measure_run, read_layout
    from ridgeline.rundir import CONFIG, RunDir

    path = Path(asked.what)
    if asked.rest:
        raise UsageError(f"{asked.rest[0]!r}: a finished run takes no settings; leave it out")
    if asked.effort is not None:
        raise UsageError(
            f"--climb runs a training, and {path} is over; give it the recipe: {path / CONFIG}"
        )
    chosen = {"-n": asked.num_processes != 1, "--steps": asked.steps != STEPS}
    chosen |= {"--machine": asked.machine is not None, "--trace": asked.trace, "--nvtx": asked.nvtx}
    for option in (name for name, is_chosen in chosen.items() if is_chosen):
        raise UsageError(
            f"{option} is for a training that runs, and {path} is over and judged by its records; leave "
            f"it out, or give the recipe: {path / CONFIG}"
        )
    run = RunDir.open(path)
    ranks = [measure_run(run)]
    trained = load_config(path / CONFIG, []).config
    trained = dataclasses.replace(trained, layout=str(read_layout(run)))
    compared = _compare(run, ranks[0])
    return _conclude(ranks, [], asked.out or path, asked.as_json, None, trained, compared)


def _judge_training(asked: Asked) -> dict[str, Any]:
    """A recipe or a script: some steps of it are run, and with --climb many more."""
    from ridgeline.config import find_recipe, load_config, telling_places
    from ridgeline.doctor.recommend import how_to_try
    from ridgeline.doctor.request import TRACE, read_answers
    from ridgeline.doctor.seen import as_listed, of_script
    from ridgeline.rundir import RunDir

    _check_is_training(asked.what)
    require_torch("`ridgeline doctor`")
    is_script = asked.what.endswith(".py")
    recipe = None if is_script else find_recipe(asked.what)
    config = None if recipe is None else load_config(recipe, asked.rest).config
    _check_can_run(asked, config)
    with _folder_of_ranks() as folder:
        with telling_places(recipe, () if is_script else asked.rest):
            if config is not None:
                config = _choose(asked, config)
            _run_ranks(asked, config, folder)
        ranks, timeline, script = read_answers(folder)
        ranks = _note_strangers(ranks, asked.num_processes)
        if not ranks:
            raise RunError("no rank left a measurement; run it with `ridgeline train` to see why")
        out = asked.out or RunDir.create(Path("runs"), f"doctor-{Path(asked.what).stem}").path
        without = asked.effort.without if asked.effort is not None else ()
        if config is not None:
            ran, more = _with_ranks(config, asked.num_processes), ""
        else:
            assert script is not None  # rank 0 says it with its measurement
            ran, more = as_listed(of_script(Path(asked.what)), script), ""
            if asked.effort is None:
                more = how_to_try(asked.what, asked.rest, asked.num_processes, script.has_job)
        value = _conclude(
            ranks, timeline, out, asked.as_json, folder / TRACE, ran, without=without, more=more,
            has_job=script is not None and script.has_job,
        )  # fmt: skip
    if asked.effort is not None:
        trained = ran if config is not None else None
        value["ladder"] = _climb(asked, trained, out, ranks[0], asked.effort)
    return value


def _note_strangers(ranks: list[Measured], num_processes: int) -> list[Measured]:
    """Processes of a script that never met are no ranks of one training."""
    if num_processes == 1 or not ranks or ranks[0].num_ranks > 1:
        return ranks
    note = (
        f"the {num_processes} processes exchanged nothing: these are as many trainings of their own beside "
        "each other, and this is the first of them"
    )
    return [dataclasses.replace(ranks[0], notes=(*ranks[0].notes, note))]


@contextmanager
def _folder_of_ranks() -> Iterator[Path]:
    """Where ranks leave what they found. It stays where an error sends its reader there for a traceback."""
    folder = Path(tempfile.mkdtemp(prefix="ridgeline-doctor-"))
    stays = False
    try:
        yield folder
    except RunError as error:
        stays = str(folder) in str(error)
        raise
    finally:
        if not stays:
            shutil.rmtree(folder, ignore_errors=True)


def _check_is_training(what: str) -> None:
    from ridgeline.config import recipe_names
    from ridgeline.rundir import CONFIG

    if Path(what).is_dir() and what not in recipe_names():
        inside = sorted(Path(what).glob(f"*/{CONFIG}"))
        named = f", {inside[-1].parent} for one" if inside else ""
        raise UsageError(
            f"{what} is a directory without {CONFIG}, and so no run; name a run directory{named}, a recipe "
            "or a script"
        )


def _choose(asked: Asked, config: RunConfig) -> RunConfig:
    """The recipe that ranks are started with, and that a climb begins with: `auto` is a layout now."""
    # What is said of the choice is not for programs.
    with redirect_stdout(sys.stderr if asked.as_json else sys.stdout):
        config = choose_for_ranks(config, asked.num_processes, asked.num_processes).config
    _check_layout(config.layout, asked.num_processes)
    return config


def _with_ranks(config: RunConfig, num_ranks: int) -> RunConfig:
    """The recipe with `dp` filled in where it was left to the number of ranks."""
    from ridgeline.layout import Layout

    layout = Layout.parse_for(config.layout, num_ranks, "layout")
    return dataclasses.replace(config, layout=str(layout))


def _check_can_run(asked: Asked, config: RunConfig | None) -> None:
    """What is known to be wrong before anything runs."""
    from ridgeline.doctor.interface import surely_lacks_interface, tell_missing
    from ridgeline.machine.record import read_machine

    if asked.machine is not None:
        if not asked.machine.is_file():
            raise UsageError(
                f"no file {asked.machine} of --machine; `ridgeline machine compute` makes one"
            )
        read_machine(asked.machine, "--machine")
    script = Path(asked.what)
    if config is None and not script.is_file():
        raise UsageError(f"no script at {script}; name a file, a recipe or a run directory")
    if config is None and asked.effort is not None and surely_lacks_interface(script):
        raise UsageError(tell_missing(script))


def _run_ranks(asked: Asked, config: RunConfig | None, folder: Path) -> None:
    """Measure on every rank; what each of them finds lies in the folder then."""
    from ridgeline.config import dump_config
    from ridgeline.doctor.request import Request
    from ridgeline.launch.start import Local
    from ridgeline.rundir import CONFIG

    text, threads = "", None
    if config is not None:
        text, threads = dump_config(config), config.threads
    Request(
        steps=asked.steps,
        script=asked.what if config is None else "",
        arguments=tuple(asked.rest) if config is None else (),
        nvtx=asked.nvtx,
        machine=str(asked.machine.resolve()) if asked.machine is not None else "",
        trace=asked.trace,
        climbs=asked.effort is not None,
    ).write(folder)
    (folder / CONFIG).write_text(text, encoding="utf-8")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = ["-m", "ridgeline.doctor.worker", str(folder)]
    quiet = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    starter = Local(asked.num_processes, num_cores())
    try:
        with ended_in_order():
            starter.run(command, asked.num_processes, folder, threads, quiet)
    except KeyboardInterrupt:
        raise RunError("interrupted; there is no verdict") from None


def _check_layout(layout: str, num_processes: int) -> None:
    from ridgeline.layout import Layout, check_available, require_layout

    said = Layout.parse_for(layout, num_processes, "layout")
    require_layout(said, "layout")
    for finding in check_available(said):
        raise UsageError(str(finding))


def _conclude(
    ranks: Sequence[Measured],
    timeline: Sequence[tuple[float, float, str, float]],
    out: Path,
    as_json: bool,
    trace: Path | None,
    config: RunConfig,
    compared: Sequence[Compared] = (),
    without: Sequence[str] = (),
    more: str = "",
    has_job: bool = False,
) -> dict[str, Any]:
    """Judge, draw, write, and tell; for programs the caller prints what this returns. `compared`: what
    was predicted of a finished run. `without`: remedies that nobody wants to hear of; `more` is said
    beneath those that there are; `has_job`: of a script, whether it uses the interface."""
    from ridgeline.doctor.pictures import write_pictures
    from ridgeline.doctor.recommend import list_remedies
    from ridgeline.doctor.show import show_verdict
    from ridgeline.doctor.verdict import judge

    measured = ranks[0]
    verdict = judge(measured, ranks[1:])
    remedies = list_remedies(measured, config, without, has_job)
    value: dict[str, Any] = {
        "verdict": verdict.to_dict(),
        "remedies": remedies,
        "measured": [m.to_dict() for m in ranks],
    }
    if compared:
        value["predicted"] = [one.to_dict() for one in compared]
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / DOCTOR).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        made = [out / DOCTOR, *write_pictures(out, measured, timeline)]
        if trace is not None and trace.is_file():
            (out / trace.name).write_bytes(trace.read_bytes())
            made.append(out / trace.name)
    except OSError as error:
        raise RunError(
            f"cannot write into {out} of --out ({error.strerror}); name another"
        ) from error
    if not as_json:
        typer.echo(show_verdict(measured, verdict, remedies, compared, more))
        typer.echo(f"\nwritten: {', '.join(path.name for path in made)} in {out}")
    return value


def _climb(
    asked: Asked, config: RunConfig | None, out: Path, measured: Measured, effort: Effort
) -> dict[str, Any]:
    """From the measured state as far as it goes; the ladder as plain values."""
    from ridgeline.doctor.climb import CLIMBED, RECIPE, climb, climb_script

    def say(text: str) -> None:
        typer.echo(text, err=asked.as_json)

    # Also where a shell has started this in the background, and Ctrl-C is ignored there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    several = f"-n {asked.num_processes}" if asked.num_processes > 1 else ""
    own = f"{asked.num_processes} processes of its own" if several else "its own process"
    say(f"\nclimbing; every state has {own}, and what is compared takes turns\n")
    try:
        if config is None:
            script = Path(asked.what)
            ladder = climb_script(
                script, asked.rest, out, measured=measured, effort=effort, say=say,
                num_ranks=asked.num_processes,
            )  # fmt: skip
            say(f"\nwritten: {CLIMBED}, ladder.json, ladder.svg in {out}")
            how = "python" if asked.num_processes == 1 else f"ridgeline launch {several} -- python"
            use = (
                f"RIDGELINE_TUNE={out / CLIMBED} {how} {script}, or ridgeline.start(tune=...) in it"
            )
        else:
            ladder = climb(config, out, measured=measured, effort=effort, say=say)
            say(f"\nwritten: {RECIPE}, ladder.json, ladder.svg in {out}")
            use = " ".join(["ridgeline train", str(out / RECIPE), several]).strip()
    except OSError as error:
        raise RunError(f"cannot climb in {out} ({error.strerror}); name another --out") from error
    if ladder.interrupted:
        raise RunError(f"interrupted; what was climbed so far is in {out}")
    if ladder.overrides:
        say(f"use it: {use}")
    return dataclasses.asdict(ladder)


def _compare(run: RunDir, measured: Measured) -> list[Compared]:
    from ridgeline.plan.kept import compare_run

    ranks = [r.peak_memory_bytes for r in run.ranks() if r.peak_memory_bytes is not None]
    seen = [measured.memory.peak_bytes] if measured.memory is not None else []
    most = max([*seen, *ranks], default=None)
    return compare_run(run, measured.step_s, most, measured.device_kind == "cuda")
