"""Ranks forked from one process that has loaded torch: as if each had been started by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ridgeline.launch import warm
from ridgeline.launch.env import WARM
from ridgeline.launch.failures import RankError
from ridgeline.launch.local import run_ranks
from ridgeline.launch.warm import Templates

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")

PROBE = """
import json, os, signal, sys, time
from pathlib import Path
import psutil

folder, what = Path(sys.argv[1]), sys.argv[2:]
if what == ["nothing"]:
    os._exit(0)
loaded = "torch" in sys.modules
if loaded:
    import numpy
    import torch
rank = int(os.environ["RANK"])
numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD)
told = dict(
    rank=rank, pid=os.getpid(), parent=os.getppid(), session=os.getsid(0),
    command=psutil.Process().cmdline(), excepthook=sys.excepthook is sys.__excepthook__,
    signals=[signal.getsignal(one) == signal.SIG_DFL for one in numbers],
    drawn=float(numpy.random.rand()) if loaded else 0.0,
    threads=torch.get_num_threads() if loaded else 0,
    name=__name__, argv=sys.argv, local=os.environ["LOCAL_RANK"], mine=os.environ.get("MINE"),
    launcher=os.environ["RIDGELINE_LAUNCHER"],
    files=[int(one.name) for one in Path("/proc/self/fd").iterdir() if one.exists()],
)
aside = folder / f".{rank}"
aside.write_text(json.dumps(told))
aside.rename(folder / f"rank-{rank}.json")
print("out", rank)
print("err", rank, file=sys.stderr)
if "mute" in what and rank == 1:
    os.close(2)
if what and what[0] == "fails" and rank == 1:
    raise ValueError("on purpose")
if what and what[0] == "exits" and rank == 1:
    sys.exit(int(what[1]) if what[1].isdigit() else what[1])
if what and what[0] == "waits":
    time.sleep(120)
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the module that ranks run here."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "rank_probe.py").write_text(textwrap.dedent(PROBE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "WORKER", "rank_probe")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        yield folder


@pytest.fixture(scope="module")
def templates(probe: Path) -> Iterator[Templates]:
    found = Templates()
    yield found
    found.close()


def answers(folder: Path, num: int) -> list[dict[str, Any]]:
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num)]
    for path in folder.glob("rank-*.json"):
        path.unlink()
    return found


def command(folder: Path, *words: str) -> list[str]:
    return ["-m", "rank_probe", str(folder), *words]


def test_a_rank_is_as_if_started_by_itself(templates: Templates, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    run_ranks(command(tmp_path), 3, logs, 2, {"MINE": "a"}, templates)
    first = answers(tmp_path, 3)
    template = templates._template
    assert template is not None
    for rank, told in enumerate(first):
        assert told["parent"] == template._process.pid
        assert told["launcher"] == str(told["parent"])  # by which it knows who asks for a requeue
        assert told["session"] == told["pid"]
        assert told["command"] == [sys.executable, *command(tmp_path)]
        assert all(told["signals"])
        assert set(told["files"]) == {0, 1, 2}
        assert (told["name"], told["argv"][1:]) == ("__main__", [str(tmp_path)])
        assert (told["local"], told["threads"], told["mine"]) == (str(rank), 2, "a")
        if rank:
            assert (logs / f"rank{rank}.stdout.log").read_text() == f"out {rank}\n"
            assert (logs / f"rank{rank}.stderr.log").read_text() == f"err {rank}\n"
    assert len({told["drawn"] for told in first}) == 3
    # Fewer ranks later, with another variable, from the same process.
    run_ranks(command(tmp_path), 2, logs, 2, {"MINE": "b"}, templates)
    second = answers(tmp_path, 2)
    assert {told["parent"] for told in second} == {template._process.pid}
    assert [(told["threads"], told["mine"]) for told in second] == [(2, "b")] * 2
    assert not {told["pid"] for told in first} & {told["pid"] for told in second}


def test_how_a_rank_ended_is_told(templates: Templates, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1: ended with exit code 7"):
        run_ranks(command(tmp_path, "exits", "7"), 2, tmp_path / "a", 1, {}, templates)
    with pytest.raises(RankError, match="rank 1: ended with exit code 1"):
        run_ranks(command(tmp_path, "fails"), 2, tmp_path / "b", 1, {}, templates)
    assert "ValueError: on purpose" in (tmp_path / "b" / "rank1.stderr.log").read_text()


def test_a_rank_that_cannot_say_why_fails_all_the_same(
    probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its log lies on a disk that is full."""
    monkeypatch.setattr(warm, "LOADED", ("json",))
    templates = Templates()
    for words in (("fails", "mute"), ("exits", "in words", "mute")):
        with pytest.raises(RankError, match="rank 1: ended with exit code 1"):
            run_ranks(command(tmp_path, *words), 2, tmp_path / "logs", 1, {}, templates)
    assert templates._template is not None
    assert templates._template.is_alive
    templates.close()


def test_a_rank_whose_template_ended_behind_its_answer_is_lost(
    probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "LOADED", ("json",))
    template = warm.Template(command(tmp_path), os.environ)
    assert template.is_ready(lambda: False)
    template.close()
    assert warm.Forked(template, 1).poll() == -signal.SIGKILL


def test_a_fork_that_is_refused_ends_no_other_rank(
    probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second rank is started by itself; a limit on processes would be told then."""
    (tmp_path / "refuses.py").write_text(
        "import os\nfork, calls = os.fork, []\n"
        "def refuse():\n    calls.append(1)\n"
        "    if len(calls) == 2:\n        raise BlockingIOError(11, 'no more processes')\n"
        "    return fork()\nos.fork = refuse\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setattr(warm, "LOADED", ("json", "refuses"))
    templates = Templates()
    run_ranks(command(tmp_path), 3, tmp_path / "logs", 1, {}, templates)
    assert templates._template is not None
    parents = [told["parent"] for told in answers(tmp_path, 3)]
    ours = templates._template._process.pid
    assert parents == [ours, os.getpid(), ours]
    templates.close()


def test_what_is_ignored_stays_so(
    probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a lost terminal is under `nohup`."""
    monkeypatch.setattr(warm, "LOADED", ("json",))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    templates = Templates()
    try:
        run_ranks(command(tmp_path), 1, tmp_path / "logs", 1, {}, templates)
    finally:
        signal.signal(signal.SIGHUP, before)
        templates.close()
    assert answers(tmp_path, 1)[0]["signals"] == [True, True, False, True]


ENDING = """
import sys, threading
from pathlib import Path
import psutil
from ridgeline.launch import warm
from ridgeline.launch.start import Local
warm.WORKER, warm.LOADED = "rank_probe", ("slow",)
starter = Local(2, 2)
threading.Timer(1.0, starter.kill).start()
try:
    starter.run(["-m", "rank_probe", sys.argv[1]], 2, Path(sys.argv[1]) / "logs", 1, {})
except BaseException as error:
    print(type(error).__name__, error)
print(psutil.Process().children())
"""


def test_nothing_is_started_once_it_is_to_end(
    probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second request to stop, while torch is being loaded."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    wanted = [sys.executable, "-c", ENDING, str(tmp_path)]
    said = subprocess.run(wanted, capture_output=True, text=True, timeout=50).stdout
    assert "RankError rank 0: was killed by SIGKILL" in said
    assert said.endswith("\n[]\n")
    assert not list(tmp_path.glob("rank-*.json"))


def test_ranks_that_are_over_at_once(
    probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the launcher knows who they are."""
    monkeypatch.setattr(warm, "LOADED", ("json",))
    templates = Templates()
    for _ in range(20):
        run_ranks(command(tmp_path, "nothing"), 2, tmp_path / "logs", 1, {}, templates)
    assert templates._template is not None
    assert not templates._template._ranks
    assert not templates._template._ended
    templates.close()


def waiting(folder: Path, num: int) -> list[psutil.Process]:
    until = time.monotonic() + 60
    while len(list(folder.glob("rank-*.json"))) < num:
        assert time.monotonic() < until
        time.sleep(0.02)
    return [psutil.Process(told["pid"]) for told in answers(folder, num)]


LAUNCHER = """
import signal, sys
from pathlib import Path
from ridgeline.launch import warm
from ridgeline.launch.local import run_ranks
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
warm.WORKER, warm.LOADED = "rank_probe", ("json",)
templates = warm.Templates()
try:
    run_ranks(["-m", "rank_probe", sys.argv[1], "waits"], 2, Path(sys.argv[1]) / "logs", 1, {}, templates)
except BaseException as error:
    print(type(error).__name__, error)
templates.close()
"""


@pytest.mark.parametrize("whom", ["rank", "template", "launcher", "interrupt", "scheduler"])
def test_whoever_is_killed_nobody_is_left(probe: Path, tmp_path: Path, whom: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    ranks = waiting(tmp_path, 2)
    template = ranks[0].parent()
    assert template is not None
    assert template.ppid() == process.pid
    told = "rank 1: was killed by SIGKILL"
    if whom == "rank":
        ranks[1].kill()
    elif whom == "template":  # as by a kernel that is out of memory
        template.kill()
        told = "was killed by SIGKILL"
    elif whom == "launcher":
        process.kill()
        told = "out 0"
    elif whom == "interrupt":
        process.send_signal(signal.SIGINT)
        told = "KeyboardInterrupt got SIGINT"
    else:  # schedulers signal every process of a job; the template is not the one to act on it
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            template.send_signal(number)
        time.sleep(0.3)
        assert template.is_running()
        assert ranks[0].is_running()
        ranks[1].terminate()
        told = "rank 1: was killed by SIGTERM"
    said, _ = process.communicate(timeout=60)
    assert told in said
    _, alive = psutil.wait_procs([*ranks, template], timeout=20)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_what_cannot_be_forked_is_started_one_by_one(
    probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("OMP_PROC_BIND", "KINETO_USE_DAEMON"):
        monkeypatch.setenv(name, "1")
        assert run_cold(tmp_path / name)
        monkeypatch.delenv(name)
    monkeypatch.setenv(WARM, "0")
    assert run_cold(tmp_path / "asked")
    monkeypatch.delenv(WARM)
    # What a template cannot load, each rank will complain about in its own words.
    monkeypatch.setattr(warm, "LOADED", ("json", "no_such_module"))
    capsys.readouterr()
    assert run_cold(tmp_path / "unfit")
    told = "ranks are started one by one: ModuleNotFoundError: No module named 'no_such_module'"
    assert capsys.readouterr().out == f"{told}\n"


def run_cold(folder: Path) -> bool:
    folder.mkdir()
    templates = Templates()
    run_ranks(command(folder), 2, folder / "logs", 1, {}, templates)
    told = answers(folder, 2)
    assert templates._template is None
    return all(one["parent"] == os.getpid() for one in told)


def test_a_template_that_opened_a_device_says_so(
    probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No rank that is forked from it could use that device."""
    (tmp_path / "opens.py").write_text("file = open('/dev/ptmx', 'rb')\nnull = open('/dev/null')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    monkeypatch.setattr(warm, "LOADED", ("opens",))
    assert run_cold(tmp_path / "cold")
    assert "one by one: loading torch has opened /dev/" in capsys.readouterr().out


def test_other_commands_are_not_forked(tmp_path: Path) -> None:
    templates = Templates()
    run_ranks(["-c", "pass"], 2, tmp_path, 1, {}, templates)
    assert templates._template is None


def test_another_environment_has_another_template(
    probe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What libraries read when they are loaded is not changed behind their backs."""
    monkeypatch.setattr(warm, "LOADED", ("json",))
    templates = Templates()
    run_ranks(command(tmp_path), 1, tmp_path / "logs", 1, {}, templates)
    before = answers(tmp_path, 1)[0]["parent"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # read when a device is opened
    run_ranks(command(tmp_path), 1, tmp_path / "logs", 1, {}, templates)
    assert answers(tmp_path, 1)[0]["parent"] == before
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    run_ranks(command(tmp_path), 1, tmp_path / "logs", 1, {}, templates)
    third = answers(tmp_path, 1)[0]["parent"]
    assert third != before
    run_ranks(command(tmp_path), 1, tmp_path / "logs", 2, {}, templates)
    assert answers(tmp_path, 1)[0]["parent"] not in (before, third)  # other numbers of threads
    # One that has died meanwhile is noticed before it is asked.
    assert templates._template is not None
    templates._template._process.kill()
    templates._template._process.wait()
    run_ranks(command(tmp_path), 1, tmp_path / "logs", 2, {}, templates)
    assert answers(tmp_path, 1)[0]["parent"] == templates._template._process.pid
    templates.close()
