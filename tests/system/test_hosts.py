"""Four hosts without a scheduler, over ssh: they train as one does, and one that is lost ends the job."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ridgeline_cluster.hosts import wait_until
from ridgeline_cluster.jobs import (
    ENDLESS,
    TRAINING,
    gone,
    losses,
    reached,
    ridgeline,
    write_script,
)

FOUR = "host1,host2,host3,host4"


@pytest.fixture
def world(hosts: Any) -> Iterator[Any]:
    yield hosts
    for index in range(1, hosts.num + 1):
        hosts.mend(index)


def over_ssh(ssh_config: Path, hosts: str = FOUR, on: str = "--scheduler") -> list[object]:
    return [on, "ssh", "--hosts", hosts, "--ssh-command", f"ssh -F {ssh_config}"]


def test_four_hosts_train_as_one_does(
    world: Any, ssh_config: Path, tmp_path: Path, reference: list[float]
) -> None:
    run = tmp_path / "run"
    words = [*TRAINING, "train.steps=20", *over_ssh(ssh_config, on="--on"), "--run", run]
    done = world.run(0, ridgeline("train", *words, "-n", 1), timeout=720)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(run) == reference[:20]


def test_from_one_of_the_hosts_through_another_program_than_ssh(world: Any, tmp_path: Path) -> None:
    text = "import os, socket; print(os.environ['RANK'], socket.gethostname())"
    script = write_script(tmp_path, text)
    options = ["--scheduler", "ssh", "--hosts", "host1:2,host3", "--ssh-command", world.rsh]
    options += ["--folder", tmp_path / "job"]
    done = world.run(0, ridgeline("launch", *options, "--", sys.executable, script), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    logs = sorted((tmp_path / "job" / "logs").glob("rank-*.out"))
    said = [path.read_text().split() for path in logs]
    assert said == [["0", "host1"], ["1", "host1"], ["2", "host3"]]


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named_and_ends_the_job(
    world: Any, ssh_config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = [*TRAINING, *ENDLESS, *over_ssh(ssh_config, on="--on"), "--run", run, "-n", 1]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        job = world.popen(
            0, ridgeline("train", *words), env={"RIDGELINE_LOST_S": "6"}, stdout=out, stderr=err
        )
    wait_until("step 5, or the end", lambda: reached(run, 5)() or job.poll() is not None, 480)
    assert job.poll() is None, (tmp_path / "err").read_text()
    world.cut(3)
    began = time.monotonic()
    code = job.wait(480)
    took = time.monotonic() - began
    error = (tmp_path / "err").read_text()
    assert code == 1, error
    assert "host3" in error
    assert took < 300
    others = [name for name in world.names if name != "host3"]
    gone_on(world, others)
    world.mend(3)
    gone(world, ["ridgeline.train", "ridgeline.launch"], 300)


def gone_on(world: Any, names: list[str]) -> None:
    def none() -> bool:
        left = {**world.matching("ridgeline.train"), **world.matching("ridgeline.launch")}
        return not set(left) & set(names)

    wait_until(f"{names} to be free", none, 100, 0.25)


def test_a_host_that_does_not_resolve_is_named(
    world: Any, ssh_config: Path, tmp_path: Path
) -> None:
    options = [*over_ssh(ssh_config, "host1,nobody"), "--folder", tmp_path / "job"]
    began = time.monotonic()
    done = world.run(0, ridgeline("launch", *options, "--", "sleep", "888"), timeout=360)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert "nobody" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3, done.stderr
    assert time.monotonic() - began < 150
    gone(world, ["sleep 888", "ridgeline.launch"], 100)


def test_a_command_that_is_interrupted_leaves_nothing_behind(
    world: Any, ssh_config: Path, tmp_path: Path
) -> None:
    options = [*over_ssh(ssh_config, "host1,host2"), "--folder", tmp_path / "job"]
    script = write_script(tmp_path, "import time\nprint('here', flush=True)\ntime.sleep(999)\n")
    job = world.popen(0, ridgeline("launch", *options, "--", sys.executable, script))
    logs = [tmp_path / "job" / "logs" / f"rank-{rank}.out" for rank in range(2)]
    wait_until("ranks", lambda: all(p.is_file() and "here" in p.read_text() for p in logs), 300)
    inner = [p for p in world.processes(0) if "ridgeline.cli" in p.cmdline()]
    assert inner
    inner[0].kill()  # no last words
    job.wait(100)
    gone(world, [str(script), "ridgeline.launch"], 300)
