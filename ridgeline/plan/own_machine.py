"""A machine made of its `machine.json`: what `ridgeline machine compute`, `network` and `storage` found.

A device that has a shipped profile starts from it, and what was measured takes the place of its rates; any
other, a CPU too, is made of what was measured, and of a profile like it for the rest. What is taken from
there is said in `source["assumed"]`, which the command prints. Called by `measured.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ridgeline.plan.machine import Device, Link, Machine, load_machine
from ridgeline.plan.tables import PAIR, PAIRS, Table

PROFILES: Final = {
    "H200": "h200",
    "H100": "h100",
    "A100": "selene",
    "GB200": "gb200",
    "V100": "summit",
}
"""Shipped profiles by what the device's own name contains."""
LIKE: Final = {"cpu": "cpu-node", "cuda": "h100"}
"""Where values come from that were not measured of a device without a profile."""
KEYS: Final = ("compute", "network", "storage")
_FITTED: Final = ("bf16", "fp16", "fp32", "tf32")
_PASSES: Final = {"all_reduce": 2.0}

Row = Mapping[str, Any]
Fit = Callable[[Device, Sequence[Row]], dict[str, float]]


def is_machine_file(content: Any) -> bool:
    """Whether this is a `machine.json` with something for the planner in it."""
    if not isinstance(content, dict):
        return False
    return any(isinstance(content.get(key), list) and content[key] for key in KEYS[:2])


def profile_of(device_name: str) -> str | None:
    """The shipped profile of a device by its own name; None where there is none."""
    return next(
        (PROFILES[name] for name in PROFILES if re.search(rf"\b{name}\b", device_name)), None
    )


def machine_from_file(content: Mapping[str, Any], fit: Fit) -> Machine:
    """The machine that these facts are of; `fit` turns measured products into the device's efficiency."""
    compute = _newest_compute(content.get("compute") or [])
    rows = [row for row in content.get("network") or [] if isinstance(row, dict)]
    kind = str((compute or rows[-1]).get("device_kind", "cpu"))
    name = str((compute or rows[-1]).get("device_name", "a device"))
    used = [row for row in rows if row.get("device_kind") == kind]
    assumed: list[str] = []
    if rows and not used:
        assumed.append(
            f"its links, since the network was measured between {rows[-1]['device_kind']}s"
        )
    profile = profile_of(name)
    base = load_machine(profile or LIKE.get(kind, "h100"))
    per_node = max((max(row["ranks_per_node"]) for row in used), default=None)
    if per_node is None:
        per_node = 1 if kind == "cpu" else base.devices_per_node
        assumed.append(f"{per_node} device{'s' * (per_node > 1)} a node")
    machine = dataclasses.replace(
        base, name=f"{name.strip()}, measured", devices_per_node=int(per_node), source={}
    )
    if profile is None:
        machine, more = _without_profile(machine, compute, kind, name, int(per_node), base.name)
        assumed += more
    elif compute is not None:
        machine = _with_profile(machine, compute)
    else:
        assumed.append(f"the device's rates, from {base.name}")
    if compute is not None:
        machine, more = _fitted(machine, compute, fit)
        assumed += more
    machine, more = _with_links(machine, used, base.name)
    assumed += more
    changes: dict[str, Any] = {}
    if compute is not None and (link := _host_link(compute)):
        changes["host_link_bandwidth"] = link
    read, path = _storage(content.get("storage") or [])
    if read:
        changes["storage_bandwidth"] = read
    source = {"storage_bandwidth": f"read from {path}"} if read else {}
    if assumed:
        source["assumed"] = "; ".join(assumed)
    return machine.replace(**changes, source=source)


def _newest_compute(rows: Sequence[Any]) -> Row | None:
    """A GPU before the CPU beside it."""
    found = [row for row in rows if isinstance(row, dict) and row.get("peak_flops")]
    return max(
        found,
        key=lambda row: (row.get("device_kind") == "cuda", row.get("time") or 0.0),
        default=None,
    )


def _memory_rate(compute: Row) -> float | None:
    rates = [compute.get("copy_bytes_per_s"), compute.get("triad_bytes_per_s")]
    return max((float(rate) for rate in rates if rate), default=None)


def _with_profile(machine: Machine, compute: Row) -> Machine:
    changes: dict[str, Any] = {}
    if rate := _memory_rate(compute):
        changes["device.memory_efficiency"] = rate / machine.device.memory_bandwidth
    if compute.get("device_memory_bytes"):
        changes["device.memory_bytes"] = float(compute["device_memory_bytes"])
    if compute.get("num_sms"):
        changes["device.num_sms"] = int(compute["num_sms"])
    return machine.replace(**changes)


def _without_profile(
    machine: Machine, compute: Row | None, kind: str, name: str, per_node: int, like: str
) -> tuple[Machine, list[str]]:
    """What was measured of the device, and what has to be taken from another one's profile."""
    device = dataclasses.replace(machine.device, name=name)
    if compute is None:
        return machine.replace(device=device), [f"the device itself, as {like}'s: no compute facts"]
    peaks = {key: float(value) for key, value in compute["peak_flops"].items()}
    peaks.setdefault("fp32", max(peaks.values()))
    # Peaks are what products have reached, not what a data sheet says.
    changes: dict[str, Any] = {"peak_flops": peaks, "sustained_clock": 1.0, "gemm_efficiency": 0.99}
    missing = ["fused attention's share of the peak", "overlap", "what a step costs the host"]
    if rate := _memory_rate(compute):
        changes |= {"memory_bandwidth": rate, "memory_efficiency": 1.0}
    else:
        missing.append("memory bandwidth")
    threads = int(compute.get("num_threads") or 1)
    sms = compute.get("num_sms") or (threads if kind == "cpu" else None)
    if sms:
        changes["num_sms"] = int(sms)
    else:
        missing.append("the number of multiprocessors")
    if compute.get("device_memory_bytes"):
        # The ranks of a node share a CPU's memory.
        share = per_node if kind == "cpu" else 1
        changes["memory_bytes"] = float(compute["device_memory_bytes"]) / share
    else:
        missing.append(f"{device.memory_bytes / 1e9:.0f} GB of memory")
    if kind == "cpu" and compute.get("launch_s"):
        changes["host_kernel_s"] = float(compute["launch_s"])
    else:
        missing.append("what a kernel costs the host")
    device = dataclasses.replace(device, **changes)
    return machine.replace(device=device), [f"as {like}: {', '.join(missing)}"]


def _fitted(machine: Machine, compute: Row, fit: Fit) -> tuple[Machine, list[str]]:
    """The efficiency and tile overhead that the measured products show."""
    for precision in _FITTED:
        products = [
            {"m": m, "n": n, "k": k, "s": row["seconds"], "precision": precision}
            for row in compute.get("products") or ()
            if row.get("kind") == "matrix" and row.get("precision") == precision
            for m, n, k in [row["shape"]]
        ]
        if len(products) >= 3:
            machine = machine.replace(**{"device.sustained_clock": 1.0})
            values = fit(machine.device, products)
            found = {f"device.{name}": value for name, value in values.items()}
            return machine.replace(**found), []
    return machine, ["what small products lose, since fewer than three were measured"]


def _host_link(compute: Row) -> float:
    """The slower way, with pinned memory where that was measured."""
    for how in ("pinned", "pageable"):
        rates = [compute.get(f"{way}_{how}_bytes_per_s") for way in ("h2d", "d2h")]
        if any(rates):
            return min(float(rate) for rate in rates if rate)
    return 0.0


def _storage(rows: Sequence[Any]) -> tuple[float, str]:
    """The fastest that was measured and is no memory, by one reader or several."""
    best, where = 0.0, ""
    for row in rows:
        if not isinstance(row, dict) or row.get("kind") == "memory":
            continue
        rates = (row.get("read_bytes_per_s"), row.get("threads_read_bytes_per_s"))
        rate = max(float(rate or 0.0) for rate in rates)
        if rate > best:
            best, where = rate, str(row.get("path", "?"))
    return best, where


def tables_of(rows: Sequence[Row]) -> tuple[Table, ...]:
    """Tables of all networks that were measured; of equal kinds of groups the newest counts."""
    found: dict[tuple[Any, ...], Table] = {}
    for row in sorted(rows, key=lambda row: row.get("time") or 0.0):
        points: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
        for t in row.get("timings") or ():
            key = (t["collective"], t["size"], t["per_node"], t["num_groups"])
            if t["seconds"] > 0 and t["size"] > 1:
                points.setdefault(key, []).append((float(t["num_bytes"]), float(t["seconds"])))
        for key, pairs in points.items():
            rising = not_falling(sorted(dict(pairs).items()))
            found[key] = Table(*key, rising, str(row.get("backend", "nccl")))
    return tuple(found.values())


def not_falling(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """A larger message does not take less time; where it seems to, that is noise, and neighbours get the
    mean of their logarithms.

    >>> not_falling([(1, 1.0), (2, 4.0), (4, 1.0), (8, 8.0)])
    ((1, 1.0), (2, 2.0), (4, 2.0), (8, 8.0))
    """
    pools: list[list[float]] = []  # the sum of logarithms, and of how many
    for _, seconds in points:
        pools.append([math.log(seconds), 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + count]
    level = [math.exp(total / count) for total, count in pools for _ in range(int(count))]
    return tuple((size, seconds) for (size, _), seconds in zip(points, level, strict=True))


def _with_links(machine: Machine, rows: Sequence[Row], like: str) -> tuple[Machine, list[str]]:
    """The tables, and links that are like them for what only links tell."""
    if not rows:
        return machine, [f"both levels of the network, as {like}'s: no network facts"]
    tables = tables_of(rows)
    assumed = []
    for name, crosses, where in (
        ("intra", False, "inside a node"),
        ("inter", True, "between nodes"),
    ):
        link = link_of(tables, crosses, machine.devices_per_node)
        if link is not None:
            machine = machine.replace(**{name: link})
        elif crosses or machine.devices_per_node > 1:
            assumed.append(f"links {where}, as {like}'s: not measured")
    return machine.replace(tables=tables), assumed


def link_of(tables: Sequence[Table], crosses: bool, devices: int) -> Link | None:
    """One link like what was measured of a level: its top bus bandwidth, its smallest time in steps."""
    here = [t for t in tables if t.kind not in (PAIR, PAIRS) and (t.nodes > 1) == crosses]
    # One rank a node where there is such a group; else rings through whole nodes.
    here = [t for t in here if not crosses or t.per_node == 1] or here
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        found = [t for t in here if t.kind == kind]
        if found:
            break
    else:
        return None
    table = max(found, key=lambda t: (t.num_groups if crosses else 0, t.size))
    passes = _PASSES.get(table.kind, 1.0)
    steps = passes * (table.size - 1)
    bus = max(steps / table.size * size / seconds for size, seconds in table.points)
    members = table.num_groups * table.per_node if crosses else 1
    bandwidth = bus * members
    pairs = [t for t in tables if t.kind in (PAIR, PAIRS) and (t.per_node == 1) == crosses]
    top = max(
        (
            size / seconds * (t.num_groups if crosses else 1)
            for t in pairs
            for size, seconds in t.points
        ),
        default=bandwidth,
    )
    return Link(
        bandwidth=bandwidth,
        efficiency=1.0,
        pair_efficiency=min(top / bandwidth, 4.0),
        latency_s=0.0,
        step_s=table.points[0][1]
        / (passes * max(table.nodes - 1 if crosses else table.size - 1, 1)),
    )
