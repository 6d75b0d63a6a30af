"""Measured collectives in the planner: between sizes, to other groups, level by level; and machine.json."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.errors import UsageError
from ridgeline.plan.machine import Machine, load_machine
from ridgeline.plan.measured import load_measured
from ridgeline.plan.network import Group, algorithms_s, collective_s, point_to_point_s, ring_s
from ridgeline.plan.own_machine import link_of, not_falling, tables_of
from ridgeline.plan.tables import Table, carried_s, measured_pair_s, measured_s

SIZES = [float(1 << power) for power in range(10, 31, 2)]
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
SELENE = load_machine("selene")


def ring(kind: str, size: int, num_bytes: float, step: float = 1e-5, rate: float = 1e10) -> float:
    """A ring whose every step costs a start and the bytes of its piece."""
    return PASSES[kind] * (size - 1) * (step + num_bytes / size / rate)


def table(kind: str, size: int, per_node: int, groups: int = 1, rate: float = 1e10) -> Table:
    points = tuple((b, ring(kind, size, b, rate=rate)) for b in SIZES)
    return Table(kind, size, per_node, groups, points)


def test_measured_sizes_are_themselves_and_others_lie_between() -> None:
    found = table("all_reduce", 4, 4)
    for size, seconds in found.points:
        assert found.seconds(size) == pytest.approx(seconds)
    for low, high in zip(found.points, found.points[1:], strict=False):
        middle = found.seconds(math.sqrt(low[0] * high[0]))
        assert middle == pytest.approx(math.sqrt(low[1] * high[1]))
        assert low[1] < middle < high[1]


def test_beyond_the_ends_there_is_the_start_and_the_last_rate() -> None:
    found = table("all_reduce", 4, 4)
    assert found.seconds(1.0) == found.points[0][1]
    assert found.seconds(0.0) == found.points[0][1]
    assert found.seconds(2.0**33) == pytest.approx(ring("all_reduce", 4, 2.0**33), rel=1e-6)
    falling = Table("all_reduce", 2, 2, 1, ((1e6, 2e-3), (4e6, 1e-3)))  # noise, not physics
    assert falling.seconds(8e6) > 1e-3
    single = Table("all_reduce", 2, 2, 1, ((1e6, 1e-3),))
    assert single.seconds(1e3) == 1e-3
    assert single.seconds(4e6) == pytest.approx(4e-3)


@pytest.mark.parametrize("kind", list(PASSES))
@pytest.mark.parametrize("size", [2, 3, 8, 64])
def test_a_ring_is_carried_over_to_another_size_by_its_steps(kind: str, size: int) -> None:
    found = replace(table(kind, 4, 4), backend="gloo")
    for num_bytes in (4096.0, 1e6, 1e9):
        exact = ring(kind, size, num_bytes)
        # Interpolation is the only thing that is not exact; below the smallest piece it says too much.
        assert 0.99 * exact < carried_s(found, num_bytes, size) < 1.35 * exact


def test_between_nodes_small_messages_take_the_tree() -> None:
    found = table("all_reduce", 2, 1)
    slow = replace(found, backend="gloo")
    small, large = 4096.0, 1e9
    assert carried_s(found, small, 128) < 0.2 * carried_s(slow, small, 128)
    assert carried_s(found, large, 128) == pytest.approx(ring("all_reduce", 128, large), rel=0.15)
    assert carried_s(found, small, 128) > carried_s(found, small, 2)


def test_a_broadcast_is_carried_over_as_its_library_does_it() -> None:
    points = ((1e3, 1e-4), (1e9, 1.0))
    tree = Table("broadcast", 2, 2, 1, points, "gloo")
    assert carried_s(tree, 1e9, 8) == pytest.approx(3.0)
    chain = Table("broadcast", 2, 2, 1, points, "nccl")
    assert carried_s(chain, 1e9, 8) == pytest.approx(1.0, rel=0.01)


def test_inside_and_between_have_their_own_tables() -> None:
    tables = (table("all_reduce", 4, 4, rate=1e11), table("all_reduce", 2, 1, 4, rate=1e9))
    inside = measured_s(tables, 4, "all_reduce", 1e8, 4, 4)
    between = measured_s(tables, 4, "all_reduce", 1e8, 2, 1)
    assert inside == pytest.approx(ring("all_reduce", 4, 1e8, rate=1e11), rel=0.05)
    assert between == pytest.approx(ring("all_reduce", 2, 1e8, rate=1e9), rel=0.05)
    assert measured_s(tables, 4, "all_to_all", 1e8, 4, 4) is None
    assert measured_s(tables[:1], 4, "all_reduce", 1e8, 2, 1) is None


def test_groups_that_will_share_a_nic_do_though_one_was_measured_alone() -> None:
    alone, both = table("all_reduce", 2, 1, 1), table("all_reduce", 2, 1, 4, rate=2.5e9)
    shared = measured_s((alone,), 4, "all_reduce", 1e9, 2, 1)
    assert shared == pytest.approx(4 * ring("all_reduce", 2, 1e9), rel=0.05)
    assert measured_s((alone, both), 4, "all_reduce", 1e9, 2, 1) == both.seconds(1e9)
    assert measured_s((alone, both), 1, "all_reduce", 1e9, 2, 1) == alone.seconds(1e9)


def test_twos_of_a_node_at_once_are_preferred_to_a_pair_alone() -> None:
    alone, both = table("all_reduce", 2, 2, 1), table("all_reduce", 2, 2, 2, rate=5e9)
    assert measured_s((alone, both), 4, "all_reduce", 1e8, 2, 2) == both.seconds(1e8)
    assert measured_s((alone, both), 2, "all_reduce", 1e8, 2, 2) == alone.seconds(1e8)


def test_a_group_that_spans_both_levels_is_its_own_table_or_the_sum_of_levels() -> None:
    levels = (
        table("reduce_scatter", 4, 4), table("all_gather", 4, 4), table("all_reduce", 2, 1, 4),
    )  # fmt: skip
    summed = measured_s(levels, 4, "all_reduce", 1e8, 8, 4)
    parts = (
        ring("reduce_scatter", 4, 1e8),
        ring("all_gather", 4, 1e8),
        ring("all_reduce", 2, 2.5e7),
    )
    assert summed == pytest.approx(sum(parts), rel=0.05)
    own = table("all_reduce", 8, 4, rate=3e9)
    assert measured_s((*levels, own), 4, "all_reduce", 1e8, 8, 4) == own.seconds(1e8)
    # Twice the nodes: the same table, more steps.
    more = measured_s((*levels, own), 4, "all_reduce", 1e8, 16, 4)
    assert more is not None
    assert more == pytest.approx(ring("all_reduce", 16, 1e8, rate=3e9), rel=0.15)
    assert measured_s(levels[:2], 4, "all_reduce", 1e8, 8, 4) is None


def test_pairs_at_once_count_before_one_pair() -> None:
    one = Table("pair", 2, 1, 1, ((1e6, 1e-3), (1e9, 1.0)))
    many = Table("pairs_at_once", 2, 1, 4, ((1e6, 3e-3), (1e9, 3.0)))
    inside = Table("pair", 2, 2, 1, ((1e6, 1e-5), (1e9, 1e-2)))
    assert measured_pair_s((one, many, inside), 4, 1e9, True) == pytest.approx(3.0)
    assert measured_pair_s((one, inside), 4, 1e9, True) == pytest.approx(4.0, rel=0.01)
    assert measured_pair_s((one, many, inside), 4, 1e9, False) == pytest.approx(1e-2)
    assert measured_pair_s((one,), 4, 1e9, False) is None


def test_the_planner_takes_what_was_measured_and_links_for_the_rest() -> None:
    tables = (table("all_reduce", 8, 8), Table("pair", 2, 8, 1, ((1e6, 0.5), (1e9, 500.0))))
    machine = SELENE.replace(tables=tables)
    assert collective_s(machine, "all_reduce", 1e8, Group(8, 8)) == tables[0].seconds(1e8)
    assert collective_s(machine, "all_gather", 1e8, Group(8, 8)) == collective_s(
        SELENE, "all_gather", 1e8, Group(8, 8)
    )
    assert collective_s(machine, "all_reduce", 1e8, Group(1, 1)) == 0.0
    assert point_to_point_s(machine, 1e9, False) == pytest.approx(500.0)
    assert point_to_point_s(machine, 1e9, True) == point_to_point_s(SELENE, 1e9, True)


def test_another_link_is_not_the_one_that_was_measured() -> None:
    machine = SELENE.replace(
        tables=(table("all_reduce", 8, 8), table("all_reduce", 2, 1), table("all_reduce", 16, 8))
    )
    assert [t.size for t in machine.replace(**{"inter.bandwidth": 1e9}).tables] == [8]
    assert [t.size for t in machine.replace(**{"intra.bandwidth": 1e9}).tables] == [2]
    assert len(machine.replace(skew=0.1, **{"device.memory_bytes": 1e9}).tables) == 3
    assert len({machine, machine.replace(tables=())}) == 2


def test_the_best_algorithm_is_a_tree_for_small_and_a_ring_or_levels_for_large() -> None:
    group = Group(64, 1)
    small, large = (algorithms_s(SELENE, "all_reduce", size, group) for size in (1e4, 4e9))
    assert min(small, key=small.__getitem__) == "tree"
    assert min(large, key=large.__getitem__) == "ring"
    assert collective_s(SELENE, "all_reduce", 1e4, group) == small["tree"]
    assert set(algorithms_s(SELENE, "all_reduce", 1e8, Group(64, 8))) == {"ring", "tree", "levels"}
    assert set(algorithms_s(SELENE, "all_gather", 1e8, Group(64, 4))) == {"ring"}
    assert set(algorithms_s(SELENE, "all_reduce", 1e8, Group(8, 8))) == {"ring"}
    assert collective_s(SELENE, "broadcast", 1e8, Group(8, 8)) > 0


def test_a_large_tree_moves_each_byte_twice() -> None:
    found = algorithms_s(SELENE, "all_reduce", 1e10, Group(32, 1))
    rate = SELENE.inter.bandwidth * SELENE.inter.efficiency / 8
    assert found["tree"] == pytest.approx(2e10 / 0.92 / rate, rel=0.01)
    assert found["ring"] == ring_s(SELENE, "all_reduce", 1e10, Group(32, 1))


def network_row(**changes: Any) -> dict[str, Any]:
    """Two nodes of two, as `ridgeline machine network --out` writes them."""
    rows = []
    levels = (("all", 4, 2, 1), ("node", 2, 2, 1), ("across_at_once", 2, 1, 2))
    for kind in PASSES:
        for level, size, per_node, groups in levels:
            rows += [
                {"collective": kind, "level": level, "size": size, "per_node": per_node,
                 "num_groups": groups, "num_bytes": int(b), "seconds": ring(kind, size, b)}
                for b in SIZES
            ]  # fmt: skip
    for per_node, rate in ((2, 2e10), (1, 4e9)):
        rows += [
            {"collective": "pair", "level": "x", "size": 2, "per_node": per_node, "num_groups": 1,
             "num_bytes": int(b), "seconds": 1e-5 + b / rate}
            for b in SIZES
        ]  # fmt: skip
    row = {"hosts": ["a", "b"], "backend": "gloo", "device_kind": "cpu", "device_name": "Some CPU",
           "ranks_per_node": [2, 2], "time": 1.0, "timings": rows}  # fmt: skip
    return {**row, **changes}


def compute_row(**changes: Any) -> dict[str, Any]:
    products = [
        {"kind": "matrix", "precision": "fp32", "shape": [n, n, n], "seconds": 2.0 * n**3 / 1e11}
        for n in (256, 512, 1024)
    ]
    row = {"host": "a", "device_kind": "cpu", "device_name": "Some CPU", "time": 1.0, "num_threads": 4,
           "device_memory_bytes": 64e9, "peak_flops": {"fp32": 1e11, "bf16": 2e11},
           "products": products, "copy_bytes_per_s": 2e10, "launch_s": 5e-6}  # fmt: skip
    return {**row, **changes}


def load(tmp_path: Path, **content: Any) -> Machine:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(content))
    return load_measured(path)


def test_a_cpu_machine_is_made_of_its_machine_json(tmp_path: Path) -> None:
    machine = load(tmp_path, compute=[compute_row()], network=[network_row()])
    assert machine.devices_per_node == 2
    assert machine.device.peak_flops["fp32"] == 1e11
    assert machine.device.memory_bandwidth == 2e10
    assert machine.device.memory_bytes == 32e9  # two ranks share the node's
    assert machine.device.num_sms == 4
    assert 0.3 <= machine.device.gemm_efficiency <= 0.99
    group = Group(4, 2)
    assert collective_s(machine, "all_reduce", 2.0**20, group) == pytest.approx(
        ring("all_reduce", 4, 2.0**20)
    )
    assert machine.intra.bandwidth == pytest.approx(1e10, rel=0.05)
    assert machine.inter.bandwidth == pytest.approx(2e10, rel=0.05)  # both ranks' of a node
    assert "as cpu-node" in machine.source["assumed"]
    assert "links" not in machine.source["assumed"]
    assert machine.storage_bandwidth == machine.host_link_bandwidth == 0.0


def test_what_is_missing_is_assumed_and_said(tmp_path: Path) -> None:
    without = compute_row(
        device_memory_bytes=None, copy_bytes_per_s=None, launch_s=None, products=[]
    )
    machine = load(tmp_path, compute=[without])
    said = machine.source["assumed"]
    for words in ("256 GB of memory", "memory bandwidth", "1 device a node", "no network facts",
                  "what a kernel costs the host", "fewer than three"):  # fmt: skip
        assert words in said, words
    only_network = load(tmp_path, network=[network_row(ranks_per_node=[2])])
    assert "no compute facts" in only_network.source["assumed"]


def test_one_node_leaves_the_links_between_nodes_to_the_profile(tmp_path: Path) -> None:
    row = network_row(ranks_per_node=[4], hosts=["a"])
    row["timings"] = [{**t, "per_node": 4} for t in row["timings"] if t["level"] == "all"]
    machine = load(tmp_path, compute=[compute_row()], network=[row])
    assert "links between nodes, as cpu-node's" in machine.source["assumed"]
    assert machine.inter == load_machine("cpu-node").inter
    assert machine.devices_per_node == 4
    # Levels: measured inside, assumed between.
    assert collective_s(machine, "all_reduce", 1e8, Group(8, 4)) > collective_s(
        machine, "all_reduce", 1e8, Group(4, 4)
    )


def test_a_device_with_a_profile_keeps_what_was_not_measured(tmp_path: Path) -> None:
    h200 = load_machine("h200")
    products = [
        {
            "kind": "matrix",
            "precision": "bf16",
            "shape": [n, n, n],
            "seconds": 2.0 * n**3 / 7.5e14 + 3e-6,
        }
        for n in (2048, 4096, 8192)
    ]
    row = compute_row(
        device_kind="cuda", device_name="NVIDIA H200", products=products, num_sms=132,
        peak_flops={"bf16": 7.5e14}, copy_bytes_per_s=4.2e12, device_memory_bytes=150e9,
        h2d_pinned_bytes_per_s=5.5e10, d2h_pinned_bytes_per_s=5.0e10,
    )  # fmt: skip
    machine = load(tmp_path, compute=[compute_row(time=9.0), row], network=[network_row()])
    assert machine.device.peak_flops == h200.device.peak_flops
    assert machine.device.memory_efficiency == pytest.approx(4.2 / 4.8)
    assert 0.65 < machine.device.gemm_efficiency < 0.9
    assert machine.host_link_bandwidth == 5.0e10
    assert machine.inter == h200.inter
    assert "network was measured between cpus" in machine.source["assumed"]
    assert machine.tables == ()


def test_storage_is_the_fastest_that_is_no_memory(tmp_path: Path) -> None:
    storage = [
        {"path": "/dev/shm", "kind": "memory", "read_bytes_per_s": 9e9},
        {"path": "/scratch", "kind": "network", "read_bytes_per_s": 1e9, "threads_read_bytes_per_s": 3e9},
        {"path": "/home", "kind": "network", "read_bytes_per_s": None},
    ]  # fmt: skip
    machine = load(tmp_path, compute=[compute_row()], storage=storage)
    assert machine.storage_bandwidth == 3e9
    assert machine.source["storage_bandwidth"] == "read from /scratch"


def test_the_newest_of_equal_groups_counts_and_links_are_like_tables() -> None:
    old = network_row()
    new = network_row(time=2.0)
    new["timings"] = [{**t, "seconds": 2 * t["seconds"]} for t in new["timings"]]
    tables = tables_of([new, old])
    assert len(tables) == 3 * len(PASSES) + 2
    assert tables[0].seconds(2.0**20) == pytest.approx(2 * ring("all_reduce", 4, 2.0**20))
    assert link_of((), False, 4) is None
    link = link_of(tables, False, 2)
    assert link is not None
    assert link.bandwidth * link.pair_efficiency == pytest.approx(2e10 / 2, rel=0.05)


def test_noise_that_makes_larger_messages_quicker_is_evened_out() -> None:
    steady = [(b, ring("all_reduce", 4, b)) for b in SIZES]
    assert dict(not_falling(steady)) == pytest.approx(dict(steady))
    seconds = [
        s for _, s in not_falling([(1.0, 9.0), (2.0, 1.0), (4.0, 3.0), (8.0, 2.0), (16.0, 50.0)])
    ]
    assert seconds == sorted(seconds)
    assert seconds[-1] == pytest.approx(50.0)
    assert math.prod(seconds) == pytest.approx(9 * 1 * 3 * 2 * 50)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "no measured rates"),
        ('{"storage": [{"path": "/x"}]}', "no measured rates"),
        ('{"network": [{"device_kind": "cpu"}]}', "no measured rates"),
        ("[1]", "no measured rates"),
        ("nothing", "holds no JSON"),
    ],
)
def test_files_of_another_kind_are_one_sentence(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=words):
        load_measured(path)


def test_the_command_plans_with_it_and_says_what_it_assumed(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"compute": [compute_row()], "network": [network_row()]}))
    args = ["plan", "60m", "--machine", str(path), "-N", "2", "--batch", "8", "--top", "2", "--why"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "dp=" in done.stdout
    assert "assumed of Some CPU, measured: as cpu-node" in done.output
