"""The hub: who may come, what it makes of those who say otherwise, and how it notices who is gone."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.errors import UsageError
from ridgeline.launch.failures import RankError, RankFailure, raise_first
from ridgeline.launch.hub import Hub, RankExit, read_members
from ridgeline.launch.start import _as_failure, _said_by_all


class Caller:
    """A rank's wrapper, as far as the hub can tell."""

    def __init__(self, hub: Hub, token: str | None = None, **changes: Any) -> None:
        secret, _, places = hub.address.partition("@")
        port = int(places.split(",")[0].rpartition(":")[2])
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        hello = {
            "rank": 0,
            "world_size": hub.num_ranks,
            "local_rank": 0,
            "local_world_size": 1,
            "node_rank": 0,
            "host": "node1",
            "ports": [1, 2, 3],
            "pid": 7,
            "source": "Slurm",
            "cpus": "0-1",
            "gpus": [],
            **changes,
        }
        self.send({"token": secret if token is None else token, "hello": hello})
        self._lines = self.socket.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, word: str) -> Any:
        """The next message with this word in it."""
        for line in self._lines:
            message = json.loads(line)
            if word in message:
                return message[word]
        raise AssertionError(f"the hub closed the connection before {word!r}")


LIMITED = """
import resource
from ridgeline.errors import UsageError
from ridgeline.launch.hub import Hub
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
Hub(1000).close()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
try:
    Hub(50000)
except UsageError as error:
    print(error)
"""


def test_a_large_job_may_open_as_many_files() -> None:
    """In a process of its own, which gives the rest of its limit away."""
    if 0 < resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096:
        pytest.skip("this account may not open 4096 files")
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert not done.stderr
    allowed, refusal = done.stdout.splitlines()
    assert allowed == "2256"
    assert "50000 ranks need as many open files, and this account may have 4096" in refusal


@pytest.fixture
def make_hub() -> Iterator[Any]:
    made = []

    def make(*args: Any, **options: Any) -> Hub:
        made.append(Hub(*args, **options))
        return made[-1]

    yield make
    for hub in made:
        hub.close()


def wait_for_problem(hub: Hub) -> str:
    until = time.monotonic() + 60
    while hub.problem is None and time.monotonic() < until:
        hub.wait(0.05)
    assert hub.problem is not None
    return str(hub.problem)


def test_all_are_told_who_is_there_once_all_have_come(make_hub) -> None:
    hub = make_hub(3)
    first = Caller(hub, rank=0, host="a", node_rank=0)
    # Nodes as launchers number them may leave some out; the hub counts those that have ranks.
    third = Caller(hub, rank=2, host="b", node_rank=5)
    first.socket.settimeout(0.4)
    with pytest.raises(TimeoutError):
        first.hear("start")
    first.socket.settimeout(5)
    first._lines = first.socket.makefile("rb")
    second = Caller(hub, rank=1, host="b", node_rank=5, local_rank=1)
    for caller in (first, second, third):
        members = read_members(caller.hear("start")["members"])
        assert [member.rank for member in members] == [0, 1, 2]
        assert [member.host for member in members] == ["a", "b", "b"]
        assert [member.node_rank for member in members] == [0, 1, 1]
        assert all(member.address for member in members)


def test_ranks_that_were_told_another_number_are_named(make_hub) -> None:
    hub = make_hub(2)
    other = Caller(hub, rank=1, world_size=4, host="node7")
    text = wait_for_problem(hub)
    assert "rank 1 on node7" in text
    assert "4 ranks" in text
    assert "started with 2" in text
    assert "Slurm" in text
    del other


def test_two_processes_with_one_rank_are_both_named(make_hub) -> None:
    hub = make_hub(2)
    callers = [Caller(hub, rank=1, host="node1", pid=11), Caller(hub, rank=1, host="node2", pid=12)]
    text = wait_for_problem(hub)
    for word in ("rank 1", "11 on node1", "12 on node2"):
        assert word in text
    assert callers[0].hear("end") == text


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b"{}\n",
        b"\xff\xfe\n",
        '{"token": "ü"}\n'.encode(),
    ],
)
def test_strangers_do_no_harm(make_hub, said: bytes) -> None:
    hub = make_hub(1)
    port = int(hub.address.rpartition(":")[2])
    stranger = socket.create_connection(("127.0.0.1", port), timeout=60)
    stranger.sendall(said)
    wrong = Caller(hub, token="guess")
    with pytest.raises((AssertionError, ConnectionError)):
        wrong.hear("start")
    right = Caller(hub)
    assert right.hear("start")
    assert hub.problem is None
    stranger.close()


def test_a_host_that_falls_silent_is_named(make_hub) -> None:
    hub = make_hub(3, lost_s=1.0)
    callers = [Caller(hub, rank=rank, host=f"node{rank}") for rank in range(3)]
    for caller in callers:
        caller.hear("start")
    for _ in range(16):  # the others go on
        if hub.problem is not None:
            break
        for caller in callers[:2]:
            caller.send({"beat": 1})
        time.sleep(0.1)
    text = wait_for_problem(hub)
    assert text.startswith("host node2 (rank 2) did not answer")
    assert callers[0].hear("end") == text


def test_waiting_for_the_others_is_no_silence(make_hub) -> None:
    hub = make_hub(2, lost_s=0.5)
    first = Caller(hub, rank=0)
    time.sleep(0.9)
    second = Caller(hub, rank=1)
    assert first.hear("start")
    assert second.hear("start")
    first.send({"beat": 1})
    second.send({"beat": 1})
    time.sleep(0.1)
    assert hub.problem is None


def test_hosts_that_did_not_come_are_named(make_hub) -> None:
    hub = make_hub(2, ["node1", "node2"], join_s=0.3)
    caller = Caller(hub, rank=0, host="node1")
    text = wait_for_problem(hub)
    assert "1 of 2 ranks did not come" in text
    assert "nothing was heard from node2" in text
    del caller


def test_an_end_is_reported_and_an_end_without_a_word_is_one_too(make_hub) -> None:
    hub = make_hub(2)
    callers = [Caller(hub, rank=rank) for rank in range(2)]
    for caller in callers:
        caller.hear("start")
    told = {"rank": 0, "code": 0, "time": 1.0, "tail": "", "account": None}
    callers[0].send({"exit": told})
    callers[1].socket.shutdown(socket.SHUT_RDWR)
    until = time.monotonic() + 60
    while not hub.wait(0.1) and time.monotonic() < until:
        pass
    assert not hub.exits[0].failed
    assert hub.exits[1].code == -9


def test_the_others_are_ended_after_one_failed(make_hub) -> None:
    hub = make_hub(2)
    callers = [Caller(hub, rank=rank) for rank in range(2)]
    for caller in callers:
        caller.hear("start")
    callers[1].send({"exit": {"rank": 1, "code": 3, "time": 1.0, "tail": "x", "account": None}})
    assert callers[0].hear("end") == "another rank failed"


def test_a_command_that_asks_to_be_started_again_ends_nobody(make_hub) -> None:
    hub = make_hub(2)
    callers = [Caller(hub, rank=rank) for rank in range(2)]
    for caller in callers:
        caller.hear("start")
    callers[1].send({"exit": {"rank": 1, "code": 75, "time": 1.0, "tail": "", "account": None}})
    callers[0].socket.settimeout(1.5)
    with pytest.raises((TimeoutError, OSError)):
        callers[0].hear("end")
    assert not hub.exits[1].failed


def test_signals_go_to_the_ranks_they_are_for(make_hub) -> None:
    hub = make_hub(2)
    callers = [Caller(hub, rank=rank) for rank in range(2)]
    for caller in callers:
        caller.hear("start")
    hub.signal("SIGUSR1", [1])
    assert callers[1].hear("signal") == "SIGUSR1"
    hub.signal("SIGTERM")
    assert callers[0].hear("signal") == "SIGTERM"


def test_a_rank_that_ends_before_all_have_come_is_not_waited_for(make_hub) -> None:
    hub = make_hub(2)
    caller = Caller(hub, rank=1, host="node4")
    time.sleep(0.3)
    caller.socket.close()
    caller._lines.close()
    assert wait_for_problem(hub) == "rank 1 on node4 ended before all ranks had come"


def test_what_all_ranks_say_is_said_once() -> None:
    def of(rank: int, text: str) -> RankFailure:
        return RankFailure(rank, float(rank), text)

    found = _said_by_all([of(1, "no room"), of(0, "no room")], 2)
    assert [(one.rank, one.message) for one in found] == [(0, "no room (on all 2 ranks)")]
    for others in ([of(0, "no room")], [of(0, "no room"), of(1, "too late")]):
        assert _said_by_all(others, 2) == others


def test_a_command_of_ours_that_was_asked_wrongly_is_told_as_that(tmp_path: Path) -> None:
    """By its sentence and its exit code; another's exit code 2 is a rank that failed."""
    hub = SimpleNamespace(members={}, exits={})
    ours = RankExit(1, 2, 5.0, "some line\nridgeline: no recipe 'x'; did you mean 'y'?\n")
    with pytest.raises(UsageError, match=r"^no recipe 'x'; did you mean 'y'\?$"):
        raise_first([_as_failure(ours, hub)], tmp_path)
    for told, words in (
        (RankExit(1, 2, 5.0, "usage: prog\n"), "ended with exit code 2"),
        (RankExit(1, 1, 5.0, "ridgeline: too few\n"), "too few;"),
    ):
        with pytest.raises(RankError, match=f"rank 1: {words}"):
            raise_first([_as_failure(told, hub)], tmp_path)
