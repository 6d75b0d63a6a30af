"""The words of each framework for who a rank is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ridgeline.errors import UsageError
from ridgeline.launch.detect import detect
from ridgeline.launch.frameworks import (
    MAX_VARIABLE_BYTES,
    Member,
    World,
    endpoint,
    framework_notes,
    framework_variables,
)


def build_world(
    counts: list[int], master_port: int = 29_500, ports: int = 3, **options: object
) -> World:
    """So many ranks on each node."""
    members: list[Member] = []
    for node, count in enumerate(counts):
        for local in range(count):
            first = 40_000 + 10 * local
            members.append(
                Member(
                    rank=len(members),
                    local_rank=local,
                    node_rank=node,
                    host=f"nid{node:05d}",
                    address=f"10.0.{node // 250}.{node % 250 + 1}",
                    ports=tuple(range(first, first + ports)),
                )
            )
    return World(tuple(members), "10.0.0.1", master_port, **options)  # type: ignore[arg-type]


def test_torch() -> None:
    variables = framework_variables(build_world([3, 1]), 3)
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert expected.items() <= variables.items()


@pytest.mark.parametrize("rank", range(4))
def test_our_own_detection_believes_them(rank: int) -> None:
    """Also though they look like Open MPI's to JAX, and inside a job of Slurm's."""
    around = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    found = detect({**around, **framework_variables(build_world([3, 1]), rank, around)})
    assert (found.source, found.rank, found.world_size) == ("torchrun", rank, 4)
    assert found.node_rank == rank // 3


def test_tensorflow() -> None:
    world = build_world([2, 2])
    configs = [json.loads(framework_variables(world, rank)["TF_CONFIG"]) for rank in range(4)]
    workers = ["10.0.0.1:40000", "10.0.0.1:40010", "10.0.0.2:40000", "10.0.0.2:40010"]
    assert [config["cluster"] for config in configs] == [{"worker": workers}] * 4
    tasks = [config["task"] for config in configs]
    assert tasks == [{"type": "worker", "index": rank} for rank in range(4)]


def test_jax() -> None:
    world = build_world([2, 2])
    third = framework_variables(world, 3)
    assert third["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:40001"
    assert third["JAX_LOCAL_DEVICE_IDS"] == "1"
    assert third["OMPI_COMM_WORLD_RANK"] == "3"
    assert third["OMPI_COMM_WORLD_SIZE"] == "4"
    assert third["OMPI_COMM_WORLD_LOCAL_RANK"] == "1"
    assert third["OMPI_MCA_orte_hnp_uri"] == ""
    # Under mpirun it is needed by those that mpirun started, and stays.
    under_mpirun = {"OMPI_MCA_orte_hnp_uri": "1010630656.0;tcp://10.0.0.1:51375"}
    assert "OMPI_MCA_orte_hnp_uri" not in framework_variables(world, 3, under_mpirun)


def test_jax_devices() -> None:
    world = build_world([2, 1])
    assert framework_variables(world, 1, devices=[0])["JAX_LOCAL_DEVICE_IDS"] == "0"
    assert framework_variables(world, 2, devices=[0, 1])["JAX_LOCAL_DEVICE_IDS"] == "0,1"
    # Alone on its node it may have all, and JAX chooses.
    assert "JAX_LOCAL_DEVICE_IDS" not in framework_variables(world, 2)


def test_horovod_counts_across_uneven_nodes() -> None:
    world = build_world([2, 3, 1])
    seen = []
    for rank in range(6):
        variables = framework_variables(world, rank)
        names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
        seen.append(tuple(int(variables[f"HOROVOD_{name}"]) for name in names))
    assert seen == [
        (0, 2, 0, 3),
        (1, 2, 0, 2),
        (0, 3, 1, 3),
        (1, 3, 1, 2),
        (2, 3, 0, 1),
        (0, 1, 2, 3),
    ]
    assert framework_variables(world, 5)["HOROVOD_HOSTNAME"] == "nid00002"


def test_horovod_without_a_server_is_left_to_mpi_and_told() -> None:
    variables = framework_variables(build_world([2]), 0)
    assert variables["HOROVOD_SIZE"] == "2"
    assert "HOROVOD_CONTROLLER" not in variables
    assert any("rendezvous server" in note for note in framework_notes(build_world([2])))
    alone = framework_variables(build_world([1]), 0)
    assert alone["HOROVOD_CONTROLLER"] == "gloo"
    assert framework_notes(build_world([1])) == []


def test_horovod_with_a_server() -> None:
    world = build_world([2], horovod_server=("10.0.0.9", 7000))
    variables = framework_variables(world, 1)
    assert variables["HOROVOD_CONTROLLER"] == variables["HOROVOD_CPU_OPERATIONS"] == "gloo"
    assert variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.9"
    assert variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "7000"
    assert framework_notes(world) == []


def test_no_two_services_at_one_port() -> None:
    """Whichever of rank 0's ports is torch's."""
    for master_port in (29_500, 40_000, 40_001, 40_002):
        world = build_world([2], master_port)
        variables = framework_variables(world, 0)
        worker = json.loads(variables["TF_CONFIG"])["cluster"]["worker"][0]
        ports = [worker.rpartition(":")[2], variables["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2]]
        assert len({*ports, variables["MASTER_PORT"]}) == 3


def test_ranks_without_ports_get_the_rest() -> None:
    world = build_world([2], ports=0)
    variables = framework_variables(world, 0)
    assert variables["RANK"] == "0"
    assert not [name for name in variables if name.startswith(("TF_", "JAX_", "OMPI_"))]
    notes = framework_notes(world)
    assert any("rank 0 has no free port for a TensorFlow worker" in note for note in notes)
    assert any("no JAX_COORDINATOR_ADDRESS" in note for note in notes)


def test_what_the_user_set_stays_but_not_who_a_rank_is() -> None:
    environ = {
        "RANK": "7",
        "HOROVOD_RANK": "7",
        "OMPI_COMM_WORLD_RANK": "7",
        "TF_CONFIG": "{}",
        "JAX_COORDINATOR_ADDRESS": "elsewhere:1",
        "JAX_LOCAL_DEVICE_IDS": "",
        "HOROVOD_CONTROLLER": "mpi",
    }
    variables = framework_variables(build_world([2], horovod_server=("10.0.0.9", 7000)), 1, environ)
    for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"):
        assert variables[name] == "1"
    assert json.loads(variables["TF_CONFIG"])["task"]["index"] == 1
    assert "JAX_COORDINATOR_ADDRESS" not in variables
    assert variables["JAX_LOCAL_DEVICE_IDS"] == "1"  # empty is not set
    assert "HOROVOD_CONTROLLER" not in variables


def test_list_of_workers_that_is_too_long_is_left_out_and_told() -> None:
    world = build_world([8] * 1000)
    assert "TF_CONFIG" not in framework_variables(world, 0)
    assert framework_variables(world, 0)["JAX_COORDINATOR_ADDRESS"]
    (note,) = [note for note in framework_notes(world) if "TF_CONFIG" in note]
    assert "8000 workers" in note


def test_variables_of_the_largest_world_start_a_process() -> None:
    """As many ranks as still fit: one more would not, and the kernel takes these."""
    low, high = 1, 8000
    while high - low > 1:
        middle = (low + high) // 2
        fits = "TF_CONFIG" in framework_variables(build_world([1] * middle), middle - 1)
        low, high = (middle, high) if fits else (low, middle)
    assert low > 4000
    variables = framework_variables(build_world([1] * low), low - 1)
    assert MAX_VARIABLE_BYTES - 40 < len(f"TF_CONFIG={variables['TF_CONFIG']}") < MAX_VARIABLE_BYTES
    code = "import json, os; print(len(json.loads(os.environ['TF_CONFIG'])['cluster']['worker']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(low), done.stderr


def test_addresses_of_ip_version_6_stand_in_brackets() -> None:
    assert endpoint("fd00::2", 80) == "[fd00::2]:80"
    members = (Member(0, 0, 0, "a", "fd00::2", (1, 2)),)
    variables = framework_variables(World(members, "fd00::2", 29_500), 0)
    assert variables["JAX_COORDINATOR_ADDRESS"] == "[fd00::2]:2"
    assert "[fd00::2]:1" in variables["TF_CONFIG"]


def test_tables_that_cannot_be_are_refused() -> None:
    first = Member(0, 0, 0, "a", "a")
    with pytest.raises(UsageError, match="should be 0 to n - 1 in order, not 0, 0"):
        World((first, first), "a", 1)
    with pytest.raises(UsageError, match="not none"):
        World((), "a", 1)
    with pytest.raises(UsageError, match="rank 1 says that it is local rank 0 of node 0"):
        World((first, Member(1, 0, 0, "a", "a")), "a", 1)
    with pytest.raises(UsageError, match="no rank 2 among 1 ranks"):
        framework_variables(World((first,), "a", 1), 2)
