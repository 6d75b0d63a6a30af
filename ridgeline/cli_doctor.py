"""`ridgeline doctor`: what holds a job back, from a recipe, a script of your own, or a finished run.

A recipe or script is run for some tens of steps on as many ranks as asked, in processes of their own;
nothing of it is kept but the measurement. A run directory is judged by its records, without torch. With
--climb the remedies are then tried one after the other, and what helps is kept. Added to the app by
`cli.py`.
"""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli_shared import choose_for_ranks, num_cores, require_torch
from ridgeline.errors import RunError, UsageError

if TYPE_CHECKING:
    from ridgeline.config import RunConfig
    from ridgeline.doctor.measured import Measured
    from ridgeline.plan.kept import Compared
    from ridgeline.rundir import RunDir

DOCTOR = "doctor.json"


def doctor(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|SCRIPT|RUNDIR",
            help="A recipe, a script of your own, or a finished run.",
        ),
    ],
    rest: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="For a recipe; for a script: its own arguments."
        ),
    ] = None,
    num_processes: Annotated[
        int, typer.Option("-n", "--num-processes", min=1, help="Ranks on this machine.")
    ] = 1,
    steps: Annotated[int, typer.Option(min=6, help="Steps that are timed and profiled.")] = 30,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where doctor.json and the pictures go; default: the run, or runs/doctor-*."
        ),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(help="machine.json of `ridgeline machine compute`; else a quick measurement."),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Keep the profile too, as trace.json for Perfetto.")
    ] = False,
    nvtx: Annotated[
        bool, typer.Option("--nvtx", help="Mark steps, data and updates for Nsight.")
    ] = False,
    climbs: Annotated[
        bool,
        typer.Option("--climb", help="Try the remedies, and keep those that are faster and right."),
    ] = False,
    budget: Annotated[
        float,
        typer.Option(min=1, help="With --climb: begin no remedy after so many seconds."),
    ] = 1800.0,
    loss_bound: Annotated[
        float,
        typer.Option(min=0, help="With --climb: how far the loss may be off, as a share of it."),
    ] = 0.005,
    rounds: Annotated[
        int, typer.Option(min=1, help="With --climb: turns of each two states that are compared.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Say what holds a training back, with the evidence, and what would help."""
    from ridgeline.config import find_recipe, load_config
    from ridgeline.rundir import CONFIG, RunDir

    path = Path(what)
    if path.is_dir() and (path / CONFIG).is_file():
        from ridgeline.doctor.finished import measure_run

        if rest:
            raise UsageError(f"{rest[0]!r}: a finished run takes no settings; leave it out")
        if climbs:
            raise UsageError(
                f"--climb runs a training, and {what} is over; give it the recipe: {path / CONFIG}"
            )
        run = RunDir.open(path)
        ranks = [measure_run(run)]
        trained = load_config(path / CONFIG, []).config
        value = _conclude(ranks, [], out or path, as_json, None, trained, _compare(run, ranks[0]))
        if as_json:
            typer.echo(json.dumps(value, indent=1))
        return
    require_torch("`ridgeline doctor`")
    is_script = what.endswith(".py")
    config = None if is_script else load_config(find_recipe(what), rest or []).config
    if climbs and num_processes > 1:
        raise UsageError(f"-n {num_processes} with --climb: a climb is on one device; leave -n out")
    folder = _measure(what, config, rest or [], num_processes, steps, machine, trace, nvtx)
    with folder as name:
        value, out, measured = _answer(Path(name), _name_of(what), out, as_json, config)
    if climbs:
        effort = {"budget_s": budget, "loss_bound": loss_bound, "rounds": rounds}
        value["ladder"] = _climb(what, config, rest or [], out, measured, effort, as_json)
    if as_json:
        typer.echo(json.dumps(value, indent=1))


def _climb(
    what: str,
    config: RunConfig | None,
    rest: list[str],
    out: Path,
    measured: Measured,
    effort: dict[str, Any],
    as_json: bool,
) -> dict[str, Any]:
    """From the measured state as far as it goes; the ladder as plain values."""
    import dataclasses

    from ridgeline.doctor.climb import CLIMBED, RECIPE, climb, climb_script
    from ridgeline.doctor.states import Effort

    def say(text: str) -> None:
        typer.echo(text, err=as_json)

    chosen = Effort(**effort)
    # The launcher of the measurement has left a handler of its own behind.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    say("\nclimbing; every state has its own process, and what is compared takes turns\n")
    try:
        if config is None:
            ladder = climb_script(Path(what), rest, out, measured=measured, effort=chosen, say=say)
            say(f"\nwritten: {CLIMBED}, ladder.json, ladder.svg in {out}")
            say(
                f"use it: RIDGELINE_TUNE={out / CLIMBED} python {what}, or "
                f'ridgeline.start(tune="{out / CLIMBED}") in it'
            )
        else:
            ladder = climb(config, out, measured=measured, effort=chosen, say=say)
            say(f"\nwritten: {RECIPE}, ladder.json, ladder.svg in {out}")
            say(f"use it: ridgeline train {out / RECIPE}")
    except OSError as error:
        raise RunError(f"cannot climb in {out} ({error.strerror}); name another --out") from error
    if ladder.interrupted:
        raise RunError(f"interrupted; what was climbed so far is in {out}")
    return dataclasses.asdict(ladder)


def _measure(
    what: str,
    config: RunConfig | None,
    rest: list[str],
    num_processes: int,
    steps: int,
    machine: Path | None,
    trace: bool,
    nvtx: bool,
) -> tempfile.TemporaryDirectory[str]:
    """Run the ranks; a folder with what each of them found."""
    from ridgeline.config import dump_config
    from ridgeline.doctor.request import Request
    from ridgeline.launch.start import Local
    from ridgeline.rundir import CONFIG

    if machine is not None:
        from ridgeline.machine.record import read_machine

        if not machine.is_file():
            raise UsageError(
                f"no file {machine} of --machine; `ridgeline machine compute` makes one"
            )
        read_machine(machine)
    shared: dict[str, Any] = {
        "steps": steps,
        "nvtx": nvtx,
        "trace": trace,
        "machine": str(machine.resolve()) if machine is not None else "",
    }
    threads = None
    if config is None:
        script = Path(what)
        if not script.is_file():
            raise UsageError(f"no script at {what}; name a file, a recipe or a run directory")
        text, request = "", Request(script=str(script), arguments=tuple(rest), **shared)
    else:
        config = choose_for_ranks(config, num_processes, num_processes).config
        _check(config.layout, num_processes)
        text, request, threads = dump_config(config), Request(**shared), config.threads
    folder = tempfile.TemporaryDirectory(prefix="ridgeline-doctor-")
    try:
        request.write(Path(folder.name))
        (Path(folder.name) / CONFIG).write_text(text, encoding="utf-8")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        command = ["-m", "ridgeline.doctor.worker", folder.name]
        quiet = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        starter = Local(num_processes, num_cores())
        starter.run(command, num_processes, Path(folder.name), threads, quiet)
    except KeyboardInterrupt:
        folder.cleanup()
        raise RunError("interrupted; there is no verdict") from None
    except BaseException:
        folder.cleanup()
        raise
    return folder


def _check(layout: str, num_processes: int) -> None:
    from ridgeline.layout import Layout, check_available, require_layout

    said = Layout.parse_for(layout, num_processes, "layout")
    require_layout(said, "layout")
    for finding in check_available(said):
        raise UsageError(str(finding))


def _name_of(what: str) -> str:
    return f"doctor-{Path(what).stem}"


def _answer(
    folder: Path, name: str, out: Path | None, as_json: bool, config: RunConfig | None
) -> tuple[dict[str, Any], Path, Measured]:
    from ridgeline.doctor.request import TRACE, read_answers
    from ridgeline.rundir import RunDir

    ranks, timeline = read_answers(folder)
    if not ranks:
        raise RunError("no rank left a measurement; run it with `ridgeline train` to see why")
    if out is None:
        out = RunDir.create(Path("runs"), name).path
    return _conclude(ranks, timeline, out, as_json, folder / TRACE, config), out, ranks[0]


def _conclude(
    ranks: Sequence[Measured],
    timeline: Sequence[tuple[float, float, str, float]],
    out: Path,
    as_json: bool,
    trace: Path | None,
    config: RunConfig | None,
    compared: Sequence[Compared] = (),
) -> dict[str, Any]:
    """Judge, draw, write, and tell; for programs the caller prints what this returns. `compared`: what
    was predicted of a finished run."""
    from ridgeline.doctor.pictures import write_pictures
    from ridgeline.doctor.show import show_verdict
    from ridgeline.doctor.verdict import judge

    measured = ranks[0]
    verdict = judge(measured, ranks[1:])
    remedies = list_remedies(measured, config)
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
        typer.echo(show_verdict(measured, verdict, remedies, compared))
        typer.echo(f"\nwritten: {', '.join(path.name for path in made)} in {out}")
    return value


def _compare(run: RunDir, measured: Measured) -> list[Compared]:
    from ridgeline.plan.kept import compare_run

    ranks = [r.peak_memory_bytes for r in run.ranks() if r.peak_memory_bytes is not None]
    seen = [measured.memory.peak_bytes] if measured.memory is not None else []
    most = max([*seen, *ranks], default=None)
    return compare_run(run, measured.step_s, most, measured.device_kind == "cuda")


def list_remedies(measured: Measured, config: RunConfig | None) -> list[str]:
    """Remedies that apply to a recipe, the one with the largest predicted gain first; none for a script,
    whose settings are in its code."""
    if config is None:
        return []
    try:
        from ridgeline.doctor.remedies.table import (  # type: ignore[import-not-found,unused-ignore]
            REMEDIES,
        )
    except ImportError:
        return []
    found = []
    for name, remedy in REMEDIES.items():
        reason = remedy.applies(measured, config)
        if reason is not None:
            found.append((remedy.predicted_gain(measured, config), name, reason))
    return [f"{name} (up to x{gain:.2f}): {why}" for gain, name, why in sorted(found, reverse=True)]
