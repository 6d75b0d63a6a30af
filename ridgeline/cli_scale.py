"""`ridgeline scale`: what more samples in a step are worth. Added to the app by `cli.py`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from ridgeline.cli_shared import counting_bar, require_torch
from ridgeline.errors import UsageError

if TYPE_CHECKING:
    from ridgeline.config import RunConfig


class _Commands(typer.core.TyperGroup):
    """`ridgeline scale RUN` leaves the command out, and is told which there is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from ridgeline.config import recipe_names

        what = args[0] if args else ""
        if what not in self.commands and (what in recipe_names() or Path(what or "-").exists()):
            raise UsageError(
                f"ridgeline scale takes a command, and {what!r} is none; measure its gradient noise scale "
                f"with `ridgeline scale noise {shlex.quote(what)}`"
            )
        return super().parse_args(ctx, args)


scale_app = typer.Typer(
    cls=_Commands, help="What more samples in a step are worth.", no_args_is_help=True
)


@scale_app.callback()
def _scale() -> None:
    """So that the one command keeps its name."""


@scale_app.command()
def noise(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|RECIPE", help="Whose weights; of a recipe the first ones."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changed settings.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of one gradient; default: an eighth of train.batch."),
    ] = None,
    gradients: Annotated[int, typer.Option(min=12, help="Gradients that are compared.")] = 60,
    every: Annotated[
        bool, typer.Option("--all", help="At every checkpoint that the run has kept.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Measure the gradient noise scale: up to which batch more ranks are worth their samples."""
    config, checkpoints = _find(what, overrides or [], every)
    size = batch or max(2, config.train.batch // 8)
    require_torch("`ridgeline scale noise`")
    from ridgeline.scaling.noise import show
    from ridgeline.scaling.noise_run import measure_noise

    total, done = gradients * max(len(checkpoints), 1), itertools.count(1)
    with counting_bar() as tell:
        found = measure_noise(
            config, checkpoints, size, gradients, lambda: tell("gradients", next(done), total)
        )
    if as_json:
        rows = [dataclasses.asdict(one) | {"scale": one.scale} for one in found]
        typer.echo(json.dumps({"batch": config.train.batch, "found": rows}, indent=1))
        return
    for line in show(found, config.train.batch):
        typer.echo(line)


def _find(what: str, overrides: list[str], every: bool) -> tuple[RunConfig, list[Path]]:
    """The configuration, and the checkpoints that are looked at."""
    from ridgeline.checkpoint.find import find_all
    from ridgeline.checkpoint.manifest import read_manifest
    from ridgeline.config import find_recipe, load_config, parse_config

    path = Path(what)
    if not path.is_dir():
        if every:
            raise UsageError(f"--all is for runs, and {what} is none; leave it out")
        return load_config(find_recipe(what), overrides).config, []
    found = find_all(path)
    found = found if every else found[-1:]
    # As the checkpoint has it: a run may have gone on with other settings.
    text, place = read_manifest(found[-1]).config, f"the configuration in {found[-1]}"
    if not text:
        raise UsageError(
            f"{found[-1]} was saved by a loop of its own and names no model that could be built; "
            "give a run of `ridgeline train`"
        )
    return parse_config(text, place, overrides), found
