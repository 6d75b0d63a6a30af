"""`ridgeline data`: pack, unpack, look at, check, stage and time the data of a training.

All but timing, and packing what a recipe makes, need no torch. Each command imports what it needs when
it is called. Added to the app by `cli.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli_shared import counting_bar, ended_in_order, num_cores, require_torch
from ridgeline.errors import RunError, UsageError, unknown_word

if TYPE_CHECKING:
    from ridgeline.data.pack import Packed, Samples

data_app = typer.Typer(
    help="Pack, check, stage and time the data of a training.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Processes = Annotated[
    int | None, typer.Option("--processes", "-j", min=1, help="Default: one a core, at most 8.")
]
SomeData = Annotated[
    Path, typer.Argument(metavar="DATA", help="A packed data set, a file of samples or a folder.")
]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?$", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def read_size(text: str, place: str) -> int:
    """Bytes in a size as people write it: 256M, 1.5GiB, 4096."""
    match = _SIZE.match(text.strip())
    if match is None:
        raise UsageError(f"{place} {text!r} is no size; write for example 256M or 1G")
    number, letter, binary = match.groups()
    size = int(float(number) * (1024 if binary else 1000) ** _POWERS[letter.upper()])
    if size < 1:
        raise UsageError(f"{place} {text!r} is less than a byte; write for example 256M")
    return size


@data_app.command()
def pack(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A folder, files in any format, or recipe:NAME for what it trains on.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A directory that does not exist.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Of the recipe.")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", "-f", help="`ridgeline data formats` lists.")
    ] = "tar",
    shard_size: Annotated[str, typer.Option(help="About so large: 256M, 1G.")] = "256M",
    varying: Annotated[
        bool, typer.Option("--varying", help="Arrays may have other shapes than the first ones.")
    ] = False,
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", help="Write the samples in a random order.")
    ] = None,
    processes: Processes = None,
) -> None:
    """Write any samples as shards of one format; the same command goes on after an end."""
    from ridgeline.data.formats.table import FORMATS
    from ridgeline.data.pack import Shuffled, was_packed
    from ridgeline.data.pack import pack as write
    from ridgeline.data.work import default_processes

    if form not in FORMATS:
        raise unknown_word("format", form, FORMATS, "--format")
    options: dict[str, Any] = {
        "shard_bytes": read_size(shard_size, "--shard-size"),
        "varying": varying,
        "processes": processes or default_processes(),
    }
    parts = list(_samples(source, target, overrides or []))
    if shuffle is not None:
        parts = [(Shuffled(samples, shuffle), place) for samples, place in parts]
    # One part of a recipe may have ended before the other was interrupted.
    left = [part for part in parts if not was_packed(*part, FORMATS[form])]
    for samples, place in left or parts:
        try:
            with ended_in_order(), counting_bar() as tell:
                done = write(samples, place, FORMATS[form], tell=tell, **options)
        except KeyboardInterrupt:
            raise RunError(
                f"interrupted; the same command goes on with what is in {place}"
            ) from None
        _say_packed(done, place)


def _samples(source: str, target: Path, overrides: list[str]) -> Iterator[tuple[Samples, Path]]:
    """What is to be packed and where to; a recipe has two parts."""
    if source.startswith("recipe:"):
        from ridgeline.config import find_recipe, load_config, telling_places
        from ridgeline.data.recipe import open_recipe

        recipe = find_recipe(source.removeprefix("recipe:"))
        with telling_places(recipe, overrides):
            parts = open_recipe(load_config(recipe, overrides).config)
        for name, samples in parts.items():
            yield samples, target / name
        return
    if overrides:
        raise UsageError(f"{overrides[0]!r} is for recipe:NAME; {source!r} is a path")
    from ridgeline.data.dataset import open_dataset

    path = Path(source)
    if path.is_dir() and target.resolve().is_relative_to(path.resolve()):
        raise UsageError(
            f"{target} lies inside {source}, which is what is packed; choose another place"
        )
    yield open_dataset(path, check="always"), target


def _say_packed(done: Packed, place: Path) -> None:
    dataset = done.dataset
    there = len(dataset) - done.num_written
    before = f" ({there} were there already)" if there else ""
    shards = "1 shard" if len(dataset.entries) == 1 else f"{len(dataset.entries)} shards"
    typer.echo(
        f"{place}: {len(dataset)} samples{before} in {shards} of format "
        f"{dataset.form.name}, {dataset.num_bytes / 1e6:.1f} MB, every checksum compared, "
        f"{done.seconds:.1f} s"
    )


@data_app.command()
def unpack(source: SomeData, target: Path, processes: Processes = None) -> None:
    """Write every sample as files in a folder, as they were before packing."""
    from ridgeline.data.dataset import open_dataset
    from ridgeline.data.pack import unpack as write
    from ridgeline.data.work import default_processes

    with counting_bar() as tell:
        number = write(
            open_dataset(source, check="always"),
            target,
            processes=processes or default_processes(),
            tell=tell,
        )
    typer.echo(f"{target}: {number} samples")


@data_app.command()
def info(source: SomeData, as_json: Json = False) -> None:
    """Say what a data set holds."""
    from ridgeline.data.dataset import open_dataset
    from ridgeline.data.formats.contract import describe_schema

    dataset = open_dataset(source)
    if as_json:
        values = {
            "format": dataset.form.name,
            "samples": len(dataset),
            "bytes": dataset.num_bytes,
            "fields": {name: field.to_dict() for name, field in dataset.schema.items()},
            "classes": dataset.classes,
            "origin": dataset.origin,
            "shards": [entry.to_dict() for entry in dataset.entries],
            "checksums": dataset.has_checksums,
        }
        typer.echo(json.dumps(values, indent=1))
        return
    sizes = [entry.num_bytes for entry in dataset.entries]
    lines = [
        ("format", f"{dataset.form.name} ({dataset.form.about})"),
        (
            "samples",
            f"{len(dataset)}, {dataset.num_bytes / max(1, len(dataset)) / 1e3:.1f} KB each",
        ),
        ("size", f"{dataset.num_bytes / 1e6:.1f} MB"),
        ("shards", f"{len(sizes)}, {min(sizes) / 1e6:.1f} to {max(sizes) / 1e6:.1f} MB"),
        ("fields", describe_schema(dataset.schema)),
        ("classes", f"{len(dataset.classes)}" if dataset.classes else "none"),
        ("first keys", ", ".join(dataset.key(i) for i in range(min(3, len(dataset))))),
        (
            "checksums",
            "one a field of a sample" if dataset.has_checksums else "none; pack it to have them",
        ),
    ]
    if dataset.origin and dataset.origin != str(source):
        lines.append(("packed from", dataset.origin))
    for name, text in lines:
        typer.echo(f"{name:<12} {text}")


@data_app.command()
def verify(source: SomeData, processes: Processes = None, as_json: Json = False) -> None:
    """Read every sample and compare its checksums; exit code 1 when one is damaged."""
    from ridgeline.data.check import verify as check
    from ridgeline.data.dataset import open_dataset
    from ridgeline.data.work import default_processes

    dataset = open_dataset(source)
    with counting_bar() as tell:
        bad = check(dataset, processes or default_processes(), tell)
    lost = sum(damage.num_lost for damage in bad)
    if as_json:
        lines = [line for damage in bad for line in damage.lines]
        typer.echo(json.dumps({"samples": len(dataset), "lost": lost, "damaged": lines}, indent=1))
    else:
        for line in (line for damage in bad for line in damage.shown):
            typer.echo(line)
    if bad:
        raise RunError(
            f"{lost} of {len(dataset)} samples of {source}, in {len(bad)} of its "
            f"{len(dataset.entries)} shards, cannot be used as they are"
        )
    if not as_json:
        compared = "read whole and as they were written" if dataset.has_checksums else "readable"
        typer.echo(f"{source}: {len(dataset)} samples, all {compared}")


@data_app.command()
def formats() -> None:
    """List the formats."""
    from ridgeline.data.formats.table import FORMATS

    for form in FORMATS.values():
        typer.echo(f"{form.name:<10} {form.suffix or '-':<12} {form.about}")


@data_app.command()
def stage(
    source: Annotated[
        Path | None, typer.Argument(metavar="SRC", help="A data set, a file or a folder.")
    ] = None,
    to: Annotated[str, typer.Option(help="A folder on this node, or `auto`.")] = "auto",
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Leave the copy there for jobs to come.")
    ] = True,
    check: Annotated[
        bool, typer.Option("--verify", help="Read the copy back and compare.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="What is on this node.")] = False,
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Remove copies that nobody uses; with --all kept ones too."),
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="See --clean.")] = False,
    as_json: Json = False,
) -> None:
    """Copy data to this node's own disk, once, or say or remove what is there."""
    from ridgeline.data.stage.command import clean_command, list_command, stage_command

    if show + clean + (source is not None) != 1:
        raise UsageError("stage takes one of: a data set to copy, --list, --clean")
    if show:
        list_command(to, as_json)
    elif clean:
        clean_command(to, everything, as_json)
    else:
        assert source is not None
        stage_command(source, to, keep, as_json, check)


@data_app.command()
def bench(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.batch=256")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help="Numbers to try, as 0,1,2,4; 0 is threads. Default: up to twice the cores."
        ),
    ] = None,
    forms: Annotated[
        str,
        typer.Option("--formats", help="Also pack some samples in each of tar,hdf5,... or `all`."),
    ] = "",
    samples: Annotated[int, typer.Option(min=1, help="That are packed for --formats.")] = 2000,
    seconds: Annotated[float, typer.Option(min=0.01, help="A measurement.")] = 2.0,
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop the files from memory before each measurement.")
    ] = False,
    where: Annotated[
        Path | None, typer.Option(help="Where --formats packs to; default: for temporary files.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the loader alone against what the step asks for: how many workers are enough."""
    from ridgeline.config import find_recipe, load_config, telling_places

    config = load_config(find_recipe(recipe), overrides or []).config
    require_torch("`ridgeline data bench`")
    from ridgeline.train.feeding_run import Choice, check_formats, default_workers
    from ridgeline.train.feeding_run import bench as measure
    from ridgeline.train.feeding_show import to_dict, to_text

    if where is not None and not where.is_dir():
        raise UsageError(f"{str(where)!r} in --where is not a directory; make it, or name another")
    cores = num_cores()
    choice = Choice(
        workers=default_workers(cores) if workers is None else _read_workers(workers),
        cores=cores,
        formats=check_formats([name.strip() for name in forms.split(",")] if forms else []),
        num_samples=samples,
        seconds=seconds,
        cold=cold,
        where=where,
    )
    try:
        told = telling_places(find_recipe(recipe), overrides or [])
        with told, ended_in_order(), counting_bar() as tell:
            found = measure(config, choice, tell)
    except KeyboardInterrupt:
        raise RunError(
            "interrupted; there are no figures, and what was packed is removed"
        ) from None
    typer.echo(json.dumps(to_dict(found), indent=1) if as_json else to_text(found))


def _read_workers(text: str) -> tuple[int, ...]:
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"{text!r} in --workers is no list of numbers; write for example 0,1,2,4")
    return tuple(sorted({int(number) for number in numbers}))
