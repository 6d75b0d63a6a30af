"""How the ranks of one node work on a copy together, without a process group.

They meet in a folder in the node's memory: the first writes what each has to do, the others what they
did. A file is written whole or not at all, and every wait has a limit and notices when the other side
is dead. Called by `run.py`; with one rank a node nobody meets.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ridgeline.data.stage.held import make_private
from ridgeline.data.stage.problem import StageProblem
from ridgeline.data.stage.users import User, this_process
from ridgeline.launch.ranks import write_aside

GO, RESULT, STOP, _BEAT = "go", "result", "stop", "beat"
_POLL_S = 0.02
_meetings: Counter[str] = Counter()
"""Meetings that this process has been to, by name: the next one of that name is another."""


@dataclass(frozen=True)
class NodePlace:
    """Where a rank stands among the ranks of its node, and the node among the nodes."""

    node: int = 0
    num_nodes: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    job: str = ""
    """The same on all ranks of a job, and different for two jobs that run on a node at once."""


class Patience:
    """A wait that ends in a problem when nothing has changed for too long."""

    def __init__(self, limit_s: float, what: str, token: Callable[[], Any]) -> None:
        self._limit_s, self._what, self._token = limit_s, what, token
        self._seen: Any = None
        self._since = time.monotonic()

    def wait(self) -> None:
        """A moment."""
        token, now = self._token(), time.monotonic()
        if token != self._seen:
            self._seen, self._since = token, now
        if now - self._since > self._limit_s:
            raise StageProblem(f"{self._what} made no progress for {self._limit_s:g} s")
        time.sleep(_POLL_S)


class Meeting:
    """The folder of one call of `stage` on one node."""

    def __init__(self, place: NodePlace, source: Path) -> None:
        self.place = place
        self._folder: Path | None = None
        self._beaten = 0.0
        if place.local_world_size == 1:
            return
        name = "\0".join((socket.gethostname(), place.job, str(place.node), str(source)))
        _meetings[name] += 1
        digest = hashlib.sha256(f"{name}\0{_meetings[name]}".encode(errors="surrogateescape"))
        self._folder = _room() / digest.hexdigest()[:24]
        if place.local_rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)  # of a process that was killed
            self._folder.mkdir()
            self.say("leader", asdict(this_process()))

    def say(self, name: str, value: Any) -> None:
        if self._folder is not None:
            write_aside(self._folder / name, json.dumps(value))

    def heard(self, name: str) -> Any:
        """What was said, or None."""
        if self._folder is not None:
            with suppress(OSError, ValueError):
                return json.loads((self._folder / name).read_text(encoding="utf-8"))
        return None

    def beat(self) -> None:
        """The first rank shows that it is at work; more often than the others look is of no use."""
        now = time.monotonic()
        if self._folder is not None and now - self._beaten >= _POLL_S:
            (self._folder / _BEAT).touch()
            self._beaten = now

    def is_stopped(self) -> bool:
        return self._folder is not None and (self._folder / STOP).exists()

    def from_leader(self, names: tuple[str, ...], limit_s: float) -> tuple[str, Any]:
        """The first of these words that the first rank says; not what a dead one said before."""
        patience = Patience(limit_s, "the first rank of this node", self._last_beat)
        met = self.heard(f"here-{self.place.local_rank}") is not None
        while True:
            said = self.heard("leader")
            lives = said is not None and User(**said).is_alive()
            if lives or met:
                for name in names:
                    value = self.heard(name)
                    if value is not None:
                        return name, value
            if met and not lives:
                raise StageProblem("the first rank of this node died while it staged the data")
            patience.wait()

    def from_others(self, name: str, limit_s: float, token: Callable[[], Any]) -> list[Any]:
        """What each of the other ranks says, in their order; None of one that left without a word."""
        patience = Patience(limit_s, "another rank of this node", token)
        said = []
        for rank in range(1, self.place.local_world_size):
            while True:
                has_left = self._has_left(rank)  # first, for its last word comes before
                value = self.heard(f"{name}-{rank}")
                if value is not None or has_left:
                    break
                here = self.heard(f"here-{rank}")
                if here is not None and not User(**here).is_alive():
                    raise StageProblem(f"local rank {rank} died while it staged the data")
                self.beat()
                patience.wait()
            said.append(value)
        return said

    def leave(self) -> None:
        """The last one clears the table."""
        if self._folder is None:
            return
        with suppress(OSError):
            (self._folder / f"left-{self.place.local_rank}").touch()
            if len(list(self._folder.glob("left-*"))) == self.place.local_world_size:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _has_left(self, rank: int) -> bool:
        return self._folder is not None and (self._folder / f"left-{rank}").exists()

    def _last_beat(self) -> float:
        assert self._folder is not None
        with suppress(OSError):
            return (self._folder / _BEAT).stat().st_mtime
        return 0.0


def _room() -> Path:
    """In memory where there is a place for it, for files are asked for many times a second."""
    for parent in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if os.access(parent, os.W_OK | os.X_OK):
            return make_private(parent / f"ridgeline-meet-{os.getuid()}")
    raise StageProblem("there is no folder in which the ranks of this node could meet")
