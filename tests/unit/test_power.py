"""What a GPU draws, from a gauge that plays one: averages, its counter of energy, and no gauge at all."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.machine import power as power_module
from ridgeline.machine.power import PowerWatch, Reading, open_gauge


class FakeGauge:
    limit_watts, max_clock_mhz = 700.0, 1980.0

    def __init__(self, reasons: list[int], watts_by_counter: float | None = None) -> None:
        self._reasons = itertools.cycle(reasons)
        self._watts = watts_by_counter
        self.num_reads = 0

    def read(self) -> Reading:
        self.num_reads += 1
        return Reading(600.0, 1500.0, next(self._reasons))

    def joules(self) -> float | None:
        return None if self._watts is None else 1e6 + self._watts * time.perf_counter()


def watch(gauge: FakeGauge, monkeypatch: pytest.MonkeyPatch, reads: int = 40) -> object:
    monkeypatch.setattr(power_module, "EVERY_S", 0.002)
    watched = PowerWatch(gauge)
    watched.start()
    until = time.monotonic() + 60
    while gauge.num_reads < reads and time.monotonic() < until:
        time.sleep(0.005)
    return watched.stop()


def test_shares_of_the_time_are_by_the_drivers_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    found = watch(FakeGauge([0x04, 0x04, 0x80, 0x20, 0x40, 0x01, 0x00, 0x04]), monkeypatch)
    assert isinstance(found, power_module.Power)
    assert found.capped == pytest.approx(0.5, abs=0.06)
    assert found.hot == pytest.approx(0.25, abs=0.06)
    assert (found.watts, found.clock_mhz) == (600.0, 1500.0)
    assert (found.limit_watts, found.max_clock_mhz) == (700.0, 1980.0)


def test_the_counter_of_energy_goes_before_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    brief = watch(FakeGauge([0], watts_by_counter=450.0), monkeypatch)
    assert isinstance(brief, power_module.Power)
    assert brief.watts == 600.0  # its steps are too long for that
    monkeypatch.setattr(power_module, "COUNTER_S", 0.01)
    found = watch(FakeGauge([0], watts_by_counter=450.0), monkeypatch)
    assert isinstance(found, power_module.Power)
    assert found.watts == pytest.approx(450.0, rel=0.05)


def test_too_few_samples_say_nothing_and_no_thread_is_left() -> None:
    before = threading.active_count()
    watched = PowerWatch(FakeGauge([0]))
    watched.start()
    assert watched.stop() is None
    assert threading.active_count() == before
    assert PowerWatch(None).stop() is None


NUMBERS = {
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetPowerUsage": 655_500,
    "nvmlDeviceGetClockInfo": 1524,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x04,
    "nvmlDeviceGetTotalEnergyConsumption": 9_000_000_000_000,
}


class FakeLibrary:
    """Answers as the driver's library does: 0 and a number in the last argument, or an error."""

    def __init__(self, *without: str) -> None:
        self.without = without
        self.asked: list[bytes] = []

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: object) -> int:
        self.asked.append(uuid)
        return 0 if uuid == b"GPU-12ab" else 6

    def __getattr__(self, name: str) -> Any:
        def answer(device: object, *arguments: Any) -> int:
            if name in self.without:
                return 3  # not supported
            arguments[-1]._obj.value = NUMBERS[name]
            return 0

        return answer


def test_the_drivers_library_is_asked_by_the_devices_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    library = FakeLibrary()
    monkeypatch.setattr(power_module.ctypes, "CDLL", lambda name: library)
    facts = SimpleNamespace(uuid="12ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    gauge = open_gauge(torch.device("cuda"))
    assert gauge is not None
    assert library.asked == [b"GPU-12ab"]
    assert (gauge.limit_watts, gauge.max_clock_mhz) == (700.0, 1980.0)
    assert gauge.read() == Reading(655.5, 1524.0, 0x04)
    assert gauge.joules() == 9e9
    facts.uuid = "34cd"
    assert open_gauge(torch.device("cuda")) is None
    facts.uuid = "12ab"
    library.without = ("nvmlDeviceGetPowerUsage",)
    assert open_gauge(torch.device("cuda")) is None
    library.without = ("nvmlDeviceGetTotalEnergyConsumption",)
    old = open_gauge(torch.device("cuda"))
    assert old is not None
    assert old.joules() is None


def test_a_device_that_cannot_be_asked_has_no_gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    assert open_gauge(torch.device("cpu")) is None
    monkeypatch.setattr(power_module.ctypes, "CDLL", missing)
    facts = SimpleNamespace(uuid="12ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert open_gauge(torch.device("cuda")) is None
