"""Trials on the nodes of the job around the search: an agent on each (`agent.py`), told what to train.

One step of the scheduler's launcher starts all agents, so that it matters neither how many trials there are
nor which launcher it is, and each agent sees the cores and GPUs that the job has on its node. They connect
to this process, line by line of JSON; who does not know the secret is not listened to. Imports without
torch; made by `cli_search.py`.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ridgeline.errors import RunError, UsageError
from ridgeline.launch.env import SEARCH
from ridgeline.launch.hub import listen, own_addresses
from ridgeline.launch.job import Step
from ridgeline.launch.nodes import job_around
from ridgeline.launch.rank import Line
from ridgeline.launch.schedulers.table import SCHEDULERS
from ridgeline.launch.start import LauncherProcess
from ridgeline.search.agent import KEEP_ALIVE
from ridgeline.search.places import STOP_S, Ended, Running

JOIN_S = 300.0
"""How long agents may take to come: many nodes import Python from one file system."""
_LOOK_S = 0.1


class Launcher(Protocol):
    def poll(self) -> int | None: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def last_words(self) -> str: ...


@dataclass(eq=False)
class _Node:
    """An agent that has said what its node has."""

    line: Line
    host: str
    devices: int
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
    _nodes: list[_Node] = field(default_factory=list)
    _number: int = 0

    @property
    def count(self) -> int:
        """Of those that are left."""
        self.listen()
        if not self._nodes:
            words = self._launcher.last_words() if self._launcher.poll() is not None else ""
            raise RunError(f"no node of the job is left to train on{f': {words}' if words else ''}")
        slots = sum(node.slots for node in self._nodes)
        return min(slots, self.at_once or slots)

    def open(self, is_over: Callable[[], bool]) -> None:
        """Start the agents, and wait for all of them or until it is over before it began."""
        self._token = secrets.token_hex(16)
        self._board = listen()
        self._board.setblocking(False)
        self._selector = selectors.DefaultSelector()
        port = self._board.getsockname()[1]
        address = f"{self._token}@{','.join(f'{name}:{port}' for name in own_addresses())}"
        command = (sys.executable, "-m", "ridgeline.search.agent")
        step = Step(
            command if self.on_gpus else (*command, "--cpu"),
            nodes=self.num_nodes,
            per_node=1,
            cpus_per_rank=self.cpus_per_node,
            variables={SEARCH: address},
        )
        self._launcher = self.begin(step)
        until = time.monotonic() + self.join_s
        while len(self._nodes) < self.num_nodes and not is_over():
            self._welcome()
            if self._launcher.poll() is not None:
                raise RunError(f"the nodes of the job did not start: {self._launcher.last_words()}")
            if time.monotonic() > until:
                known = ", ".join(node.host for node in self._nodes) or "none"
                raise RunError(
                    f"{len(self._nodes)} of {self.num_nodes} nodes came in {self.join_s:.0f} s ({known}); "
                    "check that the nodes of the job reach each other"
                )
            time.sleep(_LOOK_S)
        if not is_over():
            self._share_out()

    def close(self) -> None:
        """The agents end by themselves; trials that are still there get the time to save."""
        if not hasattr(self, "_launcher"):
            return
        for node in list(self._nodes):
            self.tell(node, {"end": "the search is over"})
        until = time.monotonic() + STOP_S
        while self._launcher.poll() is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if self._launcher.poll() is None:
            self._launcher.kill()
        for node in self._nodes:
            node.line.socket.close()
        self._board.close()
        self._selector.close()

    def start(self, words: Sequence[str], run: Path, log: Path, workdir: str) -> Running:
        node = max(self._nodes, key=lambda one: one.free)
        self._number += 1
        trial = _Remote(self._number, node, self)
        node.trials[trial.number] = trial
        order = {"do": "start", "trial": trial.number, "words": list(words), "workdir": workdir}
        self.tell(node, {**order, "run": str(run), "log": str(log)})
        return trial

    def tell(self, node: _Node, message: Mapping[str, Any]) -> None:
        if node not in self._nodes:
            return
        try:
            node.line.send(dict(message))
        except OSError:
            self._lose(node)

    def listen(self) -> None:
        """Whatever agents have said by now."""
        for key, _ in self._selector.select(0):
            node: _Node = key.data
            messages = node.line.read()
            if messages is None:
                self._lose(node)
                continue
            for message in messages:
                trial = node.trials.pop(message["trial"], None)
                if trial is not None:
                    trial.ended = Ended(message["how"], message["words"])

    def _lose(self, node: _Node) -> None:
        """What it trained goes on elsewhere, from its checkpoints."""
        if node not in self._nodes:
            return
        self._nodes.remove(node)
        self._selector.unregister(node.line.socket)
        node.line.socket.close()
        for trial in node.trials.values():
            trial.ended = Ended("stopped", f"{node.host} is gone")
        node.trials.clear()

    def _welcome(self) -> None:
        """Agents that have come, if they know the secret."""
        with suppress(BlockingIOError):
            connection, _ = self._board.accept()
            connection.settimeout(10.0)
            line = Line(connection)
            try:
                hello = next(iter(line.read() or []), {})
            except json.JSONDecodeError:
                hello = {}
            if not hmac.compare_digest(str(hello.get("token", "")), self._token):
                connection.close()
                return
            for option, value in KEEP_ALIVE.items():
                connection.setsockopt(*option, value)
            node = _Node(line, str(hello["host"]), len(hello["devices"]))
            self._nodes.append(node)
            self._selector.register(connection, selectors.EVENT_READ, node)

    def _share_out(self) -> None:
        each = -(-(self.at_once or 0) // max(len(self._nodes), 1))
        for node in self._nodes:
            room = node.devices // self.ranks if node.devices else max(each, 1)
            if not room or each > room:
                raise UsageError(
                    f"{max(each, 1)} trials of -n {self.ranks} ranks on each node need more GPUs than the "
                    f"{node.devices} of {node.host}; ask for fewer, or make each a job (--on slurm)"
                )
            node.slots = each or room
            self.tell(node, {"slots": node.slots, "ranks": self.ranks})


def build_nodes(ranks: int, at_once: int | None, on_gpus: bool) -> Nodes:
    kind, given = job_around()

    def begin(step: Step) -> Launcher:
        return LauncherProcess(SCHEDULERS[kind].step(step), step.variables)

    return Nodes(given.num_nodes, ranks, at_once, begin, on_gpus, given.cpus_per_node)
