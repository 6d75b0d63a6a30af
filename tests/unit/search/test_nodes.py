"""Searches on the nodes of a job, each node a process of this host: trials go everywhere, and on when a
node is gone."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ridgeline.cli_search import _tell_idle
from ridgeline.config import dump_config, load_config
from ridgeline.errors import Requeue, RunError, UsageError
from ridgeline.launch.job import Step
from ridgeline.launch.nodes import job_around
from ridgeline.search.nodes import Nodes
from ridgeline.search.places import Ended
from ridgeline.search.request import make_request
from ridgeline.search.run import Search

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
    while nodes.agents and time.monotonic() < until:
        nodes.listen(0.05)
    with pytest.raises(RunError, match="no node of the job is left to train on"):
        _ = nodes.count


def test_a_node_that_is_asked_to_leave_saves_and_is_given_nothing_more(
    opened: Any, tmp_path: Path
) -> None:
    words = ["train", "digits", "device=cpu", "train.epochs=50000", "threads=1", "--run"]
    nodes, agents = opened(2)
    both = [start(nodes, tmp_path, n, *words, str(tmp_path / f"run{n}")) for n in range(2)]
    until = time.monotonic() + 120
    while time.monotonic() < until and not all(
        (tmp_path / f"run{n}" / "metrics.jsonl").is_file() for n in range(2)
    ):
        time.sleep(0.1)
    for process in agents[0].processes:
        process.send_signal(signal.SIGUSR1)
    ends = [wait_for(one) for one in both]
    assert [(one.how, one.is_taken) for one in ends] == [("stopped", True)] * 2
    assert all(list((tmp_path / f"run{n}" / "checkpoints").iterdir()) for n in range(2))
    with pytest.raises(Requeue, match=r"stopped by SIGUSR1; its trials were saved") as error:
        _ = nodes.count
    assert error.value.exit_code == 75
    for process in agents[0].processes:
        assert process.wait(60) == 0


FAKE = "import sys; from ridgeline.search.agent import main; sys.exit(main([], lambda: 4))"


def test_each_trial_sees_its_own_gpus_and_not_the_secret(opened: Any, tmp_path: Path) -> None:
    def begin(step: Step) -> Agents:
        assert "--cpu" not in step.command
        return Agents(dataclasses.replace(step, command=(sys.executable, "-c", FAKE)))

    nodes, _ = opened(1, ranks=2, begin=begin, on_gpus=True)
    assert nodes.count == 2  # 4 GPUs, 2 ranks each
    words = ["train", "digits", "device=cpu", "train.epochs=500", "--run"]
    both = [start(nodes, tmp_path, n, *words, str(tmp_path / f"run{n}")) for n in range(2)]
    (agent,) = (psutil.Process(one.pid) for agents in [nodes._launcher] for one in agents.processes)
    until = time.monotonic() + 30
    while len(children := agent.children()) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    seen = [child.environ() for child in children]
    assert sorted(one["CUDA_VISIBLE_DEVICES"] for one in seen) == ["0,1", "2,3"]
    assert not any("RIDGELINE_SEARCH" in one for one in seen)
    cores = [set(child.cpu_affinity()) for child in children]
    if len(os.sched_getaffinity(0)) > 1:
        assert not cores[0] & cores[1]
    for trial in both:
        trial.kill()
        assert wait_for(trial).how == "failed"


def test_a_start_that_fails_costs_no_place(opened: Any, tmp_path: Path) -> None:
    nodes, _ = opened(1)
    for number in range(3):
        trial = nodes.start(["version"], tmp_path, tmp_path / "log", str(tmp_path / "nowhere"))
        assert wait_for(trial).how == "failed", number
    assert wait_for(start(nodes, tmp_path, 9, "version")).how == "done"


def test_places_are_shared_out_among_the_nodes(opened: Any) -> None:
    nodes, _ = opened(2, at_once=3)
    assert sorted(node.slots for node in nodes.agents) == [1, 2]
    assert nodes.count == 3


@pytest.mark.parametrize(
    ("gpus", "ranks", "at_once", "slots"),
    [
        ([8, 4], 1, 10, [6, 4]),
        ([8, 4], 1, None, [8, 4]),
        ([8, 1], 2, None, [4, 0]),
        ([4, 4], 2, 3, [2, 1]),
        ([8, 0], 1, 2, [2, 0]),
        ([0, 0], 4, None, [1, 1]),
        ([0, 0], 4, 5, [3, 2]),
        ([2, 2], 4, None, None),
        ([4, 4], 2, 5, None),
    ],
)
def test_trials_go_where_their_gpus_are(
    gpus: list[int], ranks: int, at_once: int | None, slots: list[int] | None
) -> None:
    nodes = Nodes(len(gpus), ranks, at_once, Agents)
    nodes.agents = [
        SimpleNamespace(devices=num, host=f"node{n}", slots=0) for n, num in enumerate(gpus)
    ]
    told: list[int] = []
    nodes.tell = lambda node, message: told.append(message["slots"])  # type: ignore[method-assign]
    if slots is None:
        with pytest.raises(UsageError, match=r"need more GPUs .*node0: \d"):
            nodes._share_out()
    else:
        nodes._share_out()
        assert told == slots


def test_strangers_are_not_listened_to(opened: Any) -> None:
    callers: list[socket.socket] = []

    def begin(step: Step) -> Agents:
        host, _, port = step.variables["RIDGELINE_SEARCH"].rpartition(",")[2].rpartition(":")
        for text in (
            b'{"token": "guess", "host": "x", "devices": 0}\n', b"no json\n", b"1\n", b"[]\n",
            b"\xff\xfe\n", '{"token": "\u00e9"}\n'.encode(), b"",
        ):  # fmt: skip
            callers.append(socket.create_connection((host, int(port))))
            callers[-1].sendall(text)
        return Agents(step)

    nodes, _ = opened(1, begin=begin)
    assert [node.devices for node in nodes.agents] == [0]
    assert nodes.count == 1
    for caller in callers[:-1]:
        caller.settimeout(10)
        assert caller.recv(1) == b""


def test_nodes_that_do_not_come_are_told_of() -> None:
    class Nobody(Agents):
        code: int | None = None

        def __init__(self, step: Step) -> None:
            self.processes = []

        def poll(self) -> int | None:
            return self.code

        def kill(self) -> None:
            self.code = -9

    nodes = Nodes(2, ranks=1, at_once=None, begin=Nobody, join_s=0.5)
    with pytest.raises(RunError, match="0 of 2 nodes came in 0 s"):
        nodes.open(lambda: False)
    nodes._launcher.code = 1  # type: ignore[union-attr]
    nodes.close()

    class Fails(Nobody):
        code = 1

    nodes = Nodes(2, ranks=1, at_once=None, begin=Fails)
    with pytest.raises(RunError, match="did not start: the agents are gone"):
        nodes.open(lambda: False)
    nodes.close()
    waits = Nodes(2, ranks=1, at_once=None, begin=Nobody)
    waits.open(lambda: True)  # somebody has ended it
    waits._launcher.code = 0  # type: ignore[union-attr]
    waits.close()


def test_a_search_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    """One of two agents is killed with a trial on it: the other trains both."""
    config = load_config(None, [*SETTINGS, "checkpoint.every=5"]).config
    (tmp_path / "recipe.yaml").write_text(dump_config(config))
    request = make_request(
        ["train.lr=0.1,0.2"], workdir=str(tmp_path), schedule="full", draw="grid", on="nodes"
    )
    agents: list[Agents] = []

    def begin(step: Step) -> Agents:
        assert not step.together
        agents.append(Agents(step))
        return agents[-1]

    nodes = Nodes(2, ranks=1, at_once=None, begin=begin, on_gpus=False)
    hosts: list[int] = []

    def tell(trial: Any, failed: str) -> None:
        hosts.append(trial.number)
        assert not failed

    found = Search(tmp_path, request, nodes, tell)
    killed = threading.Thread(target=_kill_once_both_train, args=(tmp_path, agents))
    killed.start()
    found.run()
    killed.join()
    assert sorted(hosts) == [0, 1]
    assert all(trial.share == 1.0 and not trial.failed for trial in found.journal.trials)
    assert all(process.poll() is not None for process in agents[0].processes)


SETTINGS = (
    "model.name=mlp", "model.args={in_features: 16, hidden: 32, out_features: 4}", "data.source=synthetic",
    "data.args={shape: [16], classes: 4}", "train.batch=8", "train.steps=400", "train.eval_every=100",
    "log.tensorboard=no", "device=cpu", "threads=1",
)  # fmt: skip


def _kill_once_both_train(folder: Path, agents: list[Agents]) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if all((folder / "trials" / f"00{n}" / "metrics.jsonl").is_file() for n in range(2)):
            break
        time.sleep(0.02)
    os.killpg(agents[0].processes[0].pid, signal.SIGKILL)


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
