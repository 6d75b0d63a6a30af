"""Ranks on one node or on many: the ways in which a run's command is started on every one of them.

`Local` is processes on this machine. `Spread` uses the launcher of the nodes that were given
(`srun`, `jsrun`, `mpiexec`, `flux run`), or a connection to each host (`hosts.py`), to start `rank.py` once
a rank; who is there, how they ended and what they are told goes through the hub. Used by `survive.py` for
`ridgeline train` and by `supervise.py` for any other command.
"""

from __future__ import annotations

import collections
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ridgeline.errors import OURS, Requeue, RunError, UsageError
from ridgeline.launch.env import BIND, HUB, TERMINAL, read_limits, said_threads
from ridgeline.launch.failures import (
    RankError,
    RankFailure,
    is_echo,
    raise_first,
    signal_name,
)
from ridgeline.launch.hub import LOST_S, Hub, RankExit
from ridgeline.launch.job import Step
from ridgeline.launch.ranks import RankProcess
from ridgeline.launch.warm import Templates

_TAIL = 40
_END_S = 15.0
"""How long a launcher may take to end once its ranks have."""
_LOOK_S = 0.25
_SAME_S = 0.5
"""Ends that are no further apart may have been seen in another order; who ends others waits for longer."""


class Starter(Protocol):
    """One way to have ranks."""

    name: str
    num_ranks: int
    here: bool
    """Whether the ranks are all on this host, started by this process."""

    def run(
        self,
        command: list[str],
        num_ranks: int,
        log_dir: Path,
        threads: int | None,
        extra: Mapping[str, str],
    ) -> None:
        """Run `command` (for this interpreter) on every rank and wait; raises the first failure."""
        ...

    def send(self, processes: Iterable[RankProcess], name: str) -> None:
        """A signal to these ranks."""
        ...

    def kill(self) -> None:
        """End everything now."""
        ...

    def close(self) -> None:
        """No ranks will be asked for any more."""
        ...


class Local:
    """This machine."""

    name, here = "local", True

    def __init__(self, num_ranks: int, num_cores: int, bind: str = "auto") -> None:
        self.num_ranks, self._num_cores, self._bind = num_ranks, num_cores, bind
        self._templates = Templates()

    def run(
        self,
        command: list[str],
        num_ranks: int,
        log_dir: Path,
        threads: int | None,
        extra: Mapping[str, str],
    ) -> None:
        from ridgeline.launch.local import run_ranks

        cores = threads or said_threads() or max(1, self._num_cores // num_ranks)
        variables = {**extra, BIND: self._bind}
        run_ranks(command, num_ranks, log_dir, cores, variables, self._templates)

    def send(self, processes: Iterable[RankProcess], name: str) -> None:
        for process in processes:
            process.send(signal.Signals[name])

    def kill(self) -> None:
        import psutil

        self._templates.is_stopped = True
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                child.kill()

    def close(self) -> None:
        self._templates.close()


class Running(Protocol):
    """What was started to have ranks."""

    def poll(self) -> int | None: ...
    def stop(self) -> None: ...
    def kill(self) -> None: ...
    def last_words(self) -> str: ...


class LauncherProcess:
    """A launcher's command, whose complaints are passed on and the last of them kept."""

    def __init__(
        self, line: Sequence[str], variables: Mapping[str, str], stdin: bytes | None = None
    ) -> None:
        self._line = list(line)
        try:
            self._process = subprocess.Popen(
                self._line,
                env={**_without_places(), **variables},
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Ctrl-C is for whoever started this; it ends the launcher after the ranks.
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(
                f"cannot run {self._line[0]!r}: {error.strerror}; is it installed and on the PATH here?"
            ) from error
        if stdin is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(stdin)
                self._process.stdin.flush()
        self._tail: collections.deque[str] = collections.deque(maxlen=_TAIL)
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.terminate()

    def kill(self) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        self._thread.join(1.0)
        words = "\n".join(line for line in self._tail if line.strip())
        return (
            words
            or f"{shlex.join(self._line[:3])} ... ended with exit code {self._process.returncode}"
        )

    def _pass_on(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._tail.append(line.decode(errors="replace").rstrip("\n"))
            with suppress(OSError, ValueError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()


class Spread:
    """Nodes that a scheduler gave, or hosts that answer: ranks started by their own launcher."""

    here = False

    def __init__(
        self,
        name: str,
        start: Callable[[Step], Running],
        nodes: int,
        per_node: int,
        hosts: Sequence[str] = (),
        bind: str = "auto",
        prefix: Sequence[str] = (),
        cpus_per_rank: int | None = None,
        gpus_per_node: int | None = None,
        num_ranks: int | None = None,
        expected: Sequence[str] = (),
    ) -> None:
        """`hosts` are chosen; `expected` are those that the launcher will choose, so that one of which
        nothing is heard can be named. `prefix` comes before every rank's command: a container's. `start`
        has to start `step.command` once a rank, with `step.variables` in its environment."""
        self.name, self.nodes, self.per_node = name, nodes, per_node
        # Hosts may take more ranks or fewer each.
        self.num_ranks = nodes * per_node if num_ranks is None else num_ranks
        self._start, self._hosts, self._bind, self._prefix = start, tuple(hosts), bind, list(prefix)
        self._expected = tuple(hosts or expected)
        self._sizes = (cpus_per_rank, gpus_per_node)
        self.met = False
        """Whether all ranks have come together, in any call of `run`."""
        self._hub: Hub | None = None
        self._running: Running | None = None

    def run(
        self,
        command: list[str],
        num_ranks: int,
        log_dir: Path,
        threads: int | None,
        extra: Mapping[str, str],
    ) -> None:
        python = "python3" if self._prefix else sys.executable
        self.run_command([python, *command], num_ranks, log_dir, threads, extra)

    def run_command(
        self,
        command: list[str],
        num_ranks: int,
        log_dir: Path,
        threads: int | None,
        extra: Mapping[str, str],
    ) -> None:
        """As `run`, for any command."""
        if num_ranks != self.num_ranks:
            raise RunError(f"{self.name} starts {self.num_ranks} ranks, not {num_ranks}")
        log_dir.mkdir(parents=True, exist_ok=True)
        hub = self._hub = Hub(num_ranks, self._expected, read_limits().lost_s or LOST_S)
        wrapper = [sys.executable, "-m", "ridgeline.launch.rank", "--logs", str(log_dir.resolve())]
        whole = [*wrapper, "--bind", self._bind, "--", *self._prefix, *command]
        terminal = "1" if sys.stdout.isatty() else "0"
        variables = {**extra, HUB: hub.address, TERMINAL: terminal}
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
        step = Step(tuple(whole), self.nodes, self.per_node, self._hosts, *self._sizes, variables)
        try:
            running = self._running = self._start(step)
            try:
                self._wait(hub, running)
            except BaseException:
                hub.end("interrupted")
                if hub.missing():  # they would not hear of it
                    running.stop()
                self._let_end(hub, running)
                raise
            finally:
                self._let_end(hub, running)
            self.met = self.met or not hub.missing()
            self._judge(hub, running, log_dir)
        finally:
            hub.close()
            self._hub = self._running = None

    def send(self, processes: Iterable[RankProcess], name: str) -> None:
        if self._hub is not None:
            self._hub.signal(name, [process.rank for process in processes])

    def send_all(self, name: str) -> None:
        if self._hub is not None:
            self._hub.signal(name)

    def kill(self) -> None:
        if self._hub is not None:
            self._hub.end("asked to end at once")
        if self._running is not None:
            self._running.stop()

    def close(self) -> None:
        """Launchers start ranks one by one: nothing is kept for the next time."""

    def _wait(self, hub: Hub, running: Running) -> None:
        while not hub.wait(_LOOK_S) and running.poll() is None:
            pass
        if hub.problem is None and running.poll() is not None:
            # The launcher is done: what its ranks had to say has arrived or is about to.
            until = time.monotonic() + 3.0
            while not hub.wait(_LOOK_S) and time.monotonic() < until:
                pass

    def _let_end(self, hub: Hub, running: Running) -> None:
        until = time.monotonic() + _END_S
        while running.poll() is None and time.monotonic() < until:
            hub.wait(_LOOK_S)
            time.sleep(0.05)
        if running.poll() is None:
            running.stop()
            until = time.monotonic() + _END_S
            while running.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
        running.kill()

    def _judge(self, hub: Hub, running: Running, log_dir: Path) -> None:
        """One error of what the hub has heard; none when every rank ended well."""
        problem = hub.problem
        if problem is not None and problem.kind == "early" and not hub.unheard():
            raise RunError(f"{problem}: {running.last_words()}")
        if problem is not None and problem.kind not in ("lost", "missing", "early"):
            raise RunError(str(problem))
        if problem is not None and problem.kind != "early":
            raise _node_gone(problem.rank, str(problem))
        if not hub.members:
            raise RunError(f"no rank was started: {running.last_words()}")
        if absent := hub.missing():
            # Nobody's command has run; those who came were ended because others did not.
            came = f"{len(hub.members)} of {hub.num_ranks} ranks were started{hub.unheard()}"
            raise _node_gone(absent[0], f"{came}: {running.last_words()}")
        failures = [_as_failure(told, hub) for told in hub.exits.values() if told.failed]
        missing = [rank for rank in hub.members if rank not in hub.exits]
        if missing and not failures:
            text = f"is missing since {self.name} ended: {running.last_words()}"
            failures = [RankFailure(rank, time.time(), text) for rank in missing]
        if failures:
            raise_first(_said_by_all(failures, hub.num_ranks), log_dir)
        asking = [told.rank for told in hub.exits.values() if told.code]
        if asking:
            raise Requeue(
                f"rank {asking[0]} ended with exit code {Requeue.exit_code}, to be started again"
            )


def _without_places() -> dict[str, str]:
    """This environment, less what says which rank of another job this process is."""
    mine = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
    )
    return {name: value for name, value in os.environ.items() if name not in mine}


def _node_gone(rank: int, text: str) -> RankError:
    failure = RankFailure(rank, time.time(), text, decisive=True, node_gone=True)
    return RankError(text, failure, None)


def _said_by_all(failures: list[RankFailure], num_ranks: int) -> list[RankFailure]:
    """One for all where every rank has failed with the same words."""
    if num_ranks == 1 or len(failures) < num_ranks or len({one.message for one in failures}) > 1:
        return failures
    first = min(failures, key=lambda one: one.time)
    return [replace(first, message=f"{first.message} (on all {num_ranks} ranks)")]


def _as_failure(told: RankExit, hub: Hub) -> RankFailure:
    """What a rank said of its end, or what can be seen of it."""
    where = f" on {hub.members[told.rank].host}" if hub.members.get(told.rank) else ""
    if told.account is not None:
        return RankFailure(**{"rank": told.rank, "time": told.time, **told.account})
    if told.code < 0:
        name = signal_name(-told.code)
        # Launchers and the hub end the others with these once one has failed; nobody has before the first.
        first = all(told.time <= other.time + _SAME_S for other in hub.exits.values())
        echo = -told.code in (signal.SIGTERM, signal.SIGKILL) and not told.tail and not first
        return RankFailure(
            told.rank, told.time, f"was killed by {name}{where}", echo=echo or name == "SIGTERM"
        )
    last = [line for line in told.tail.splitlines() if line.strip()]
    words = f": {last[-1].strip()}" if last else ""
    ours = last[-1].partition(OURS)[2] if last and last[-1].startswith(OURS) else ""
    if ours and told.code in (UsageError.exit_code, RunError.exit_code):
        is_usage = told.code == UsageError.exit_code
        return RankFailure(told.rank, told.time, ours.strip(), usage=is_usage)
    return RankFailure(
        told.rank,
        told.time,
        f"ended with exit code {told.code}{where}{words}",
        echo=bool(last) and is_echo(last[-1]),
        traceback=told.tail,
    )
