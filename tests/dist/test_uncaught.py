"""An error of ours that a loop of the user's own does not catch: one sentence and its exit code, in every way
such a script is started; whatever else is raised looks as it always does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch, ridgeline
HOOK
job = ridgeline.start(layout=sys.argv[2] if len(sys.argv) > 2 else "")
if sys.argv[1] == "usage":
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    job.parallelize(torch.nn.Linear(2, 2))
    job.loader(data, batch_size=3)
    job.parallelize(torch.nn.Linear(2, 2), buckets=3)
if sys.argv[1] == "run":
    raise ridgeline.RunError("the wheel came off")
raise ValueError("not ours")
"""
OWN_HOOK = "sys.excepthook = lambda kind, error, trace: print('told of', kind.__name__, flush=True)"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(
    folder: Path, *args: str, python: tuple[str, ...] | list[str] = (), hook: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    script = folder / "own.py"
    script.write_text(SCRIPT.replace("HOOK", hook))
    return subprocess.run(
        [sys.executable, *python, str(script), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1", **more},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        (["usage"], 2, "'buckets'"),
        (["run"], 1, "the wheel came off"),
        (["run", "dq=2"], 2, "dq"),  # from start() itself
    ],
)
def test_one_sentence_and_its_exit_code(
    tmp_path: Path, what: list[str], code: int, words: str
) -> None:
    done = run(tmp_path, *what)
    assert done.returncode == code
    assert done.stderr.startswith("ridgeline: ") and words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "other")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ValueError: not ours" in done.stderr
    assert "ridgeline:" not in done.stderr


def test_the_traceback_is_there_when_asked_for(tmp_path: Path) -> None:
    done = run(tmp_path, "run", RIDGELINE_TRACEBACK="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1] == "ridgeline: the wheel came off"


def test_a_hook_of_the_users_own_still_hears_of_it(tmp_path: Path) -> None:
    done = run(tmp_path, "run", hook=OWN_HOOK)
    assert done.stdout == "told of RunError\n"
    assert (done.returncode, done.stderr) == (1, "ridgeline: the wheel came off\n")
    other = run(tmp_path, "other", hook=OWN_HOOK)
    assert (other.stdout, other.stderr) == ("told of ValueError\n", "")


def test_an_interactive_session_goes_on(tmp_path: Path) -> None:
    done = run(tmp_path, "run", python=("-i",))
    assert done.returncode == 0
    assert "Traceback" in done.stderr and "RunError: the wheel came off" in done.stderr


def test_under_torchrun_the_sentence_is_not_lost(tmp_path: Path) -> None:
    done = run(tmp_path, "usage", python=TORCHRUN)
    assert done.returncode == 1  # torchrun's own
    assert "exitcode  : 2" in done.stderr
    lines = done.stderr.splitlines()
    assert any(line.startswith("ridgeline: batch_size=3") for line in lines), done.stderr
    assert "traceback : ridgeline: batch_size=3" in done.stderr
    assert "UsageError" not in done.stderr


def test_under_torchrun_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "other", python=TORCHRUN)
    assert "[rank0]: ValueError: not ours" in done.stderr
