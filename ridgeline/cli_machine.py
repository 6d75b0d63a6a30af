"""`ridgeline machine`: measure the machine under a run.

`storage` says what the file systems are good for: what `dd` tells of large and small writes, and what it
does not tell of small files, random reads and many readers; it needs no torch, so that it works on a login
node. `compute` says what a device reaches, and draws its roofline. `network` says what ranks reach between
them (`cli_network.py` gets the ranks). Added to the app by `cli.py`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli_shared import ended_in_order, require_torch
from ridgeline.errors import RunError, UsageError, unknown_word

if TYPE_CHECKING:
    from ridgeline.facts import StorageFacts
    from ridgeline.machine.roofline import ComputeFacts
    from ridgeline.machine.storage import Amounts, Tell

machine_app = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@machine_app.callback()
def machine() -> None:
    """Measure this machine."""


@machine_app.command()
def storage(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="Directories, one a file system.")
    ],
    size: Annotated[
        str | None,
        typer.Option(
            help="Of the large file, e.g. 4GiB; at most a quarter of the room. Default 1GiB."
        ),
    ] = None,
    files: Annotated[int | None, typer.Option(min=1, help="Small files; default 2000.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=256, help="Readers at once; default 8.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="64 MiB and 400 files: seconds, and less certain.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Add what was measured to this machine.json.")
    ] = None,
) -> None:
    """Measure file systems, and say which is good for environments, data and checkpoints."""
    from ridgeline.machine.record import check_writable

    amounts = _amounts(quick, size, files, threads)
    if out is not None:
        check_writable(out)
    measured: list[StorageFacts] = []
    try:
        for path in dict.fromkeys(paths):
            measured.append(_measure(path, amounts))  # noqa: PERF401 (what is done is kept)
    finally:
        # Figures that took a minute are not thrown away for a slip in the path after them.
        _keep_and_show(measured, as_json, out)
    problems = [problem for facts in measured for problem in facts.problems]
    if problems:
        raise RunError("; ".join(problems))


@machine_app.command()
def compute(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For --model.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto.")] = "auto",
    model: Annotated[
        str | None,
        typer.Option(help="Also the matrix products of this recipe, and what padding would win."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of --model; default: the recipe's own.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and repetitions.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Add what was measured to this machine.json.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the roofline into this SVG.")] = None,
) -> None:
    """Measure arithmetic, memory and launches of a device; its roofline is what the doctor judges by."""
    from ridgeline.machine.record import check_writable

    require_torch("`ridgeline machine compute`")
    if out is not None:
        check_writable(out)
    if overrides and model is None:
        raise UsageError(f"{overrides[0]!r} is for --model, and none is named; give --model RECIPE")
    import torch

    from ridgeline.machine.compute import measure_compute

    chosen = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if chosen not in ("cuda", "cpu"):
        raise UsageError(f"--device {device!r} is not one of cuda, cpu and auto")
    try:
        with ended_in_order(), _bar(chosen) as tell:
            facts = measure_compute(torch.device(chosen), quick, tell)
            lines, rows = _sweep(model, overrides or [], chosen, precision, facts.peak_flops, quick)
    except KeyboardInterrupt:
        raise RunError(f"interrupted while {chosen} was measured; it has no figures") from None
    if as_json:
        typer.echo(json.dumps({**facts.to_dict(), "model": rows}, indent=2))
    else:
        from ridgeline.machine.show import show_compute

        show_compute(facts, lines)
    _keep_compute(facts, out, picture, as_json)


@machine_app.command()
def network(
    num: Annotated[
        int | None,
        typer.Option("-n", min=2, help="Start so many ranks here; else join those around."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(help="1KB..1GB (each 4 times the one before; *2 after it: twice), or a list."),
    ] = None,
    collectives: Annotated[
        str | None, typer.Option(help="A list of all_reduce, all_gather, ..., pair; default all.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto.")] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repetitions; on a CPU up to 16MB.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Add what was measured to this machine.json.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw bus bandwidth against size into this SVG.")
    ] = None,
    accounts: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure collectives between ranks: what the planner reckons with, and who is slow."""
    from ridgeline.cli_network import Asked, measure_here, start_ranks
    from ridgeline.launch.env import read_rank_env

    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {device!r} is not one of cuda, cpu and auto")
    asked = Asked(
        sizes=None if sizes is None else read_sizes(sizes),
        collectives=_collectives(collectives),
        device=device,
        quick=quick,
        as_json=as_json,
        out=out,
        picture=picture,
        accounts=accounts,
    )
    env = read_rank_env()
    if env.world_size > 1:
        if num is not None:
            raise UsageError(
                f"-n {num} starts ranks, and this is one of {env.world_size} that {env.source} has "
                "started; leave -n out"
            )
        require_torch("`ridgeline machine network`")
        measure_here(asked, env, _bar)
        return
    if num is None:
        raise UsageError(
            "one process has nobody to talk to; start ranks here with -n 4, or this command on the ranks "
            "of a job: srun, mpirun, torchrun, or `ridgeline launch -- ridgeline machine network`"
        )
    if out is not None:
        from ridgeline.machine.record import check_writable

        check_writable(out)
    require_torch("`ridgeline machine network`")
    given = (("--sizes", sizes), ("--collectives", collectives), ("--device", device))
    given_files = (("--out", out), ("--picture", picture))
    words = [w for k, v in (*given, *given_files) if v is not None for w in (k, str(v))]
    start_ranks(num, [*words, *["--quick"] * quick, *["--json"] * as_json])


def read_sizes(text: str, place: str = "--sizes") -> tuple[int, ...]:
    """Sizes of messages in bytes, in growing order.

    >>> read_sizes("1KB..16KB"), read_sizes("1KB..4KB*2"), read_sizes("1MB,4KB")
    ((1024, 4096, 16384), (1024, 2048, 4096), (4096, 1048576))
    """
    from ridgeline.machine.links import sizes_between

    if ".." not in text:
        return tuple(sorted({parse_size(part, place) for part in text.split(",")}))
    span, _, factor = text.partition("*")
    low, _, high = span.partition("..")
    first, last = parse_size(low, place), parse_size(high, place)
    if first > last or (factor and (not factor.isdigit() or int(factor) < 2)):
        raise UsageError(
            f"{text!r} in {place} is no range of sizes; write it as 1KB..1GB or 1KB..1GB*2"
        )
    return sizes_between(first, last, int(factor or 4))


def _collectives(text: str | None) -> tuple[str, ...]:
    from ridgeline.machine.links import COLLECTIVES, PAIR

    known = (*COLLECTIVES, PAIR)
    if text is None:
        return known
    names = [part.strip().replace("-", "_") for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise unknown_word("collective", name, known, "--collectives")
    if not names:
        raise UsageError(f"{text!r} in --collectives names none of {', '.join(known)}")
    return tuple(name for name in known if name in names)


def _sweep(
    model: str | None,
    overrides: list[str],
    device: str,
    precision: str | None,
    peaks: dict[str, float],
    quick: bool,
) -> tuple[list[str], list[dict[str, Any]]]:
    """The shapes of a recipe's model: lines for people, rows for programs."""
    if model is None:
        return [], []
    import torch

    from ridgeline.config import find_recipe, load_config
    from ridgeline.doctor.shapes import (
        MULTIPLES,
        collect_shapes,
        describe_swept,
        find_cliffs,
        sweep_model,
    )
    from ridgeline.layout import Layout, read_auto

    config = load_config(find_recipe(model), overrides).config
    layout = read_auto(config.layout) or Layout.parse(config.layout, "layout")
    said = precision or layout.precision
    if said not in MULTIPLES:
        raise UsageError(f"--precision {said!r} is not one of {', '.join(MULTIPLES)}")
    if said not in peaks:
        raise UsageError(f"--precision {said}: this device has no such products; name another")
    vocab = config.model.args.get("vocab")
    vocabulary = vocab if isinstance(vocab, int) else None
    used = collect_shapes(config)
    rows = sweep_model(
        used,
        torch.device(device),
        said,
        vocabulary,
        repeats=3 if quick else 7,
        longest_s=0.2 if device == "cpu" else 1.0,
    )
    timed = {row.used for row in rows}
    left_out = [(one, find_cliffs(one, said, vocabulary)) for one in used if one not in timed]
    lines = [f"products of {config.model.name}, {said}:"]
    lines += describe_swept(rows, peaks.get(said), left_out)
    return lines, [row.to_dict() for row in rows]


def _keep_compute(
    facts: ComputeFacts, out: Path | None, picture: Path | None, as_json: bool
) -> None:
    from ridgeline.machine.record import add_compute
    from ridgeline.machine.roofline import draw_roofline

    try:
        if out is not None:
            add_compute(out, facts)
        if picture is not None:
            picture.write_text(draw_roofline(facts), encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"cannot write {error.filename} ({error.strerror}); name another file"
        ) from error
    for path in (out, picture):
        if path is not None and not as_json:
            typer.echo(f"{'added to' if path is out else 'drawn in'} {path}")


def _amounts(quick: bool, size: str | None, files: int | None, threads: int | None) -> Amounts:
    from ridgeline.machine.storage import LEAST_SIZE_BYTES, NORMAL, QUICK

    amounts = QUICK if quick else NORMAL
    size_bytes = amounts.size_bytes if size is None else parse_size(size, "--size")
    if size_bytes < LEAST_SIZE_BYTES:
        raise UsageError(f"{size!r} in --size measures nothing; give 4MiB or more")
    return dataclasses.replace(
        amounts,
        size_bytes=size_bytes,
        num_files=files or amounts.num_files,
        num_threads=threads or amounts.num_threads,
    )


def parse_size(text: str, place: str) -> int:
    """Bytes of a size as people write it; units are powers of 1024, as they are for `dd`.

    >>> parse_size("4096", "--size"), parse_size("64M", "--size"), parse_size("1.5 GiB", "--size")
    (4096, 67108864, 1610612736)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b)?", text.strip().lower())
    number = float(match[1]) * 1024 ** (" kmgt".index(match[2] or " ")) if match else 0.0
    if number < 1:
        raise UsageError(f"{text!r} in {place} is no size; write it as 512MiB or 4GiB")
    return int(number)


def _measure(path: Path, amounts: Amounts) -> StorageFacts:
    from ridgeline.machine.storage import measure_storage

    try:
        with ended_in_order(), _bar(str(path)) as tell:
            return measure_storage(path, amounts, tell)
    except KeyboardInterrupt:
        raise RunError(
            f"interrupted while {path} was measured; what was written there is removed, and it has no "
            "figures: start again, with --quick for a shorter time"
        ) from None


@contextmanager
def _bar(path: str) -> Iterator[Tell]:
    """A progress bar on a terminal, nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _what, _share: None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(path, total=1.0)
        yield lambda what, share: progress.update(
            task, completed=share, description=f"{path}: {what}"
        )


def _keep_and_show(measured: list[StorageFacts], as_json: bool, out: Path | None) -> None:
    from ridgeline.machine.record import add_storage
    from ridgeline.machine.verdict import judge

    if not measured:
        return
    if as_json:
        rows = [
            {**facts.to_dict(), "verdicts": [dataclasses.asdict(v) for v in judge(facts)]}
            for facts in measured
        ]
        typer.echo(json.dumps(rows, indent=2))
    else:
        from ridgeline.machine.show import show_storage

        show_storage(measured)
    if out is None:
        return
    try:
        add_storage(out, measured)
    except OSError as error:
        raise RunError(
            f"cannot write {out} of --out ({error.strerror}); name another file"
        ) from error
    if not as_json:
        typer.echo(f"added to {out}")
