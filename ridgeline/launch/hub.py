"""Where the ranks of a job report to whoever started them: one connection a rank, whatever started it.

Launchers differ in what they tell of their ranks, in which signals they pass on and in when they notice
that a node is gone. This does not depend on them: each rank's wrapper (`rank.py`) connects here, says who
it is, waits until all have come, and is told where rank 0 is met. Later it says how its rank ended, passes
signals on to it, and both ends notice when the other is silent for too long. Lines of JSON over TCP; who
does not know the job's secret is not listened to. Used by `start.py`.

Torch's agent does this for one node or for agents that start by themselves; nothing of it works under
`srun`, `jsrun` and `mpiexec`, which start the ranks, so this is written by hand.
"""

from __future__ import annotations

import hmac
import json
import resource
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ridgeline.errors import Requeue, UsageError

BEAT_S = 2.0
"""Between two signs of life."""
LOST_S = 30.0
"""Silence after which a rank's node is given up."""
JOIN_S = 300.0
"""How long ranks may take to come."""
_MAX_LINE = 1 << 24
_SETTLE_S = 1.0
"""After a failure: time in which others tell theirs, so that the first can be told from its echoes."""
_HELLO_S = 10.0


@dataclass(frozen=True)
class Member:
    """One rank as it introduced itself."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    host: str
    address: str
    """Where the others reach it."""
    ports: tuple[int, ...]
    """Free on its node when it was asked."""
    pid: int
    source: str
    cpus: str
    """Hardware threads that it may use, as ranges."""
    gpus: tuple[str, ...]
    """PCI addresses, in the order in which it counts its devices."""


@dataclass(frozen=True)
class RankExit:
    """How one rank's command ended."""

    rank: int
    code: int
    """Negative: the signal that ended it."""
    time: float
    tail: str = ""
    """The last that it wrote."""
    account: dict[str, Any] | None = None
    """What the rank itself left as the reason, where it did."""

    @property
    def failed(self) -> bool:
        """A command that asks to be started again has not."""
        return self.code not in (0, Requeue.exit_code)


@dataclass(eq=False)
class _Caller:
    """A connection, whose owner is known once it has said hello."""

    socket: socket.socket
    peer: str
    ours: str
    since: float
    buffer: bytearray = field(default_factory=bytearray)
    member: Member | None = None
    heard: float = 0.0


def allow_files(num_ranks: int) -> None:
    """A connection a rank is an open file each, and the usual limit of 1024 is below large jobs."""
    wanted = 2 * num_ranks + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < num_ranks + 64:
        raise UsageError(
            f"{num_ranks} ranks need as many open files, and this account may have {hard} (ulimit -Hn); "
            "ask for more, or start the job from a compute node"
        )


class HubError(Exception):
    """Why the ranks cannot go on, found by looking at all of them."""

    def __init__(self, text: str, rank: int, kind: str) -> None:
        super().__init__(text)
        self.rank, self.kind = rank, kind


class Hub:
    """Listens from the moment it is made. `address` goes to every rank, by a variable."""

    def __init__(
        self,
        num_ranks: int,
        hosts: Sequence[str] = (),
        lost_s: float = LOST_S,
        join_s: float = JOIN_S,
    ) -> None:
        self.num_ranks, self._hosts, self._lost_s, self._join_s = num_ranks, hosts, lost_s, join_s
        self.members: dict[int, Member] = {}
        self.exits: dict[int, RankExit] = {}
        self.problem: HubError | None = None
        allow_files(num_ranks)
        self._token = secrets.token_hex(16)
        self._board = listen()
        self._callers: dict[int, _Caller] = {}
        """By rank."""
        self._strangers: set[_Caller] = set()
        self._started = False
        self._early = ""
        """The signal that ranks are to get as soon as they have started."""
        self._begun = time.monotonic()
        self._failed_at: float | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._board, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="ridgeline-hub", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The secret and everywhere this process may be reached, for `rank.py` to try."""
        port = self._board.getsockname()[1]
        return f"{self._token}@{','.join(f'{name}:{port}' for name in own_addresses())}"

    def signal(self, name: str, ranks: Iterable[int] | None = None) -> None:
        """Have the wrappers send a signal to their ranks."""
        if not self._started:
            self._early = name  # those who have not come yet have to hear of it too
            return
        self._tell({"signal": name}, ranks)

    def end(self, why: str) -> None:
        """Have every rank ended, in order at first."""
        self._tell({"end": why})

    def wait(self, timeout: float) -> bool:
        """Until something has happened, or the time is over; True when every rank has ended."""
        with self._changed:
            if not self._over():
                self._changed.wait(timeout)
            return self._over()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(5.0)
        with self._lock:
            for caller in [*self._callers.values(), *self._strangers]:
                _close(caller.socket)
            self._selector.close()
            _close(self._board)

    def _over(self) -> bool:
        return self.problem is not None or len(self.exits) == self.num_ranks

    def _serve(self) -> None:
        last_beat = time.monotonic()
        while not self._closed.is_set():
            for key, _ in self._selector.select(0.2):
                if key.data is None:
                    self._welcome()
                else:
                    self._read(key.data)
            now = time.monotonic()
            if now - last_beat >= BEAT_S:
                last_beat = now
                self._tell({"beat": 1})
            self._look(now)

    def _welcome(self) -> None:
        with suppress(OSError):
            connection, peer = self._board.accept()
            connection.settimeout(_HELLO_S)
            _keep_sending(connection)
            ours = connection.getsockname()[0]
            caller = _Caller(connection, peer[0], ours, time.monotonic())
            self._strangers.add(caller)
            self._selector.register(connection, selectors.EVENT_READ, caller)

    def _read(self, caller: _Caller) -> None:
        try:
            piece = caller.socket.recv(1 << 16)
        except OSError:
            piece = b""
        if not piece or len(caller.buffer) > _MAX_LINE:
            self._gone(caller)
            return
        caller.heard = time.monotonic()
        caller.buffer += piece
        while (end := caller.buffer.find(b"\n")) >= 0:
            line = bytes(caller.buffer[:end])
            del caller.buffer[: end + 1]
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self._gone(caller)
                return
            try:
                self._hear(caller, message)
            except (TypeError, KeyError, ValueError):
                self._gone(caller)  # it does not speak as ours do
                return

    def _hear(self, caller: _Caller, message: dict[str, Any]) -> None:
        if caller.member is None:
            said = str(message.get("token", "")).encode()
            if not hmac.compare_digest(said, self._token.encode()):
                self._gone(caller)
                return
            self._join(caller, message["hello"])
        elif "exit" in message:
            told = RankExit(**message["exit"])
            with self._changed:
                self.exits[told.rank] = told
                if told.failed and self._failed_at is None:
                    self._failed_at = time.monotonic()
                self._changed.notify_all()

    def _join(self, caller: _Caller, hello: dict[str, Any]) -> None:
        address = caller.peer if not _is_loopback(caller.peer) else ""
        member = _as_member({**hello, "address": address})
        other = self.members.get(member.rank)
        if member.world_size != self.num_ranks or not 0 <= member.rank < self.num_ranks:
            self._fail(
                f"rank {member.rank} on {member.host} was told by {member.source} that there are "
                f"{member.world_size} ranks, but the job was started with {self.num_ranks}; "
                "start as many as were asked for, or ask for as many as there are slots",
                member.rank,
                "world",
            )
            return
        if other is not None:
            self._fail(
                f"two processes are rank {member.rank}: {other.pid} on {other.host} and {member.pid} on "
                f"{member.host} ({member.source}); the launcher has started the command twice",
                member.rank,
                "twice",
            )
            return
        caller.member = member
        with self._lock:
            self._strangers.discard(caller)
            self._callers[member.rank] = caller
            self.members[member.rank] = member
        if len(self.members) == self.num_ranks and not self._started:
            self._start()

    def _start(self) -> None:
        self._started = True
        now = time.monotonic()
        for caller in self._callers.values():
            caller.heard = now  # nothing was expected of those who waited
        members = self._placed()
        self.members = {member.rank: member for member in members}
        message = {
            "start": {
                "master_addr": members[0].address,
                "members": [_as_list(member) for member in members],
                "lost_s": self._lost_s,
            }
        }
        self._tell(message)
        if self._early:
            self._tell({"signal": self._early})

    def _placed(self) -> list[Member]:
        """Every member with an address that the others reach and the place of its node."""
        nodes: dict[tuple[str, int], int] = {}
        members = [self.members[rank] for rank in range(self.num_ranks)]
        for member in members:
            nodes.setdefault((member.host, member.node_rank), len(nodes))
        # A rank on this host came over loopback: the others reach it where they reached this process.
        seen = [c.ours for c in self._callers.values() if not _is_loopback(c.ours)]
        here = seen[0] if seen else "127.0.0.1"
        return [
            Member(
                **{
                    **vars(member),
                    "address": member.address or here,
                    "node_rank": nodes[member.host, member.node_rank],
                }
            )
            for member in members
        ]

    def _look(self, now: float) -> None:
        """What silence and time have to say."""
        if self.problem is not None:
            return
        for caller in [c for c in self._strangers if now - c.since > _HELLO_S]:
            self._gone(caller)
        if not self._started:
            if now - self._begun > self._join_s:
                self._fail(self._who_is_missing(), self.missing()[0], "missing")
            return
        silent = [
            caller.member
            for rank, caller in self._callers.items()
            if rank not in self.exits and caller.member and now - caller.heard > self._lost_s
        ]
        if silent:
            self._fail_lost([member.rank for member in silent], f"for {self._lost_s:.0f} s")
        elif self._failed_at is not None and now - self._failed_at > _SETTLE_S:
            self._failed_at = float("inf")
            self._tell({"end": "another rank failed"})

    def _gone(self, caller: _Caller) -> None:
        """The connection is over: in order after its rank's end, else with its wrapper or its node."""
        with self._lock:
            with suppress(KeyError, ValueError):
                self._selector.unregister(caller.socket)
            _close(caller.socket)
            self._strangers.discard(caller)
        member = caller.member
        if member is None or member.rank in self.exits or self._closed.is_set():
            return
        if not self._started:
            text = f"rank {member.rank} on {member.host} ended before all ranks had come"
            self._fail(text, member.rank, "early")
            return
        with self._changed:
            # Whoever started the wrapper has ended it: its rank is gone with it, and that is a failure,
            # but maybe the consequence of another.
            self.exits[member.rank] = RankExit(member.rank, -9, time.time(), "", None)
            if self._failed_at is None:
                self._failed_at = time.monotonic()
            self._changed.notify_all()

    def _fail_lost(self, ranks: list[int], how_long: str) -> None:
        hosts = sorted({self.members[rank].host for rank in ranks})
        them = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        self._fail(
            f"{'hosts' if len(hosts) > 1 else 'host'} {', '.join(hosts)} ({them}) did not answer "
            f"{how_long}; the node is down or its network is cut off",
            ranks[0],
            "lost",
        )

    def _fail(self, text: str, rank: int, kind: str) -> None:
        with self._changed:
            if self.problem is None:
                self.problem = HubError(text, rank, kind)
            self._changed.notify_all()
        self._tell({"end": text})

    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in range(self.num_ranks) if rank not in self.members]

    def unheard(self) -> str:
        """The hosts of which no rank has come, in brackets; empty where they are not known."""
        came = {member.host.partition(".")[0] for member in self.members.values()}
        absent = [host for host in self._hosts if host.partition(".")[0] not in came]
        return f" (nothing was heard from {', '.join(absent)})" if absent else ""

    def _who_is_missing(self) -> str:
        missing = self.missing()
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        return (
            f"{len(missing)} of {self.num_ranks} ranks did not come within {self._join_s:.0f} s: "
            f"{shown}{self.unheard()}; check that the nodes reach {socket.gethostname()}"
        )

    def _tell(self, message: dict[str, Any], ranks: Iterable[int] | None = None) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            chosen = list(self._callers) if ranks is None else list(ranks)
            for rank in chosen:
                caller = self._callers.get(rank)
                if caller is not None:
                    with suppress(OSError):
                        caller.socket.sendall(line)


def own_addresses() -> list[str]:
    """Names and numbers of this host, those that other nodes know best first."""
    import psutil

    found = [socket.gethostname(), socket.getfqdn()]
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if name != "lo" and not name.startswith(("docker", "virbr")):
            found += [a.address for a in addresses if a.family == socket.AF_INET]
    found.append("127.0.0.1")
    return [name for name in dict.fromkeys(found) if name and ":" not in name and "," not in name]


def _as_list(member: Member) -> list[Any]:
    return [*vars(member).values()]


def read_members(lists: Iterable[Sequence[Any]]) -> list[Member]:
    """The other end of what `start` carries."""
    names = list(Member.__dataclass_fields__)
    return [_as_member(dict(zip(names, values, strict=True))) for values in lists]


def _as_member(value: dict[str, Any]) -> Member:
    return Member(**{**value, "ports": tuple(value["ports"]), "gpus": tuple(value["gpus"])})


def listen() -> socket.socket:
    """On a free port of every address."""
    board = socket.socket()
    board.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    board.bind(("", 0))
    board.listen(1024)
    return board


def _keep_sending(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.close()
