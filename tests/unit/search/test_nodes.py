"""Searches on the nodes of a job, each node a process of this host: trials go everywhere, and on when a
node is gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli_search import _tell_idle
from ridgeline.errors import RunError, UsageError
from ridgeline.launch.job import Step
from ridgeline.launch.nodes import job_around
from ridgeline.search.nodes import Nodes
from ridgeline.search.places import Ended
from ridgeline.search.request import make_request

JOB = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_CPUS_PER_NODE": "16,8",
}


class Agents:
    """A launcher whose nodes are all here."""

    def __init__(self, step: Step) -> None:
        environ = {**os.environ, **step.variables}
        self.processes = [
            subprocess.Popen(step.command, env=environ, start_new_session=True)
            for _ in range(step.num_ranks)
        ]

    def poll(self) -> int | None:
        codes = [process.poll() for process in self.processes]
        return None if None in codes else max(map(abs, codes))  # type: ignore[type-var]

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def last_words(self) -> str:
        return "the agents are gone"


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    made: list[tuple[Nodes, list[Agents]]] = []

    def build(num: int, **options: Any) -> tuple[Nodes, list[Agents]]:
        agents: list[Agents] = []

        def begin(step: Step) -> Agents:
            agents.append(Agents(step))
            return agents[-1]

        nodes = Nodes(
            num, **{"ranks": 1, "at_once": None, "begin": begin, "on_gpus": False, **options}
        )
        made.append((nodes, agents))
        nodes.open(lambda: False)
        return nodes, agents

    yield build
    for nodes, agents in made:
        nodes.close()
        for one in agents:
            assert one.poll() is not None
            one.kill()


def wait_for(running: Any, seconds: float = 60.0) -> Ended:
    until = time.monotonic() + seconds
    while (ended := running.poll()) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    return ended


def start(nodes: Nodes, folder: Path, number: int, *words: str) -> Any:
    return nodes.start(words, folder / str(number), folder / f"{number}.log", str(folder))


def test_trials_are_started_everywhere_and_told_of(opened: Any, tmp_path: Path) -> None:
    nodes, _ = opened(2)
    assert nodes.count == 2
    both = [start(nodes, tmp_path, n, "version") for n in range(2)]
    assert both[0].node is not both[1].node
    assert [wait_for(one).how for one in both] == ["done", "done"]
    assert (tmp_path / "0.log").read_text().strip()
    wrong = wait_for(start(nodes, tmp_path, 2, "train", "no-such-recipe"))
    assert wrong.how == "failed"
    assert "no-such-recipe" in wrong.words


def test_a_trial_that_is_asked_to_end_saves_and_goes_on(opened: Any, tmp_path: Path) -> None:
    words = ["train", "digits", "device=cpu", "train.epochs=200", "threads=1", "--run"]
    nodes, _ = opened(1)
    trial = start(nodes, tmp_path, 0, *words, str(tmp_path / "run"))
    until = time.monotonic() + 120
    while not (tmp_path / "run" / "metrics.jsonl").is_file() and time.monotonic() < until:
        time.sleep(0.1)
    assert trial.stop()
    assert wait_for(trial).how == "stopped"
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_what_a_lost_node_trained_is_free_to_go_on_elsewhere(opened: Any, tmp_path: Path) -> None:
    nodes, agents = opened(2)
    long = ["train", "digits", "device=cpu", "train.epochs=5000", "--run"]
    both = [start(nodes, tmp_path, n, *long, str(tmp_path / f"run{n}")) for n in range(2)]
    lost = agents[0].processes[0]
    os.killpg(lost.pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while not any(one.poll() for one in both) and time.monotonic() < until:
        time.sleep(0.05)
    ended = [one for one in both if one.poll() is not None]
    assert [one.poll().how for one in ended] == ["stopped"]
    assert "is gone" in ended[0].poll().words
    assert nodes.count == 1  # only one place is left
    os.killpg(agents[0].processes[1].pid, signal.SIGKILL)
    agents[0].processes[1].wait()
    agents[0].processes[0].wait()
    while nodes._nodes and time.monotonic() < until:
        nodes.listen()
        time.sleep(0.05)
    with pytest.raises(RunError, match="no node of the job is left to train on"):
        _ = nodes.count


def test_places_are_shared_out_among_the_nodes(opened: Any) -> None:
    nodes, _ = opened(2, at_once=3)
    assert [node.slots for node in nodes._nodes] == [2, 2]
    assert nodes.count == 3


def test_more_ranks_than_a_node_has_gpus_is_told() -> None:
    nodes = Nodes(1, ranks=4, at_once=None, begin=Agents)
    nodes._nodes = [type("Node", (), {"devices": 2, "host": "node1", "slots": 0})()]
    with pytest.raises(UsageError, match=r"more GPUs than the 2 of node1"):
        nodes._share_out()
    nodes._nodes[0].devices = 8
    nodes.tell = lambda node, message: None  # type: ignore[method-assign,assignment]
    nodes._share_out()
    assert nodes._nodes[0].slots == 2


def test_strangers_are_not_listened_to(tmp_path: Path) -> None:
    told: list[str] = []

    class Nobody(Agents):
        def __init__(self, step: Step) -> None:
            self.processes = []
            address = step.variables["RIDGELINE_SEARCH"].partition("@")[2].split(",")[-1]
            host, _, port = address.rpartition(":")
            for text in (b'{"token": "guess", "host": "x", "devices": []}\n', b"no json\n"):
                connection = socket.create_connection((host, int(port)))
                connection.sendall(text)
                told.append(connection)  # type: ignore[arg-type]

        def poll(self) -> int | None:
            return None if len(told) == 2 else 1

        def kill(self) -> None:
            told.clear()

    nodes = Nodes(1, ranks=1, at_once=None, begin=Nobody, join_s=2.0)
    with pytest.raises(RunError, match="0 of 1 nodes came in 2 s"):
        nodes.open(lambda: False)


def test_outside_of_a_job_it_is_told_what_to_do() -> None:
    with pytest.raises(UsageError, match="--on nodes is for the nodes of a job"):
        job_around({})
    kind, given = job_around(JOB)
    assert (kind, given.num_nodes, given.cpus_per_node) == ("slurm", 2, 8)
    assert given.nodes == ("n1", "n2")


def test_a_search_on_one_of_many_nodes_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    request = make_request(["train.lr=0.1,0.2"], workdir=str(tmp_path))
    _tell_idle(request)
    assert "one of the 2 nodes of this job; --on nodes takes all" in capsys.readouterr().out
    on_nodes = make_request(["train.lr=0.1,0.2"], workdir=str(tmp_path), on="nodes")
    _tell_idle(on_nodes)
    assert capsys.readouterr().out == ""
    assert on_nodes.train_options == ()
    assert make_request(["train.lr=0.1,0.2"], workdir=".", on="slurm").train_options == (
        "--on",
        "slurm",
    )
