"""A warm pool of gloo ranks: a distributed test is an ordinary function, run on n of them.

One server process per pytest session imports torch and the package once, with one thread, and forks
sets of ranks from there: a set of n ranks is one gloo group that stays for the session, because
leaving a group and joining another in the same process is what hangs. Tests call the pool through
the fixture `ranks` of `conftest.py`. A set in which anything went wrong is killed and made anew,
since nobody knows which collectives its ranks are still waiting in.

This file is also the server: `python pool.py ADDRESS`, told on standard input what to fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

TIMEOUT_S = 240.0
"""How long a call may take before it counts as hung."""
START_TIMEOUT_S = 240.0
MOST_THREADS = 40
"""Of a rank that is kept. A gloo group has three, one of which wakes a hundred times a second for as long
as the process lives: the groups of a few hundred tests take a core of their own."""
SETTLE_S = 0.2
"""After a failure: how long to wait for an account of an earlier one from another rank."""
GROUP_TIMEOUT_S = 600
"""Of the gloo group itself; longer than a call, so that a hang ends with every rank's stack."""
# One thread a rank and the same kernels whatever ran before: bf16 on a CPU without it switches
# mkldnn off for the rest of the process.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class RankFailure(AssertionError):
    """A rank raised or died; `error` is the exception itself where it could be sent."""

    def __init__(self, rank: int, text: str, error: BaseException | None = None) -> None:
        super().__init__(f"rank {rank} {text}")
        self.rank, self.error = rank, error


class RanksHang(AssertionError):
    """A call did not end in time; the message holds the stack of every rank."""


@dataclass(frozen=True)
class _Account:
    """How one rank's call ended, as it is sent back."""

    ok: bool
    time: float
    value: bytes
    text: str = ""


@dataclass
class _Set:
    """n ranks in one process group."""

    folder: Path
    connections: list[Connection]
    pids: list[int]

    def kill(self) -> None:
        for pid, connection in zip(self.pids, self.connections, strict=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            connection.close()

    @property
    def num_threads(self) -> int:
        """Of the first rank."""
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self.pids[0]}/task"))
        return 0

    def said(self, rank: int) -> str:
        """The last lines that a rank wrote to standard output and error."""
        path = self.folder / f"output-{rank}"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "".join(f"  | {line}\n" for line in lines[-20:])


class RankPool:
    """`pool(n, function, *args)` runs a test module's top-level function on n ranks."""

    Failure = RankFailure
    Hang = RanksHang

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ridgeline-pool-")
        self._root = Path(self._folder.name)
        address = str(self._root / "socket")
        self._listener = Listener(address, family="AF_UNIX", backlog=16)
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), address],
            stdin=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._sets: dict[int, _Set] = {}
        self._num_sets = 0

    def __call__(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_S
    ) -> list[Any]:
        """The function's result on each rank, by rank."""
        ranks = self._set(num_ranks)
        module = sys.modules[function.__module__]
        place = (module.__name__, str(module.__file__), function.__qualname__)
        call = pickle.dumps((place, pickle.dumps(args)))
        try:
            for connection in ranks.connections:
                connection.send_bytes(call)
            accounts = self._collect(ranks, timeout)
        except BaseException:
            self._sets.pop(num_ranks).kill()
            raise
        return [pickle.loads(account.value) for account in accounts]

    def pids(self, num_ranks: int) -> list[int]:
        return list(self._set(num_ranks).pids)

    def close(self) -> None:
        for ranks in self._sets.values():
            ranks.kill()
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(5)
        except subprocess.TimeoutExpired:
            # A process that some test forked off this one holds the other end of the pipe too.
            self._server.kill()
            self._server.wait()
        self._listener.close()
        self._folder.cleanup()

    def _collect(self, ranks: _Set, timeout: float) -> list[_Account]:
        accounts: dict[int, _Account] = {}
        waiting = {connection: rank for rank, connection in enumerate(ranks.connections)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                accounts[rank] = self._receive(connection, rank)  # type: ignore[arg-type]
                if not accounts[rank].ok:
                    deadline = min(deadline, time.monotonic() + SETTLE_S)
        failed = [rank for rank in accounts if not accounts[rank].ok]
        if failed:
            first = min(failed, key=lambda rank: accounts[rank].time)
            account = accounts[first]
            error = pickle.loads(account.value) if account.value else None
            raise RankFailure(first, account.text + ranks.said(first), error)
        if waiting:
            raise RanksHang(self._describe_hang(ranks, sorted(waiting.values()), timeout))
        return [accounts[rank] for rank in range(len(ranks.connections))]

    @staticmethod
    def _receive(connection: Connection, rank: int) -> _Account:
        try:
            account: _Account = _Account(*pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            return _Account(False, time.monotonic(), b"", "died without a word\n")
        return account

    @staticmethod
    def _describe_hang(ranks: _Set, hung: list[int], timeout: float) -> str:
        for pid in ranks.pids:
            os.kill(pid, signal.SIGRTMIN)
        time.sleep(0.3)  # the handler writes the stack; there is nothing to wait on
        text = f"ranks {hung} did not end within {timeout:g} s\n"
        for rank in range(len(ranks.pids)):
            stack = (ranks.folder / f"stack-{rank}").read_text(errors="replace")
            text += f"--- rank {rank}{'' if rank in hung else ' (done)'}\n{stack}{ranks.said(rank)}"
        return text

    def _set(self, num_ranks: int) -> _Set:
        if num_ranks in self._sets and self._sets[num_ranks].num_threads > MOST_THREADS:
            self._sets.pop(num_ranks).kill()
        if num_ranks not in self._sets:
            self._sets[num_ranks] = self._start(num_ranks)
        return self._sets[num_ranks]

    def _start(self, num_ranks: int) -> _Set:
        self._num_sets += 1
        folder = self._root / f"set-{self._num_sets}"
        folder.mkdir()
        assert self._server.stdin is not None
        self._server.stdin.write(f"{num_ranks} {folder}\n")
        self._server.stdin.flush()
        found: dict[int, tuple[Connection, int]] = {}
        while len(found) < num_ranks:
            if self._server.poll() is not None:
                raise RuntimeError(f"the server of ranks ended with {self._server.returncode}")
            socket = self._listener._listener._socket  # type: ignore[attr-defined]
            socket.settimeout(START_TIMEOUT_S)
            connection = self._listener.accept()
            rank, pid = connection.recv()
            found[rank] = (connection, pid)
        pairs = [found[rank] for rank in range(num_ranks)]
        return _Set(folder, [c for c, _ in pairs], [pid for _, pid in pairs])


# The server and the ranks.


def serve(address: str) -> None:
    """Import everything once, then fork a set of ranks for each line `NUM_RANKS FOLDER`."""
    import pytest  # noqa: F401
    import torch
    import torch._dynamo  # two seconds that building any optimizer would cost every rank
    import torch._inductor.cudagraph_trees
    import torch.utils.flop_counter

    import ridgeline.train.job
    import ridgeline.train.run  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that ranks that ended leave no zombies
    children: list[int] = []
    for line in sys.stdin:
        count, folder = line.split(maxsplit=1)
        for rank in range(int(count)):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, int(count), Path(folder.rstrip("\n")), address)
            children.append(pid)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)  # nothing is left to tidy, and the interpreter would take a second to do it


def _be_rank(rank: int, num_ranks: int, folder: Path, address: str) -> NoReturn:
    """A rank's whole life: join, run what it is sent, end when nobody is left to send."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        faulthandler.register(signal.SIGRTMIN, file=(folder / f"stack-{rank}").open("w"))
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(num_ranks),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(num_ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="0",
        )
        _join(rank, num_ranks, folder)
        connection = Client(address)
        connection.send((rank, os.getpid()))
        modules: dict[str, ModuleType] = {}
        while True:
            account = _answer(connection.recv_bytes(), modules)
            sys.stdout.flush()
            connection.send_bytes(pickle.dumps(account))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _join(rank: int, num_ranks: int, folder: Path) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.backends.mkldnn.enabled = False
    if num_ranks > 1:
        store = dist.FileStore(str(folder / "store"), num_ranks)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )


def _answer(call: bytes, modules: dict[str, ModuleType]) -> tuple[bool, float, bytes, str]:
    import torch

    torch.manual_seed(0)
    try:
        (name, path, function), packed = pickle.loads(call)
        if path not in modules:
            modules[path] = _load(name, path)
        found: Any = modules[path]
        for part in function.split("."):
            found = getattr(found, part)
        return True, time.monotonic(), pickle.dumps(found(*pickle.loads(packed))), ""
    except BaseException as error:
        when = time.monotonic()
        text = f"raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
        except Exception:
            packed = b""
        return False, when, packed, text


def _load(name: str, path: str) -> ModuleType:
    """A test module under the name it has in pytest, so that what it defines can be sent."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    while "." in name:  # pickle imports `tests` before `tests.dist.test_x`, and it is no package
        name = name.rpartition(".")[0]
        sys.modules.setdefault(name, ModuleType(name))
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    serve(sys.argv[1])
