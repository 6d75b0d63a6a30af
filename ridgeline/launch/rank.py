"""What every rank of a job is started by: `python -m ridgeline.launch.rank --logs DIR -- COMMAND ARGS`.

It finds out who it is from the launcher's variables, reports to the hub (`hub.py`), waits for the others,
sets the variables that torch, TensorFlow, JAX and Horovod read, takes the cores that are its own, and runs
the command as its child. Then it stands by: signals go on to the command, a sign of life goes to the
hub, and when the hub is gone or says so the command is ended. What the command wrote stays in
`DIR/rank-R.out`; rank 0's is passed on as well. Started by the command line of a scheduler's `step`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from ridgeline.errors import OURS, Requeue, RunError, UsageError, complain
from ridgeline.launch.bind import MODES, Bound, bind_rank, binding_variables, show_bindings
from ridgeline.launch.env import (
    ACCOUNT,
    BINDING,
    HUB,
    LAUNCHER,
    RANK_VARIABLES,
    RankEnv,
    cuda_visible,
    hub_address,
    on_terminal,
    read_rank_env,
)
from ridgeline.launch.frameworks import framework_notes, framework_variables
from ridgeline.launch.hub import BEAT_S, LOST_S, Member, read_members
from ridgeline.launch.topology import Topology, View, read_ranges, read_topology, show_ranges

_KNOCK_S = 5.0
_FIND_S = 120.0
"""How long the hub may be looked for: a node's network can come up after its daemon."""
_GRACE_S = 5.0
"""Between the request to end and the end."""
_NUM_PORTS = 3
_TAIL_LINES = 40
_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)


class Line:
    """The connection to the hub."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = bytearray()
        self.heard = time.monotonic()
        self.pending: list[dict[str, Any]] = []
        """What came with the start and is still to be heeded."""
        self.lost_s = LOST_S
        self.over = False
        """Whether the hub has said that all is to end."""

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """What has arrived; None when the other end is gone."""
        try:
            piece = self.socket.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not piece:
            return None
        self.heard = time.monotonic()
        self._buffer += piece
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        messages = [json.loads(line) for line in lines]
        self.over |= any("end" in message for message in messages)
        return messages


def find_hub(address: str, until: float) -> tuple[Line, str]:
    """The hub at one of the places that its address names, and the secret to be let in with."""
    token, _, places = address.partition("@")
    problems: dict[str, str] = {}
    while True:
        for place in places.split(","):
            host, _, port = place.rpartition(":")
            try:
                connection = socket.create_connection((host, int(port)), timeout=_KNOCK_S)
            except OSError as error:
                problems[place] = str(error)
                continue
            if connection.getsockname() == connection.getpeername():
                connection.close()  # a port that was free and was given to this very call
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Line(connection), token
        if time.monotonic() > until:
            told = "; ".join(f"{place}: {problem}" for place, problem in problems.items())
            raise RunError(
                f"{socket.gethostname()} does not reach the job's first process ({told}); check that "
                "the nodes of the job reach each other"
            )
        time.sleep(0.5)


def free_ports(num: int) -> list[int]:
    """Ports that nobody has on this node now."""
    held: list[socket.socket] = []
    with _closing(held):
        for _ in range(num):
            board = socket.socket()
            held.append(board)
            board.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            board.bind(("", 0))
        return [board.getsockname()[1] for board in held]


@contextmanager
def _closing(sockets: list[socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for one in sockets:
            one.close()


def join(env: RankEnv, view: View) -> tuple[Line, list[Member]]:
    """Report to the hub and wait for the others."""
    line, token = find_hub(hub_address(), time.monotonic() + _FIND_S)
    hello = {
        "rank": env.rank,
        "world_size": env.world_size,
        "local_rank": env.local_rank,
        "local_world_size": env.local_world_size,
        "node_rank": env.node_rank,
        "host": socket.gethostname(),
        "ports": free_ports(_NUM_PORTS),
        "pid": os.getpid(),
        "source": env.source,
        "cpus": show_ranges(view.cpus),
        "gpus": list(view.gpus),
    }
    line.send({"token": token, "hello": hello})
    while True:
        messages = line.read()
        if messages is None:
            raise RunError("the job's first process is gone before all ranks had come")
        for number, message in enumerate(messages):
            if "start" in message:
                line.pending = messages[number + 1 :]
                line.lost_s = message["start"]["lost_s"]
                return line, read_members(message["start"]["members"])
            if "end" in message:
                raise RunError(message["end"])
        if time.monotonic() - line.heard > LOST_S:
            raise RunError(f"the job's first process has been silent for {LOST_S:.0f} s")


class Child:
    """The rank's command, and where its output goes."""

    def __init__(
        self, command: list[str], logs: Path, rank: int, variables: dict[str, str]
    ) -> None:
        self.log = logs / f"rank-{rank}.out"
        logs.mkdir(parents=True, exist_ok=True)
        self._copies: list[threading.Thread] = []
        environment = {**os.environ, **variables, LAUNCHER: str(os.getpid())}
        environment.pop(HUB, None)  # the secret is the wrapper's
        options: dict[str, Any] = {
            "env": environment,
            "preexec_fn": _prepare_child,
            "process_group": 0,
        }
        shown = rank == 0
        # On a terminal the command gets it, so that its progress bars work.
        if shown and on_terminal() and sys.stdout.isatty():
            self.process = _spawn(command, options)
            return
        with self.log.open("ab") as file:
            if not shown:
                self.process = _spawn(command, {**options, "stdout": file, "stderr": file})
                return
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = _spawn(command, {**options, **pipes})
        kept = self.log.open("ab", buffering=0)
        for pipe, out in ((self.process.stdout, 1), (self.process.stderr, 2)):
            assert pipe is not None
            thread = threading.Thread(target=_copy, args=(pipe, out, kept), daemon=True)
            thread.start()
            self._copies.append(thread)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end(self, number: int) -> None:
        """The command and all that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def finish(self) -> None:
        """What it has left behind ends with it; all that it wrote is passed on."""
        self.end(signal.SIGKILL)
        for thread in self._copies:
            thread.join(5.0)

    def keep(self, account: dict[str, Any] | None) -> None:
        """An account that was not written to where the rest of its output is kept."""
        if account is None or not self._copies:
            return
        with suppress(OSError), self.log.open("a", encoding="utf-8") as file:
            file.write(f"{OURS}{account.get('message')}\n")

    def tail(self) -> str:
        """The last lines of what it wrote."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 16_384))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])


def _spawn(command: list[str], options: dict[str, Any]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, **options)
    except OSError as error:
        raise UsageError(
            f"cannot run {command[0]!r} on {socket.gethostname()}: {error.strerror}"
        ) from error


def end_with_parent() -> None:
    """In a child: on Linux the kernel ends it when whoever started it is killed outright."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _prepare_child() -> None:
    end_with_parent()
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_DFL)


def _copy(pipe: IO[bytes], out: int, kept: IO[bytes]) -> None:
    while piece := os.read(pipe.fileno(), 1 << 16):
        for write in (kept.write, lambda data: os.write(out, data)):
            with suppress(OSError):
                write(piece)


def stand_by(child: Child, line: Line) -> int:
    """Until the command has ended: its exit code (negative: a signal's)."""
    process, why, kill_at = child.process, "", 0.0
    last_beat = time.monotonic()
    alive: list[Any] = [line.socket]
    while process.poll() is None:
        readable, _, _ = select.select(alive, [], [], 0.1)
        messages = line.read() if readable else line.pending
        line.pending = []
        now = time.monotonic()
        if messages is None or (alive and now - line.heard > line.lost_s):
            alive = []
            messages = [{"end": "the job's first process is gone"}]
        for message in messages:
            if "signal" in message:
                child.signal(signal.Signals[message["signal"]])
            if "end" in message and not why:
                why, kill_at = message["end"], now + _GRACE_S
                child.end(signal.SIGTERM)
        if why and now > kill_at:
            child.end(signal.SIGKILL)
        if alive and now - last_beat > BEAT_S:
            last_beat = now
            with suppress(OSError):
                line.send({"beat": 1})
    return process.returncode


def _report(line: Line, rank: int, code: int, tail: str, account: dict[str, Any] | None) -> None:
    told = {"rank": rank, "code": code, "time": time.time(), "tail": tail, "account": account}
    with suppress(OSError):
        line.send({"exit": told})
        # A launcher ends all ranks at once when one has failed: the others get the time to say why first.
        until = time.monotonic() + _GRACE_S
        failed = code not in (0, Requeue.exit_code)
        while failed and not line.over and time.monotonic() < until:
            if select.select([line.socket], [], [], 0.2)[0] and line.read() is None:
                return


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ridgeline.launch.rank")
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--bind", choices=MODES, default="auto")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    forward: list[Callable[[int], None]] = []
    for number in _FORWARDED:
        signal.signal(number, lambda got, _: [send(got) for send in forward] and None)
    try:
        env = read_rank_env(needs_master=False)
        topology = read_topology(visible=cuda_visible())
        line, members = join(env, topology.view())
    except (UsageError, RunError) as error:
        return complain(error)
    account = options.logs / f"failure-{env.rank}.json"
    try:
        bound = _bind(options.bind, topology, members, env.rank)
        variables = {
            **RANK_VARIABLES,
            # What the first rank writes is shown, and whoever started the job says why it failed.
            **({ACCOUNT: str(account)} if env.rank == 0 else {}),
            **binding_variables(bound.mine, os.environ),
            **framework_variables(members, env.rank, os.environ),
            BINDING: json.dumps(bound.to_record()),
        }
        _tell_binding(bound, members[env.rank], options.logs)
        if env.rank == 0 and (notes := framework_notes(members)):
            (options.logs / "variables.txt").write_text("\n".join(notes) + "\n", encoding="utf-8")
        child = Child(command, options.logs, env.rank, variables)
    except OSError as error:
        text = f"cannot write to {options.logs} on {socket.gethostname()}: {error.strerror}"
        _report(line, env.rank, 1, "", {"message": text})
        return 1
    except (UsageError, RunError) as error:
        told = {"message": str(error), "usage": error.exit_code == 2}
        _report(line, env.rank, error.exit_code, "", told)
        return error.exit_code
    forward.append(child.signal)
    code = stand_by(child, line)
    child.finish()
    own = _read_account(account)
    child.keep(own)
    _report(line, env.rank, code, child.tail() if code else "", own)
    if code == Requeue.exit_code:
        return 0  # launchers end all ranks when one has an exit code; the hub knows better
    return code if code >= 0 else 128 - code


def _bind(mode: str, topology: Topology, members: list[Member], rank: int) -> Bound:
    """The share of this rank in what the ranks of its node see."""
    me = members[rank]
    here = [member for member in members if member.node_rank == me.node_rank]
    here.sort(key=lambda member: member.local_rank)
    views = [View(tuple(read_ranges(one.cpus)), one.gpus) for one in here]
    return bind_rank(mode, topology, here.index(me), views)


def _tell_binding(bound: Bound, me: Member, logs: Path) -> None:
    """The map of the node into the logs, and the first node's to whoever looks on."""
    if me.local_rank != 0:
        return
    text = show_bindings(bound.node)
    logs.mkdir(parents=True, exist_ok=True)
    (logs / f"binding-{me.node_rank}.txt").write_text(f"{me.host}\n{text}\n", encoding="utf-8")
    if bound.held and me.node_rank == 0:
        print(f"ranks of {me.host}:\n{text}", file=sys.stderr, flush=True)


def _read_account(path: Path) -> dict[str, Any] | None:
    """What the rank itself left as the reason of its end."""
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    return None


def _run() -> NoReturn:
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Threads that copy output may still wait for a grandchild that has it open.
    os._exit(code)


if __name__ == "__main__":
    _run()
