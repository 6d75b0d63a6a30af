"""The words of each framework for who a rank is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from ridgeline.errors import UsageError
from ridgeline.launch.detect import detect
from ridgeline.launch.frameworks import (
    MAX_VARIABLE_BYTES,
    PORTS_A_RANK,
    endpoint,
    framework_notes,
    framework_variables,
)

FOUR = ("0000:03:00.0", "0000:41:00.0", "0000:82:00.0", "0000:c1:00.0")


@dataclass(frozen=True)
class Rank:
    rank: int
    local_rank: int
    node_rank: int
    host: str
    address: str
    ports: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()


def build_ranks(
    counts: list[int], ports: int = PORTS_A_RANK, gpus: tuple[str, ...] = FOUR
) -> list[Rank]:
    """So many ranks on each node."""
    ranks: list[Rank] = []
    for node, count in enumerate(counts):
        for local in range(count):
            first = 40_000 + 10 * local + 1000 * (node % 10)
            ranks.append(
                Rank(
                    rank=len(ranks),
                    local_rank=local,
                    node_rank=node,
                    host=f"nid{node:05d}",
                    address=f"10.0.{node // 250}.{node % 250 + 1}",
                    ports=tuple(range(first, first + ports)),
                    gpus=gpus,
                )
            )
    return ranks


def test_torch() -> None:
    variables = framework_variables(build_ranks([3, 1]), 3)
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "40000",
    }
    assert expected.items() <= variables.items()


@pytest.mark.parametrize("rank", range(4))
def test_our_own_detection_believes_them(rank: int) -> None:
    """Also though they look like Open MPI's to JAX, and inside a job of Slurm's."""
    around = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    found = detect({**around, **framework_variables(build_ranks([3, 1]), rank, around)})
    assert (found.source, found.rank, found.world_size) == ("torchrun", rank, 4)
    assert found.node_rank == rank // 3


def test_tensorflow() -> None:
    ranks = build_ranks([2, 2])
    configs = [json.loads(framework_variables(ranks, rank)["TF_CONFIG"]) for rank in range(4)]
    workers = ["10.0.0.1:40001", "10.0.0.1:40010", "10.0.0.2:41000", "10.0.0.2:41010"]
    assert [config["cluster"] for config in configs] == [{"worker": workers}] * 4
    tasks = [config["task"] for config in configs]
    assert tasks == [{"type": "worker", "index": rank} for rank in range(4)]


def test_jax() -> None:
    ranks = build_ranks([2, 2])
    third = framework_variables(ranks, 3)
    assert third["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:40002"
    assert third["JAX_LOCAL_DEVICE_IDS"] == "1"
    assert third["OMPI_COMM_WORLD_RANK"] == "3"
    assert third["OMPI_COMM_WORLD_SIZE"] == "4"
    assert third["OMPI_COMM_WORLD_LOCAL_RANK"] == "1"
    assert third["OMPI_MCA_orte_hnp_uri"] == ""
    # Under mpirun it is needed by those that mpirun started, and stays.
    under_mpirun = {"OMPI_MCA_orte_hnp_uri": "1010630656.0;tcp://10.0.0.1:51375"}
    assert "OMPI_MCA_orte_hnp_uri" not in framework_variables(ranks, 3, under_mpirun)


@pytest.mark.parametrize(
    ("counts", "gpus", "rank", "expected"),
    [
        ([4], FOUR, 3, "3"),
        ([8], FOUR, 6, "2"),  # more ranks than GPUs
        ([1, 2], FOUR, 0, "0,1,2,3"),  # alone on its node it has all
        ([1, 2], FOUR, 2, "1"),
        ([2], (), 1, None),
    ],
)
def test_jax_devices(
    counts: list[int], gpus: tuple[str, ...], rank: int, expected: str | None
) -> None:
    variables = framework_variables(build_ranks(counts, gpus=gpus), rank)
    assert variables.get("JAX_LOCAL_DEVICE_IDS") == expected


def test_jax_device_where_each_rank_sees_its_own() -> None:
    ranks = [replace(rank, gpus=(FOUR[rank.local_rank],)) for rank in build_ranks([4])]
    for rank in range(4):
        assert framework_variables(ranks, rank)["JAX_LOCAL_DEVICE_IDS"] == "0"


def test_horovod_counts_across_uneven_nodes() -> None:
    ranks = build_ranks([2, 3, 1])
    seen = []
    for rank in range(6):
        variables = framework_variables(ranks, rank)
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
    assert framework_variables(ranks, 5)["HOROVOD_HOSTNAME"] == "nid00002"


def test_horovod_without_a_server_is_left_to_mpi_and_told() -> None:
    variables = framework_variables(build_ranks([2]), 0)
    assert variables["HOROVOD_SIZE"] == "2"
    assert "HOROVOD_CONTROLLER" not in variables
    assert any("rendezvous server" in note for note in framework_notes(build_ranks([2])))
    alone = framework_variables(build_ranks([1]), 0)
    assert alone["HOROVOD_CONTROLLER"] == "gloo"
    assert framework_notes(build_ranks([1])) == []


def test_horovod_with_a_server() -> None:
    ranks, server = build_ranks([2]), ("10.0.0.9", 7000)
    variables = framework_variables(ranks, 1, horovod_server=server)
    assert variables["HOROVOD_CONTROLLER"] == variables["HOROVOD_CPU_OPERATIONS"] == "gloo"
    assert variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.9"
    assert variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "7000"
    assert framework_notes(ranks, horovod_server=server) == []


def test_no_two_services_at_one_port() -> None:
    """Nor where other ranks were given the same number, which their nodes may well do."""
    ranks = [replace(rank, ports=(40_000, 40_001, 40_002)) for rank in build_ranks([1, 1])]
    variables = framework_variables(ranks, 0)
    workers = json.loads(variables["TF_CONFIG"])["cluster"]["worker"]
    assert workers == ["10.0.0.1:40001", "10.0.0.2:40001"]
    assert variables["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:40002"
    assert variables["MASTER_PORT"] == "40000"


def test_ranks_with_too_few_ports_get_the_rest() -> None:
    ranks = build_ranks([2], ports=1)
    variables = framework_variables(ranks, 0)
    assert variables["MASTER_PORT"] == "40000"
    assert not [name for name in variables if name.startswith(("TF_", "JAX_", "OMPI_"))]
    notes = framework_notes(ranks)
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
    variables = framework_variables(build_ranks([2]), 1, environ, horovod_server=("10.0.0.9", 7000))
    for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"):
        assert variables[name] == "1"
    assert json.loads(variables["TF_CONFIG"])["task"]["index"] == 1
    assert "JAX_COORDINATOR_ADDRESS" not in variables
    assert variables["JAX_LOCAL_DEVICE_IDS"] == "1"  # empty is not set
    assert "HOROVOD_CONTROLLER" not in variables


def test_list_of_workers_that_is_too_long_is_left_out_and_told() -> None:
    ranks = build_ranks([8] * 1000)
    assert "TF_CONFIG" not in framework_variables(ranks, 0)
    assert framework_variables(ranks, 0)["JAX_COORDINATOR_ADDRESS"]
    (note,) = [note for note in framework_notes(ranks) if "TF_CONFIG" in note]
    assert "8000 workers" in note


def test_variables_of_the_largest_world_start_a_process() -> None:
    """As many ranks as still fit: one more would not, and the kernel takes these."""
    low, high = 1, 8000
    while high - low > 1:
        middle = (low + high) // 2
        fits = "TF_CONFIG" in framework_variables(build_ranks([1] * middle), middle - 1)
        low, high = (middle, high) if fits else (low, middle)
    assert low > 4000
    variables = framework_variables(build_ranks([1] * low), low - 1)
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
    variables = framework_variables([Rank(0, 0, 0, "a", "fd00::2", (1, 2, 3))], 0)
    assert variables["JAX_COORDINATOR_ADDRESS"] == "[fd00::2]:3"
    assert "[fd00::2]:2" in variables["TF_CONFIG"]


def test_tables_that_cannot_be_are_refused() -> None:
    first = Rank(0, 0, 0, "a", "a", (1,))
    with pytest.raises(UsageError, match="should be 0 to n - 1 in order, not 0, 0"):
        framework_variables([first, first], 0)
    with pytest.raises(UsageError, match="not none"):
        framework_variables([], 0)
    with pytest.raises(UsageError, match="rank 1 says that it is local rank 0 of node 0"):
        framework_variables([first, replace(first, rank=1)], 0)
    with pytest.raises(UsageError, match="no rank 2 among 1 ranks"):
        framework_variables([first], 2)
    with pytest.raises(UsageError, match="rank 0 on a found no free port"):
        framework_variables([replace(first, ports=())], 0)
