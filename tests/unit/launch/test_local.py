"""Ranks on this machine: whoever fails is named, and nothing is left behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ridgeline.launch import local
from ridgeline.launch.failures import RankError
from ridgeline.launch.local import run_ranks

START = "import os, signal, subprocess, sys, time, pathlib\nrank = int(os.environ['RANK'])\n"

LAUNCHER = """
import sys
from pathlib import Path
from ridgeline.launch.local import run_ranks
try:
    run_ranks(["-c", sys.argv[2]], 2, Path(sys.argv[1]), 1)
except BaseException as error:
    print(type(error).__name__, error)
    raise SystemExit(3)
"""


def hears_all() -> None:
    """A shell that starts tests in the background has some of them ignored."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def launcher(
    folder: Path, text: str, prepare: Callable[[], object] = hears_all
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), START + text],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=prepare,
    )


def wait_for(path: Path, seconds: float = 20.0) -> str:
    until = time.monotonic() + seconds
    while not path.is_file() or not path.read_text():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.02)
    return path.read_text()


def is_gone(pid: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_all_well(tmp_path: Path) -> None:
    code = (
        START
        + f"pathlib.Path({str(tmp_path)!r}, f'env-{{rank}}').write_text(repr(dict(os.environ)))"
    )
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as under a torchrun around it
    try:
        run_ranks(["-c", code], 2, tmp_path / "logs", 3, {"MINE": "yes"})
    finally:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    said = [eval((tmp_path / f"env-{rank}").read_text()) for rank in (0, 1)]
    assert [one["LOCAL_RANK"] for one in said] == ["0", "1"]
    assert {one["MASTER_PORT"] for one in said} == {said[0]["MASTER_PORT"]}
    for one in said:
        assert (one["WORLD_SIZE"], one["OMP_NUM_THREADS"], one["MINE"]) == ("2", "3", "yes")
        assert one["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert list((tmp_path / "logs").iterdir()) == []


def test_who_was_killed_first_is_named(tmp_path: Path) -> None:
    """The other one writes its own account while it is ended."""
    account = {
        "rank": 0, "message": "ValueError: later", "usage": False, "echo": False, "traceback": "",
        "step": None, "decisive": False, "would_repeat": False,
    }  # fmt: skip
    code = (
        START
        + f"""
def tell(number, frame):
    time.sleep(0.3)
    account = dict({account!r}, time=time.time())
    import json
    pathlib.Path({str(tmp_path)!r}, "failure-0.json").write_text(json.dumps(account))
    os._exit(1)
signal.signal(signal.SIGTERM, tell)
pathlib.Path({str(tmp_path)!r}, f"ready-{{rank}}").write_text("x")
while rank == 1 and not pathlib.Path({str(tmp_path)!r}, "ready-0").is_file():
    time.sleep(0.02)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    )
    with pytest.raises(RankError, match="rank 1: was killed by SIGKILL"):
        run_ranks(["-c", code], 2, tmp_path, 1)


def test_what_ranks_have_started_ends_with_them(tmp_path: Path) -> None:
    text = f"""
child = subprocess.Popen(["sleep", "60"])
pathlib.Path({str(tmp_path)!r}, f"child-{{rank}}").write_text(str(child.pid))
while not pathlib.Path({str(tmp_path)!r}, "child-0").is_file():
    time.sleep(0.02)
sys.exit(3 if rank == 1 else 0)
"""
    with pytest.raises(RankError, match="rank 1: ended with exit code 3"):
        run_ranks(["-c", START + text], 2, tmp_path / "logs", 1)
    assert all(is_gone(int((tmp_path / f"child-{rank}").read_text())) for rank in (0, 1))


def test_logs_of_ranks_before_stay(tmp_path: Path) -> None:
    for words in ("first", "second"):
        run_ranks(["-c", f"print({words!r})"], 2, tmp_path, 1)
    assert (tmp_path / "rank1.stdout.log").read_text() == "first\nsecond\n"
    assert not (tmp_path / "rank1.stderr.log").exists()


WAITING = """
pathlib.Path({folder!r}, f"pid-{{rank}}").write_text(str(os.getpid()))
time.sleep({seconds})
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_all(number: signal.Signals, tmp_path: Path) -> None:
    process = launcher(tmp_path / "logs", WAITING.format(folder=str(tmp_path), seconds=60))
    pids = [int(wait_for(tmp_path / f"pid-{rank}")) for rank in (0, 1)]
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (3, f"KeyboardInterrupt got {number.name}\n")
    assert all(map(is_gone, pids))


def test_a_lost_terminal_is_passed_over_under_nohup(tmp_path: Path) -> None:
    ignoring = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    text = WAITING.format(folder=str(tmp_path), seconds=1.5)
    process = launcher(tmp_path / "logs", text, ignoring)
    wait_for(tmp_path / "pid-0")
    process.send_signal(signal.SIGHUP)
    assert process.wait(20) == 0


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    process = launcher(tmp_path / "logs", WAITING.format(folder=str(tmp_path), seconds=60))
    pids = [int(wait_for(tmp_path / f"pid-{rank}")) for rank in (0, 1)]
    process.kill()
    process.wait(20)
    assert all(map(is_gone, pids))


def test_ctrl_c_while_ranks_are_ended_does_not_lose_the_cause(tmp_path: Path) -> None:
    text = f"""
signal.signal(signal.SIGTERM, lambda n, f: pathlib.Path({str(tmp_path)!r}, "asked").write_text("x"))
pathlib.Path({str(tmp_path)!r}, f"pid-{{rank}}").write_text(str(os.getpid()))
while not pathlib.Path({str(tmp_path)!r}, "pid-0").is_file():
    time.sleep(0.02)
if rank == 1:
    sys.exit(7)
while True:
    time.sleep(1)
"""
    process = launcher(tmp_path / "logs", text)
    wait_for(tmp_path / "asked")
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert out.startswith("RankError rank 1: ended with exit code 7")
    assert time.monotonic() - begun < local.SHUTDOWN_S - 1
    assert is_gone(int((tmp_path / "pid-0").read_text()))


def test_what_not_even_a_kill_ends_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a rank is whose device hangs in its driver: signals do nothing here."""
    monkeypatch.setattr(local, "SHUTDOWN_S", 0.2)
    monkeypatch.setattr(local, "_send", lambda process, number: None)
    code = START + "sys.exit(1 if rank == 1 else time.sleep(3))"
    with pytest.raises(RankError, match="rank 1: ended with exit code 1"):
        run_ranks(["-c", code], 2, tmp_path, 1)
    assert "does not end even when it is killed" in capsys.readouterr().err


def test_from_another_thread(tmp_path: Path) -> None:
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            run_ranks(["-c", START + "sys.exit(rank)"], 2, tmp_path, 1)
        except RankError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert "rank 1: ended with exit code 1" in str(found[0])
