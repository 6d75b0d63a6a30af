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


def every_rank_is(cluster: Any, job: str, folder: Path, num: int, word: str = "here") -> None:
    """Wait until each rank has said so."""
    logs = [folder / "logs" / f"rank-{rank}.out" for rank in range(num)]
    cluster.wait_until(
        job, "every rank", lambda: all(p.is_file() and word in p.read_text() for p in logs)
    )


def train(cluster: Any, run: Path, *words: object, **options: Any) -> str:
    job, folder = submit(cluster, "train", *TRAINING, *words, "--run", run, **options)
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
    wait_until("the requeue", lambda: cluster.show(job).get("Restarts") == "1", 300, 0.25)
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
def test_a_node_that_loses_power_is_named_and_the_job_goes_on_after_it(
    cluster: Any, tmp_path: Path
) -> None:
    """Slurm takes minutes to see it; the ranks' silence is noticed before, and the job puts itself back
    into the queue."""
    run = tmp_path / "run"
    words = ["train.steps=100", "checkpoint.every=20", "--on", "slurm", "-N", 2, "-n", 1]
    words += ["--requeue", "--restarts", 0]  # not in the same nodes first
    job = train(cluster, run, *words, env={"RIDGELINE_LOST_S": "4"})
    cluster.wait_until(job, "step 30", reached(run, 30))
    cluster.kill("node2")
    cluster.wait_until(job, "the requeue", lambda: cluster.show(job).get("Restarts") == "1")
    gone(cluster.hosts, ["ridgeline.train.worker"])
    said = (run / "job.out").read_text()
    assert "host node2 (rank 1) did not answer for 4 s" in said
    assert f"job {job} goes back into the queue" in said
    # Slurm has not seen it yet and gives the job the same node again, or sees it and lets the job wait.
    cluster.wait_until(
        job,
        "a second start, or Slurm to see it",
        lambda: cluster.show(job)["Restarts"] == "2" or "down" in cluster.node_states()["node2"],
    )
    cluster.up("node2")
    cluster.wait_for(job, "COMPLETED")
    assert len(losses(run)) == 100


@pytest.mark.thorough
@pytest.mark.slow
def test_ranks_outlive_the_daemon_of_their_node(
    cluster: Any, tmp_path: Path, reference: list[float]
) -> None:
    run = tmp_path / "run"
    job = train(cluster, run, "train.steps=100", *TWO_BY_TWO, "--requeue")
    cluster.wait_until(job, "step 5", reached(run, 5))
    cluster.stop_daemon("node2")
    assert "node2" in cluster.hosts.matching("ridgeline.train.worker")
    time.sleep(2)
    cluster.up("node2")
    assert cluster.wait_for(job, "COMPLETED").get("Restarts", "0") == "0"
    assert losses(run) == reference[:100]


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
    every_rank_is(cluster, job, folder, 4)
    assert set(cluster.hosts.matching("sleep 7777")) == {"node1", "node2"}
    status = cluster.run(ridgeline("launch", "status", job), check=True).stdout
    assert re.search(r"\brunning\b.*node\[1-2\]", status), status
    cluster.run(ridgeline("launch", "cancel", job), check=True)
    assert cluster.wait_for(job)["JobState"] == "CANCELLED"
    gone(cluster.hosts, ["sleep 7777", str(script), "ridgeline.launch"], 100)
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
    over = cluster.wait_for(job, "FAILED", timeout_s=240)
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


MEET = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(sys.argv[1])])
for _ in range(20):
    dist.all_reduce(total)
    total /= dist.get_world_size()
    time.sleep(0.2)
print(os.environ["MASTER_PORT"], total.item(), flush=True)
dist.destroy_process_group()
"""


def test_two_jobs_on_the_same_nodes_do_not_meet(cluster: Any, tmp_path: Path) -> None:
    """And a script of torch's own finds its ranks, with nothing of ours in it."""
    script = write_script(tmp_path, MEET)
    jobs = []
    for value in ("1", "2"):
        options = ["--scheduler", "slurm", "-N", 2, "-n", 1, "--folder", tmp_path / value]
        jobs.append(submit(cluster, "launch", *options, "--", sys.executable, script, value))
    cluster.wait_until(
        jobs[0][0],
        "both to run at once",
        lambda: all(cluster.show(job)["JobState"] == "RUNNING" for job, _ in jobs),
    )
    for job, _ in jobs:
        cluster.wait_for(job, "COMPLETED")
    said = [[text.splitlines()[-1].split() for text in rank_logs(folder, 2)] for _, folder in jobs]
    assert [[rank[1] for rank in one] for one in said] == [["1.0", "1.0"], ["2.0", "2.0"]]


STOP_AND_GO = """
import os, pathlib, signal, sys, time
saved = pathlib.Path(sys.argv[1] + os.environ["RANK"])
if saved.exists():
    print("went on after", saved.read_text(), flush=True)
    sys.exit(0)

def stop(number, frame):
    saved.write_text(signal.Signals(number).name)
    sys.exit(75)

signal.signal(signal.SIGUSR1, stop)
signal.signal(signal.SIGTERM, stop)
print("here", flush=True)
time.sleep(600)
"""


def test_a_job_that_has_to_make_room_goes_on_afterwards(cluster: Any, tmp_path: Path) -> None:
    script = write_script(tmp_path, STOP_AND_GO)
    options = ["--scheduler", "slurm", "-N", 2, "-n", 1, "--requeue", "--folder", tmp_path / "job"]
    options += ["--partition", "main", "--time", "1h"]
    words = (*options, "--", sys.executable, script, tmp_path / "saved")
    job, folder = submit(cluster, "launch", *words)
    every_rank_is(cluster, job, folder, 2)
    batch = "#!/bin/sh\nsleep 1\n"
    other = cluster.sbatch(batch, "-p", "high", "-N2", "--exclusive", "-o", "/dev/null")
    cluster.wait_for(other, "COMPLETED")
    assert cluster.wait_for(job, "COMPLETED")["Restarts"] == "1"
    assert all("went on after SIG" in text for text in rank_logs(folder, 2))


def test_a_search_whose_trials_are_jobs_is_cut_off_and_finds_them_again(
    cluster: Any, tmp_path: Path, reference: list[float]
) -> None:
    """Two settings, a job each; the search itself is ended while they run, and needs no third."""
    folder = tmp_path / "search"
    words = [
        *TRAINING, "train.steps=20", "--over", "train.batch=32,64", "--draw", "grid", "--schedule", "full",
        "--on", "slurm", "--job=-N", "--job=1", "--job=--time=10m", "--at-once", 2, "--out", folder,
    ]  # fmt: skip
    first = cluster.hosts.popen(0, ridgeline("search", *words))
    logs = [folder / "trials" / f"{number:03d}.log" for number in range(2)]
    wait_until(
        "both jobs",
        lambda: (
            first.poll() is not None
            or all(path.is_file() and "job " in path.read_text() for path in logs)
        ),
        300,
        0.25,
    )
    owner = json.loads((folder / ".lock").read_text())["pid"]
    cluster.run(["kill", "-TERM", str(owner)], check=True)
    assert first.wait(60) == 75
    done = cluster.run(ridgeline("search", folder, "--at-once", 2), check=True)
    assert "best: trial" in done.stdout
    assert [path.read_text().count("job ") for path in logs] == [1, 1]
    of_64 = next(
        path.with_suffix("") for path in logs
        if "\n  batch: 64\n" in (path.with_suffix("") / "config.yaml").read_text()
    )  # fmt: skip
    assert losses(of_64) == pytest.approx(reference[:20], rel=1e-5)


def test_a_search_trains_on_all_nodes_of_its_job(
    cluster: Any, tmp_path: Path, reference: list[float]
) -> None:
    """Four trials, two at a time on each of two nodes; the search is stopped and goes on in another job."""
    folder = tmp_path / "search"
    words = [
        *TRAINING, "train.steps=100", "log.resources_s=0.5", "--over", "train.batch=32,64", "--over",
        "train.seed=0,1", "--draw", "grid", "--schedule", "full", "--on", "nodes", "--at-once", 4, "--out",
        folder,
    ]  # fmt: skip
    line = " ".join(f"'{word}'" for word in ridgeline("search", *words))
    options = ["-N2", "--ntasks-per-node=1", "-o", str(tmp_path / "out"), "--open-mode=append"]
    job = cluster.sbatch(f"#!/bin/sh\nexec {line}\n", *options)
    runs = [folder / "trials" / f"{number:03d}" for number in range(4)]
    cluster.wait_until(
        job,
        "all four to train",
        lambda: all([*run.glob("resources/*.jsonl")] for run in runs),
    )
    hosts = [path.stem for run in runs for path in run.glob("resources/*.jsonl")]
    assert sorted(hosts) == ["node1", "node1", "node2", "node2"]
    cluster.run(["scancel", "--batch", "--signal=TERM", job], check=True)
    assert cluster.wait_for(job, "FAILED")["ExitCode"] == "75:0"
    assert "its trials were saved" in (tmp_path / "out").read_text()
    job = cluster.sbatch(f"#!/bin/sh\nexec {line}\n", *options)
    # A node's agent dies, and with it its trials: the other node trains them.
    trains = ["pgrep", "-f", "ridgeline.cli train"]
    cluster.wait_until(job, "node2 to train", lambda: not cluster.hosts.run(2, trains).returncode)
    cluster.hosts.run(2, ["pkill", "-KILL", "-f", "ridgeline.search.agent"], check=True)
    cluster.wait_for(job, "COMPLETED")
    assert "best: trial" in (tmp_path / "out").read_text()
    of_64 = next(
        run
        for run in runs
        if re.search(r"\n  batch: 64\n(.*\n)*  seed: 0\n", (run / "config.yaml").read_text())
    )
    assert losses(of_64) == pytest.approx(reference[:100], rel=1e-5)
