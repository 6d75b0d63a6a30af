"""Jobs under a real Slurm of two nodes: submitted, trained, stopped, requeued, cancelled, and harmed."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ridgeline_cluster.hosts import wait_until
from ridgeline_cluster.jobs import (
    ENDLESS,
    LONGEST,
    TRAINING,
    gone,
    losses,
    rank_logs,
    reached,
    ridgeline,
    submit,
    write_script,
)

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "launch"
TWO_BY_TWO = ("--on", "slurm", "-N", 2, "-n", 2)

SAY = """
import json, os, socket, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
         "RIDGELINE_ARRAY_INDEX", "SLURM_PROCID")
said = {name: os.environ.get(name) for name in names}
print(json.dumps({"argv": sys.argv[1:], "host": socket.gethostname(), **said}))
"""


@pytest.fixture
def cluster(slurm: Any) -> Iterator[Any]:
    """The Slurm of the session, with nothing in it before and after."""
    yield slurm
    slurm.recover()


def said_by(folder: Path, num: int) -> list[dict[str, Any]]:
    return [json.loads(text.splitlines()[-1]) for text in rank_logs(folder, num)]


def train(cluster: Any, run: Path, *words: object) -> str:
    job, folder = submit(cluster, "train", *TRAINING, *words, "--run", run)
    assert folder == run
    return job


def test_two_nodes_train_as_one_does(cluster: Any, tmp_path: Path, reference: list[float]) -> None:
    run = tmp_path / "run"
    job = train(cluster, run, "train.steps=20", *TWO_BY_TWO, "--time", "10m")
    assert cluster.wait_for(job)["JobState"] == "COMPLETED", cluster.tail(job)
    assert losses(run) == reference[:20]
    assert "loss" in (run / "job.out").read_text()
    status = cluster.run(ridgeline("launch", "status", job), check=True).stdout
    assert re.search(r"\bdone\b", status), status


def test_a_job_that_is_warned_saves_is_requeued_and_goes_on(
    cluster: Any, tmp_path: Path, reference: list[float]
) -> None:
    run = tmp_path / "run"
    job = train(
        cluster, run, f"train.steps={LONGEST}", "checkpoint.minutes=0", *TWO_BY_TWO, "--requeue"
    )
    cluster.wait_until(job, "step 20", reached(run, 20))
    cluster.run(["scancel", "--signal=USR1", "--batch", job], check=True)
    wait_until("the requeue", lambda: cluster.show(job).get("Restarts") == "1", 60, 0.25)
    before = len(reached_steps(run))
    assert 20 <= before < LONGEST
    assert cluster.wait_for(job, "COMPLETED")["Restarts"] == "1"
    assert losses(run) == reference


def reached_steps(run: Path) -> list[str]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if '"kind": "step"' in line]


def test_an_array_gives_each_job_its_index(cluster: Any, tmp_path: Path) -> None:
    script = write_script(tmp_path, SAY)
    options = [
        "--scheduler",
        "slurm",
        "-N",
        1,
        "-n",
        1,
        "--array",
        "0-2",
        "--folder",
        tmp_path / "jobs",
    ]
    job, folder = submit(cluster, "launch", *options, "--", sys.executable, script)
    for index in range(3):
        cluster.wait_for(f"{job}_{index}", "COMPLETED")
    files = sorted(folder.rglob("rank-0.out"))
    assert len(files) == 3, list(folder.rglob("*"))
    indices = [
        json.loads(file.read_text().splitlines()[-1])["RIDGELINE_ARRAY_INDEX"] for file in files
    ]
    assert sorted(indices) == ["0", "1", "2"]
    assert re.search(r"\bdone\b", cluster.run(ridgeline("launch", "status", job)).stdout)


@pytest.mark.slow
def test_a_node_that_loses_power_costs_the_steps_since_the_last_checkpoint(
    cluster: Any, tmp_path: Path, reference: list[float]
) -> None:
    run = tmp_path / "run"
    job = train(
        cluster,
        run,
        f"train.steps={LONGEST}",
        "checkpoint.every=20",
        *TWO_BY_TWO,
        "--requeue",
    )
    cluster.wait_until(job, "step 30", reached(run, 30))
    cluster.kill("node2")
    wait_until("Slurm to give the node up", lambda: "down" in cluster.node_states()["node2"], 60)
    wait_until("the requeue", lambda: cluster.show(job).get("Restarts") == "1", 60, 0.25)
    gone(cluster.hosts, ["ridgeline.train.worker"])
    cluster.up("node2")
    cluster.wait_for(job, "COMPLETED")
    assert losses(run) == reference


@pytest.mark.slow
def test_ranks_outlive_the_daemon_of_their_node(
    cluster: Any, tmp_path: Path, reference: list[float]
) -> None:
    run = tmp_path / "run"
    job = train(cluster, run, f"train.steps={LONGEST}", *TWO_BY_TWO, "--requeue")
    cluster.wait_until(job, "step 10", reached(run, 10))
    cluster.stop_daemon("node2")
    assert "node2" in cluster.hosts.matching("ridgeline.train.worker")
    time.sleep(2)
    cluster.up("node2")
    assert cluster.wait_for(job, "COMPLETED").get("Restarts", "0") == "0"
    assert losses(run) == reference


STUBBORN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "7777"])
print("here", flush=True)
time.sleep(7777)
"""


def test_cancel_leaves_no_process_on_any_node(cluster: Any, tmp_path: Path) -> None:
    script = write_script(tmp_path, STUBBORN)
    options = ["--scheduler", "slurm", "-N", 2, "-n", 2, "--folder", tmp_path / "job"]
    job, folder = submit(cluster, "launch", *options, "--", sys.executable, script)
    ready = [folder / "logs" / f"rank-{rank}.out" for rank in range(4)]
    cluster.wait_until(
        job, "every rank", lambda: all(p.is_file() and "here" in p.read_text() for p in ready)
    )
    assert set(cluster.hosts.matching("sleep 7777")) == {"node1", "node2"}
    cluster.run(ridgeline("launch", "cancel", job), check=True)
    assert cluster.wait_for(job)["JobState"] == "CANCELLED"
    gone(cluster.hosts, ["sleep 7777", str(script), "ridgeline.launch"], 20)
    assert re.search(r"\bcancelled\b", cluster.run(ridgeline("launch", "status", job)).stdout)


BOOM = """
import os, time
print("rank", os.environ["RANK"], "is here", flush=True)
if os.environ["RANK"] == "3":
    raise ValueError("boom at rank 3")
time.sleep(600)
"""


def test_logs_have_the_error_of_the_failing_rank_on_top(cluster: Any, tmp_path: Path) -> None:
    script = write_script(tmp_path, BOOM)
    options = ["--scheduler", "slurm", "-N", 2, "-n", 2, "--folder", tmp_path / "job"]
    job, _folder = submit(cluster, "launch", *options, "--", sys.executable, script)
    over = cluster.wait_for(job, "FAILED", timeout_s=60)
    assert not over["ExitCode"].startswith("0:")
    status = cluster.run(ridgeline("launch", "status", job)).stdout
    assert re.search(r"\bfailed\b", status), status
    logs = cluster.run(ridgeline("launch", "logs", job), check=True).stdout
    assert "boom at rank 3" in "\n".join(logs.splitlines()[:5]), logs
    one = cluster.run(ridgeline("launch", "logs", job, "--rank", 1), check=True).stdout
    assert "rank 1 is here" in one
    assert "rank 0 is here" not in one


NASTY = [
    "two  words",
    "",
    'it\'s "quoted"',
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned #",
    "line\nbreak\ttab\\n",
    "-x",
    "--",
    "ünïcödé ☃ 雪",
    "*",
    "~",
    "$HOME",
    "%j",
    "!!",
    "a\\ b",
]


def test_arguments_arrive_as_they_were_given(cluster: Any, tmp_path: Path) -> None:
    script = write_script(tmp_path, SAY, "with space & 'quote'.py")
    name = "$(touch pwned) `touch pwned`\n#SBATCH --nodes=7 ☃"
    options = ["--scheduler", "slurm", "-N", 2, "-n", 2, "--name", name]
    options += ["--folder", tmp_path / "a job ☃"]
    job, folder = submit(
        cluster, "launch", *options, "--", sys.executable, script, *NASTY, cwd=tmp_path
    )
    cluster.wait_for(job, "COMPLETED")
    said = said_by(folder, 4)
    assert [one["argv"] for one in said] == [NASTY] * 4
    assert [(one["RANK"], one["LOCAL_RANK"], one["GROUP_RANK"], one["host"]) for one in said] == [
        ("0", "0", "0", "node1"),
        ("1", "1", "0", "node1"),
        ("2", "0", "1", "node2"),
        ("3", "1", "1", "node2"),
    ]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in said} == {("4", "2")}
    assert not list(tmp_path.rglob("pwned"))


def test_a_folder_that_no_directive_can_hold_is_refused(cluster: Any, tmp_path: Path) -> None:
    folder = tmp_path / "it's mine\n#SBATCH --nodes=7"
    done = cluster.run(
        ridgeline("launch", "--scheduler", "slurm", "--folder", folder, "--", "true")
    )
    assert done.returncode == 2
    assert "its mine" not in done.stderr
    assert "the folder of the job" in done.stderr
    assert not cluster.run(["squeue", "-h"]).stdout


def test_the_script_is_the_one_in_the_golden_file(cluster: Any, tmp_path: Path) -> None:
    words = [
        "train",
        "digits",
        "train.steps=20",
        *TWO_BY_TWO,
        "--time",
        "1h",
        "--partition",
        "main",
    ]
    done = cluster.run(
        ridgeline(*words, "--run", tmp_path / "run", "--dry-run"), cwd=tmp_path, check=True
    )
    script = (
        done.stdout.replace(str(tmp_path), "@FOLDER@")
        .replace(sys.executable, "@PYTHON@")
        .replace(os.environ.get("PYTHONPATH", "@NONE@"), "@PATH@")
    )
    golden = GOLDEN / "slurm_train.sh"
    if os.environ.get("RIDGELINE_GOLDEN") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(script)
    assert script == golden.read_text()
    assert not (tmp_path / "run").exists()


def test_inside_an_allocation_ranks_are_started_there(cluster: Any, tmp_path: Path) -> None:
    script = write_script(tmp_path, SAY)
    inner = ridgeline(
        "launch", "-N", 2, "-n", 1, "--folder", tmp_path / "inner", "--", sys.executable, script
    )
    job = cluster.sbatch(
        "#!/bin/sh\n" + " ".join(f"'{word}'" for word in inner) + "\n",
        "-N2",
        "--ntasks-per-node=2",
        "-o",
        str(tmp_path / "out"),
        cwd=tmp_path,
    )
    cluster.wait_for(job, "COMPLETED")
    said = said_by(tmp_path / "inner", 2)
    assert [(one["RANK"], one["WORLD_SIZE"], one["host"]) for one in said] == [
        ("0", "2", "node1"),
        ("1", "2", "node2"),
    ]
    assert [one["SLURM_PROCID"] for one in said] == ["0", "1"]
    assert len(cluster.run(["squeue", "-h"]).stdout.splitlines()) == 0


def test_two_jobs_on_the_same_nodes_do_not_meet(cluster: Any, tmp_path: Path) -> None:
    runs = [tmp_path / "first", tmp_path / "second"]
    words = ("train.steps=10", "--on", "slurm", "-N", 2, "-n", 1)
    jobs = [train(cluster, run, *words, "--cpus-per-rank", 2) for run in runs]
    wait_until(
        "both to run at once",
        lambda: all(cluster.show(job)["JobState"] == "RUNNING" for job in jobs),
        30,
    )
    for job in jobs:
        cluster.wait_for(job, "COMPLETED")
    first, second = (losses(run) for run in runs)
    assert first == second
    assert len(first) == 10


def test_an_endless_run_is_told_by_status_and_ended_by_cancel(cluster: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = train(cluster, run, *ENDLESS, "--on", "slurm", "-N", 2, "-n", 1)
    cluster.wait_until(job, "step 5", reached(run, 5))
    status = cluster.run(ridgeline("launch", "status", job), check=True).stdout
    assert re.search(r"\brunning\b", status), status
    assert "node[1-2]" in status or ("node1" in status and "node2" in status), status
    cluster.run(ridgeline("launch", "cancel", job), check=True)
    cluster.wait_for(job, "CANCELLED")
    gone(cluster.hosts, ["ridgeline.train", "ridgeline.launch"], 30)
