"""What `ridgeline plan` was asked: its model, its machine and its options, each looked at before a search.

Called by `cli_plan.py`. Needs no torch but to trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ridgeline.errors import UsageError

if TYPE_CHECKING:
    from ridgeline.plan.kinds import Model
    from ridgeline.plan.machine import Machine
    from ridgeline.plan.module import ModuleFacts


def read_machine(name: str) -> Machine:
    """By its profile's name, a file of it, or measured rates."""
    from ridgeline.plan.machine import load_machine
    from ridgeline.plan.show import show_programs

    if name.endswith(".json"):
        from ridgeline.plan.measured import load_measured

        place = load_measured(Path(name))
        if place.source.get("assumed"):
            typer.echo(f"assumed of {place.name}: {place.source['assumed']}", err=True)
    else:
        place = load_machine(name)
    for line in show_programs(place):
        typer.echo(line, err=True)
    return place


def require_together(given: dict[str, bool], scales: bool) -> None:
    """No option that would do nothing beside the others."""

    def one_of(names: tuple[str, ...], why: str) -> None:
        for name in names:
            if given[name]:
                raise UsageError(f"{name} {why}; leave one of them out")

    if scales:
        many = "is of one number of nodes, and --scale has many"
        one_of(("--write", "--explain", "--why", "--tokens", "--json", "--by", "--top"), many)
    if given["--explain"]:
        one_of(("--why", "--by", "--top"), "ranks layouts, and --explain has one")
        if given["--with"]:
            raise UsageError("--with is for the search; write it into the layout of --explain")
    if given["--json"]:
        one_of(("--why", "--write"), "is told in words, and --json prints values alone")
    if given["--picture"] and not scales:
        raise UsageError("--picture draws the curves of --scale; give that too, as in 1..64")


SAID = ("compile", "shard", "compress", "sync", "offload")
"""What the search does not choose and the planner knows the price of."""


def read_precision(asked: str | None, own: str | None, place: Machine, explain: str | None) -> str:
    """What was asked for, else the recipe's, else the 16 bits that the device has."""
    from ridgeline.plan.machine import require_precision

    found = asked or own
    if found is None:
        have = [name for name in ("bf16", "fp16", "fp32") if place.device.peak_flops.get(name)]
        found = have[0]
        if found != "bf16":
            typer.echo(f"{place.device.name} has no bf16: planned in {found}", err=True)
    if explain is None or "precision=" not in explain:
        require_precision(
            place, found, "--precision" if asked else "the recipe" if own else "--machine"
        )
    return found


def read_said(text: str) -> dict[str, Any]:
    """Fields of a layout that the search is not to choose."""
    from ridgeline.layout import Layout

    names = [item.partition("=")[0].strip() for item in text.split(",") if item.strip()]
    layout = Layout.parse(text, "--with")
    for name in names:
        if name not in SAID:
            raise UsageError(
                f"{name} in --with {text} is not for it: it takes {', '.join(SAID)}, and the search "
                "chooses the rest; ask for one layout with --explain"
            )
    if layout.sync == "async":
        raise UsageError(f"the planner has no model of sync=async in --with {text}; leave it out")
    return {name: getattr(layout, name) for name in names}


@dataclass(frozen=True)
class Asked:
    """What is to be planned: a model's sizes or a module's facts, and what goes with them."""

    model: Model
    batch: int = 1024
    precision: str | None = None
    layout: str | None = None
    """A recipe's own, where it says one."""


def read_model(name: str, seq: int | None, inputs: list[str], overrides: list[str]) -> Asked:
    from ridgeline.config import find_recipe, load_config, recipe_names
    from ridgeline.plan.known import MODELS, find_model

    known = name in MODELS
    if inputs and (known or ":" not in name):
        raise UsageError(
            f"--input {inputs[0]} is for package.module:factory; {name} has its own samples"
        )
    is_recipe = not known and (name in recipe_names() or name.endswith((".yaml", ".yml")))
    if overrides and not is_recipe:
        raise UsageError(f"{overrides[0]!r} changes a recipe, and {name} is none; leave it out")
    if not is_recipe and not name.endswith(".json") and ":" not in name:
        return Asked(find_model(name, seq))
    asked: dict[str, Any] = {}
    if is_recipe:
        from ridgeline.layout import Layout, read_auto
        from ridgeline.plan.recipe import recipe_model

        config = load_config(find_recipe(name), overrides).config
        auto = read_auto(config.layout)
        asked = {
            "batch": config.train.batch,
            "precision": (auto or Layout.parse(config.layout, "layout")).precision,
            "layout": config.layout if auto is None else None,
        }
        if config.model.name == "llama":
            return Asked(recipe_model(config, seq=seq), **asked)
    if seq is not None:
        raise UsageError(
            f"--seq {seq} is for models that are planned by their sizes, and {name} is planned from a "
            "trace; change the recipe or --input, and trace it again"
        )
    if name.endswith(".json"):
        from ridgeline.plan.module import load_facts

        return Asked(load_facts(Path(name)))
    return Asked(trace_model(name, overrides, inputs), **asked)


def trace_model(name: str, overrides: list[str], inputs: list[str]) -> ModuleFacts:
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


def change_machine(machine: Machine, changes: list[str]) -> Machine:
    from ridgeline.plan.machine import read_place, require_links
    from ridgeline.plan.profile import read_number

    for text in changes:
        name, equals, value = (part.strip() for part in text.partition("="))
        was = read_place(machine, name)
        if not equals or isinstance(was, bool) or not isinstance(was, (int, float)):
            raise UsageError(
                f"{text!r} in --what-if changes nothing; write a number's place as in "
                "inter.bandwidth=400e9, device.memory_bytes=141e9 or device.peak_flops.bf16=2e15"
            )
        number = read_number(name, value, "--what-if")
        head, _, key = name.rpartition(".")
        inside = read_place(machine, head) if head else None
        if isinstance(inside, dict):
            machine = machine.replace(**{head: {**inside, key: number}})
        else:
            machine = machine.replace(**{name: number})
    if any(text.startswith(("devices_per_board", "devices_per_domain")) for text in changes):
        require_links(machine)
    return machine
