"""`ridgeline export`: a run's model as a package that a C++ program loads.

Words are checked before torch is imported; the rest is `export/run.py`. Added to the app by `cli.py`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli_shared import ended_in_order, require_torch
from ridgeline.errors import RunError, say


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run: its newest checkpoint, or a step-N directory."),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[OUT] [KEY=VALUE]...",
            help="The new folder (default: export in the run), and settings that are others here, e.g. "
            "data.args.path=/where/it/is",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: as in the recipe.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16 weights; default: as in the recipe.")
    ] = None,
    batch: Annotated[
        str, typer.Option(help="vary: any number of samples; N: always so many.")
    ] = "vary",
    bare: Annotated[
        bool,
        typer.Option("--bare", help="The model alone, without what evaluation does to inputs."),
    ] = False,
    live: Annotated[
        bool, typer.Option("--live", help="The weights themselves, not their average (optim.ema).")
    ] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Compare nothing, build no C++ program.")
    ] = False,
) -> None:
    """Write a run's model as a package for C++ programs, and prove that it gives what the model gives."""
    from ridgeline.checkpoint.describe import tell_weights
    from ridgeline.checkpoint.find import find_one
    from ridgeline.checkpoint.manifest import read_manifest
    from ridgeline.checkpoint.text import byte_bar, human_bytes
    from ridgeline.export.request import default_out, read_wanted, split_words

    named, overrides = split_words(words or [])
    wanted = read_wanted(device, dtype, batch, bare, not no_check, overrides, live)
    path = find_one(checkpoint)
    told = tell_weights(path, read_manifest(path), live)
    out = Path(named) if named is not None else default_out(path)
    require_torch("`ridgeline export`")
    from ridgeline.export.run import export_run

    began = time.perf_counter()
    try:
        with ended_in_order():
            done = export_run(path, out, wanted, byte_bar, say)
    except KeyboardInterrupt:
        raise RunError(f"interrupted; {out} was not written") from None
    if not wanted.check:
        say("nothing was compared with the model (--no-check)")
    took = time.perf_counter() - began
    say(f"{out}: model.pt2 of {human_bytes(done.num_bytes)}, {told} ({took:.0f} s)")
