"""Machines in numbers: a device, the node around it and the links between nodes, from spec sheets.

A profile is a YAML file under `machines/`, shipped with the package; each value that is not on a data
sheet has its source beside it. What was measured (see `measured.py`) takes the place of rates, and tables
of collectives that of links. Read by `kernels.py`, `network.py` and `memory.py`; `load_machine` is what
commands call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

from ridgeline.errors import UsageError, unknown_word
from ridgeline.plan.profile import read_fields, read_number, read_rates
from ridgeline.plan.tables import Table

MACHINES: Final = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU socket)."""

    name: str
    peak_flops: dict[str, float]
    """Dense, by precision."""
    num_sms: int
    memory_bytes: float
    memory_bandwidth: float
    """Bytes a second on the data sheet."""
    sustained_clock: float
    """Clock under a matrix-product load as a share of the one that `peak_flops` is given for."""
    gemm_efficiency: float
    """What the best kernel for large products reaches of the peak at that clock."""
    tile_overhead: float
    """Prologue and epilogue of a tile, in steps of its inner dimension."""
    memory_efficiency: float
    """What streaming kernels reach of `memory_bandwidth`."""
    kernel_s: float
    """Start and end of a kernel on the device, which nothing hides."""
    host_kernel_s: float
    """What the host needs to issue one kernel from an eager framework's Python."""
    flash_efficiency: float
    """What a fused attention kernel reaches of the peak, forward."""
    is_host: bool = False
    """Whether it is the host itself: then issuing a kernel and computing it take turns."""
    workspace_bytes: float = 8e6
    """Of the product library, allocated with the first product."""
    context_bytes: float = 500e6
    """What the driver takes before anything is allocated."""

    def __hash__(self) -> int:
        return hash((self.name, self.num_sms, self.gemm_efficiency, self.tile_overhead))


@dataclass(frozen=True)
class Link:
    """One level of the network: inside a node, or between nodes."""

    bandwidth: float
    """Bytes a second and direction: of a device inside a node, of all NICs of a node between nodes."""
    efficiency: float
    """What collectives reach of it with large messages."""
    pair_efficiency: float
    """What point-to-point transfers, and collectives of two, reach of it."""
    latency_s: float
    """A collective's start and end."""
    step_s: float
    """Each step of a ring."""


@dataclass(frozen=True)
class Machine:
    """Nodes of equal kind."""

    name: str
    device: Device
    devices_per_node: int
    intra: Link
    inter: Link
    overlap_cost: float
    """Share of hidden communication that still costs time: its kernels hold some multiprocessors and
    some memory bandwidth."""
    step_s: float
    """What a step costs the host once: the next batch, overflow check, logging."""
    devices_per_domain: int = 1
    """Devices that `intra` connects where they are of several nodes, as in a rack; else fewer than a node
    has."""
    devices_per_board: int = 1
    """Devices that have links to each other, where a node has several such boards; 1: all of a node."""
    board_bandwidth: float = 0.0
    """Bytes a second that pass each member of a ring over several boards of a node."""
    skew: float = 0.005
    """Standard deviation of one device's speed over the devices of the machine, as a share of the mean; a
    step waits for the slowest of them."""
    price_per_device_hour: float = 0.0
    storage_bandwidth: float = 0.0
    """Bytes a second that a node reads from storage; 0: not known, and nothing waits for it."""
    host_link_bandwidth: float = 0.0
    """Bytes a second and direction between a device and its host; 0: not known."""
    host_memory_bytes: float = 0.0
    """Of a node, for `offload`; 0: not known, and taken as what its devices have."""
    tables: tuple[Table, ...] = ()
    """Collectives as they were measured, which count before the links."""
    programs: dict[str, dict[str, float]] = field(default_factory=dict)
    """What was fitted of programs on it, by their names: fields of `Software` that are not as shipped."""
    source: dict[str, str] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((self.name, self.device, self.devices_per_node))

    @property
    def reach(self) -> int:
        """Devices that `intra` connects."""
        return max(self.devices_per_node, self.devices_per_domain)

    def reach_of(self, count: int) -> int:
        """As many of `count` devices as `intra` connects, where a job gets as many nodes of each rack."""
        per_rack = self.reach // self.devices_per_node
        nodes = -(-count // self.devices_per_node)
        racks = -(-nodes // per_rack)
        return min(count, self.devices_per_node * -(-nodes // racks))

    def replace(self, **changes: Any) -> Machine:
        """The same machine with some values changed; dots go inside, as in `inter.bandwidth`. What was
        measured of a link does not hold for another one, and goes."""
        machine = self
        for name, value in changes.items():
            head, _, tail = name.partition(".")
            if tail:
                inner = dataclasses.replace(getattr(machine, head), **{tail: value})
                machine = dataclasses.replace(machine, **{head: inner})
                gone = {"intra": _inside, "inter": _between}.get(head)
                if gone is not None and machine.tables:
                    kept = tuple(table for table in machine.tables if not gone(table))
                    machine = dataclasses.replace(machine, tables=kept)
            else:
                machine = dataclasses.replace(machine, **{head: value})
        return machine


def _inside(table: Table) -> bool:
    return table.per_node > 1


def _between(table: Table) -> bool:
    """Pairs are of two ranks, which are on two nodes where they do not share one."""
    return table.nodes > 1


def machine_names() -> list[str]:
    return sorted(path.stem for path in MACHINES.glob("*.yaml"))


@lru_cache(maxsize=64)
def load_machine(name: str) -> Machine:
    """A shipped profile by name, or a file in the same form."""
    path = MACHINES / f"{name}.yaml"
    if not path.is_file():
        path = Path(name)
        if not path.is_file():
            raise _unknown(name)
    try:
        return machine_from_dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read {path} as a machine's profile: {error}") from error
    except UsageError as error:
        raise UsageError(
            f"{path} is no machine profile: {error}; {MACHINES / 'selene.yaml'} is one"
        ) from error


def _unknown(name: str) -> UsageError:
    """A name that no profile has: often it is that of a device."""
    if "/" in name or Path(name).suffix:
        return UsageError(f"there is no file {name}, given as --machine")
    word = name.lower().replace(" ", "-")
    found = [one for one in machine_names() if word in load_machine(one).device.name.lower()]
    if found:
        return UsageError(
            f"{name!r} in --machine is a device; machines with it: {', '.join(found)}; "
            "`ridgeline plan machines` lists all"
        )
    return unknown_word("machine", name, machine_names(), "--machine")


def machine_from_dict(values: Any) -> Machine:
    """A profile's fields, each checked; a UsageError names the one that cannot be."""
    found = read_fields(Machine, values, "")
    device = read_fields(Device, found["device"], "device")
    device["peak_flops"] = read_rates("device.peak_flops", device["peak_flops"])
    found["device"] = Device(**device)
    for name in ("intra", "inter"):
        found[name] = Link(**read_fields(Link, found[name], name))
    programs = found.get("programs", {})
    if not isinstance(programs, Mapping):
        raise UsageError(f"programs is {programs!r}; give a program's factors by its name")
    found["programs"] = {}
    for name, factors in programs.items():
        if not isinstance(factors, Mapping):
            raise UsageError(f"programs.{name} is {factors!r}; give its factors by their names")
        values = {n: read_number(f"programs.{name}.{n}", v) for n, v in factors.items()}
        found["programs"][name] = values
    machine = Machine(**found)
    require_links(machine)
    return machine


def require_links(machine: Machine) -> None:
    """Boards and racks hold whole numbers of each other, and boards say how they are connected."""
    per_node, board = machine.devices_per_node, machine.devices_per_board
    if board > 1 and (per_node % board or not machine.board_bandwidth):
        raise UsageError(
            f"devices_per_board={board} of {per_node} devices a node with "
            f"board_bandwidth={machine.board_bandwidth:g}; give a part of a node and bytes a second"
        )
    if machine.devices_per_domain > 1 and machine.devices_per_domain % per_node:
        raise UsageError(
            f"devices_per_domain={machine.devices_per_domain} is no multiple of the {per_node} devices of "
            "a node; give how many devices the links of a rack connect"
        )


def require_precision(machine: Machine, precision: str, place: str) -> None:
    """A device without hardware for it computes otherwise, or not at all."""
    rates = machine.device.peak_flops
    if not rates.get(precision):
        have = [name for name, rate in rates.items() if rate]
        raise UsageError(
            f"{machine.device.name} of {machine.name} has no {precision}, asked for in {place}; "
            f"it has {', '.join(have)}"
        )


def machine_to_yaml(machine: Machine, comment: str) -> str:
    """A profile in the form that `load_machine` reads; tables of what was measured are not a part of it."""
    values = dataclasses.asdict(machine)
    del values["tables"]
    return f"# {comment}\n" + yaml.safe_dump(values, sort_keys=False, width=108)


def read_place(machine: Machine, name: str) -> Any:
    """A value by its place, as in `inter.bandwidth`; None where there is none."""
    place: Any = machine
    for part in name.split("."):
        place = place.get(part) if isinstance(place, dict) else getattr(place, part, None)
    return place
