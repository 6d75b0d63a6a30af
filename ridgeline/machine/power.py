"""What a GPU draws and how fast its clock is while something runs: `PowerWatch(device)`.

A GPU under full load slows its own clock down to stay within its power limit or its temperature, and then
no kernel is as fast as a short trial of it says. The driver's library is asked directly, a few times a
second from a thread of its own; where there is none (no NVIDIA device, no right to ask) nothing is known.
Used by the doctor's probe and by `compute.py`.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

EVERY_S = 0.05
FEWEST = 4
"""Samples below which nothing is said."""
COUNTER_S = 1.0
"""The counter of energy goes on in steps, which are long for less than this."""

_SM_CLOCK = 1
_POWER_CAP, _POWER_BRAKE = 0x04, 0x80
_HOT = 0x20 | 0x40
"""Bits of the driver's reasons for a clock that is not the highest: software and hardware that cool."""


@dataclass(frozen=True)
class Power:
    """A GPU over some time."""

    watts: float
    """On average; by its own counter of energy where it has one."""
    limit_watts: float
    clock_mhz: float
    max_clock_mhz: float
    capped: float
    """Share of the samples in which the clock was held down by the power limit."""
    hot: float
    """The same, by the temperature."""
    seconds: float


@dataclass(frozen=True)
class Reading:
    """What the driver says at one moment."""

    watts: float
    clock_mhz: float
    reasons: int


class Gauge(Protocol):
    """A device that can be asked."""

    limit_watts: float
    max_clock_mhz: float

    def read(self) -> Reading | None: ...

    def joules(self) -> float | None:
        """Since some moment in the past."""


def load_driver() -> Any:
    """The driver's library, started; an `OSError` where there is none. Also for `gauges.py`."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    if library.nvmlInit_v2() != 0:
        raise OSError("the driver's library does not start")
    return library


def find_device(library: Any, uuid: str) -> ctypes.c_void_p:
    """A device by its UUID; an `OSError` where the driver does not know it."""
    device = ctypes.c_void_p()
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    if library.nvmlDeviceGetHandleByUUID(name.encode("ascii"), ctypes.byref(device)) != 0:
        raise OSError(f"the driver knows no device {name}")
    return device


def ask_driver(library: Any, device: ctypes.c_void_p, function: str, kind: Any, *words: int) -> Any:
    """What a function of the driver fills in for a device, or None where it does not."""
    value = kind()
    call = getattr(library, function, None)
    if call is None:
        return None
    extra = [ctypes.c_int(word) for word in words]
    return value if call(device, *extra, ctypes.byref(value)) == 0 else None


class Nvml:
    """A device by its UUID through the driver's library; an `OSError` where that does not work."""

    def __init__(self, uuid: str) -> None:
        self._library = load_driver()
        self._device = find_device(self._library, uuid)
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint)
        clock = self._ask("nvmlDeviceGetMaxClockInfo", ctypes.c_uint, _SM_CLOCK)
        if not limit or not clock or self.read() is None:
            raise OSError(f"{uuid} does not tell its power and clock")
        self.limit_watts, self.max_clock_mhz = limit / 1e3, float(clock)

    def _ask(self, function: str, kind: Any, *words: int) -> int | None:
        value = ask_driver(self._library, self._device, function, kind, *words)
        return None if value is None else int(value.value)

    def read(self) -> Reading | None:
        milliwatts = self._ask("nvmlDeviceGetPowerUsage", ctypes.c_uint)
        clock = self._ask("nvmlDeviceGetClockInfo", ctypes.c_uint, _SM_CLOCK)
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong)
        if milliwatts is None or clock is None:
            return None
        return Reading(milliwatts / 1e3, float(clock), reasons or 0)

    def joules(self) -> float | None:
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)
        return millijoules / 1e3 if millijoules else None


def open_gauge(device: Any) -> Gauge | None:
    """Of a torch device; None where nothing can be asked."""
    if device.type != "cuda":
        return None
    import torch

    try:
        return Nvml(str(torch.cuda.get_device_properties(device).uuid))
    except (OSError, AttributeError):  # AMD, an old driver, a part of a device
        return None


class PowerWatch:
    """Samples from `start` to `stop`, which says what they were; None where they were too few."""

    def __init__(self, gauge: Gauge | None) -> None:
        self._gauge = gauge
        self._readings: list[Reading] = []
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._begun = 0.0
        self._joules: float | None = None

    def start(self) -> None:
        if self._gauge is None or self._thread is not None:
            return
        self._readings, self._over = [], threading.Event()
        self._begun, self._joules = time.perf_counter(), self._gauge.joules()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        assert self._gauge is not None
        while not self._over.wait(EVERY_S):
            reading = self._gauge.read()
            if reading is not None:
                self._readings.append(reading)

    def stop(self) -> Power | None:
        if self._gauge is None or self._thread is None:
            return None
        seconds, joules = time.perf_counter() - self._begun, self._gauge.joules()
        self._over.set()
        self._thread.join(1.0)
        hangs, self._thread = self._thread.is_alive(), None
        if hangs:  # a driver that does not answer
            return None
        rows = self._readings
        if len(rows) < FEWEST:
            return None
        watts = statistics.fmean(row.watts for row in rows)
        if joules is not None and self._joules is not None and seconds > COUNTER_S:
            watts = (joules - self._joules) / seconds
        return Power(
            watts=watts,
            limit_watts=self._gauge.limit_watts,
            clock_mhz=statistics.fmean(row.clock_mhz for row in rows),
            max_clock_mhz=self._gauge.max_clock_mhz,
            capped=_share(rows, _POWER_CAP | _POWER_BRAKE),
            hot=_share(rows, _HOT),
            seconds=seconds,
        )


def _share(rows: list[Reading], bits: int) -> float:
    return sum(bool(row.reasons & bits) for row in rows) / len(rows)
