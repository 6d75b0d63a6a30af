"""Trials on the nodes of the job around the search: an agent on each (`agent.py`), told what to train.

One step of the scheduler's launcher starts all agents, so that it matters neither how many trials there are
nor which launcher it is, and each agent sees the cores and GPUs that the job has on its node. They connect
to this process, line by line of JSON; who does not know the secret is not listened to. Imports without
torch; made by `cli_search.py`.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.errors import Requeue, RunError, UsageError, say
from ridgeline.launch.env import SEARCH
from ridgeline.launch.hub import allow_files, listen, own_addresses
from ridgeline.launch.job import Step
from ridgeline.launch.nodes import job_around
from ridgeline.launch.rank import Line
from ridgeline.launch.schedulers.table import SCHEDULERS
from ridgeline.launch.start import LauncherProcess
from ridgeline.launch.start import Running as Launcher
from ridgeline.search.agent import KEEP_ALIVE
from ridgeline.search.places import STOP_S, Ended, Running

JOIN_S = 300.0
"""How long agents may take to come: many nodes import Python from one file system."""
_HELLO_S = 10.0
_LOOK_S = 0.1


@dataclass(eq=False)
class _Node:
    """A connection; an agent once it has said what its node has."""

    line: Line
    since: float
    host: str = ""
    devices: int = 0
    slots: int = 0
    trials: dict[int, _Remote] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.slots - len(self.trials)


@dataclass(eq=False)
class _Remote:
    """A trial on another node."""

    number: int
    node: _Node
    nodes: Nodes
    ended: Ended | None = None

    def poll(self) -> Ended | None:
        self.nodes.listen()
        return self.ended

    def stop(self) -> bool:
        self.nodes.tell(self.node, {"do": "stop", "trial": self.number})
        return True

    def kill(self) -> None:
        self.nodes.tell(self.node, {"do": "kill", "trial": self.number})


@dataclass
class Nodes:
    """The nodes of one job, each with as many trials at a time as it has devices for."""

    num_nodes: int
    ranks: int
    """Of a trial."""
    at_once: int | None
    begin: Callable[[Step], Launcher]
    on_gpus: bool = True
    cpus_per_node: int | None = None
    join_s: float = JOIN_S
    left = "its trials were saved"
    agents: list[_Node] = field(default_factory=list)
    _strangers: list[_Node] = field(default_factory=list)
    _signal: str = ""
    """By which the first agent was asked to leave."""
    _number: int = 0
    _token: str = field(default_factory=lambda: secrets.token_hex(16))
    _launcher: Launcher | None = None

    @property
    def count(self) -> int:
        """Of those that are left; 0 while the last trials of those that leave are saved."""
        self.listen()
        slots = sum(node.slots for node in self.agents)
        if slots or any(node.trials for node in self.agents):
            return min(slots, self.at_once or slots)
        if self._signal:
            text = f"its nodes were stopped by {self._signal}; {self.left}, and the same command goes on"
            raise Requeue(text, self._signal)
        over = self._launcher is not None and self._launcher.poll() is not None
        words = f": {self._launcher.last_words()}" if over and self._launcher is not None else ""
        raise RunError(
            f"no node of the job is left to train on{words}; the same command goes on in another job"
        )

    def open(self, is_over: Callable[[], bool]) -> None:
        """Start the agents, and wait for all of them or until it is over before it began."""
        allow_files(self.num_nodes)
        self._board = listen()
        self._board.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._board, selectors.EVENT_READ, None)
        port = self._board.getsockname()[1]
        address = f"{self._token}@{','.join(f'{name}:{port}' for name in own_addresses())}"
        command = (sys.executable, "-m", "ridgeline.search.agent")
        step = Step(
            command if self.on_gpus else (*command, "--cpu"),
            nodes=self.num_nodes,
            per_node=1,
            cpus_per_rank=self.cpus_per_node,
            variables={SEARCH: address},
            together=False,
        )
        self._launcher = self.begin(step)
        until = time.monotonic() + self.join_s
        while len(self.agents) < self.num_nodes:
            if is_over():
                return
            self.listen(_LOOK_S)
            if self._launcher.poll() is not None:
                raise RunError(f"the nodes of the job did not start: {self._launcher.last_words()}")
            if time.monotonic() > until:
                known = ", ".join(node.host for node in self.agents) or "none"
                raise RunError(
                    f"{len(self.agents)} of {self.num_nodes} nodes came in {self.join_s:.0f} s ({known}); "
                    "check that the nodes of the job reach each other"
                )
        self._share_out()

    def close(self) -> None:
        """The agents end by themselves; trials that are still there get the time to save."""
        for node in list(self.agents):
            self.tell(node, {"end": "the search is over"})
        if self._launcher is not None:
            for seconds, end in ((STOP_S, self._launcher.stop), (5.0, self._launcher.kill)):
                until = time.monotonic() + seconds
                while self._launcher.poll() is None and time.monotonic() < until:
                    time.sleep(_LOOK_S)
                if self._launcher.poll() is None:
                    end()
        for node in (*self.agents, *self._strangers):
            node.line.socket.close()
        if hasattr(self, "_board"):
            self._selector.close()
            self._board.close()

    def start(self, words: Sequence[str], run: Path, log: Path, workdir: str) -> Running:
        node = max(self.agents, key=lambda one: one.free)
        self._number += 1
        trial = _Remote(self._number, node, self)
        node.trials[trial.number] = trial
        order = {"do": "start", "trial": trial.number, "words": list(words), "workdir": workdir}
        self.tell(node, {**order, "run": str(run), "log": str(log)})
        return trial

    def tell(self, node: _Node, message: Mapping[str, Any]) -> None:
        if node not in self.agents:
            return
        try:
            node.line.send(dict(message))
        except OSError:
            self._lose(node)

    def listen(self, wait_s: float = 0.0) -> None:
        """Whatever agents have said by now."""
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                self._welcome()
                continue
            node: _Node = key.data
            try:
                messages = node.line.read()
            except (ValueError, TypeError):  # as scanners of ports speak
                messages = None
            if messages is None:
                self._lose(node)
            elif node in self._strangers:
                self._meet(node, messages)
            else:
                for message in messages:
                    self._heed(node, message)
        late = [one for one in self._strangers if time.monotonic() - one.since > _HELLO_S]
        for one in late:
            self._lose(one)

    def _heed(self, node: _Node, message: dict[str, Any]) -> None:
        if "leaving" in message:
            self._signal = self._signal or str(message["leaving"])
            node.slots = 0
            return
        trial = node.trials.pop(message["trial"], None)
        if trial is not None:
            # What stops because its node was asked to go has done nothing wrong.
            trial.ended = Ended(message["how"], message["words"], is_taken=not node.slots)

    def _lose(self, node: _Node) -> None:
        """What it trained goes on elsewhere, from its checkpoints."""
        for known in (self.agents, self._strangers):
            if node in known:
                known.remove(node)
                self._selector.unregister(node.line.socket)
                node.line.socket.close()
        for trial in node.trials.values():
            trial.ended = Ended("stopped", f"{node.host} is gone", is_taken=True)
        node.trials.clear()

    def _welcome(self) -> None:
        """Everybody who has come; who it is, is said later."""
        with suppress(OSError):  # no more of them
            while True:
                connection, _ = self._board.accept()
                connection.settimeout(_HELLO_S)
                for option, value in KEEP_ALIVE.items():
                    connection.setsockopt(*option, value)
                node = _Node(Line(connection), time.monotonic())
                self._strangers.append(node)
                self._selector.register(connection, selectors.EVENT_READ, node)

    def _meet(self, node: _Node, messages: Sequence[object]) -> None:
        """An agent, if it knows the secret."""
        for hello in messages[:1]:
            token = str(hello.get("token", "")) if isinstance(hello, dict) else ""
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                self._lose(node)
                return
            assert isinstance(hello, dict)
            node.host, node.devices = str(hello["host"]), int(hello["devices"])
            self._strangers.remove(node)
            self.agents.append(node)

    def _share_out(self) -> None:
        """Trials to the nodes, one to each in turn, as many as they have GPUs for."""
        num = len(self.agents)
        if any(node.devices for node in self.agents):
            rooms = [node.devices // self.ranks for node in self.agents]
        else:
            rooms = [-(-(self.at_once or num) // num)] * num
        wanted = sum(rooms) if self.at_once is None else self.at_once
        if not 0 < wanted <= sum(rooms):
            gpus = ", ".join(f"{node.host}: {node.devices}" for node in self.agents)
            raise UsageError(
                f"--at-once {wanted or 1} trials of -n {self.ranks} ranks need more GPUs than the nodes of "
                f"the job have for whole trials ({gpus}); ask for fewer, or make each a job (--on slurm)"
            )
        while sum(node.slots for node in self.agents) < wanted:
            for node, room in zip(self.agents, rooms, strict=True):
                if node.slots < room and sum(one.slots for one in self.agents) < wanted:
                    node.slots += 1
        for node, room in zip(self.agents, rooms, strict=True):
            if not room:
                say(f"{node.host} has {node.devices} GPUs, too few for a trial: none runs there")
            self.tell(node, {"slots": node.slots, "ranks": self.ranks})


def build_nodes(ranks: int, at_once: int | None, on_gpus: bool) -> Nodes:
    kind, given = job_around()

    def begin(step: Step) -> Launcher:
        return LauncherProcess(SCHEDULERS[kind].step(step), step.variables)

    return Nodes(given.num_nodes, ranks, at_once, begin, on_gpus, given.cpus_per_node)
