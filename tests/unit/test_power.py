"""What a GPU draws, from a gauge that plays one: averages, its counter of energy, and no gauge at all."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

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
    until = time.monotonic() + 10.0
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


def test_a_device_that_cannot_be_asked_has_no_gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert open_gauge(torch.device("cpu")) is None
    facts = SimpleNamespace(uuid="5d1a-no-such-device")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    assert open_gauge(torch.device("cuda")) is None
