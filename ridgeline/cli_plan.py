"""`ridgeline plan`: memory and time of layouts before anything runs, and how far to trust them.

`ridgeline plan MODEL ...` looks for the best layouts; `ridgeline plan facts` traces a module into facts
that can be planned from; `validate` and `choose` are in `cli_validate.py`. Needs no torch but to trace.
Added to the app by `cli.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from ridgeline.cli_validate import choose, validate
from ridgeline.errors import RunError, UsageError

if TYPE_CHECKING:
    from ridgeline.plan.kinds import Model
    from ridgeline.plan.machine import Machine
    from ridgeline.plan.module import ModuleFacts
    from ridgeline.plan.search import Found


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
    machine: Annotated[
        str,
        typer.Option(
            "--machine",
            help="A machine's name, a YAML file of its facts, or measured rates as JSON.",
        ),
    ],
    nodes: Annotated[int, typer.Option("-N", "--nodes", min=1, help="Nodes.")] = 1,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Global batch in samples; default: the recipe's, or 1024."),
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens a sample.")] = None,
    precision: Annotated[str, typer.Option(help="Arithmetic: bf16, fp16, tf32 or fp32.")] = "bf16",
    by: Annotated[str, typer.Option(help="Rank by time, memory or cost.")] = "time",
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 10,
    tokens: Annotated[
        float | None,
        typer.Option(help="A goal in tokens (or samples), for days and cost."),
    ] = None,
    price: Annotated[float, typer.Option(help="Of a device and hour, for the cost.")] = 0.0,
    why: Annotated[
        bool, typer.Option("--why", help="What limits the best, and what would change it.")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", help="Change the machine, as in inter.bandwidth=400e9."),
    ] = None,
    scale: Annotated[
        str | None, typer.Option(help="Scaling curves over nodes, as in 1..64 (powers of 2).")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw --scale into this SVG file as well.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option(help="One layout: its time and memory, and whether it fits.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Put the best layout into this recipe.")
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
) -> None:
    """The best layouts of a model on a machine."""
    from ridgeline.plan.machine import load_machine
    from ridgeline.plan.search import ORDERS, search
    from ridgeline.plan.show import show_best, show_programs, show_why

    if by not in ORDERS:
        raise UsageError(f"--by {by} is none of {', '.join(ORDERS)}")
    sizes, own_batch = _model(model, seq, inputs or [])
    if machine.endswith(".json"):
        from ridgeline.plan.measured import load_measured

        place = load_measured(Path(machine))
        if place.source.get("assumed"):
            typer.echo(f"assumed of {place.name}: {place.source['assumed']}", err=True)
    else:
        place = load_machine(machine)
    for line in show_programs(place):
        typer.echo(line, err=True)
    place = place.replace(price_per_device_hour=price)
    place = _changed(place, what_if or [])
    batch = batch or own_batch
    devices = nodes * place.devices_per_node
    if explain is not None:
        if "precision=" not in explain:
            explain = f"{explain},precision={precision}".removeprefix(",")
        _explain(explain, sizes, place, devices, batch, sample_bytes)
        return
    if scale is not None:
        _scale(scale, sizes, place, batch, precision, picture, sample_bytes)
        return
    if picture is not None:
        raise UsageError("--picture draws the curves of --scale; give that too, as in 1..64")
    order = "memory" if by == "memory" else "time"
    found = search(sizes, place, devices, batch, precision, top, order, sample_bytes=sample_bytes)
    if not found.best:
        raise RunError(_nothing(sizes.name, batch, devices, place.name, found))
    typer.echo(f"{sizes.name}, batch {batch} on {nodes} x {place.devices_per_node} of {place.name}")
    for line in show_best(found, tokens):
        typer.echo(line)
    if why:
        typer.echo("")
        for line in show_why(found, sizes, place, batch, precision):
            typer.echo(line)
    if write is not None:
        _write(write, str(found.best[0].layout))


def _model(name: str, seq: int | None, inputs: list[str]) -> tuple[Model, int]:
    """A model's sizes or a module's facts, and the batch that goes with them."""
    from ridgeline.plan.known import MODELS, find_model, model_of_recipe

    if name in MODELS:
        return find_model(name, seq), 1024
    from ridgeline.config import find_recipe, load_config, recipe_names

    is_recipe = name in recipe_names() or name.endswith((".yaml", ".yml"))
    if not is_recipe and not name.endswith(".json") and ":" not in name:
        return find_model(name, seq), 1024
    if is_recipe:
        config = load_config(find_recipe(name), []).config
        args = config.data.args
        if config.model.name == "llama":
            length = seq or args.get("seq_len") or (args.get("shape") or [None])[0]
            return model_of_recipe("llama", config.model.args, length), config.train.batch
    if seq is not None:
        raise UsageError(
            f"--seq {seq} is for models that are planned by their sizes, and {name} is planned from a "
            "trace; change the recipe or --input, and trace it again"
        )
    if name.endswith(".json"):
        from ridgeline.plan.module import load_facts

        return load_facts(Path(name)), 1024
    return _trace(name, [], inputs), config.train.batch if is_recipe else 1024


def _trace(name: str, overrides: list[str], inputs: list[str]) -> ModuleFacts:
    """Facts of a recipe's model, or of a module of the user's own."""
    from ridgeline.cli_shared import require_torch

    require_torch(f"tracing {name}")
    from ridgeline.train.traced import trace_named, trace_recipe

    if ":" in name:
        if overrides:
            raise UsageError(f"{overrides[0]!r} changes a recipe, and {name} is none; leave it out")
        return trace_named(name, inputs)
    from ridgeline.config import find_recipe, load_config

    if inputs:
        raise UsageError(
            f"--input {inputs[0]} is for package.module:factory; {name} has its own samples"
        )
    return trace_recipe(load_config(find_recipe(name), overrides).config)


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

    found = _trace(model, overrides or [], inputs or [])
    for line in show_facts(found):
        typer.echo(line)
    if out is not None:
        write_facts(found, out)
        typer.echo(f"\nfacts written to {out}")


def _changed(machine: Machine, changes: list[str]) -> Machine:
    for text in changes:
        name, equals, value = text.partition("=")
        place: object = machine
        for part in name.strip().split("."):
            place = getattr(place, part, None)
        if not equals or not isinstance(place, (int, float)):
            raise UsageError(
                f"{text!r} in --what-if changes nothing; write a number's place as in "
                "inter.bandwidth=400e9 or device.memory_bytes=141e9"
            )
        try:
            number = float(value)
        except ValueError as error:
            raise UsageError(f"{value!r} in --what-if {text} is no number") from error
        machine = machine.replace(
            **{name.strip(): int(number) if isinstance(place, int) else number}
        )
    return machine


def _explain(
    text: str, model: Model, machine: Machine, devices: int, batch: int, sample_bytes: float
) -> None:
    from ridgeline.layout import Layout, require_layout
    from ridgeline.plan.kinds import kind_of
    from ridgeline.plan.predict import predict
    from ridgeline.plan.search import Planned
    from ridgeline.plan.show import explain
    from ridgeline.plan.software import own_program

    layout = Layout.parse_for(text, devices, "--explain")
    require_layout(layout, "--explain")
    parts = layout.dp * (layout.microbatches if layout.pp > 1 else layout.accumulate)
    if batch % parts:
        raise UsageError(
            f"--batch {batch} is not divisible by the {parts} parts of {text!r} in --explain; "
            f"use --batch {-(-batch // parts) * parts}"
        )
    kind = kind_of(model)
    most = kind.choices(model, machine).most_stages
    if layout.pp * layout.virtual > most:
        raise UsageError(
            f"{layout.pp * layout.virtual} stages of {text!r} in --explain are more than the "
            f"{most} layers of {model.name}; use pp={most} or less"
        )
    job = kind.arrange(model, machine, layout, batch, own_program(machine))
    job = replace(job, sample_bytes=sample_bytes)
    for line in kind.assumptions(job):
        typer.echo(line)
    predicted = predict(job)
    for line in explain(Planned(layout, job, predicted.time, predicted.memory)):
        typer.echo(line)


def _scale(
    text: str,
    model: Model,
    machine: Machine,
    batch: int,
    precision: str,
    picture: Path | None = None,
    sample_bytes: float = 0.0,
) -> None:
    from ridgeline.plan.search import scale
    from ridgeline.plan.show import show_scale

    first, dots, last = text.partition("..")
    if not dots or not first.isdigit() or not last.isdigit() or not 1 <= int(first) <= int(last):
        raise UsageError(f"{text!r} in --scale is no range; write it as 1..64")
    nodes, count = [], int(first)
    while count <= int(last):
        nodes.append(count)
        count *= 2
    curves = {
        weak: scale(model, machine, nodes, batch, precision, weak, sample_bytes=sample_bytes)
        for weak in (True, False)
    }
    for weak, rows in curves.items():
        for line in show_scale(rows, weak):
            typer.echo(line)
        typer.echo("")
    if picture is not None:
        from ridgeline.scaling.curves import draw_scaling

        title = f"{model.name} on {machine.name}, batch {batch} on the fewest nodes, {precision}"
        try:
            picture.write_text(draw_scaling(curves[True], curves[False], title), encoding="utf-8")
        except OSError as error:
            raise RunError(
                f"cannot write {picture} of --picture ({error.strerror}); name another file"
            ) from error
        typer.echo(f"drawn: {picture}")


def _nothing(name: str, batch: int, devices: int, machine: str, found: Found) -> str:
    text = f"no layout of {name} with a batch of {batch} fits {devices} devices of {machine}"
    if found.closest is not None:
        layout, need = found.closest
        return f"{text}; the closest, {layout}, needs {need / 1e9:.1f} GB a device: use more nodes"
    if found.too_large:
        return f"{text}: weights and optimizer state alone are too large in all of them; use more nodes"
    return f"{text}: none divides it; try a batch that more devices divide"


def _write(path: Path, layout: str) -> None:
    """Replace or add the line `layout:` of a recipe, and leave every other as it is."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if not line.startswith("layout:")]
        path.write_text("\n".join([*kept, f"layout: {layout}"]) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"cannot write {path} of --write ({error.strerror}); name a recipe"
        ) from error
    typer.echo(f"layout written to {path}")


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


plan_app.command()(validate)
plan_app.command()(choose)
