"""`ridgeline checkpoint`: list, show, verify, reshard, export and compare what runs have saved.

Listing, showing and verifying need no torch, so that they work where the files are and nothing else is.
Each command imports what it needs when it is called. Added to the app by `cli.py`.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.cli_shared import require_torch
from ridgeline.errors import RunError

checkpoint_app = typer.Typer(
    help="Look at, check, move and compare checkpoints.", no_args_is_help=True
)

One = Annotated[
    Path, typer.Argument(metavar="CKPT", help="A step-N directory, or a run: its newest.")
]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


@checkpoint_app.command("ls")
def ls(
    where: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or a directory of step-N.")],
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run."""
    from ridgeline.checkpoint.describe import list_rows
    from ridgeline.checkpoint.find import find_all
    from ridgeline.checkpoint.text import human_bytes, human_metrics, human_time, table

    rows = list_rows(find_all(where))
    if as_json:
        _print_json(rows)
        return
    lines = []
    for row in rows:
        marks = [word for word in ("newest", "best") if row[f"is_{word}"]]
        state = "; ".join(row["problems"]) or "ok"
        if "step" in row:
            cells = [str(row["step"]), human_time(row["time"]), human_bytes(row["num_bytes"])]
            cells += [row["layout"] or "-", str(row["num_ranks"]), human_metrics(row["metrics"])]
        else:
            cells = [row["name"].removeprefix("step-").lstrip("0") or "0", *"-----"]
        lines.append([*cells, " ".join(marks) or "-", state])
    head = ("step", "saved", "size", "layout", "ranks", "metrics", "marks", "files")
    typer.echo(table(head, lines))


@checkpoint_app.command()
def show(
    checkpoint: One,
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor as well.")] = False,
    as_json: Json = False,
) -> None:
    """Say what is in a checkpoint."""
    from ridgeline.checkpoint.describe import describe, tensor_rows
    from ridgeline.checkpoint.find import find_one
    from ridgeline.checkpoint.manifest import read_manifest

    path = find_one(checkpoint)
    manifest = read_manifest(path)
    found = describe(path, manifest)
    rows = tensor_rows(manifest) if tensors else []
    if as_json:
        _print_json({**found, **({"tensors": rows} if tensors else {})})
    else:
        typer.echo(_shown(found, rows))


def _shown(found: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    from ridgeline.checkpoint.describe import short_config
    from ridgeline.checkpoint.text import human_bytes, human_metrics, human_time, table

    totals = [
        [kind, str(total["tensors"]), str(total["boxes"]), human_bytes(total["bytes"])]
        for kind, total in found["totals"].items()
    ]
    lines = [
        f"{found['path']}",
        f"step {found['step']}, epoch {found['epoch']}, batch {found['batch']} of it; "
        f"saved {human_time(found['time'])}",
        f"layout {found['layout'] or '-'} on {found['num_ranks']} ranks, "
        f"{found['num_files']} files, {human_bytes(found['num_bytes'])}",
        f"metrics {human_metrics(found['metrics'])}",
        "versions " + ", ".join(f"{name} {text}" for name, text in found["versions"].items()),
        "config\n  " + short_config(found["config"]),
        *(f"NOT WHOLE: {problem}" for problem in found["problems"]),
        "",
        table(("kind", "tensors", "boxes", "size"), totals),
    ]
    if rows:
        cells = [
            [r["name"], r["dtype"], str(r["shape"]), str(r["boxes"]), human_bytes(r["bytes"])]
            for r in rows
        ]
        lines += ["", table(("tensor", "dtype", "shape", "boxes", "size"), cells)]
    return "\n".join(lines)


@checkpoint_app.command()
def verify(
    where: Annotated[
        Path, typer.Argument(metavar="CKPT", help="A step-N directory, or a run: all of them.")
    ],
    as_json: Json = False,
) -> None:
    """Read every byte and hold it against its checksum; exit code 1 when something is damaged."""
    from ridgeline.checkpoint.find import find_all

    paths = find_all(where)
    results = [result for path in paths if (result := _verify_one(path, as_json)) is not None]
    if as_json:
        _print_json(results)
    damaged = [result["name"] for result in results if result["problems"]]
    if damaged:
        raise RunError(f"{len(damaged)} of {len(results)} are damaged: {', '.join(damaged)}")


def _verify_one(path: Path, quiet: bool) -> dict[str, Any] | None:
    """What was found, also told at once; None when the run has removed it meanwhile."""
    from ridgeline.checkpoint.damage import Problem, find_problems
    from ridgeline.checkpoint.manifest import MANIFEST, Damaged, Manifest, read_manifest
    from ridgeline.checkpoint.text import byte_bar, human_bytes

    began = time.perf_counter()
    manifest = Manifest(0, "", 0, 0.0)
    try:
        manifest = read_manifest(path)
        with byte_bar(path.name, manifest.num_bytes) as advance:
            problems = find_problems(path, manifest, advance)
    except Damaged as error:
        problems = [Problem(str(error), MANIFEST)]
    if not path.is_dir():
        return None
    seconds = time.perf_counter() - began
    num_boxes = sum(len(stored.chunks) for stored in manifest.tensors.values())
    if not quiet:
        for problem in problems:
            typer.echo(f"{path.name}: DAMAGED: {problem}")
        if not problems:
            rate = human_bytes(manifest.num_bytes / max(seconds, 1e-9))
            typer.echo(
                f"{path.name}: whole: {len(manifest.tensors)} tensors in {num_boxes} boxes and "
                f"{len(manifest.files)} files, {human_bytes(manifest.num_bytes)} read in "
                f"{seconds:.2f} s ({rate}/s)"
            )
    return {
        "path": str(path),
        "name": path.name,
        "num_bytes": manifest.num_bytes,
        "seconds": seconds,
        "problems": [
            {"text": p.text, "file": p.file, "tensors": list(p.tensors)} for p in problems
        ],
    }


@checkpoint_app.command()
def reshard(
    checkpoint: One,
    target: Annotated[Path, typer.Argument(metavar="DST", help="Where the new step-N goes.")],
    layout: Annotated[str, typer.Option("--layout", help="The new layout, e.g. tp=2,pp=2.")],
) -> None:
    """Write a checkpoint anew as another layout would have, and prove that it is the same."""
    from ridgeline.checkpoint.find import find_one

    path = find_one(checkpoint)
    require_torch("`ridgeline checkpoint reshard`")
    from ridgeline.train.reshard import reshard as write_anew

    began = time.perf_counter()
    done, count = write_anew(path, target, layout)
    typer.echo(f"{done}: whole, {count} tensors equal ({time.perf_counter() - began:.1f} s)")


@checkpoint_app.command()
def export(
    checkpoint: One,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A .safetensors file.")],
    names: Annotated[
        str, typer.Option(help="own, or transformers: as its LlamaForCausalLM has them.")
    ] = "own",
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32; default: as they are.")
    ] = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="The optimizer's state as well.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="The weights themselves, not their average (optim.ema).")
    ] = False,
) -> None:
    """Write the weights as one safetensors file; model.weights=FILE starts a run from one."""
    from ridgeline.checkpoint.describe import tell_weights
    from ridgeline.checkpoint.find import find_one
    from ridgeline.checkpoint.manifest import read_manifest
    from ridgeline.checkpoint.text import byte_bar, human_bytes

    path = find_one(checkpoint)
    manifest = read_manifest(path)
    told = tell_weights(path, manifest, live)
    require_torch("`ridgeline checkpoint export`")
    from ridgeline.checkpoint.export import export_weights

    with byte_bar(str(out), manifest.num_bytes) as advance:
        done = export_weights(path, out, names, dtype, optimizer, advance, live)
    for note in done.notes:
        typer.echo(note)
    typer.echo(f"{out}: {done.num_tensors} tensors, {human_bytes(done.num_bytes)}, {told}")


@checkpoint_app.command()
def diff(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="A step-N directory, or a run: its newest.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The one to compare with.")],
    as_json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor, in whatever layouts; exit code 1 when they differ."""
    from ridgeline.checkpoint.find import find_one
    from ridgeline.checkpoint.manifest import read_manifest
    from ridgeline.checkpoint.text import byte_bar

    left, right = find_one(a), find_one(b)
    require_torch("`ridgeline checkpoint diff`")
    from ridgeline.checkpoint.compare import compare

    with byte_bar("comparing", read_manifest(left).num_bytes) as advance:
        found = compare(left, right, advance)
    if as_json:
        _print_json({"a": str(left), "b": str(right), **asdict(found)})
    else:
        for note in found.notes:
            typer.echo(note)
        for difference in found.differences:
            typer.echo(f"{difference.name}: {difference.text}")
        typer.echo(f"{found.num_equal} tensors equal, {len(found.differences)} differences")
    if found.differences:
        raise typer.Exit(1)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
