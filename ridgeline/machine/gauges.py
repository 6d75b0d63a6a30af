"""What a node does at one moment: cores, memory, disks, links and GPUs, as one `ResourceRecord`.

Everything is read from the kernel's counters and the driver's library, nothing is started and nothing is
measured by doing work, so that a sample costs about a millisecond. What cannot be read is None. Called by
`train/resources.py` from a thread of its own; imports without torch.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ridgeline.machine.power import ask_driver, find_device, load_driver
from ridgeline.machine.room import used_memory
from ridgeline.rundir import GpuUse, ResourceRecord

FAMILY_S = 30.0
"""How long the list of processes is kept: to find them, all of the node are looked at."""

_SM_CLOCK, _CORE_SENSOR = 1, 0
_T = TypeVar("_T")


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`: percent of the time in which a kernel ran, and memory was used."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Gpus:
    """Devices of the node that can be asked; none where there is no driver."""

    def __init__(self, uuids: Sequence[str] | None) -> None:
        """`uuids` are those of the ranks; None takes all that the driver shows."""
        self._devices: list[tuple[int, ctypes.c_void_p]] = []
        with suppress(OSError, AttributeError):
            self._library = load_driver()
            handles = self._all() if uuids is None else self._named(uuids)
            for place, device in enumerate(handles):
                index = ask_driver(self._library, device, "nvmlDeviceGetIndex", ctypes.c_uint)
                self._devices.append((place if index is None else int(index.value), device))

    def _named(self, uuids: Sequence[str]) -> list[ctypes.c_void_p]:
        found = []
        for uuid in uuids:
            with suppress(OSError):
                found.append(find_device(self._library, uuid))
        return found

    def _all(self) -> list[ctypes.c_void_p]:
        """Those that this job may use: of the others the driver gives no handle."""
        count, found = ctypes.c_uint(), []
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        for number in range(count.value):
            device = ctypes.c_void_p()
            call = self._library.nvmlDeviceGetHandleByIndex_v2
            if call(ctypes.c_uint(number), ctypes.byref(device)) == 0:
                found.append(device)
        return found

    def read(self) -> tuple[GpuUse, ...]:
        return tuple(self._read_one(index, device) for index, device in self._devices)

    def _read_one(self, index: int, device: ctypes.c_void_p) -> GpuUse:
        def ask(function: str, kind: Any, *words: int) -> Any:
            return ask_driver(self._library, device, function, kind, *words)

        busy = ask("nvmlDeviceGetUtilizationRates", _Utilization)
        memory = ask("nvmlDeviceGetMemoryInfo", _Memory)
        milliwatts = ask("nvmlDeviceGetPowerUsage", ctypes.c_uint)
        degrees = ask("nvmlDeviceGetTemperature", ctypes.c_uint, _CORE_SENSOR)
        clock = ask("nvmlDeviceGetClockInfo", ctypes.c_uint, _SM_CLOCK)
        return GpuUse(
            index=index,
            utilization_percent=None if busy is None else float(busy.gpu),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            watts=None if milliwatts is None else milliwatts.value / 1e3,
            temperature_c=None if degrees is None else float(degrees.value),
            sm_clock_mhz=None if clock is None else float(clock.value),
        )


class Gauges:
    """All of a node; the first sample has no rates, because there is nothing before it."""

    def __init__(
        self,
        find_ranks: Callable[[], Sequence[int]],
        gpus: Gpus | None = None,
        num_ranks: int = 1,
        sys_root: Path = Path("/sys"),
    ) -> None:
        """`find_ranks` says which processes of this node are ranks of the run, of `num_ranks`."""
        self._find_ranks, self._gpus, self._num_ranks = find_ranks, gpus, num_ranks
        self._sys_root, self._is_whole = sys_root, False
        self._host = socket.gethostname()
        self._family: list[psutil.Process] = []
        self._cores: set[int] = set()
        self._family_at = -FAMILY_S
        self._before: tuple[float, dict[str, float]] | None = None
        self._busy_before: dict[int, tuple[float, float]] = {}

    def sample(self) -> ResourceRecord:
        now = time.monotonic()
        if now - self._family_at >= FAMILY_S:
            self._family_at = now
            _try(self._look_around)
        used, total = _try(used_memory) or (None, None)
        cpu_percent = _try(self._read_cores)
        counters = {**(_try(_read_disks) or {}), **(_try(_read_links) or {})}
        counters |= _try(lambda: _read_fabric(self._sys_root)) or {}
        rates = self._rates(now, counters)
        return ResourceRecord(
            time=time.time(),
            host=self._host,
            cpu_count=len(self._cores) or os.cpu_count() or 1,
            cpu_percent=cpu_percent,
            memory_used_bytes=used,
            memory_total_bytes=total,
            rss_bytes=_try(self._read_family) if self._is_whole else None,
            gpus=_try(self._gpus.read) or () if self._gpus is not None else (),
            **rates,
        )

    def _look_around(self) -> None:
        """The ranks with all that they started, and the cores that ranks may use."""
        found = self._find_ranks()
        ranks, self._is_whole = set(found), len(found) >= self._num_ranks
        parent_of = _read_parents()
        mine = set(ranks)
        for pid in parent_of:
            line: list[int] = []
            above: int | None = pid
            while above and above not in mine and above not in line:
                line.append(above)
                above = parent_of.get(above)
            if above in mine:
                mine.update(line)
        self._family, self._cores = [], set()
        for pid in mine:
            with suppress(psutil.Error):
                self._family.append(psutil.Process(pid))
        for pid in ranks:
            with suppress(OSError, AttributeError):
                self._cores |= os.sched_getaffinity(pid)

    def _read_family(self) -> int:
        total = 0
        for process in self._family:
            with suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def _read_cores(self) -> float | None:
        """Busy share of the ranks' cores since the last call; psutil's own keeps one for the process."""
        now: dict[int, tuple[float, float]] = {}
        for number, times in enumerate(psutil.cpu_times(percpu=True)):
            # A guest's time is inside `user` already.
            all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
            idle_s = times.idle + getattr(times, "iowait", 0.0)
            now[number] = (all_s - idle_s, all_s)
        before, self._busy_before = self._busy_before, now
        cores = [n for n in (self._cores or now) if n in before and n in now]
        all_s = sum(now[n][1] - before[n][1] for n in cores)
        busy_s = sum(now[n][0] - before[n][0] for n in cores)
        return round(min(max(100 * busy_s / all_s, 0.0), 100.0), 1) if all_s > 0 else None

    def _rates(self, now: float, counters: dict[str, float]) -> dict[str, float]:
        """Of counters that were there before as well; one that was set back gives none."""
        before, self._before = self._before, (now, counters)
        if before is None or now <= before[0]:
            return {}
        seconds = now - before[0]
        grown = {
            name: value - before[1][name] for name, value in counters.items() if name in before[1]
        }
        return {f"{n}_bytes_per_s": round(g / seconds, 1) for n, g in grown.items() if g >= 0}


def _try(read: Callable[[], _T]) -> _T | None:
    """A gauge that is not there, or that breaks, is one that says nothing."""
    try:
        return read()
    except Exception:
        return None


def _read_parents() -> dict[int, int]:
    """The parent of each process of the node. psutil's own list takes several times as long, which counts
    on nodes with thousands of them."""
    found = {}
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    for name in names:
        if name.isdecimal():
            with (
                suppress(OSError, ValueError, IndexError),
                open(f"/proc/{name}/stat", "rb") as file,
            ):
                # The command stands in brackets and may be called anything; state and parent follow.
                found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return found


def _read_disks() -> dict[str, float]:
    found = psutil.disk_io_counters()
    if found is None:
        return {}
    return {"disk_read": found.read_bytes, "disk_write": found.write_bytes}


def _read_links() -> dict[str, float]:
    links = [link for name, link in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    if not links:
        return {}
    sent, received = sum(i.bytes_sent for i in links), sum(i.bytes_recv for i in links)
    return {"net_sent": sent, "net_received": received}


def _read_fabric(sys_root: Path) -> dict[str, float]:
    """InfiniBand and RoCE count in words of four bytes, below the network interfaces."""
    found: dict[str, float] = {}
    files = {"fabric_sent": "port_xmit_data", "fabric_received": "port_rcv_data"}
    for port in (sys_root / "class/infiniband").glob("*/ports/*/counters"):
        for name, file in files.items():
            with suppress(OSError, ValueError):
                found[name] = found.get(name, 0) + 4 * int((port / file).read_text())
    return found
