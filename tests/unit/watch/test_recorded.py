"""What a node does, on record: what is read, what is written, and that a run never suffers by it."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from ridgeline import rundir
from ridgeline.config import load_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.launch.ranks import introduce
from ridgeline.machine import gauges as gauges_module
from ridgeline.machine.gauges import Gauges, Gpus
from ridgeline.machine.room import used_memory
from ridgeline.rundir import GpuUse, ResourceRecord, RunDir, fair_share
from ridgeline.train import resources as resources_module
from ridgeline.train.resources import ResourceLog
from ridgeline.train.run import run_training

ALONE = read_rank_env({})


def me() -> list[int]:
    return [os.getpid()]


def record_of(number: int, host: str = "n1", **values: Any) -> ResourceRecord:
    return ResourceRecord(1000.0 + 5 * number, host, 8, **values)


# The run directory.


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    gpu = GpuUse(3, 97.0, 2**30, 2**37, 640.5, 61.0, 1755.0)
    written = [record_of(0, cpu_percent=12.5, gpus=(gpu,)), record_of(1, net_sent_bytes_per_s=4e9)]
    for record in written:
        run.append_resources(record)
    run.append_resources(record_of(0, "n2"))
    assert run.resources() == {"n1": written, "n2": [record_of(0, "n2")]}


def test_a_line_cut_off_by_a_kill_is_passed_over_and_the_next_is_whole(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append_resources(record_of(0))
    file = run.resource_files()[0]
    with file.open("ab") as out:
        out.write(b'{"time": 1005.0, "ho')
    assert run.resources()["n1"] == [record_of(0)]
    RunDir(tmp_path).append_resources(record_of(2))  # the run that goes on
    assert run.resources()["n1"] == [record_of(0), record_of(2)]


def test_the_newest_are_all_kept_and_the_beginning_is_not_lost(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for number in range(1000):
        run.append_resources(record_of(number))
    times = [(r.time - 1000) / 5 for r in run.resources(most=50)["n1"]]
    assert times[-10:] == list(range(990, 1000))
    assert 50 <= len(times) <= 100
    assert times[0] == 0
    assert len(set(times)) == len(times)
    assert times == sorted(times)
    gaps = [b - a for a, b in pairwise(times[:50])]
    assert max(gaps) < 2 * 1000 / 50
    assert len(run.resources()["n1"]) == 1000  # few enough


def test_whole_machines_keep_less_of_each_node() -> None:
    assert [fair_share(count) for count in (0, 1, 30, 100, 5000)] == [2000, 2000, 2000, 600, 50]


def test_hosts_may_have_any_name(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append_resources(record_of(0, "../a b/ü"))
    (file,) = run.resource_files()
    assert file.parent == tmp_path / rundir.RESOURCES
    assert list(run.resources()) == ["../a b/ü"]


def test_a_full_disk_loses_a_line_and_nothing_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    run = RunDir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        run.append_resources(record_of(0))
    assert run.num_unwritten() == 0
    run.append_resources(record_of(1))
    assert run.resources()["n1"] == [record_of(1)]


# The gauges.


def test_a_sample_has_this_node_in_it() -> None:
    gauges = Gauges(me)
    first = gauges.sample()
    assert first.cpu_percent is None
    assert first.disk_read_bytes_per_s is None
    until = time.perf_counter() + 0.3
    while time.perf_counter() < until:  # keeps one core busy
        pass
    second = gauges.sample()
    assert second.cpu_count == len(os.sched_getaffinity(0))
    assert second.cpu_percent is not None
    assert 50 / second.cpu_count < second.cpu_percent <= 100
    assert second.rss_bytes is not None
    assert second.rss_bytes >= psutil.Process().memory_info().rss / 2
    assert second.memory_used_bytes is not None
    assert 0 < second.memory_used_bytes < (second.memory_total_bytes or 0)
    assert second.net_sent_bytes_per_s is None or second.net_sent_bytes_per_s >= 0
    assert second.gpus == ()


def test_a_sample_costs_a_few_milliseconds_of_a_core() -> None:
    gauges = Gauges(me, Gpus(None))
    gauges.sample()
    costs = []
    for _ in range(40):
        before = time.thread_time()
        gauges.sample()
        costs.append(time.thread_time() - before)
    assert statistics.median(costs) < 0.01


def test_processes_that_a_rank_started_count_with_it() -> None:
    alone = Gauges(me).sample().rss_bytes
    child = psutil.Popen(["python3", "-c", "b = b'x' * 50_000_000; print(flush=True); input()"],
                         stdin=-1, stdout=-1)  # fmt: skip
    try:
        child.stdout.readline()
        both = Gauges(me).sample().rss_bytes
    finally:
        child.communicate(b"\n")
    assert alone is not None
    assert both is not None
    assert both - alone > 40_000_000


def test_the_memory_of_some_ranks_is_not_given_for_that_of_all() -> None:
    assert Gauges(me, num_ranks=2).sample().rss_bytes is None
    assert Gauges(lambda: [os.getpid(), os.getppid()], num_ranks=2).sample().rss_bytes


def test_a_gauge_that_breaks_says_nothing_and_the_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such counter")

    for name in ("disk_io_counters", "net_io_counters", "virtual_memory", "cpu_times"):
        monkeypatch.setattr(psutil, name, broken)
    gauges = Gauges(me, SimpleNamespace(read=broken))  # type: ignore[arg-type]
    gauges.sample()
    found = gauges.sample()
    assert (found.disk_read_bytes_per_s, found.memory_used_bytes, found.cpu_percent) == (None,) * 3
    assert found.gpus == ()
    assert found.rss_bytes


def test_adapters_that_the_interfaces_do_not_show(tmp_path: Path) -> None:
    counters = tmp_path / "class/infiniband/mlx5_0/ports/1/counters"
    counters.mkdir(parents=True)

    def count(sent: int, received: int) -> None:
        (counters / "port_xmit_data").write_text(f"{sent}\n")
        (counters / "port_rcv_data").write_text(f"{received}\n")

    gauges = Gauges(me, sys_root=tmp_path)
    count(1000, 5000)
    gauges.sample()
    count(1_001_000, 4000)  # the second was set back
    began = time.monotonic()
    time.sleep(0.1)
    found = gauges.sample()
    assert found.fabric_sent_bytes_per_s is not None
    assert 4e6 / (time.monotonic() - began + 0.1) < found.fabric_sent_bytes_per_s < 4e6 / 0.1
    assert found.fabric_received_bytes_per_s is None


class FakeDriver:
    """NVIDIA's library with two devices, of which the second tells little."""

    def __init__(self) -> None:
        self.uuids = [b"GPU-aa", b"GPU-bb"]

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:
        out._obj.value = 3
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: Any, out: Any) -> int:
        out._obj.value = 100 + number.value
        return 0 if number.value < 2 else 4  # no permission for the third

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, out: Any) -> int:
        out._obj.value = 100 + self.uuids.index(uuid) if uuid in self.uuids else None
        return 0 if uuid in self.uuids else 6

    def nvmlDeviceGetIndex(self, device: Any, out: Any) -> int:
        out._obj.value = device.value - 100
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: Any, out: Any) -> int:
        out._obj.gpu, out._obj.memory = 93, 41
        return 0 if device.value == 100 else 3

    def nvmlDeviceGetMemoryInfo(self, device: Any, out: Any) -> int:
        out._obj.total, out._obj.free, out._obj.used = 8 * 2**30, 5 * 2**30, 3 * 2**30
        return 0

    def nvmlDeviceGetPowerUsage(self, device: Any, out: Any) -> int:
        out._obj.value = 312_500
        return 0 if device.value == 100 else 3

    def nvmlDeviceGetTemperature(self, device: Any, sensor: Any, out: Any) -> int:
        assert sensor.value == 0
        out._obj.value = 64
        return 0

    def nvmlDeviceGetClockInfo(self, device: Any, kind: Any, out: Any) -> int:
        assert kind.value == 1
        out._obj.value = 1830
        return 0


def test_gpus_are_asked_through_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges_module, "load_driver", FakeDriver)
    full = GpuUse(0, 93.0, 3 * 2**30, 8 * 2**30, 312.5, 64.0, 1830.0)
    bare = GpuUse(1, None, 3 * 2**30, 8 * 2**30, None, 64.0, 1830.0)
    assert Gpus(None).read() == (full, bare)
    assert Gpus(["bb", "GPU-unknown"]).read() == (bare,)


def test_the_drivers_structures_have_the_drivers_sizes() -> None:
    assert ctypes.sizeof(gauges_module._Utilization) == 8
    assert ctypes.sizeof(gauges_module._Memory) == 24


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(gauges_module, "load_driver", none)
    assert Gpus(None).read() == ()
    assert Gpus(["aa"]).read() == ()


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/job/step", "fs/cgroup/job",
         {"memory.max": "1000000", "memory.current": "900000",
          "memory.stat": "anon 1\ninactive_file 300000\n"}),
        ("4:memory:/job", "fs/cgroup/memory/job",
         {"memory.limit_in_bytes": "1000000", "memory.usage_in_bytes": "900000",
          "memory.stat": "inactive_file 100\ntotal_inactive_file 300000\n"}),
    ],
)  # fmt: skip
def test_memory_is_the_jobs_where_that_is_less(
    tmp_path: Path, line: str, folder: str, files: dict[str, str]
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(line + "\n")
    place = tmp_path / folder
    place.mkdir(parents=True)
    for name, text in files.items():
        (place / name).write_text(text)
    assert used_memory(tmp_path, tmp_path) == (600_000, 1_000_000)


def test_memory_is_the_nodes_where_nothing_is_less(tmp_path: Path) -> None:
    used, total = used_memory(tmp_path, tmp_path)
    assert total == psutil.virtual_memory().total
    assert 0 < used < total


# In a run.


def training_of(every_s: float = 0.05, **env: Any) -> Any:
    named = ["model.name=mlp", "data.source=synthetic", "train.steps=1"]
    config = load_config(None, [*named, f"log.resources_s={every_s}"]).config
    mesh = SimpleNamespace(env=dataclasses.replace(ALONE, **env), device=torch.device("cpu"))
    return SimpleNamespace(config=config, mesh=mesh)


def is_sampling() -> bool:
    return any(thread.name == "resources" for thread in threading.enumerate())


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    assert condition()


@pytest.mark.parametrize(
    ("every_s", "env", "has_run"),
    [(0, {}, True), (0.05, {"local_rank": 1}, True), (0.05, {}, False)],
)
def test_nothing_samples_where_nothing_is_to_be_recorded(
    tmp_path: Path, every_s: float, env: dict[str, int], has_run: bool
) -> None:
    log = ResourceLog(training_of(every_s, **env), RunDir(tmp_path) if has_run else None)
    assert not is_sampling()
    log.close()


def test_a_line_comes_every_so_often_until_the_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    log = ResourceLog(training_of(), run)
    wait_for(lambda: len(next(iter(run.resources().values()), [])) >= 3)
    log.close()
    assert not is_sampling()
    (records,) = run.resources().values()
    assert all(record.cpu_percent is not None for record in records)


def test_a_sampler_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(resources_module, "Gauges", lambda *_: over.wait(60))
    log = ResourceLog(training_of(), RunDir(tmp_path))
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < 2
    over.set()
    wait_for(lambda: not is_sampling())


def test_the_ranks_of_a_node_are_found_by_a_few_files(tmp_path: Path) -> None:
    node = dataclasses.replace(ALONE, rank=4, world_size=8, local_rank=0, local_world_size=4)
    for rank in (0, 4, 5, 6):
        introduce(tmp_path, dataclasses.replace(node, rank=rank, attempt=int(rank == 6)))
    find = resources_module._FindRanks(tmp_path, node)
    assert [path.name for path in find._files] == [f"rank-{rank}.json" for rank in (4, 5, 6, 7)]
    assert find() == [os.getpid(), os.getpid()]  # 6 is of another attempt, 7 not there yet


def run_here(tmp_path: Path, *overrides: str) -> RunDir:
    base = (
        "model.name=mlp", "model.args={in_features: 16, hidden: 24, depth: 1, out_features: 3}",
        "data.source=synthetic",
        "data.args={task: classify, shape: [4, 4], classes: 3, samples: 64, eval_samples: 24}",
        "train.batch=24", "train.steps=60", "log.tensorboard=no", "device=cpu", "threads=1",
    )  # fmt: skip
    run = RunDir.create(tmp_path, "test")
    run_training(load_config(None, [*base, *overrides]).config, ALONE, run)
    return run


def test_a_run_leaves_records_of_its_node(tmp_path: Path) -> None:
    run = run_here(tmp_path, "log.resources_s=0.02")
    (records,) = run.resources().values()
    assert records
    assert not is_sampling()
    start = next(event for event in run.events() if event.event == "start")
    assert start.details["num_steps"] == 60


def test_a_run_does_not_notice_gauges_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(resources_module, "Gauges", broken)
    run = run_here(tmp_path, "log.resources_s=0.02")
    assert run.status() == "finished"
    assert len(run.steps()) == 60
    assert run.resources() == {}


def test_less_than_no_time_is_refused() -> None:
    with pytest.raises(UsageError, match=r"log\.resources_s"):
        load_config(None, ["model.name=mlp", "data.source=synthetic", "log.resources_s=-1"])
