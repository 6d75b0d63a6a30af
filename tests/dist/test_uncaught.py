"""An error of ours that a loop of the user's own does not catch: one sentence and its exit code, in each
way such a script is started; whatever else is raised looks as it always does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
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


# Loads what such a script imports, and is it once for each line of JSON: a script, its arguments, the files
# of what it writes, and variables. The script's own error leaves its process as it does any other's.
WARM = """
import json, os, sys
import torch, torch._dynamo
import ridgeline.train.job
for line in sys.stdin:
    script, args, out, err, variables = json.loads(line)
    child = os.fork()
    if child == 0:
        for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        os.environ.update(variables)
        sys.argv = [script, *args]
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
with open(script) as file:
    code = compile(file.read(), script, "exec")
exec(code, {"__name__": "__main__"})
"""
Forked = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def forked() -> Iterator[Forked]:
    """As `run`, in a process that is forked: most of what `run` takes is the imports."""
    server = subprocess.Popen(
        [sys.executable, "-c", WARM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert server.stdin is not None
    assert server.stdout is not None

    def run_forked(
        folder: Path, *args: str, hook: str = "", **more: str
    ) -> subprocess.CompletedProcess[str]:
        script = folder / "own.py"
        script.write_text(SCRIPT.replace("HOOK", hook))
        out, err = (Path(tempfile.mkstemp(dir=folder)[1]) for _ in range(2))
        print(
            json.dumps([str(script), args, str(out), str(err), more]), file=server.stdin, flush=True
        )
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(args, code, out.read_text(), err.read_text())

    yield run_forked
    server.stdin.close()
    server.wait()


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        (["usage"], 2, "'buckets'"),
        (["run"], 1, "the wheel came off"),
        (["run", "dq=2"], 2, "dq"),  # from start() itself
    ],
)
def test_one_sentence_and_its_exit_code(
    forked: Forked, tmp_path: Path, what: list[str], code: int, words: str
) -> None:
    started = run if what == ["usage"] else forked  # one of them as its user starts it
    done = started(tmp_path, *what)
    assert done.returncode == code
    assert done.stderr.startswith("ridgeline: ")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_other_errors_keep_their_traceback(forked: Forked, tmp_path: Path) -> None:
    done = forked(tmp_path, "other")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: not ours" in done.stderr
    assert "ridgeline:" not in done.stderr


def test_the_traceback_is_there_when_asked_for(forked: Forked, tmp_path: Path) -> None:
    done = forked(tmp_path, "run", RIDGELINE_TRACEBACK="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1] == "ridgeline: the wheel came off"


def test_a_hook_of_the_users_own_still_hears_of_it(forked: Forked, tmp_path: Path) -> None:
    done = forked(tmp_path, "run", hook=OWN_HOOK)
    assert done.stdout == "told of RunError\n"
    assert (done.returncode, done.stderr) == (1, "ridgeline: the wheel came off\n")
    other = forked(tmp_path, "other", hook=OWN_HOOK)
    assert (other.stdout, other.stderr) == ("told of ValueError\n", "")


def test_an_interactive_session_goes_on(tmp_path: Path) -> None:
    done = run(tmp_path, "run", python=("-i",))
    assert done.returncode == 0
    assert "Traceback" in done.stderr
    assert "RunError: the wheel came off" in done.stderr


def test_under_torchrun_the_sentence_is_not_lost(tmp_path: Path) -> None:
    done = run(tmp_path, "usage", python=TORCHRUN)
    assert done.returncode == 1  # torchrun's own
    assert "exitcode  : 2" in done.stderr
    lines = done.stderr.splitlines()
    assert sum(line.startswith("ridgeline: batch_size=3") for line in lines) == 1, done.stderr
    assert "traceback : ridgeline: batch_size=3" in done.stderr
    assert "UsageError" not in done.stderr


def test_under_torchrun_other_errors_keep_their_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "other", python=TORCHRUN)
    assert "[rank0]: ValueError: not ours" in done.stderr


def test_under_mpirun_one_rank_says_what_all_have(tmp_path: Path) -> None:
    place = {"SIZE": "2", "LOCAL_SIZE": "2"}
    for rank in ("0", "1"):
        place |= {"RANK": rank, "LOCAL_RANK": rank}
        variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()}
        done = run(tmp_path, "run", "dq=2", **variables, PMIX_NAMESPACE="x", TMPDIR=str(tmp_path))
        assert done.returncode == 2
        assert ("unknown layout field" in done.stderr) == (rank == "0")
        assert len(done.stderr.splitlines()) == (rank == "0")
