"""Ranks and the parts of a node: made-up sysfs trees of real machines, and this machine itself."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ridgeline.errors import UsageError
from ridgeline.launch import bind
from ridgeline.launch.bind import (
    Binding,
    apply_binding,
    binding_variables,
    choose_bindings,
    plan_binding,
    show_bindings,
)
from ridgeline.launch.topology import Topology, View, read_ranges, read_topology, show_ranges

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Node:
    """A node written to a folder as the kernel shows it."""

    root: Path
    cpus: list[int] = field(default_factory=list)
    minors: int = 0

    def write(self, path: str, text: str) -> None:
        target = self.root / "sys" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def core(self, threads: list[int], socket: int) -> None:
        self.cpus += threads
        for cpu in threads:
            folder = f"devices/system/cpu/cpu{cpu}/topology"
            self.write(f"{folder}/thread_siblings_list", show_ranges(threads))
            self.write(f"{folder}/physical_package_id", str(socket))
        self.write("devices/system/cpu/online", show_ranges(self.cpus))

    def memory(self, number: int, cpus: list[int], gib: int = 64, distance: str = "") -> None:
        folder = f"devices/system/node/node{number}"
        self.write(f"{folder}/cpulist", show_ranges(cpus))
        self.write(f"{folder}/meminfo", f"Node {number} MemTotal:       {gib * 2**20} kB")
        if distance:
            self.write(f"{folder}/distance", distance)

    def device(self, path: str, numa_node: int) -> Path:
        """`path` from the root complex down: pci0000:00/0000:00:01.0/0000:01:00.0."""
        folder = self.root / "sys/devices" / path
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{numa_node}\n")
        links = self.root / "sys/bus/pci/devices"
        links.mkdir(parents=True, exist_ok=True)
        (links / folder.name).symlink_to(folder)
        return folder

    def gpu(
        self,
        path: str,
        numa_node: int,
        kind: str = "0x030200",
        vendor: str = "0x10de",
        uuid: str = "",
    ) -> None:
        folder = self.device(path, numa_node)
        (folder / "class").write_text(f"{kind}\n")
        (folder / "vendor").write_text(f"{vendor}\n")
        if uuid:
            told = self.root / "proc/driver/nvidia/gpus" / folder.name / "information"
            told.parent.mkdir(parents=True)
            told.write_text(
                f"Model: \t A100\nGPU UUID: \t {uuid}\nDevice Minor: \t {self.minors}\n"
            )
            (self.root / "dev").mkdir(exist_ok=True)
            (self.root / f"dev/nvidia{self.minors}").touch()
            self.minors += 1

    def infiniband(
        self,
        name: str,
        path: str,
        numa_node: int,
        state: str = "4: ACTIVE",
        layer: str = "InfiniBand",
        rate: str = "200 Gb/sec (4X HDR)",
        subnet: str = "fe80:0000:0000:0000",
        interface: str = "",
    ) -> None:
        folder = self.device(path, numa_node)
        own = self.root / "sys/class/infiniband" / name
        own.mkdir(parents=True)
        (own / "device").symlink_to(folder)
        for file, text in (("state", state), ("link_layer", layer), ("rate", rate)):
            self.write(f"class/infiniband/{name}/ports/1/{file}", text)
        self.write(f"class/infiniband/{name}/ports/1/gids/0", f"{subnet}:0000:0000:0000:0001")
        if interface:
            (folder / "net" / interface).mkdir(parents=True)
            self.interface(interface, folder)

    def ethernet(self, name: str, path: str, numa_node: int, speed: int, up: bool = True) -> None:
        self.interface(name, self.device(path, numa_node), speed, up)

    def interface(self, name: str, folder: Path, speed: int = 1000, up: bool = True) -> None:
        own = self.root / "sys/class/net" / name
        own.mkdir(parents=True)
        (own / "device").symlink_to(folder)
        (own / "operstate").write_text("up\n" if up else "down\n")
        (own / "speed").write_text(f"{speed}\n")

    def read(self, allowed: set[int] | None = None, visible: str | None = None) -> Topology:
        return read_topology(
            self.root / "sys",
            set(self.cpus) if allowed is None else allowed,
            visible=visible,
            proc_root=self.root / "proc",
            dev_root=self.root / "dev",
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def perlmutter(node: Node, uuids: bool = False) -> Node:
    """One EPYC of 64 cores x 2 threads in 4 memory nodes; the first GPU hangs on the last of them."""
    for core in range(64):
        node.core([core, core + 64], socket=0)
    for number in range(4):
        cpus = [*range(16 * number, 16 * number + 16)]
        cpus += [cpu + 64 for cpu in cpus]
        distance = " ".join("10" if other == number else "12" for other in range(4))
        node.memory(number, cpus, distance=distance)
    for index, bus in enumerate(("03", "41", "82", "c1")):
        complex_ = f"pci0000:{int(bus, 16) & 0xC0:02x}"
        bridge = f"0000:{int(bus, 16) & 0xC0:02x}:01.1"
        uuid = f"GPU-{index}bc0ffee-0000-0000-0000-00000000000{index}" if uuids else ""
        node.gpu(f"{complex_}/{bridge}/0000:{bus}:00.0", 3 - index, uuid=uuid)
        other = f"0000:{int(bus, 16) & 0xC0:02x}:03.1"
        nic = f"0000:{int(bus, 16) + 0x10:02x}:00.0"
        node.ethernet(f"hsn{3 - index}", f"{complex_}/{other}/{nic}", 3 - index, 200_000)
    node.ethernet("eno1", "pci0000:00/0000:00:05.0/0000:22:00.0", 3, 1000)
    return node


def summit(node: Node) -> Node:
    """Two POWER9 of 22 cores x 4 threads, of which 21 are given; nodes 0 and 8, and the GPUs' own."""
    for core in range(44):
        node.core([*range(4 * core, 4 * core + 4)], socket=8 * (core // 22))
    node.memory(0, [*range(88)], distance="10 40 80 80")
    node.memory(8, [*range(88, 176)], distance="40 10 80 80")
    for number in (252, 253):
        node.memory(number, [], gib=16, distance="80 80 80 10")
    for bus in ("04", "05", "06"):
        node.gpu(f"pci0004:00/0004:00:00.0/0004:01:00.0/0004:{bus}:00.0", 0)
    for bus in ("03", "04", "05"):
        node.gpu(f"pci0035:00/0035:00:00.0/0035:01:00.0/0035:{bus}:00.0", 8)
    for name, path, number in (
        ("mlx5_0", "pci0003:00/0003:00:00.0/0003:01:00.0", 0),
        ("mlx5_1", "pci0003:00/0003:00:00.0/0003:01:00.1", 0),
        ("mlx5_2", "pci0033:00/0033:00:00.0/0033:01:00.0", 8),
        ("mlx5_3", "pci0033:00/0033:00:00.0/0033:01:00.1", 8),
    ):
        node.infiniband(name, path, number, rate="100 Gb/sec (4X EDR)")
    return node


SUMMIT_USABLE = set(range(84)) | set(range(88, 172))


def snellius(node: Node) -> Node:
    """Two sockets of 36 cores, one memory node each, 2 GPUs on each."""
    for core in range(72):
        node.core([core], socket=core // 36)
    node.memory(0, [*range(36)], distance="10 20")
    node.memory(1, [*range(36, 72)], distance="20 10")
    for bus, number in (("31", 0), ("32", 0), ("ca", 1), ("e3", 1)):
        node.gpu(f"pci0000:{'30' if number == 0 else 'c9'}/0000:{bus}:00.0", number)
    node.infiniband("mlx5_0", "pci0000:15/0000:15:01.0/0000:16:00.0", 0, interface="ib0")
    node.infiniband("mlx5_1", "pci0000:95/0000:95:01.0/0000:96:00.0", 1, interface="ib1")
    node.infiniband(
        "mlx5_2", "pci0000:30/0000:33:00.0", 0, layer="Ethernet", rate="25 Gb/sec (1X EDR)"
    )
    node.infiniband("mlx5_3", "pci0000:30/0000:34:00.0", 0, state="1: DOWN")
    return node


def juwels(node: Node) -> Node:
    """Two sockets of 24 cores in 8 memory nodes; GPUs hang on four of them."""
    for core in range(48):
        node.core([core], socket=core // 24)
    for number in range(8):
        row = [10 if n == number else 12 if n // 4 == number // 4 else 32 for n in range(8)]
        cpus = [*range(6 * number, 6 * number + 6)]
        node.memory(number, cpus, distance=" ".join(map(str, row)))
    for bus, number in (("03", 3), ("44", 1), ("84", 7), ("c4", 5)):
        node.gpu(f"pci0000:{bus}/0000:{bus}:00.0", number)
    return node


def cpus_of(binding: Binding) -> str:
    return show_ranges(binding.cpus)


def test_gpu_decides_where_a_rank_runs(node: Node) -> None:
    bindings = plan_binding(perlmutter(node).read(), 4)
    assert [cpus_of(b) for b in bindings] == [
        "48-63,112-127",
        "32-47,96-111",
        "16-31,80-95",
        "0-15,64-79",
    ]
    assert [b.memory_nodes for b in bindings] == [(3,), (2,), (1,), (0,)]
    assert [b.gpu.address for b in bindings if b.gpu] == [
        "0000:03:00.0",
        "0000:41:00.0",
        "0000:82:00.0",
        "0000:c1:00.0",
    ]
    # Not the 1 Gbit/s port, though it is as near as the fast one.
    assert [b.nic.name for b in bindings if b.nic] == ["hsn3", "hsn2", "hsn1", "hsn0"]
    assert [b.num_threads for b in bindings] == [16] * 4
    assert bindings[0].cores[0] == (48, 112)


def test_memory_node_numbers_have_gaps(node: Node) -> None:
    bindings = plan_binding(summit(node).read(SUMMIT_USABLE), 6)
    assert [len(b.cores) for b in bindings] == [7] * 6
    assert [b.memory_nodes for b in bindings] == [(0,)] * 3 + [(8,)] * 3
    assert cpus_of(bindings[0]) == "0-27"
    assert cpus_of(bindings[3]) == "88-115"
    assert cpus_of(bindings[5]) == "144-171"
    # Two ports are equally near: ranks take turns.
    names = [b.nic.name for b in bindings if b.nic]
    assert names == ["mlx5_0", "mlx5_1", "mlx5_0", "mlx5_2", "mlx5_3", "mlx5_2"]


def test_two_sockets_with_two_gpus_each(node: Node) -> None:
    bindings = plan_binding(snellius(node).read(), 4)
    assert [cpus_of(b) for b in bindings] == ["0-17", "18-35", "36-53", "54-71"]
    # InfiniBand that is up, though an Ethernet port and one that is down are nearer.
    assert [b.nic.name for b in bindings if b.nic] == ["mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1"]
    assert binding_variables(bindings[2]) == {
        "OMP_NUM_THREADS": "18",
        "UCX_NET_DEVICES": "mlx5_1:1",
    }


def test_one_rank_keeps_to_the_socket_of_its_gpu(node: Node) -> None:
    (binding,) = plan_binding(snellius(node).read(), 1)
    assert cpus_of(binding) == "0-35"


def test_more_ranks_than_gpus_go_round(node: Node) -> None:
    bindings = plan_binding(snellius(node).read(), 8)
    assert [b.gpu.name for b in bindings if b.gpu] == ["0", "1", "2", "3"] * 2
    assert [b.memory_nodes for b in bindings] == [(0,), (0,), (1,), (1,)] * 2
    assert [len(b.cores) for b in bindings] == [9] * 8
    assert len(frozenset().union(*(b.cpus for b in bindings))) == 72


def test_nodes_without_a_gpu_lend_their_cores_within_the_socket(node: Node) -> None:
    bindings = plan_binding(juwels(node).read(), 4)
    assert [len(b.cores) for b in bindings] == [12] * 4
    assert [b.memory_nodes for b in bindings] == [(3,), (1,), (7,), (5,)]
    assert all(max(b.cpus) < 24 for b in bindings[:2])
    assert len(frozenset().union(*(b.cpus for b in bindings))) == 48


def test_far_cores_are_better_than_hardly_any(node: Node) -> None:
    """The scheduler gave 2 cores near the GPUs and 14 at the other socket."""
    allowed = {0, 1} | set(range(36, 50))
    bindings = plan_binding(snellius(node).read(allowed, visible="0,1"), 2)
    assert [len(b.cores) for b in bindings] == [8, 8]
    assert [min(b.cpus) for b in bindings] == [0, 1]


def test_no_core_is_shared_while_there_are_enough(node: Node) -> None:
    """Four ranks with GPUs at one socket, which has one core for them."""
    allowed = {0} | set(range(36, 40))
    bindings = plan_binding(snellius(node).read(allowed, visible="0,1"), 4)
    taken = [cpu for b in bindings for cpu in b.cpus]
    assert len(taken) == len(set(taken)) == 5
    assert not any(b.shared for b in bindings)


def test_rank_moves_before_two_share_a_core(node: Node) -> None:
    """Two ranks at a socket with one core for them, one at a socket with five."""
    allowed = {0} | set(range(36, 41))
    bindings = plan_binding(snellius(node).read(allowed, visible="0,1,2"), 3)
    assert [len(b.cores) for b in bindings] == [1, 3, 2]
    assert [b.memory_nodes for b in bindings] == [(0,), (1,), (1,)]


def test_nearest_node_is_the_firmwares_not_the_next_number(node: Node) -> None:
    for core in range(6):
        node.core([core], socket=core // 2)
    for number, distance in ((0, "10 40 40"), (8, "40 10 20"), (16, "40 20 10")):
        node.memory(number, [number // 4, number // 4 + 1], distance=distance)
    node.gpu("pci0000:00/0000:01:00.0", 8)
    (binding,) = plan_binding(node.read({0, 1, 4, 5}), 1)
    assert binding.memory_nodes == (16,)


def test_gpu_where_no_core_is(node: Node) -> None:
    (binding,) = plan_binding(snellius(node).read(set(range(36, 40)), visible="0"), 1)
    assert cpus_of(binding) == "36-39"
    assert binding.memory_nodes == (1,)


def laptop(node: Node) -> Node:
    for core in range(4):
        node.core([2 * core, 2 * core + 1], socket=0)
    node.memory(0, [*range(8)], gib=16)
    node.ethernet("wlp1s0", "pci0000:00/0000:00:14.3", -1, 0)
    return node


def test_laptop_is_left_alone_but_for_threads(node: Node) -> None:
    topology = laptop(node).read()
    bindings = choose_bindings(topology, 2)
    assert all(not b.cores and not b.memory_nodes for b in bindings)
    assert [binding_variables(b) for b in bindings] == [{"OMP_NUM_THREADS": "2"}] * 2
    assert binding_variables(bindings[0], {"OMP_NUM_THREADS": "8"}) == {}
    bound = choose_bindings(topology, 2, "cores")
    assert [cpus_of(b) for b in bound] == ["0-3", "4-7"]


def test_laptop_with_a_gpu_is_bound(node: Node) -> None:
    laptop(node).gpu("pci0000:00/0000:00:01.0/0000:01:00.0", -1, kind="0x030000")
    (binding,) = choose_bindings(node.read(), 1)
    assert cpus_of(binding) == "0-7"
    assert binding.gpu is not None
    assert binding.gpu.node == 0  # the only one there is
    (left,) = choose_bindings(node.read(), 1, "none")
    assert left.cores == ()
    assert left.gpu is not None
    assert left.nic is None


def test_container_with_nothing_in_sysfs(tmp_path: Path) -> None:
    topology = Node(tmp_path).read({0, 1, 2, 3, 4, 5, 6})
    assert topology.gpus == ()
    assert topology.nics == ()
    bindings = plan_binding(topology, 3)
    assert [len(b.cores) for b in bindings] == [3, 2, 2]
    assert [b.memory_nodes for b in bindings] == [()] * 3
    assert [b.cores for b in choose_bindings(topology, 3)] == [()] * 3
    assert [b.num_threads for b in choose_bindings(topology, 3)] == [2, 2, 2]


def test_cpuset_of_three_odd_cores(node: Node) -> None:
    """One thread of a core, both of another, one of a third: whole cores are what counts."""
    allowed = {3, 17, 81, 40}
    topology = perlmutter(node).read(allowed, visible="")
    assert [cpus_of(b) for b in plan_binding(topology, 3)] == ["3", "17,81", "40"]
    assert [b.memory_nodes for b in plan_binding(topology, 3)] == [(0,), (1,), (2,)]
    two = plan_binding(topology, 2)
    assert sorted(len(b.cores) for b in two) == [1, 2]
    assert sum(len(b.cpus) for b in two) == 4
    # More ranks than cores: held to their memory node only.
    five = plan_binding(topology, 5)
    assert {b.num_threads for b in five} == {1}
    assert all(b.cpus for b in five)
    assert sum(b.shared for b in five) == 4


def test_ranks_without_gpus_spread_over_nodes(node: Node) -> None:
    topology = perlmutter(node).read(visible="")
    assert [b.memory_nodes for b in plan_binding(topology, 8)] == [
        (n,) for n in (0, 0, 1, 1, 2, 2, 3, 3)
    ]
    assert [len(b.cores) for b in plan_binding(topology, 8)] == [8] * 8
    uneven = plan_binding(topology, 6)
    assert sorted(len(b.cores) for b in uneven) == [8, 8, 8, 8, 16, 16]
    (alone,) = plan_binding(topology, 1)
    assert len(alone.cores) == 64
    assert alone.memory_nodes == (0, 1, 2, 3)


def test_ranks_without_gpus_take_a_socket_each(node: Node) -> None:
    bindings = plan_binding(juwels(node).read(visible=""), 2)
    assert [cpus_of(b) for b in bindings] == ["0-23", "24-47"]
    assert bindings[1].memory_nodes == (4, 5, 6, 7)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 7, 13, 64, 65, 200])
def test_every_rank_has_cores_and_none_is_taken_twice(node: Node, num_ranks: int) -> None:
    bindings = plan_binding(perlmutter(node).read(), num_ranks)
    assert [b.local_rank for b in bindings] == list(range(num_ranks))
    assert all(b.cores and b.memory_nodes and b.num_threads >= 1 for b in bindings)
    taken = [cpu for b in bindings for cpu in b.cpus]
    if num_ranks <= 64:
        assert len(taken) == len(set(taken))
        assert all(len(core) == 2 for b in bindings for core in b.cores)
    else:
        assert any(b.shared for b in bindings)


@pytest.mark.parametrize(
    ("visible", "buses"),
    [
        (None, ["03", "41", "82", "c1"]),
        ("", []),
        ("2,0", ["82", "03"]),
        ("3, 1", ["c1", "41"]),
        ("0,9,1", ["03"]),  # CUDA stops at the first that is none
        ("-1", []),
        ("1,-1,2", ["41"]),
        ("NoDevFiles", []),
        ("GPU-3bc0ffee,GPU-1", ["c1", "41"]),
        ("GPU-3bc0ffee-0000-0000-0000-000000000003", ["c1"]),
        ("GPU-7", []),
        ("MIG-GPU-2bc0ffee-0000-0000-0000-000000000002/1/0", ["82"]),
    ],
)
def test_visible_devices(node: Node, visible: str | None, buses: list[str]) -> None:
    topology = perlmutter(node, uuids=True).read(visible=visible)
    assert [gpu.address[5:7] for gpu in topology.gpus] == buses
    assert len(topology.installed) == 4


def test_visible_devices_are_the_ranks_devices(node: Node) -> None:
    bindings = plan_binding(perlmutter(node).read(visible="3,0"), 2)
    # With cores of the nodes between, which are in the same socket and nobody else's.
    assert [b.memory_nodes for b in bindings] == [(0,), (3,)]
    assert set(range(16)) <= bindings[0].cpus
    assert set(range(48, 64)) <= bindings[1].cpus
    assert [b.gpu.name for b in bindings if b.gpu] == ["3", "0"]


def test_mig_slice_that_only_the_driver_knows(node: Node) -> None:
    topology = perlmutter(node).read(visible="MIG-aa11,MIG-bb22")
    assert [(gpu.name, gpu.address) for gpu in topology.gpus] == [
        ("MIG-aa11", ""),
        ("MIG-bb22", ""),
    ]
    assert [len(b.cores) for b in plan_binding(topology, 2)] == [32, 32]


def test_devices_that_the_job_may_not_open_do_not_count(node: Node) -> None:
    """A job with GPUs 2 and 3 of a node: sysfs shows four, CUDA counts two from 0."""
    perlmutter(node, uuids=True)
    for minor in (0, 1):
        (node.root / f"dev/nvidia{minor}").unlink()
    topology = node.read(visible="0,1")
    assert [gpu.address[5:7] for gpu in topology.gpus] == ["82", "c1"]
    for minor in (2, 3):
        (node.root / f"dev/nvidia{minor}").unlink()
    assert node.read(visible="0").gpus == ()


def test_amd_accelerators_and_what_is_no_gpu(node: Node) -> None:
    laptop(node)
    node.gpu("pci0000:00/0000:c1:00.0", 0, kind="0x038000", vendor="0x1002")
    node.gpu("pci0000:00/0000:c6:00.0", 0, kind="0x120000", vendor="0x1002")
    node.gpu("pci0000:00/0000:c7:00.0", 0, kind="0x068000")  # a switch between GPUs
    node.gpu("pci0000:00/0000:c8:00.0", 0, kind="0x030000", vendor="0x1a03")  # a console
    assert [gpu.address[5:7] for gpu in node.read().gpus] == ["c1", "c6"]


def test_gpu_that_does_not_say_its_node(node: Node) -> None:
    snellius(node)
    folder = node.root / "sys/bus/pci/devices/0000:ca:00.0"
    (folder / "numa_node").write_text("-1\n")
    (folder / "local_cpulist").write_text("36-71\n")
    (node.root / "sys/bus/pci/devices/0000:e3:00.0/numa_node").write_text("-1\n")
    bindings = plan_binding(node.read(), 4)
    assert [b.gpu.node for b in bindings if b.gpu] == [0, 0, 1, None]
    # The one that nobody knows the place of goes where there is room.
    assert [b.memory_nodes for b in bindings] == [(0,), (0,), (1,), (1,)]


def test_pci_addresses_are_counted_as_numbers(node: Node) -> None:
    laptop(node)
    for address in ("10000:01:00.0", "2000:01:00.0", "0000:9a:00.0", "0000:0b:00.0"):
        node.gpu(f"pci0000:00/{address}", 0)
    assert [gpu.address for gpu in node.read().gpus] == [
        "0000:0b:00.0",
        "0000:9a:00.0",
        "2000:01:00.0",
        "10000:01:00.0",
    ]


def test_nic_under_the_same_switch_is_nearest(node: Node) -> None:
    """Eight GPUs and eight NICs, pairs behind four switches: each GPU its own switch's NICs in turn."""
    laptop(node)
    for switch in range(4):
        above = f"pci0000:00/0000:00:0{switch}.0/0000:{switch + 1}0:00.0"
        for slot in range(2):
            node.gpu(f"{above}/0000:{switch + 1}1:0{slot}.0/0000:{switch + 1}{slot + 2}:00.0", 0)
            number = 7 - 2 * switch - slot
            path = f"{above}/0000:{switch + 1}5:0{slot}.0/0000:{switch + 1}{slot + 6}:00.0"
            node.infiniband(f"mlx5_{number}", path, 0)
    names = [b.nic.name for b in plan_binding(node.read(), 8) if b.nic]
    assert names == [f"mlx5_{n}" for n in (6, 7, 4, 5, 2, 3, 0, 1)]


def test_ports_in_several_subnets_are_not_pinned(node: Node) -> None:
    laptop(node)
    node.infiniband("mlx5_0", "pci0000:00/0000:10:00.0", 0)
    node.infiniband("mlx5_1", "pci0000:00/0000:11:00.0", 0, subnet="fec0:0000:0000:0001")
    for binding in plan_binding(node.read(), 2):
        assert binding.nic is not None
        assert "UCX_NET_DEVICES" not in binding_variables(binding)


def test_slow_port_is_not_taken_though_it_is_near(node: Node) -> None:
    laptop(node).gpu("pci0000:00/0000:00:01.0/0000:01:00.0", 0)
    node.infiniband("mlx5_0", "pci0000:00/0000:00:01.0/0000:02:00.0", 0, rate="40 Gb/sec (4X QDR)")
    node.infiniband("mlx5_1", "pci0000:00/0000:00:03.0/0000:03:00.0", 0)
    (binding,) = plan_binding(node.read(), 1)
    assert binding.nic is not None
    assert binding.nic.name == "mlx5_1"


def test_roce_is_not_pinned(node: Node) -> None:
    laptop(node).infiniband("mlx5_0", "pci0000:00/0000:10:00.0", 0, layer="Ethernet")
    (binding,) = plan_binding(node.read(), 1)
    assert binding.nic is not None
    assert binding.nic.kind == "roce"
    assert "UCX_NET_DEVICES" not in binding_variables(binding)


def test_ucx_device_of_the_user_stays(node: Node) -> None:
    laptop(node).infiniband("mlx5_0", "pci0000:00/0000:10:00.0", 0)
    (binding,) = plan_binding(node.read(), 1)
    assert binding_variables(binding)["UCX_NET_DEVICES"] == "mlx5_0:1"
    assert "UCX_NET_DEVICES" not in binding_variables(binding, {"UCX_NET_DEVICES"})
    assert not [name for name in binding_variables(binding) if name.startswith(("NCCL", "GLOO"))]


def test_memory_that_the_job_may_not_use_is_not_asked_for(node: Node) -> None:
    status = node.root / "proc/self/status"
    status.parent.mkdir(parents=True)
    status.write_text("Name:\tx\nMems_allowed_list:\t0-1\n")
    bindings = plan_binding(perlmutter(node).read(), 4)
    assert [b.memory_nodes for b in bindings] == [(), (), (1,), (0,)]


def test_scheduler_gave_each_rank_its_own_cores_and_gpu(node: Node) -> None:
    """As `srun --cpus-per-task=16 --gpus-per-task=1` does: nothing is divided a second time."""
    perlmutter(node)
    own = [set(range(16 * n, 16 * n + 16)) for n in (3, 2, 1, 0)]
    seen = [node.read(own[n], visible=str(n)) for n in range(4)]
    views = [topology.view() for topology in seen]
    for rank, topology in enumerate(seen):
        bindings = choose_bindings(topology, views)
        assert [b.cpus for b in bindings] == [frozenset(cpus) for cpus in own]
        assert bindings[rank].gpu == topology.gpus[0]
        assert [b.memory_nodes for b in bindings] == [(3,), (2,), (1,), (0,)]
        assert bindings[rank].num_threads == 16


def test_scheduler_gave_cores_of_two_sockets(node: Node) -> None:
    """Whoever asked for them wants them all, far ones as well; memory is still the GPU's."""
    snellius(node)
    own = [set(range(20)) | {36, 37}, set(range(38, 60))]
    views = [node.read(own[n], visible=visible).view() for n, visible in enumerate(("0", "2"))]
    bindings = plan_binding(node.read(own[0], visible="0"), views)
    assert [b.cpus for b in bindings] == own
    assert [b.memory_nodes for b in bindings] == [(0,), (1,)]


def test_each_rank_sees_its_own_gpu_and_all_cores(node: Node) -> None:
    perlmutter(node)
    seen = [node.read(visible=str(n)) for n in range(4)]
    views = [topology.view() for topology in seen]
    plans = [choose_bindings(topology, views) for topology in seen]
    assert [b.memory_nodes for b in plans[0]] == [(3,), (2,), (1,), (0,)]
    assert [[b.cpus for b in plan] for plan in plans] == [[b.cpus for b in plans[0]]] * 4


def test_views_travel_as_json() -> None:
    view = View((0, 1, 5), ("0000:03:00.0",))
    sent = json.loads(json.dumps({"cpus": view.cpus, "gpus": view.gpus}))
    assert View(tuple(sent["cpus"]), tuple(sent["gpus"])) == view


@pytest.mark.parametrize(
    ("cgroup", "path", "files"),
    [
        ("0::/job/step", "job", {"cpu.max": "400000 100000"}),
        (
            "4:cpu,cpuacct:/job",
            "cpu,cpuacct/job",
            V1 := {"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"},
        ),
        ("4:cpuacct,cpu:/", "cpu", V1),
    ],
)
def test_quota_of_a_container_limits_threads(
    node: Node, cgroup: str, path: str, files: dict[str, str]
) -> None:
    own = node.root / "proc/self/cgroup"
    own.parent.mkdir(parents=True)
    own.write_text(f"9:memory:/elsewhere\n{cgroup}\n")
    for name, text in files.items():
        node.write(f"fs/cgroup/{path}/{name}", text)
    topology = perlmutter(node).read()
    assert topology.quota == 4.0
    assert [b.num_threads for b in choose_bindings(topology, 2)] == [2, 2]
    assert [b.num_threads for b in choose_bindings(topology, 8, "none")] == [1] * 8
    node.write(f"fs/cgroup/{path}/cpu.max", "max 100000")
    assert node.read().quota is None


def test_unknown_mode_is_named(node: Node) -> None:
    with pytest.raises(UsageError, match="unknown mode 'core' in --bind; did you mean 'cores'"):
        choose_bindings(laptop(node).read(), 1, "core")


def test_table_is_aligned(node: Node) -> None:
    text = show_bindings(plan_binding(perlmutter(node).read(), 4))
    assert text.splitlines()[0].split() == [
        "rank",
        "cores",
        "hardware",
        "threads",
        "memory",
        "GPU",
        "NIC",
        "threads",
    ]
    assert "0     16     48-63,112-127       3  0 0000:03:00.0  hsn3       16" in text
    assert len({len(line) for line in text.splitlines()}) == 1


def test_record_is_json(node: Node) -> None:
    record = plan_binding(perlmutter(node).read(), 4)[0].to_record()
    assert json.loads(json.dumps(record)) == {
        "local_rank": 0,
        "cores": "48-63,112-127",
        "num_cores": 16,
        "memory_nodes": [3],
        "gpu": "0000:03:00.0",
        "nic": "hsn3",
        "num_threads": 16,
        "shared": False,
    }


@pytest.mark.parametrize("text", ["0-3,64-66", "5", "0,2,4"])
def test_ranges_there_and_back(text: str) -> None:
    assert show_ranges(read_ranges(text)) == text


@pytest.mark.parametrize("text", ["", "\n", "x", "1-x"])
def test_ranges_that_are_none(text: str) -> None:
    assert read_ranges(text) == []


# Really, on this machine. A process of its own, so that the one with the tests keeps its cores.
BOUND = """
import json, os, subprocess, sys
from ridgeline.launch.bind import apply_binding, choose_bindings
from ridgeline.launch.topology import read_topology

binding = choose_bindings(read_topology(), 2, "cores")[1]
applied = apply_binding(binding)
def seen():
    there = os.path.exists("/proc/self/numa_maps")
    maps = open("/proc/self/numa_maps").readline().split()[1:] if there else []
    return [sorted(os.sched_getaffinity(0)), " ".join(maps[:2])]
child = "import os, json; print(json.dumps(sorted(os.sched_getaffinity(0))))"
started = json.loads(subprocess.run([sys.executable, "-c", child], capture_output=True, check=True).stdout)
read_end, write_end = os.pipe()
if os.fork() == 0:
    os.write(write_end, json.dumps(seen()).encode())
    os._exit(0)
forked = json.loads(os.read(read_end, 65536))
os.wait()
print(json.dumps({"wanted": sorted(binding.cpus), "own": seen(), "started": started, "forked": forked,
                  "applied": [applied.cores, applied.memory]}))
"""


def test_bound_process_and_its_workers_keep_to_their_cores() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOUND],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["applied"][0] == "set"
    assert told["own"][0] == told["started"] == told["forked"][0] == told["wanted"]
    if len(os.sched_getaffinity(0)) > 1:
        assert set(told["wanted"]) < os.sched_getaffinity(0)
    assert told["applied"][1] in ("set", "left") or told["applied"][1].startswith("refused: ")
    if told["applied"][1] == "set" and told["own"][1]:
        assert told["own"][1].startswith("prefer")
        assert told["forked"][1].startswith("prefer")


def test_refusals_are_told_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(bind, "_set_mempolicy", refuse)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    applied = apply_binding(Binding(0, ((0,),), (0,)))
    assert applied.cores == applied.memory == "refused: Operation not permitted"
    assert apply_binding(Binding(0)) == bind.Applied("left", "left")


def test_older_kernel_gets_one_preferred_node(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, list[int]]] = []

    def old(_: int, mode: int, nodes: tuple[int, ...]) -> None:
        asked.append((mode, list(nodes)))
        if mode == 5:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(bind, "_set_mempolicy", old)
    assert apply_binding(Binding(0, memory_nodes=(1, 3))).memory == "set"
    assert asked == [(5, [1, 3]), (1, [1])]


def test_cores_that_are_not_there_are_refused() -> None:
    before = os.sched_getaffinity(0)
    assert apply_binding(Binding(0, ((4095,),))).cores.startswith("refused: ")
    assert os.sched_getaffinity(0) == before
