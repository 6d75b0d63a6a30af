"""Plain hosts without a scheduler: one connection to each, and `host.py` at its other end.

Also this host alone, without a connection: `ridgeline launch --scheduler local`. Hosts come as
`node1,node2:4`, from a file with a line each, or from the nodes of a job around. Used by `start.py`.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import UsageError
from ridgeline.launch.hostlist import expand_hosts
from ridgeline.launch.job import Step
from ridgeline.launch.start import LauncherProcess

SSH = "ssh -T -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=10"
"""No terminal and no questions: a host that wants a password is an error, not a wait."""


@dataclass(frozen=True)
class Host:
    """One host and how many ranks it takes; None: as many as are asked for."""

    name: str
    slots: int | None = None


def read_hosts(text: str, place: str) -> list[Host]:
    """`a,b:4`, `node[01-04]:2`, or the name of a file with a host a line.

    >>> read_hosts("a,b:4", "--hosts")
    [Host(name='a', slots=None), Host(name='b', slots=4)]
    """
    if "/" in text or Path(text).is_file():
        try:
            lines = Path(text).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UsageError(f"cannot read {place} {text!r}: {error.strerror}") from error
        parts = [line.split("#")[0].strip() for line in lines]
        parts = [part.replace(" slots=", ":").replace(" ", "") for part in parts if part]
    else:
        parts = _split(text)
    hosts = [host for part in parts for host in _read_part(part, place)]
    if not hosts:
        raise UsageError(f"{place} {text!r} names no host")
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{place} names {twice!r} twice; say its slots instead, e.g. {twice}:2")
    return hosts


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _read_part(part: str, place: str) -> list[Host]:
    names, colon, slots = part.partition(":")
    if names.startswith("-") or any(letter.isspace() for letter in names):
        raise UsageError(f"{place} has {names!r}, which is no name of a host")
    if colon and (not slots.isdigit() or int(slots) < 1):
        raise UsageError(
            f"{place} has {part!r}; behind the colon stands how many ranks, e.g. node1:4"
        )
    return [Host(name, int(slots) if colon else None) for name in expand_hosts(names, place)]


def place_ranks(hosts: Sequence[Host], nodes: int | None, per_node: int | None) -> list[Host]:
    """The hosts that are used, each with the ranks it gets."""
    used = list(hosts[: nodes or len(hosts)])
    if nodes is not None and nodes > len(hosts):
        raise UsageError(
            f"-N {nodes} asks for more nodes than the {len(hosts)} hosts that were named"
        )
    for host in used:
        if per_node is not None and host.slots is not None and per_node > host.slots:
            raise UsageError(
                f"-n {per_node} asks for more ranks than the {host.slots} slots of {host.name}"
            )
    return [Host(host.name, per_node or host.slots or 1) for host in used]


class HostProcesses:
    """A connection a host."""

    def __init__(self, processes: dict[str, LauncherProcess]) -> None:
        self._processes = processes
        self._failed: str | None = None

    def poll(self) -> int | None:
        codes = {name: process.poll() for name, process in self._processes.items()}
        for name, code in codes.items():
            if code:
                self._failed = self._failed or name
                return code
        return None if None in codes.values() else 0

    def stop(self) -> None:
        for process in self._processes.values():
            process.stop()

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def last_words(self) -> str:
        name = self._failed or next(iter(self._processes))
        return f"{name}: {self._processes[name].last_words()}"


def start_on(hosts: Sequence[Host], ssh: str | None) -> Callable[[Step], HostProcesses]:
    """How ranks are started on these hosts; without `ssh`, on this one."""

    def start(step: Step) -> HostProcesses:
        first, processes = 0, {}
        counts = [host.slots or 1 for host in hosts]
        for number, (host, count) in enumerate(zip(hosts, counts, strict=True)):
            told = {
                "workdir": os.getcwd(),
                "variables": dict(step.variables),
                "command": list(step.command),
                "first_rank": first,
                "world_size": sum(counts),
                "local_world_size": count,
                "node_rank": number,
            }
            line = _line(host, ssh)
            processes[host.name] = LauncherProcess(line, {}, json.dumps(told).encode() + b"\n")
            first += count
        return HostProcesses(processes)

    return start


def _line(host: Host, ssh: str | None) -> list[str]:
    command = [sys.executable, "-m", "ridgeline.launch.host"]
    if ssh is None:
        return command
    # Where the package is not installed but found by a path, the other host finds it the same way.
    package = str(Path(__file__).resolve().parents[2])
    remote = shlex.join(["env", f"PYTHONPATH={package}", *command])
    return [*shlex.split(ssh), host.name, remote]
