"""What this node is made of, as far as this process may use it: cores, memory nodes, GPUs, NICs.

Read from sysfs and procfs alone, so that it needs neither NVML nor hwloc and can be tried on a made-up
tree. Whatever is missing there (containers, virtual machines, one memory node) is left unknown and never an
error. Called by the rank's wrapper, which hands the result to `bind.py`. The environment is not read here:
`visible` is what `CUDA_VISIBLE_DEVICES`, or `ROCR_VISIBLE_DEVICES` on AMD, says.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

UNKNOWN_NODE = -1
"""The number of the one memory node of a machine that does not tell its memory nodes."""

_NVIDIA, _AMD = "0x10de", "0x1002"
# VGA and 3D controllers; AMD's accelerators come as "display, other" and "processing accelerator".
_GPU_CLASSES = {_NVIDIA: ("0x0300", "0x0302"), _AMD: ("0x0300", "0x0302", "0x0380", "0x1200")}
_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_FAST_NAMES = ("hsn",)  # Slingshot
_ACTIVE = "4: ACTIVE"


@dataclass(frozen=True)
class Core:
    """A physical core with its hardware threads."""

    threads: tuple[int, ...]
    node: int
    socket: int


@dataclass(frozen=True)
class MemoryNode:
    number: int
    memory_bytes: int | None
    usable: bool
    """Whether the job may have memory here."""
    distances: tuple[tuple[int, int], ...] = ()
    """To other nodes, as the firmware says; 10 is here."""


@dataclass(frozen=True)
class Gpu:
    name: str
    """What the runtime calls it: an index, or what `CUDA_VISIBLE_DEVICES` says."""
    address: str
    """On the PCI bus; empty where it cannot be found out, as for a MIG slice by its name."""
    node: int | None = None
    path: tuple[str, ...] = ()
    """From the root of the PCI tree down to it."""
    uuid: str = ""
    minor: int | None = None


@dataclass(frozen=True)
class Nic:
    name: str
    kind: str
    """`infiniband`, `roce`, `slingshot` or `ethernet`."""
    address: str
    node: int | None
    path: tuple[str, ...]
    gbit_per_s: float | None
    interfaces: tuple[str, ...] = ()
    port: int | None = None
    subnet: str = ""
    """Of an InfiniBand port: devices of one subnet reach each other."""


@dataclass(frozen=True)
class View:
    """What one rank may use of its node. Ranks of a node compare these to divide what they share."""

    cpus: tuple[int, ...]
    gpus: tuple[str, ...]
    """PCI addresses, in the order in which the rank counts its devices."""


@dataclass(frozen=True)
class Topology:
    cpus: tuple[int, ...]
    """Hardware threads that this process may run on."""
    cores: tuple[Core, ...]
    """Every core of the node, those that others may use as well."""
    nodes: tuple[MemoryNode, ...]
    gpus: tuple[Gpu, ...] = ()
    """In the order in which the runtime of this process counts them."""
    installed: tuple[Gpu, ...] = ()
    """Every GPU of the node by PCI address, those that others may use as well."""
    nics: tuple[Nic, ...] = ()
    quota: float | None = None
    """Processors' worth of time that a cgroup grants, where that is limited."""

    def view(self) -> View:
        """What this process may use, to be told to the other ranks of the node."""
        return View(self.cpus, tuple(gpu.address for gpu in self.gpus))


def read_topology(
    sys_root: Path = Path("/sys"),
    allowed: set[int] | None = None,
    *,
    visible: str | None = None,
    proc_root: Path = Path("/proc"),
    dev_root: Path = Path("/dev"),
) -> Topology:
    """This node, and which part of it the process may use.

    `allowed` is for hardware threads other than those of this process, `visible` what
    `CUDA_VISIBLE_DEVICES` says (None: it is not set).
    """
    cpus = usable_cpus() if allowed is None else set(allowed)
    nodes, node_of_cpu = _read_nodes(sys_root, _usable_memory(proc_root))
    cores = _read_cores(sys_root, cpus, node_of_cpu)
    if not nodes:
        nodes = [MemoryNode(UNKNOWN_NODE, None, usable=False)]
    installed = _read_gpus(sys_root, proc_root, nodes, node_of_cpu)
    mine = [gpu for gpu in installed if _may_use(gpu, dev_root)]
    return Topology(
        cpus=tuple(sorted(cpus)),
        cores=tuple(cores),
        nodes=tuple(nodes),
        gpus=tuple(choose_visible(mine, visible)),
        installed=tuple(installed),
        nics=tuple(_read_nics(sys_root, nodes, node_of_cpu)),
        quota=_read_quota(sys_root, proc_root),
    )


def usable_cpus() -> set[int]:
    """Hardware threads that this process may run on; cpusets of the scheduler are in this already."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def read_ranges(text: str) -> list[int]:
    """The numbers of a list such as the kernel writes; nothing where it is no such list.

    >>> read_ranges("0-3,64-66")
    [0, 1, 2, 3, 64, 65, 66]
    """
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            continue
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def show_ranges(numbers: Iterable[int]) -> str:
    """
    >>> show_ranges([64, 0, 1, 2, 3, 66, 65])
    '0-3,64-66'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def choose_visible(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """The devices that CUDA shows, in its order: by number, by (the beginning of) a UUID, by MIG name.

    As in CUDA, the list ends at the first entry that is no device. A slice of a GPU that only the driver
    could find keeps its place, with an address only where there is no choice.
    """
    if visible is None:
        return [replace(gpu, name=str(index)) for index, gpu in enumerate(gpus)]
    chosen: list[Gpu] = []
    for said in (entry.strip() for entry in visible.split(",")):
        gpu = _find_visible(gpus, said)
        if gpu is None:
            break
        chosen.append(replace(gpu, name=said))
    return chosen


def _find_visible(gpus: list[Gpu], said: str) -> Gpu | None:
    if said.isdigit():
        return gpus[int(said)] if int(said) < len(gpus) else None
    if said.startswith("MIG-"):
        parent = said.removeprefix("MIG-").partition("/")[0]
        if parent.startswith("GPU-"):
            return _find_visible(gpus, parent)
        return gpus[0] if len(gpus) == 1 else Gpu(said, "")
    if not said.startswith("GPU-"):
        return None
    named = [gpu for gpu in gpus if gpu.uuid.lower().startswith(said.lower())]
    if len(named) == 1:
        return named[0]
    if any(gpu.uuid for gpu in gpus):
        return None
    return gpus[0] if len(gpus) == 1 else Gpu(said, "")


def _read(path: Path) -> str:
    """A file's text without the end of its line; empty where there is none to be had."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _read_nodes(sys_root: Path, usable: set[int] | None) -> tuple[list[MemoryNode], dict[int, int]]:
    """The memory nodes, and in which one each hardware thread is."""
    folder = sys_root / "devices/system/node"
    numbers = sorted(
        int(name[4:]) for name in _names(folder) if name.startswith("node") and name[4:].isdigit()
    )
    nodes, node_of_cpu = [], {}
    for number in numbers:
        own = folder / f"node{number}"
        node_of_cpu.update(dict.fromkeys(read_ranges(_read(own / "cpulist")), number))
        total = re.search(r"MemTotal:\s*(\d+) kB", _read(own / "meminfo"))
        size = int(total[1]) * 1024 if total else None
        # The file counts the nodes that are there, in order, not by number.
        lengths = [int(word) for word in _read(own / "distance").split() if word.isdigit()]
        distances = (
            tuple(zip(numbers, lengths, strict=True)) if len(lengths) == len(numbers) else ()
        )
        may = size != 0 and (usable is None or number in usable)
        nodes.append(MemoryNode(number, size, may, distances))
    return nodes, node_of_cpu


def _usable_memory(proc_root: Path) -> set[int] | None:
    found = re.search(
        r"^Mems_allowed_list:\s*(\S+)", _read(proc_root / "self/status"), re.MULTILINE
    )
    return set(read_ranges(found[1])) if found else None


def _read_cores(sys_root: Path, cpus: set[int], node_of_cpu: dict[int, int]) -> list[Core]:
    """Those of the node that are switched on, and those that may be used whatever sysfs knows of them."""
    default = min(node_of_cpu.values(), default=UNKNOWN_NODE)
    folder = sys_root / "devices/system/cpu"
    online = set(read_ranges(_read(folder / "online")))
    cores, seen = [], set[int]()
    for cpu in sorted(cpus | online):
        if cpu in seen:
            continue
        own = folder / f"cpu{cpu}/topology"
        listed = _read(own / "core_cpus_list") or _read(own / "thread_siblings_list")
        threads = ({cpu} | set(read_ranges(listed))) - seen
        seen |= threads
        socket = _read(own / "physical_package_id")
        cores.append(
            Core(
                threads=tuple(sorted(threads)),
                node=node_of_cpu.get(cpu, default),
                socket=int(socket) if socket.isdigit() else 0,
            )
        )
    return cores


def _read_gpus(
    sys_root: Path, proc_root: Path, nodes: list[MemoryNode], node_of_cpu: dict[int, int]
) -> list[Gpu]:
    """By PCI address, as `nvidia-smi` counts them."""
    found = []
    for address in _names(sys_root / "bus/pci/devices"):
        device = sys_root / "bus/pci/devices" / address
        if _read(device / "class")[:6] not in _GPU_CLASSES.get(_read(device / "vendor"), ()):
            continue
        told = _read(proc_root / "driver/nvidia/gpus" / address / "information")
        uuid = re.search(r"GPU UUID:\s*(GPU-[0-9a-fA-F-]+)", told)
        minor = re.search(r"Device Minor:\s*(\d+)", told)
        gpu = Gpu(
            name=address,
            address=address,
            node=_node_of(device, nodes, node_of_cpu),
            path=_pci_path(device),
            uuid=uuid[1] if uuid else "",
            minor=int(minor[1]) if minor else None,
        )
        found.append(gpu)
    return sorted(found, key=lambda gpu: [int(part, 16) for part in re.split("[:.]", gpu.address)])


def _may_use(gpu: Gpu, dev_root: Path) -> bool:
    """Whether the scheduler or container lets this process at the device: its file is there and the
    cgroup has no objection, which `access` asks for without waking the device."""
    if gpu.minor is None:
        return True
    return os.access(dev_root / f"nvidia{gpu.minor}", os.R_OK | os.W_OK)


def _node_of(device: Path, nodes: list[MemoryNode], node_of_cpu: dict[int, int]) -> int | None:
    """The memory node of a PCI device: as it says, or that of all the processors near it."""
    numbers = [node.number for node in nodes]
    said = _read(device / "numa_node")
    if said.isdigit() and int(said) in numbers:
        return int(said)
    near = {node_of_cpu.get(cpu) for cpu in read_ranges(_read(device / "local_cpulist"))}
    if len(near) == 1 and None not in near:
        return near.pop()
    return numbers[0] if len(numbers) == 1 else None


def _pci_path(device: Path) -> tuple[str, ...]:
    """The bridges from the root complex down to a device, from where its link in sysfs leads."""
    parts = Path(os.path.realpath(device)).parts
    return tuple(part for part in parts if part.startswith("pci") or _PCI.fullmatch(part))


def _read_nics(sys_root: Path, nodes: list[MemoryNode], node_of_cpu: dict[int, int]) -> list[Nic]:
    """Devices that are up and are devices: InfiniBand ports first, then interfaces that are not theirs."""
    nics, interfaces_seen = [], set[str]()
    for name in _names(sys_root / "class/infiniband"):
        device = sys_root / "class/infiniband" / name / "device"
        interfaces = tuple(_names(device / "net"))
        interfaces_seen.update(interfaces)
        ports = sys_root / "class/infiniband" / name / "ports"
        for port in _names(ports):
            if not port.isdigit() or _read(ports / port / "state") != _ACTIVE:
                continue
            kind = "roce" if _read(ports / port / "link_layer") == "Ethernet" else "infiniband"
            if any(interface.startswith(_FAST_NAMES) for interface in interfaces):
                kind = "slingshot"
            rate = _read(ports / port / "rate").partition(" ")[0]
            subnet = ":".join(_read(ports / port / "gids/0").split(":")[:4])
            nics.append(
                Nic(
                    name=name,
                    kind=kind,
                    address=(_pci_path(device) or ("",))[-1],
                    node=_node_of(device, nodes, node_of_cpu),
                    path=_pci_path(device),
                    gbit_per_s=float(rate) if _is_number(rate) else None,
                    interfaces=interfaces,
                    port=int(port),
                    subnet=subnet if kind == "infiniband" else "",
                )
            )
    for name in _names(sys_root / "class/net"):
        own = sys_root / "class/net" / name
        device = own / "device"
        if name in interfaces_seen or not device.exists() or _read(own / "operstate") != "up":
            continue
        speed = _read(own / "speed")
        nics.append(
            Nic(
                name=name,
                kind="slingshot" if name.startswith(_FAST_NAMES) else "ethernet",
                address=(_pci_path(device) or ("",))[-1],
                node=_node_of(device, nodes, node_of_cpu),
                path=_pci_path(device),
                gbit_per_s=int(speed) / 1000 if speed.isdigit() else None,
                interfaces=(name,),
            )
        )
    return nics


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _read_quota(sys_root: Path, proc_root: Path) -> float | None:
    """The tightest limit on processor time among this process's cgroups, in processors."""
    limits: list[float] = []
    for line in _read(proc_root / "self/cgroup").splitlines():
        _, controllers, place = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = ["", "unified"] if not controllers else [controllers, "cpu"]
        folders = [Path(place.lstrip("/")), *Path(place.lstrip("/")).parents]
        for mount in mounts:
            for folder in folders:
                limits += _read_limit(sys_root / "fs/cgroup" / mount / folder)
    return min(limits, default=None)


def _read_limit(folder: Path) -> list[float]:
    """Of version 2 (`max 100000`, `200000 100000`) or of version 1 (-1: no limit)."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        return [int(words[0]) / int(words[1])]
    return []
