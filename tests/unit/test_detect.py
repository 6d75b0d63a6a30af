"""Who a process is: variables as launchers set them, nested as they nest.

Sets marked "recorded" were seen in jobs of that launcher; the others follow its documentation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ridgeline.errors import UsageError
from ridgeline.launch.detect import READERS, detect
from ridgeline.launch.env import read_rank_env
from ridgeline.launch.hostlist import (
    expand_counts,
    expand_hosts,
    read_host_lines,
    read_host_pairs,
)

SBATCH = {  # recorded: the batch script of a job of 2 nodes with 2 tasks each
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
SRUN = {  # recorded: rank 3 of a step in it
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {  # recorded: mpirun -n 4
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_RANK": "2",
    "PMIX_NAMESPACE": "123456",
}
HYDRA = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}  # recorded
FLUX = {  # recorded
    "FLUX_TASK_RANK": "3",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_SIZE": "5",
    "FLUX_JOB_NNODES": "3",
    "FLUX_JOB_ID": "f123",
    "PMI_RANK": "3",
    "PMI_SIZE": "5",
    "MASTER_ADDR": "host0",
}
JSRUN = {
    "LSB_JOBID": "99",
    "LSB_MCPU_HOSTS": "launch1 1 a01n01 42 a01n02 42",
    "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "OMPI_COMM_WORLD_RANK": "7",
    "OMPI_COMM_WORLD_SIZE": "12",
    "PMIX_RANK": "7",
}
PALS = {
    "PALS_RANKID": "5",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
    "PALS_APID": "abc",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "MASTER_ADDR": "x1000c0s0b0n0",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2",
}

# launcher, rank, world, local rank, local world, node, master
CASES = {
    "nothing": ({}, ("single process", 0, 1, 0, 1, 0, "127.0.0.1")),
    "torchrun": (TORCHRUN, ("torchrun", 5, 8, 1, 4, 1, "10.0.0.1")),
    "torchrun in srun": ({**SRUN, **TORCHRUN}, ("torchrun", 5, 8, 1, 4, 1, "10.0.0.1")),
    "srun": (SRUN, ("Slurm", 3, 4, 1, 2, 1, "node1")),
    "srun with pmix": ({**SRUN, "PMIX_RANK": "3"}, ("Slurm", 3, 4, 1, 2, 1, "node1")),
    "sbatch script": (SBATCH, ("single process", 0, 1, 0, 1, 0, "127.0.0.1")),
    "salloc's shell": (
        {**SBATCH, "SLURM_STEP_ID": "4294967290"},
        ("single process", 0, 1, 0, 1, 0, "127.0.0.1"),
    ),
    "uneven nodes": (
        {
            **SRUN,
            "SLURM_STEP_NUM_TASKS": "9",
            "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
            "SLURM_STEP_NODELIST": "gpu-a[09-10],fat1",
            "SLURM_PROCID": "8",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "2",
        },
        ("Slurm", 8, 9, 0, 1, 2, "gpu-a09"),
    ),
    "mpirun": (OPEN_MPI, ("Open MPI", 2, 4, 2, 4, 0, "127.0.0.1")),
    "mpirun in sbatch": ({**SBATCH, **OPEN_MPI}, ("Open MPI", 2, 4, 2, 4, 0, "node1")),
    "mpiexec of MPICH": (HYDRA, ("MPICH", 1, 2, 1, 2, 0, "127.0.0.1")),
    "flux": (FLUX, ("Flux", 3, 5, 1, 2, 1, "host0")),
    "jsrun": (JSRUN, ("jsrun", 7, 12, 1, 6, 1, "a01n01")),
    "PALS": (PALS, ("Cray PALS", 5, 8, 1, 4, 1, "x1000c0s0b0n0")),
    "a pod": (
        {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "job-master-0",
            "MASTER_PORT": "23456",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        },
        ("torchrun", 1, 2, 0, 1, 1, "job-master-0"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_who_it_is(name: str) -> None:
    variables, expected = CASES[name]
    env = read_rank_env(variables)
    found = (
        env.source,
        env.rank,
        env.world_size,
        env.local_rank,
        env.local_world_size,
        env.node_rank,
        env.master_addr,
    )
    assert found == expected


def test_every_reader_has_a_case() -> None:
    found = {read_rank_env(variables).source for variables, _ in CASES.values()}
    assert found | {"PMIx"} == {*READERS, "single process"}


def test_ports_are_the_same_on_every_rank_and_differ_between_jobs() -> None:
    one = read_rank_env(SRUN).master_port
    assert one == read_rank_env({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master_port
    assert 20_000 <= one < 40_000
    others = {read_rank_env({**SRUN, "SLURM_JOB_ID": str(job)}).master_port for job in range(50)}
    assert len(others) > 45
    assert read_rank_env({**SRUN, "SLURM_STEP_ID": "1"}).master_port != one
    assert read_rank_env({**SRUN, "MASTER_PORT": "4711"}).master_port == 4711


def test_nodes_of_pbs_come_from_its_file(tmp_path) -> None:
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    env = read_rank_env({**HYDRA, "PBS_JOBID": "1.server", "PBS_NODEFILE": str(tmp_path / "nodes")})
    assert env.nodes == ("n1", "n2")
    assert env.master_addr == "n1"
    with pytest.raises(UsageError, match="cannot read PBS_NODEFILE"):
        read_rank_env({**HYDRA, "PBS_NODEFILE": str(tmp_path / "gone")})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0"}, "not WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of 8"),
        ({**TORCHRUN, "RANK": "two"}, "RANK='two'"),
        ({**SRUN, "SLURM_STEP_NODELIST": "node[1-"}, "SLURM_STEP_NODELIST='node.1-' is no list"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, "is no count"),
        ({**SRUN, "SLURM_NODEID": "5"}, "node 5 .* counts tasks of 2 nodes"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK=0 is set, but nothing says how many"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            "set MASTER_ADDR",
        ),
    ],
)
def test_what_cannot_be_is_said(variables: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_rank_env(variables)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("r[1-2]n[1,3]x", ["r1n1x", "r1n3x", "r2n1x", "r2n3x"]),
        ("login, gpu[7]", ["login", "gpu7"]),
    ],
)
def test_folded_names(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text, "X") == hosts


@pytest.mark.parametrize("text", ["", ",", "a,,b", "n[", "n]", "n[1", "n[[1]]", "n[1-x]", "n[3-1]"])
def test_names_that_cannot_be_unfolded(text: str) -> None:
    with pytest.raises(UsageError, match="X="):
        expand_hosts(text, "X")


def test_counts_pairs_and_lines() -> None:
    assert expand_counts("4(x2),1", "X") == [4, 4, 1]
    assert read_host_pairs("h1 4 h2 2", "X") == [("h1", 4), ("h2", 2)]
    assert read_host_lines("b\na\nb\n\n", "X") == [("b", 2), ("a", 1)]
    for text in ("h1", "h1 x", ""):
        with pytest.raises(UsageError, match="host and number in turn"):
            read_host_pairs(text, "X")


def test_flux_spreads_the_rest_over_the_first_nodes() -> None:
    places = []
    for rank in range(5):
        found = detect({**FLUX, "FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(rank % 2)})
        places.append((found.node_rank, found.local_world_size))
    assert places == [(0, 2), (0, 2), (1, 2), (1, 2), (2, 1)]


def test_the_command_names_the_variables() -> None:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    command = [sys.executable, "-m", "ridgeline.cli", "launch", "env"]
    done = subprocess.run(command, env={**kept, **SRUN}, capture_output=True, text=True, check=True)
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert lines["rank"] == ["3", "SLURM_PROCID"]
    assert lines["world_size"] == ["4", "SLURM_STEP_NUM_TASKS"]
    assert lines["nodes"] == ["node1,", "node2"]
    done = subprocess.run(
        [*command, "--json"], env={**kept, **SRUN}, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["said"]["local_world_size"] == "SLURM_STEP_TASKS_PER_NODE"


def test_ranks_that_a_hub_brings_together_need_no_master() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(UsageError, match="set MASTER_ADDR"):
        read_rank_env(variables)
    assert read_rank_env(variables, needs_master=False).rank == 3
