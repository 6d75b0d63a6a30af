"""`ridgeline machine network` between hosts, one of which has a slow link: it is measured, and named."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ridgeline_cluster.jobs import ridgeline

from ridgeline.machine.links import NetworkFacts, most_lopsided, network_from_dict, slowest_pair

BYTES_PER_S = 25e6
SLOW = 2
"""The host whose incoming link carries no more than that; it has rank 1."""


@pytest.fixture
def throttled(hosts: Any) -> Iterator[Any]:
    """The hosts, with what the bridge sends to one of them limited to 200 Mbit/s."""
    if shutil.which("tc") is None:
        pytest.skip("tc is missing, so no link can be made slow: install iproute2")
    limit = f"tc qdisc add dev port{SLOW} root tbf rate 200mbit burst 256kb latency 50ms"
    done = hosts.run(0, limit.split())
    if done.returncode != 0:
        pytest.skip(f"this kernel has no token-bucket filter: {done.stderr.strip()}")
    yield hosts
    hosts.run(0, f"tc qdisc del dev port{SLOW} root".split())


def measured(world: Any, num: int) -> NetworkFacts:
    """On the first `num` hosts, a rank each."""
    words = ["--sizes", "16KB,1MB", "--quick", "--device", "cpu", "--json"]
    words += ["--collectives", "all_reduce,pair"]
    started = []
    for rank in range(num):
        env = {"RANK": str(rank), "WORLD_SIZE": str(num), "GROUP_RANK": str(rank)}
        env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": world.address(1), "MASTER_PORT": "29577"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = ridgeline("machine", "network", *words)
        started.append(world.popen(rank + 1, command, env=env, **pipes))
    told = [process.communicate(timeout=480) for process in started]
    assert [process.returncode for process in started] == [0] * num, told
    return network_from_dict(json.loads(told[0][0]))


def test_a_slow_link_limits_collectives_and_is_named_with_its_direction(throttled: Any) -> None:
    facts = measured(throttled, 3)
    assert facts.hosts == ("host1", "host2", "host3")
    reduce = facts.of("all_reduce", "all")[-1]
    assert reduce.bus_bytes_per_s < 1.5 * BYTES_PER_S
    worst, lopsided = slowest_pair(facts), most_lopsided(facts)
    assert worst is not None
    assert lopsided is not None
    assert worst[0].target == lopsided[0].target == SLOW - 1
    assert lopsided[1] > 1.5


QUICK = ("--sizes", "16KB,256KB", "--quick", "--device", "cpu", "--collectives", "all_reduce,pair")


def test_ranks_that_srun_has_started_on_two_nodes(slurm: Any) -> None:
    command = [
        "srun",
        "-N2",
        "--ntasks-per-node=2",
        *ridgeline("machine", "network", *QUICK, "--json"),
    ]
    done = slurm.run(command, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    facts = network_from_dict(json.loads(done.stdout))
    assert facts.ranks_per_node == (2, 2)
    levels = {(t.collective, t.level) for t in facts.timings}
    assert {("all_reduce_by_levels", "all"), ("all_reduce", "across_at_once")} <= levels
    assert ("pairs_at_once", "between") in levels


@pytest.mark.thorough
def test_ranks_that_ridgeline_launch_has_started(hosts: Any, tmp_path: Path) -> None:
    options = ["--scheduler", "ssh", "--hosts", "host1,host2", "--ssh-command", hosts.rsh]
    options += ["--folder", tmp_path / "job", "--"]
    measure = ridgeline("machine", "network", *QUICK, "--out", tmp_path / "machine.json")
    done = hosts.run(0, ridgeline("launch", *options, *measure), timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 ranks on 2 nodes (1, 1 ranks), gloo") == 1
    rows = json.loads((tmp_path / "machine.json").read_text())["network"]
    assert [row["hosts"] for row in rows] == [["host1", "host2"]]
