"""`layout: auto`: the planner's choice for as many ranks as a run has, and the prediction that is kept.

Asked once, where a run's ranks are about to be started, so that all of them get one layout; what it says
goes into the run directory as `plan.json`. A run that goes on keeps the layout it had; only another number
of ranks asks again. Called by `cli_shared.py` and by `ridgeline.run_recipe`.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from ridgeline.config import RunConfig
from ridgeline.errors import UsageError
from ridgeline.layout import AUTO, Layout, read_auto
from ridgeline.plan.machine import Machine, load_machine
from ridgeline.plan.measured import load_measured
from ridgeline.plan.own_machine import PROFILES, machine_of, named_device, profile_of
from ridgeline.plan.recipe import Trace, plan_recipe, predict_recipe
from ridgeline.plan.search import Found, Planned
from ridgeline.plan.show import TIME_PARTS

_SOCKET_CORES: Final = 64
"""Cores of the device of the profile `cpu-node`."""
_DRIVER: Final = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Chosen:
    """What a run's ranks are started with."""

    config: RunConfig
    """With the layout as text, `dp` stated."""
    plan: dict[str, Any] | None
    """The content of `plan.json`; None where nothing was asked or nothing could be said."""
    lines: tuple[str, ...] = ()
    """For the user."""


@dataclass(frozen=True)
class Place:
    """Where the ranks will be."""

    num_ranks: int
    per_node: int
    num_cores: int
    """Of this host, for ranks on CPUs."""
    device_name: str | None
    """Of the GPU that is seen here; None where ranks compute on the CPU."""


def choose_layout(
    config: RunConfig,
    place: Place,
    before: Mapping[str, Any] | None,
    trace: Trace | None = None,
) -> Chosen:
    """The configuration that ranks are started with; `before` is `plan.json` of a run that goes on."""
    asked = config.layout if read_auto(config.layout) is not None else ""
    lines: list[str] = []
    if not asked and _was_chosen(config, before) and before is not None:
        if before["num_devices"] == place.num_ranks:
            return Chosen(config, _kept(config, before, place, trace))
        asked = str(before["asked"])
        lines.append(
            f"the layout {before['layout']} was chosen for {before['num_devices']} ranks and there are "
            f"{place.num_ranks}: the planner is asked again"
        )
    if not asked:
        said = config.plan.machine or (before is not None and before.get("predicted"))
        return Chosen(config, _predicted(config, place, trace) if said else None)
    config = dataclasses.replace(config, layout=asked)
    if config.plan.machine:
        load_named(
            config.plan.machine, "plan.machine"
        )  # a slip of the pen is no reason to fall back
    try:
        machine, origin = find_machine(config, place)
        found = plan_recipe(config, machine, place.num_ranks, trace=trace)
        best = runnable(found)
        if best is None and found.best:  # only weights in two stages of one rank: look further
            found = plan_recipe(config, machine, place.num_ranks, 1000, trace)
            best = runnable(found)
    except UsageError as error:
        return _plain(config, place, str(error), lines)
    if best is None:
        return _nothing_fits(config, place, machine, found, lines)
    text = stated(best.layout)
    plan = _record(config, best, place, origin)
    plan |= {"asked": asked, "layouts": found.looked_at, "too_large": found.too_large}
    return Chosen(
        dataclasses.replace(config, layout=text),
        plan,
        (*lines, *_tell(best, found, machine, origin, place)),
    )


def stated(layout: Layout) -> str:
    """With `dp` written out also where it is 1, so that nobody fills it in."""
    text = str(layout)
    return text if text.startswith("dp=") else f"dp={layout.dp},{text}"


def _was_chosen(config: RunConfig, before: Mapping[str, Any] | None) -> bool:
    return before is not None and "asked" in before and before.get("layout") == config.layout


def _kept(
    config: RunConfig, before: Mapping[str, Any], place: Place, trace: Trace | None
) -> dict[str, Any]:
    """The prediction of before, made anew where the batch is another."""
    if before.get("batch") == config.train.batch or not before.get("predicted"):
        return dict(before)
    return {**before, **(_predicted(config, place, trace) or {"predicted": None})}


def _predicted(config: RunConfig, place: Place, trace: Trace | None) -> dict[str, Any] | None:
    """What the planner says of a layout that was not its choice; None where it has nothing to say."""
    if config.plan.machine:
        load_named(config.plan.machine, "plan.machine")
    try:
        machine, origin = find_machine(config, place)
        layout = Layout.parse_for(config.layout, place.num_ranks, "layout")
        return _record(config, predict_recipe(config, machine, layout, trace), place, origin)
    except UsageError:
        return None


def _record(config: RunConfig, planned: Planned, place: Place, origin: str) -> dict[str, Any]:
    time, memory = planned.time, planned.memory
    return {
        "layout": stated(planned.layout),
        "num_devices": place.num_ranks,
        "batch": config.train.batch,
        "machine": planned.job.machine.name,
        "machine_from": origin,
        "predicted": {
            "step_s": planned.seconds,
            "allocated_bytes": memory.allocated,
            "reserved_bytes": memory.reserved,
            "device_bytes": memory.device,
            "device_memory_bytes": planned.job.machine.device.memory_bytes,
            "time_s": dataclasses.asdict(time),
            "memory_bytes": dataclasses.asdict(memory),
        },
    }


def runnable(found: Found) -> Planned | None:
    """The best that this release can also start: zero=3 and local steps refuse a weight in two stages of
    one rank.

    The embedding and the head of a transformer never are: the first stage and the last have different
    ranks. Of a traced module it is not known which stages its tied weights will be in.
    """
    for planned in found.best:
        tied = getattr(planned.job.model, "tied", False)
        anywhere = not isinstance(tied, bool) and len(tied) > 0
        layout = planned.layout
        apart = layout.zero == 3 or layout.sync != "every"
        if not (anywhere and layout.virtual > 1 and apart):
            return planned
    return None


def _tell(
    best: Planned, found: Found, machine: Machine, origin: str, place: Place
) -> tuple[str, str]:
    device = machine.device
    parts = {words: float(getattr(best.time, name)) for name, words in TIME_PARTS.items()}
    first = max(parts, key=lambda words: parts[words])
    why = f"{100 * parts[first] / best.seconds:.0f} % of it is {first}"
    other = next((p for p in found.best if p.layout != best.layout), None)
    if other is not None:
        slower = 100 * (other.seconds / best.seconds - 1)
        more = (other.memory.device - best.memory.device) / 1e9
        why += f"; next of {found.looked_at}: {other.layout}, {slower:+.1f} % time, {more:+.1f} GB"
    if found.too_large:
        why += f"; {found.too_large} do not fit"
    memory = f"{best.memory.device / 1e9:.1f} of {device.memory_bytes / 1e9:.0f} GB"
    return (
        f"layout {AUTO}: {stated(best.layout)} on {place.num_ranks} x {device.name} ({origin}); predicted: "
        f"{best.seconds:.4g} s a step, {memory}",
        f"  {why}",
    )


def _plain(config: RunConfig, place: Place, reason: str, lines: list[str]) -> Chosen:
    """Plain replicas, and why it is nothing better."""
    said = read_auto(config.layout) or Layout()
    text = stated(said.replace(dp=place.num_ranks))
    plan = {
        "asked": config.layout,
        "layout": text,
        "num_devices": place.num_ranks,
        "batch": config.train.batch,
        "predicted": None,
        "why": reason,
    }
    note = f"layout {AUTO}: {text}, unplanned, because {reason}"
    return Chosen(dataclasses.replace(config, layout=text), plan, (*lines, note))


def _nothing_fits(
    config: RunConfig, place: Place, machine: Machine, found: Found, lines: list[str]
) -> Chosen:
    if not found.looked_at:
        reason = f"none divides a batch of {config.train.batch} over {place.num_ranks} ranks"
        return _plain(config, place, reason, lines)
    if found.closest is None:
        raise UsageError(
            f"layout {AUTO}: weights and optimizer state alone are too large for {place.num_ranks} x "
            f"{machine.device.name} in all of {found.looked_at} layouts; use more ranks"
        )
    layout, need = found.closest
    chosen = _plain(config, place, "", lines)
    text, has = stated(layout), machine.device.memory_bytes
    reason = (
        f"no layout is predicted to fit; this one needs least, {need / 1e9:.1f} of {has / 1e9:.0f} GB, and "
        "may run out of memory"
    )
    plan = {**(chosen.plan or {}), "layout": text, "why": reason}
    note = f"layout {AUTO}: {text}, because {reason}"
    return Chosen(dataclasses.replace(config, layout=text), plan, (*lines, note))


def find_machine(config: RunConfig, place: Place) -> tuple[Machine, str]:
    """The machine that `plan.machine` names, or that the device's name stands for; and how it is known."""
    if config.plan.machine:
        machine = load_named(config.plan.machine, "plan.machine")
        return _with_nodes(machine, place.per_node), f"plan.machine={config.plan.machine}"
    if place.device_name is not None:
        profile, near = profile_of(place.device_name), named_device(place.device_name)
        if near is None:
            raise UsageError(
                f"{place.device_name} has no profile (there are {', '.join(PROFILES)}); name one with "
                "plan.machine, or a file of it"
            )
        machine = _with_nodes(machine_of(near), place.per_node)
        if profile is None:
            how = f"the nearest to {place.device_name}; plan.machine names another"
            return machine, f"profile {near.profile}, {how}"
        return machine, f"profile {profile}, by its name"
    if config.device == "cuda":
        raise UsageError(
            "device=cuda and this host has no GPU, so nobody knows which one to plan for; name the "
            "machine, as in plan.machine=h200"
        )
    return cpu_machine(place.num_cores, place.per_node), "this processor, roughly"


def load_named(text: str, place: str) -> Machine:
    """A machine by its profile's name, by a YAML file, or by measured rates."""
    if text.endswith(".json"):
        return load_measured(Path(text))
    try:
        return load_machine(text)
    except UsageError as error:
        raise UsageError(str(error).replace("--machine", place)) from error


def cpu_machine(num_cores: int, per_node: int) -> Machine:
    """The profile of a CPU node, with what a rank has here of its cores and memory."""
    base = load_machine("cpu-node")
    share = num_cores / per_node / _SOCKET_CORES
    rates = {name: share * value for name, value in base.device.peak_flops.items()}
    return base.replace(
        **{
            "name": f"cpu-node with {num_cores / per_node:g} cores a rank",
            "device.name": "CPU",
            "device.peak_flops": rates,
            "device.num_sms": max(1, num_cores // per_node),
            "device.memory_bandwidth": share * base.device.memory_bandwidth,
            "device.memory_bytes": float(psutil.virtual_memory().total) / per_node,
            "devices_per_node": per_node,
        }
    )


def _with_nodes(machine: Machine, per_node: int) -> Machine:
    return machine.replace(devices_per_node=per_node)


def gpu_name() -> str | None:
    """The first GPU's name as the driver tells it, without touching the GPU; None where there is none."""
    for path in sorted(_DRIVER.glob("*/information")):
        try:
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("Model:"):
                    return line.partition(":")[2].strip()
        except OSError:
            continue
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None
