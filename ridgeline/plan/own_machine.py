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
    "H200-SXM-141GB": "h200",
    "H100-SXM5-80GB": "h100",
    "A100-SXM4-80GB": "selene",
    "A100-SXM4-40GB": "a100-40g",
    "GB200": "gb200",
    "GB300": "gb300",
    "V100-SXM2-16GB": "summit",
}
"""Shipped profiles by their devices."""
_ALIKE: Final = ("b200", "h800", "a800")
"""Devices whose rates are another one's, with other links or memory."""
_SEVERAL_SIZES: Final = ("a100", "a800", "v100")
"""Devices that are sold with more than one size of memory."""
_DEVICES: Final = {
    "gb300": "gb300", "gb200": "gb200", "b200": "gb200", "h200": "h200", "h100": "h100", "h800": "h100",
    "a100": "selene", "a800": "selene", "v100": "summit",
}  # fmt: skip
"""The word for a device in names, and the profile of its usual form."""
_DEVICE: Final = re.compile(
    rf"(?<![a-z0-9])(?:\d+x)?({'|'.join(_DEVICES)})(?=[^a-z0-9]|$|sxm|pcie|nvl)"
)
_MEMORY: Final = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)[\s-]*(?:gib|gb|g)(?![a-z0-9]|\s*/\s*s)")
_BARE_MEMORY: Final = re.compile(rf"(?:{'|'.join(_DEVICES)}|sxm\d?)[\s_-](\d{{2,3}})$")
_PLAIN: Final = frozenset((
    "nvidia", "tesla", "dgx", "hgx", "gpu", "gpus", "tensor", "core", "superchip", "grace", "hopper",
    "ampere", "volta", "blackwell", "nvlink", "nvswitch", "nvl72", "nvl36", "sxm", "sxm2", "sxm3", "sxm4",
    "sxm5", "sxm6", "hbm", "hbm2", "hbm2e", "hbm3", "hbm3e", "gb", "gib", "g", "x",
))  # fmt: skip
"""Words of a name that say nothing which the profile does not."""
_OTHER_FORMS: Final = frozenset(("pcie", "pci", "nvl"))
_PARTS: Final = frozenset(("mig", "laptop", "vgpu"))
"""Words of devices that are less than the one they are named after."""
_GIVEN: Final = 0.99 * 2**30
"""Bytes that the driver gives of each "GB" in a device's name."""
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


@dataclasses.dataclass(frozen=True)
class NamedDevice:
    """What a device's name says of it."""

    device: str
    """The word for it."""
    profile: str
    memory_bytes: float
    """As stated where the profile has another size; else 0."""
    is_other: bool
    """Whether the profile is of a device that is only like it."""
    is_vague: bool
    """Whether there are several of that name, with unequal memory."""


def named_device(name: str, place: str = "") -> NamedDevice | None:
    """The profile that is nearest to a device by its name, word by word; None where none is near, or the
    name is of several. `place`: what else is said of where it stands.

    >>> named_device("NVIDIA A100-SXM4-40GB").profile
    'a100-40g'
    >>> named_device("NVIDIA RTX A1000")
    """
    text = name.lower().strip()
    found = set(_DEVICE.findall(text))
    found -= {word.removeprefix("g") for word in found if word.startswith("gb")}
    words = re.findall(r"[a-z][a-z0-9]*", _DEVICE.sub(" ", text))
    if len(found) != 1 or not _PARTS.isdisjoint(words):
        return None
    (device,) = found
    stated = _MEMORY.findall(text) or _BARE_MEMORY.findall(text)
    size = float(stated[0]) if stated else 0.0
    if stated and not 4 <= size <= 1000:
        return None
    profile = _DEVICES[device]
    if profile == "selene" and round(size) == 40:
        profile = "a100-40g"
    elif device == "a100" and "jean zay" in f"{text} {place.lower()}":
        profile = "jean-zay"
    elif device == "h100" and "500w" in f"{text} {place.lower()}":
        profile = "h100-96g-500w"
    has = load_machine(profile).device.memory_bytes
    same_size = not size or abs(has / (size * _GIVEN) - 1.0) < 0.03
    # What is in brackets, or after a comma, is about the machine.
    head = re.split(r"[(,;]|\b(?:with|on|in)\b", _MEMORY.sub(" ", _DEVICE.sub(" ", text)))[0]
    strange = set(re.findall(r"[a-z][a-z0-9]*", head)) - _PLAIN
    other = bool(strange) or not _OTHER_FORMS.isdisjoint(words) or device == "b200" or not same_size
    vague = not size and device in _SEVERAL_SIZES
    memory = 0.0 if same_size else size * _GIVEN
    return NamedDevice(device, profile, memory, other or len(stated) > 1, vague)


def machine_of(named: NamedDevice) -> Machine:
    """The profile as it is of the named device. One with another processor beside it (B200, taken as GB200)
    has neither the rack nor the host of the profile's."""
    machine = load_machine(named.profile)
    if named.profile.startswith("gb") and not named.device.startswith("gb"):
        alone = {"devices_per_domain": 1, "host_link_bandwidth": 0.0, "host_memory_bytes": 0.0}
        machine = machine.replace(**alone)
    if named.memory_bytes:
        machine = machine.replace(**{"device.memory_bytes": named.memory_bytes})
    return machine


def mentioned_device(text: str) -> NamedDevice | None:
    """The device that a longer text is about; None where it mentions none, or several."""
    found = list(_DEVICE.finditer(text.lower()))
    if len({match[1] for match in found}) != 1:
        return None
    # Its memory stands right behind it, if at all.
    return named_device(text[found[0].start() : found[0].end() + 12])


def profile_of(device_name: str) -> str | None:
    """The shipped profile of a device by its own name; None where there is none of just that device."""
    named = named_device(device_name)
    if named is None or named.is_other or named.device in _ALIKE:
        return None
    return named.profile


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
    near = named_device(name) if kind == "cuda" else None
    base = machine_of(near) if near else load_machine(profile or LIKE.get(kind, "h100"))
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

    >>> [round(seconds, 6) for _, seconds in not_falling([(1, 1.0), (2, 4.0), (4, 1.0), (8, 8.0)])]
    [1.0, 2.0, 2.0, 8.0]
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
            if crosses:  # whatever connects nodes, a rack's links too, this is what it does
                machine = machine.replace(devices_per_domain=1)
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
