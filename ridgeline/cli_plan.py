"""`ridgeline plan`: memory and time of layouts before anything runs, and how far to trust them.

`ridgeline plan MODEL ...` looks for the best layouts; `ridgeline plan facts` traces a module into facts
that can be planned from; `validate` and `choose` are in `cli_validate.py`. Needs no torch but to trace.
Added to the app by `cli.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from ridgeline.cli_answers import explain_one, show_curves, tell_beside, tell_enough, tell_nothing
from ridgeline.cli_planned import (
    change_machine,
    read_machine,
    read_model,
    read_precision,
    read_said,
    require_together,
    trace_model,
)
from ridgeline.cli_validate import choose, validate
from ridgeline.errors import RunError, UsageError

if TYPE_CHECKING:
    pass


class _ModelFirst(typer.core.TyperGroup):
    """`ridgeline plan MODEL` is `ridgeline plan best MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["best", *args]
        return super().parse_args(ctx, args)


plan_app = typer.Typer(
    cls=_ModelFirst, help="Plan layouts before anything runs.", no_args_is_help=True
)


@plan_app.callback()
def plan() -> None:
    """Plan layouts before anything runs: MODEL --machine M -N NODES, or a command below."""


@plan_app.command()
def best(
    model: Annotated[
        str,
        typer.Argument(
            help="A model's name, a recipe, facts of a module as JSON, or package.module:factory."
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to a recipe, as train.batch=64.")
    ] = None,
    machine: Annotated[
        str,
        typer.Option(
            "--machine",
            help="A machine's name, a YAML file of its facts, or measured rates as JSON.",
        ),
    ] = "",
    nodes: Annotated[int, typer.Option("-N", "--nodes", min=1, help="Nodes.")] = 1,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Global batch in samples; default: the recipe's, or 1024."),
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens a sample.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Arithmetic: fp8, bf16, fp16, tf32 or fp32; default: the recipe's, or bf16."
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="Rank by time, memory or cost; default: time.")
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Layouts to show; default: 10.")] = None,
    tokens: Annotated[
        float | None,
        typer.Option(min=0, help="A goal in tokens (or samples), for days and cost."),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Of a device and hour, for the cost; default: the machine's."),
    ] = None,
    said: Annotated[
        list[str] | None,
        typer.Option("--with", help="What is not to be chosen, as compile=true or compress=bf16."),
    ] = None,
    why: Annotated[
        bool,
        typer.Option(
            "--why", help="What limits the best, what each technique gains, what else would."
        ),
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help="Change the machine, as in inter.bandwidth=400e9."),
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="Scaling curves over nodes, as in 1..64, doubling.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw --scale into this SVG file as well.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option(help="One layout: its time and memory, and whether it fits.")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(help="Put the best layout, or that of --explain, into this recipe."),
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", help="One sample's shape for package.module:factory, as 3x224x224."
        ),
    ] = None,
    sample_bytes: Annotated[
        float,
        typer.Option(
            min=0,
            help="Of one sample in storage: the step waits for the machine's storage_bandwidth.",
        ),
    ] = 0.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="The layouts, or that of --explain, for programs.")
    ] = False,
) -> None:
    """The best layouts of a model on a machine."""
    from ridgeline.plan.record import found_record
    from ridgeline.plan.search import ORDERS, search
    from ridgeline.plan.show import show_best
    from ridgeline.plan.why import show_why
    from ridgeline.plan.write import require_batch, require_model, startable, write_layout

    if by is not None and by not in ORDERS:
        raise UsageError(f"--by {by} is none of {', '.join(ORDERS)}")
    given = {
        "--write": write is not None, "--explain": explain is not None, "--why": why,
        "--tokens": tokens is not None, "--json": as_json, "--by": by is not None,
        "--top": top is not None, "--with": bool(said), "--picture": picture is not None,
    }  # fmt: skip
    require_together(given, scale is not None)
    by, top = by or "time", top or 10
    if not machine:
        raise UsageError(
            "plan needs --machine: a name that `ridgeline plan machines` lists, a file of one's own, or "
            "the machine.json that `ridgeline machine compute` measures"
        )
    asked = read_model(model, seq, inputs or [], overrides or [])
    sizes = asked.model
    if write is not None:
        require_model(write, model, sizes)
    place = read_machine(machine)
    precision = read_precision(precision, asked.precision, place, explain)
    if price is not None:
        if tokens is None and by != "cost":
            raise UsageError("--price is for the cost of a goal; give that with --tokens")
        place = place.replace(price_per_device_hour=price)
    place = change_machine(place, what_if or [])
    if sample_bytes and not place.storage_bandwidth:
        raise UsageError(
            f"--sample-bytes is read at the machine's storage_bandwidth, which {place.name} does not "
            "say; give it with --what-if storage_bandwidth=5e9, in bytes a second and node"
        )
    if by == "cost" and not place.price_per_device_hour:
        raise UsageError(
            f"--by cost needs a price, and {place.name} has none; give --price, of a device and hour"
        )
    if batch is not None and write is not None:
        require_batch(write, batch)
    batch = batch or asked.batch
    devices = nodes * place.devices_per_node
    if explain is not None:
        if "precision=" not in explain:
            explain = f"{explain},precision={precision}".removeprefix(",")
        what = (sizes, place, devices, batch, sample_bytes)
        layout, is_fitting = explain_one(explain, *what, tokens=tokens, as_json=as_json)
        if write is not None:
            if not is_fitting:
                raise RunError(f"{layout} does not fit, and {write} is left as it was")
            typer.echo(write_layout(write, layout))
        return
    fixed = read_said(",".join(said or []))
    if scale is not None:
        show_curves(scale, sizes, place, batch, precision, picture, sample_bytes, fixed)
        return
    order = "memory" if by == "memory" else "time"
    found = search(sizes, place, devices, batch, precision, top, order, None, sample_bytes, fixed)
    if not found.best:
        more = ""
        if not said and (found.closest or found.too_large):
            more = tell_enough(sizes, place, nodes, batch, precision)
        raise RunError(
            tell_nothing(sizes.name, batch, devices, place.name, found, said or [], more)
        )
    if as_json:
        head = {"model": sizes.name, "machine": place.name, "devices": devices, "batch": batch}
        typer.echo(json.dumps({**head, **found_record(found, tokens)}, indent=1))
        return
    changed = f" with {', '.join(what_if)}" if what_if else ""
    typer.echo(
        f"{sizes.name}, batch {batch} on {nodes} x {place.devices_per_node} of {place.name}{changed}"
    )
    for line in show_best(found, tokens):
        typer.echo(line)
    if asked.layout is not None:
        typer.echo(tell_beside(asked.layout, found, sizes, place, devices, batch, sample_bytes))
    if batch % devices:
        shared = [n for n in (batch // devices * devices, -(-batch // devices) * devices) if n]
        typer.echo(
            f"a batch of {batch} is not shared evenly by {devices} devices; "
            f"{' or '.join(map(str, shared))} would be, and may be much faster"
        )
    if why:
        typer.echo("")
        for line in show_why(found, sizes, place, batch, precision, sample_bytes, fixed):
            typer.echo(line)
    if write is not None:
        typer.echo(write_layout(write, startable(found, write).layout))


@plan_app.command()
def facts(
    model: Annotated[str, typer.Argument(help="A recipe, or package.module:factory.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to a recipe, as train.batch=64.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="One sample's shape and type for package.module:factory, as 3x224x224, 128:int64 or "
            "input_ids=128:int64; once for each argument.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the facts to this JSON file.")
    ] = None,
) -> None:
    """Trace a module on the meta device; `ridgeline plan FILE` then plans it without torch."""
    from ridgeline.plan.module import write_facts
    from ridgeline.plan.show import show_facts

    found = trace_model(model, overrides or [], inputs or [])
    for line in show_facts(found):
        typer.echo(line)
    if out is not None:
        write_facts(found, out)
        typer.echo(f"\nfacts written to {out}")


@plan_app.command()
def simulate(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.batch=1024")
    ] = None,
    layout: Annotated[str, typer.Option("--layout", help="Of the whole job.")] = "",
    nodes: Annotated[int, typer.Option("-N", "--nodes", min=1, help="Nodes.")] = 1,
    machine: Annotated[
        str | None,
        typer.Option("--machine", help="As above; default: found by the device that is here."),
    ] = None,
    per_node: Annotated[
        int | None, typer.Option(min=1, help="Devices of a node; default: the machine's.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Show this rank.")] = None,
    stage: Annotated[
        int | None, typer.Option(min=0, help="Show a rank of this pipeline stage.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """One rank of a job for real, on the device at hand, and the rest of it from the network's model."""
    from ridgeline.cli_shared import require_torch
    from ridgeline.config import find_recipe, load_config

    said = [*(overrides or []), *([f"layout={layout}"] if layout else [])]
    config = load_config(find_recipe(recipe), [*said, f"device={device}"]).config
    require_torch("`ridgeline plan simulate`")
    from ridgeline.cli_shared import machine_here
    from ridgeline.scaling.show import show_simulated, to_dict
    from ridgeline.scaling.simulate import Asked, simulate

    place = machine_here(config, machine, per_node)
    asked = Asked(
        config.layout, nodes * place.devices_per_node, place, rank, stage, steps, config.device
    )
    found = simulate(config, asked)
    if as_json:
        typer.echo(json.dumps(to_dict(found), indent=1))
        return
    for line in show_simulated(found):
        typer.echo(line)


@plan_app.command()
def machines() -> None:
    """The machines whose profiles are shipped; --machine also takes a file in their form."""
    from ridgeline.plan.machine import MACHINES, load_machine, machine_names
    from ridgeline.plan.show import table

    rows = []
    for name in machine_names():
        found = load_machine(name)
        memory = f"{found.device.memory_bytes / 1e9:.0f} GB"
        rows.append([name, str(found.devices_per_node), found.device.name, memory])
    for line in table(["machine", "a node", "device", "memory"], rows):
        typer.echo(line)
    typer.echo(f"\ntheir files, to write one's own after: {MACHINES}")


plan_app.command()(validate)
plan_app.command()(choose)
