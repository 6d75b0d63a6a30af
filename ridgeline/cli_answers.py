"""What `ridgeline plan` answers: one layout in full, a recipe's own beside the best, curves over nodes, and
what would help where nothing fits.

Called by `cli_plan.py`. Needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ridgeline.errors import RunError, UsageError

if TYPE_CHECKING:
    from ridgeline.layout import Layout
    from ridgeline.plan.kinds import Model
    from ridgeline.plan.machine import Machine
    from ridgeline.plan.search import Found, Planned


def plan_one(
    text: str, option: str, model: Model, machine: Machine, devices: int, batch: int,
    sample_bytes: float,
) -> Planned:  # fmt: skip
    """A layout that `option` states, predicted; refused where it cannot be."""
    from ridgeline.layout import Layout, require_layout
    from ridgeline.plan.kinds import kind_of
    from ridgeline.plan.machine import require_precision
    from ridgeline.plan.predict import predict
    from ridgeline.plan.recipe import require_known
    from ridgeline.plan.search import Planned
    from ridgeline.plan.software import own_program

    layout = Layout.parse_for(text, devices, option, machine.devices_per_node)
    require_layout(layout, option)
    require_precision(machine, layout.precision, option)
    parts = layout.dp * (layout.microbatches if layout.pp > 1 else layout.accumulate)
    if batch % parts:
        raise UsageError(
            f"--batch {batch} is not divisible by the {parts} parts of {text!r} in {option}; "
            f"use --batch {-(-batch // parts) * parts}"
        )
    require_known(model, machine, layout)
    job = kind_of(model).arrange(model, machine, layout, batch, own_program(machine))
    job = replace(job, sample_bytes=sample_bytes)
    predicted = predict(job)
    return Planned(layout, job, predicted.time, predicted.memory)


def tell_beside(
    text: str, found: Found, model: Model, machine: Machine, devices: int, batch: int,
    sample_bytes: float,
) -> str:  # fmt: skip
    """A recipe's own layout beside the best, where it can be on so many devices at all."""
    from ridgeline.plan.memory import fits

    try:
        planned = plan_one(text, "layout", model, machine, devices, batch, sample_bytes)
    except UsageError:
        return f"the recipe's own layout, {text}, is none for {devices} devices and this batch"
    name = f"the recipe's own layout, {planned.layout}"
    if not fits(planned.job, planned.memory):
        return f"{name}, does not fit: {planned.memory.device / 1e9:.1f} GB a device"
    times = planned.seconds / found.best[0].seconds
    said = f"{times:.2f} times the best" if times > 1.005 else "as fast as the best"
    return f"{name}: {planned.seconds:.3f} s a step, {said}"


def explain_one(
    text: str, model: Model, machine: Machine, devices: int, batch: int, sample_bytes: float, *,
    tokens: float | None, as_json: bool,
) -> tuple[Layout, bool]:  # fmt: skip
    """Shows one layout; that, and whether it fits."""
    from ridgeline.plan.kinds import kind_of
    from ridgeline.plan.memory import fits
    from ridgeline.plan.record import planned_record
    from ridgeline.plan.show import explain

    planned = plan_one(text, "--explain", model, machine, devices, batch, sample_bytes)
    for line in kind_of(model).assumptions(planned.job):
        typer.echo(line, err=as_json)
    if as_json:
        head = {"model": model.name, "machine": machine.name, "devices": devices, "batch": batch}
        typer.echo(json.dumps({**head, **planned_record(planned, tokens)}, indent=1))
    else:
        for line in explain(planned, tokens):
            typer.echo(line)
    return planned.layout, fits(planned.job, planned.memory)


def show_curves(
    text: str,
    model: Model,
    machine: Machine,
    batch: int,
    precision: str,
    picture: Path | None = None,
    sample_bytes: float = 0.0,
    said: dict[str, Any] | None = None,
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
    if nodes[-1] < int(last):
        nodes.append(int(last))
    curves = {
        weak: scale(model, machine, nodes, batch, precision, weak, None, sample_bytes, said)
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


MOST_DEVICES = 16_384
"""Up to which it is looked for how many would do."""


def tell_enough(model: Model, machine: Machine, nodes: int, batch: int, precision: str) -> str:
    """What to do where nothing fits: nodes on which something does, twice as many at a time."""
    from ridgeline.plan.search import search

    looked = 0
    while (devices := 2 * nodes * machine.devices_per_node) <= MOST_DEVICES:
        nodes = looked = 2 * nodes
        if search(model, machine, devices, batch, precision, 1, "memory").best:
            return f"use -N {nodes}"
    return (
        f"nor does any on up to {looked} nodes; use another --batch" if looked else "use more nodes"
    )


def tell_nothing(
    name: str,
    batch: int,
    devices: int,
    machine: str,
    found: Found,
    said: list[str],
    more: str,
) -> str:
    text = f"no layout of {name} with a batch of {batch} fits {devices} devices of {machine}"
    if said:
        # It may rule out what would spread the weights, or divide no number of devices that there is.
        text += f" with {','.join(said)}; leave that out, or see what of it does not fit: --explain"
        return text
    if found.closest is not None:
        layout, need = found.closest
        return f"{text}; the closest, {layout}, needs {need / 1e9:.1f} GB a device: {more}"
    if found.too_large:
        return f"{text}: weights and optimizer state alone are too large in all of them; {more}"
    return f"{text}: none divides it; try a batch that more devices divide"
