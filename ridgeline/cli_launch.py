"""`ridgeline launch`: under the launcher that is there. Needs no torch. Added to the app by `cli.py`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

launch_app = typer.Typer(help="Under the launcher that is there.", no_args_is_help=True)

_FIELDS = (
    "rank",
    "world_size",
    "local_rank",
    "local_world_size",
    "node_rank",
    "master_addr",
    "master_port",
)


@launch_app.callback()
def launch() -> None:
    """Under the launcher that is there."""


@launch_app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print who this process is among the ranks, and which variable said so."""
    from ridgeline.launch.env import read_rank_env

    found = read_rank_env()
    if as_json:
        values = asdict(found)
        values["said"] = dict(found.said)
        typer.echo(json.dumps(values))
        return
    said = dict(found.said)
    typer.echo(f"{'launcher':<17} {found.source}")
    for name in _FIELDS:
        value = getattr(found, name)
        typer.echo(f"{name:<17} {value!s:<24} {said.get(name, '-')}")
    typer.echo(f"{'nodes':<17} {', '.join(found.nodes) or 'not said'}")
