"""`ridgeline launch` on this machine: each rank's command, its end, its output, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ridgeline.launch.failures import RankError
from ridgeline.launch.job import Step
from ridgeline.launch.start import LauncherProcess, Spread

SAY = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
         "OMP_NUM_THREADS", "TF_CONFIG", "JAX_COORDINATOR_ADDRESS", "HOROVOD_RANK")
print(json.dumps({"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}))
"""

WAIT = """
import os, pathlib, signal, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
got = []
signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
(folder / f"ready-{rank}").write_text(str(os.getpid()))
until = time.monotonic() + 240
while not got and time.monotonic() < until:
    time.sleep(0.02)
(folder / f"told-{rank}").write_text("yes" if got else "no")
"""

FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("about to fail", flush=True)
    raise ValueError("boom at rank 1")
time.sleep(600)
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def launch(folder: Path, *words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), cwd=folder, capture_output=True, text=True, timeout=360, **options
    )


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "ridgeline.cli", "launch", "--scheduler", "local", *words]


def test_ranks_know_who_they_are_and_get_their_words_unchanged(tmp_path: Path) -> None:
    script = write(tmp_path, SAY)
    words = ["a b", "$(touch pwned)", "`x`", "it's", '"', "two\nlines", "--flag", "-x", "ü", ""]
    done = launch(tmp_path, "-n", "3", "--folder", "job", "--", sys.executable, str(script), *words)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"job/logs/rank-{r}.out").read_text()) for r in range(3)]
    assert json.loads(done.stdout) == told[0]
    assert [one["argv"] for one in told] == [words] * 3
    assert not (tmp_path / "pwned").exists()
    assert [one["RANK"] for one in told] == ["0", "1", "2"]
    assert {one["WORLD_SIZE"] for one in told} == {"3"}
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in told}) == 1
    config = [json.loads(one["TF_CONFIG"]) for one in told]
    assert [one["task"]["index"] for one in config] == [0, 1, 2]
    assert len(set(config[0]["cluster"]["worker"])) == 3
    assert len({one["JAX_COORDINATOR_ADDRESS"] for one in told}) == 1
    assert [one["HOROVOD_RANK"] for one in told] == ["0", "1", "2"]


def test_the_rank_that_failed_is_named_and_the_others_end(tmp_path: Path) -> None:
    script = write(tmp_path, FAIL)
    began = time.monotonic()
    done = launch(tmp_path, "-n", "2", "--folder", "job", "--", sys.executable, str(script))
    assert time.monotonic() - began < 240
    assert done.returncode == 1
    assert "rank 1: ended with exit code 1" in done.stderr
    assert "ValueError: boom at rank 1" in done.stderr
    assert "Traceback" not in done.stderr
    assert "raise ValueError" in (tmp_path / "job/logs/traceback-1.txt").read_text()
    assert "raise ValueError" in (tmp_path / "job/logs/failed.txt").read_text()


OURS = """
import os, sys, time
from ridgeline.errors import RunError, UsageError
from ridgeline.train.uncaught import install_sentences
install_sentences()
if os.environ["RANK"] in sys.argv[2]:
    raise {"usage": UsageError, "run": RunError}[sys.argv[1]]("seven is wrong; use eight")
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("kind", "who", "said"),
    [
        ("usage", "0", "seven is wrong; use eight"),
        ("run", "0", "rank 0: seven is wrong; use eight; logs of every rank: "),
        ("run", "1", "rank 1: seven is wrong; use eight; logs of every rank: "),
    ],
)
def test_a_sentence_of_ours_is_said_once(tmp_path: Path, kind: str, who: str, said: str) -> None:
    script = write(tmp_path, OURS)
    done = launch(
        tmp_path, "-n", "2", "--folder", "job", "--", sys.executable, str(script), kind, who
    )
    assert done.returncode == (2 if kind == "usage" else 1)
    assert done.stderr.startswith(f"ridgeline: {said}")
    assert done.stderr.count("seven") == 1
    log = tmp_path / f"job/logs/rank-{who}.out"
    assert log.read_text() == "ridgeline: seven is wrong; use eight\n"


KILLED = """
import os, signal, time
if os.environ["RANK"] == "1":
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.6)
raise RuntimeError("Read error [127.0.0.1]:37264: Connection reset by peer")
"""


def test_who_was_killed_is_named_and_not_who_lost_it(tmp_path: Path) -> None:
    script = write(tmp_path, KILLED)
    done = launch(tmp_path, "-n", "2", "--folder", "job", "--", sys.executable, str(script))
    assert done.returncode == 1
    assert "rank 1: was killed by SIGKILL" in done.stderr


def test_a_command_that_is_not_there_is_a_slip_of_the_pen(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "2", "--folder", "job", "--", "no-such-program")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no-such-program" in done.stderr


def test_a_command_may_ask_to_be_started_again(tmp_path: Path) -> None:
    done = launch(tmp_path, "-n", "2", "--folder", "job", "--", "sh", "-c", "exit 75")
    assert done.returncode == 75


def start_waiting(tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A job of two ranks that are up, and their process ids."""
    script = write(tmp_path, WAIT)
    words = ("-n", "2", "--folder", "job", "--", sys.executable, str(script), str(tmp_path))
    process = subprocess.Popen(
        command(*words), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 240
    ready = [tmp_path / f"ready-{rank}" for rank in range(2)]
    while not all(path.exists() and path.read_text() for path in ready):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    return process, [int(path.read_text()) for path in ready]


def assert_gone(pids: list[int], within_s: float) -> None:
    until = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_warning_reaches_every_rank(tmp_path: Path) -> None:
    process, pids = start_waiting(tmp_path)
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=240)
    assert [(tmp_path / f"told-{rank}").read_text() for rank in range(2)] == ["yes", "yes"]
    assert process.returncode == 75, errors
    assert "stopped by SIGUSR1" in errors
    assert_gone(pids, 60)


def test_the_clock_warns_where_the_scheduler_does_not(tmp_path: Path) -> None:
    script = write(tmp_path, WAIT)
    words = ("-n", "2", "--folder", "job", "--", sys.executable, str(script), str(tmp_path))
    ends = {"RIDGELINE_ENDS_AT": str(int(time.time()) + 50), "RIDGELINE_WARN_S": "30"}
    done = launch(tmp_path, *words, env={**os.environ, **ends})
    assert done.returncode == 75, done.stderr
    assert "its clock" in done.stderr
    assert [(tmp_path / f"told-{rank}").read_text() for rank in range(2)] == ["yes", "yes"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_whoever_started_it(tmp_path: Path, number: signal.Signals) -> None:
    process, pids = start_waiting(tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == (1 if number == signal.SIGINT else -number)
    assert number == signal.SIGKILL or "interrupted; what the ranks wrote is in job/logs" in errors
    assert_gone(pids, 100)


def test_two_jobs_at_once_do_not_meet(tmp_path: Path) -> None:
    script = write(tmp_path, SAY)
    jobs = [
        subprocess.Popen(
            command("-n", "2", "--folder", name, "--", sys.executable, str(script), name),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    told = [json.loads(job.communicate(timeout=240)[0]) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert [one["argv"] for one in told] == [["one"], ["two"]]
    assert told[0]["MASTER_PORT"] != told[1]["MASTER_PORT"]


def test_a_node_on_which_no_rank_starts_is_named(tmp_path: Path) -> None:
    """As srun does for a node that is gone: the others are started, and ended when it gives up."""

    def start(step: Step) -> LauncherProcess:
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        text = '"$@" & sleep 2; kill -9 $!; echo "srun: error: launch failed on node node2" >&2; exit 1'
        line = ["bash", "-c", text, "srun", *step.command]
        return LauncherProcess(line, {**step.variables, **place})

    here = socket.gethostname()
    spread = Spread("slurm", start, nodes=2, per_node=1, expected=[here, "node2"])
    with pytest.raises(RankError) as caught:
        spread.run_command(["true"], 2, tmp_path / "logs", None, {})
    assert "1 of 2 ranks were started (nothing was heard from node2): srun" in str(caught.value)
    assert caught.value.failure.node_gone
    assert caught.value.failure.rank == 1
