"""Ranks of one host forked from one process that has loaded what every rank loads.

Python with torch takes seconds of a core, and thousands of small reads of a shared file system, before a
rank has done anything; n ranks take it n times at once, and every restart again. Here one process, the
template, does it once. It forks a rank in some hundredths of a second, and stands by for restarts. Only
what computes nothing is done before the fork: a template that has opened a device, which no child could use
then, says so, and ranks are started one by one as before.

`Template` is the launcher's side and imports without torch; `main` is the template's. Used by `local.py`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from ridgeline.launch.env import LAUNCHER, wants_warm
from ridgeline.launch.rank import end_with_parent

WORKER = "ridgeline.train.worker"
"""The module whose ranks a template is for."""
LOADED = ("ridgeline.train.run", "torch._dynamo", "torch.utils.flop_counter")
"""What each of them imports, or building its optimizer does."""
_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""By these, threads get cores when a library is loaded: in a template all ranks would get the same."""
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel")
_NOT_OURS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""A scheduler sends its signals to every process; they are for the launcher and for ranks."""
_LOST = -int(signal.SIGKILL)
_FORK_S = 30.0
_LARGEST = 1 << 17


class Forked:
    """A rank, with as much of a `Popen` as a launcher needs."""

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template

    def poll(self) -> int | None:
        if self.returncode is None:
            self._template.hear(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self._template.hear(0.05)
        assert self.returncode is not None
        return self.returncode


class Template:
    """The process that ranks are forked from."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ranks: dict[int, Forked] = {}
        self._ended: dict[int, int] = {}
        self._answer: dict[str, Any] | None = None
        self.is_alive = True
        # Ranks write their own command over this one, for which there has to be room.
        shown = f"ranks of: {shlex.join([sys.executable, *command])}"
        words = (str(theirs.fileno()), ",".join(LOADED), shown)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ridgeline.launch.warm", *words],
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def is_ready(self, stop: Callable[[], bool]) -> bool:
        """Whether it can fork, once it knows; False also where `stop` says so first."""
        answer = self._await(stop)
        if answer is None or "unfit" in answer:
            self.close()
        return self.is_alive

    def _await(self, stop: Callable[[], bool]) -> dict[str, Any] | None:
        while self.is_alive and self._answer is None and not stop():
            self.hear(0.05)
        return self._answer

    def differs(self, environment: Mapping[str, str]) -> set[str]:
        """The variables that are not as they were when it was started."""
        before = self._environment
        names = before.keys() | environment.keys()
        return {name for name in names if before.get(name) != environment.get(name)}

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        out: IO[bytes] | None,
        err: IO[bytes] | None,
    ) -> Forked | None:
        """A rank that runs `command` (`-m MODULE ARGUMENT...`); None where the template is gone."""
        told = {name: environment.get(name) for name in self.differs(environment)}
        message = json.dumps({"command": list(command), "variables": told}).encode()
        files = [file.fileno() for file in (out, err) if file is not None]
        self._answer = None
        try:
            socket.send_fds(self._socket, [message], files)
        except OSError:
            self.close()
            return None
        until = time.monotonic() + _FORK_S
        answer = self._await(lambda: time.monotonic() > until)
        if answer is None:
            self.close()
            return None
        pid: int = answer["pid"]
        rank = Forked(self, pid)
        if pid in self._ended:  # it was over before it was known
            rank.returncode = self._ended.pop(pid)
        else:
            self._ranks[pid] = rank
        return rank

    def hear(self, wait_s: float) -> None:
        """What it has said by now: answers, and how ranks have ended."""
        while self.is_alive and select.select([self._socket], [], [], wait_s)[0]:
            wait_s = 0.0
            try:
                piece = self._socket.recv(_LARGEST)
            except OSError:
                piece = b""
            if not piece:
                self.close()
                return
            message = json.loads(piece)
            if "ended" not in message:
                self._answer = message
            elif (rank := self._ranks.pop(message["ended"], None)) is not None:
                rank.returncode = message["code"]
            else:
                self._ended[message["ended"]] = message["code"]

    def close(self) -> None:
        """End it, and ranks that are left with it."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._socket.close()
        with suppress(OSError):
            self._process.kill()
        self._process.wait()
        for rank in self._ranks.values():
            rank.returncode = _LOST
        self._ranks.clear()


class Templates:
    """At most one, kept between the attempts of a run."""

    def __init__(self) -> None:
        self._template: Template | None = None
        self._is_off = sys.platform != "linux"

    def get(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        told: set[str],
        stop: Callable[[], bool],
    ) -> Template | None:
        """One that forks ranks of `command`, where that is possible and wanted. `told` are the variables
        that ranks may have of their own."""
        if self._is_off or list(command[:2]) != ["-m", WORKER] or not wants_warm(environment):
            return None
        if any(environment.get(name) for name in _PLACES):
            return None
        template = self._template
        if template is not None and not (
            template.is_alive and template.differs(environment) <= told
        ):
            self.close()
            template = None
        if template is None:
            template = self._template = Template(command, environment)
            if not template.is_ready(stop):
                self._template, self._is_off = None, not stop()
                return None
        return template

    def close(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None


# In the template


def main(argv: list[str]) -> NoReturn:
    line = socket.socket(fileno=int(argv[0]))
    end_with_parent()
    os.set_inheritable(line.fileno(), False)
    for one in _NOT_OURS:
        signal.signal(one, signal.SIG_IGN)
    wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    gc.disable()  # what is imported stays: looking for garbage in it takes a tenth of the time
    unfit = _load(argv[1].split(","))
    gc.freeze()  # and it is shared with the ranks, as long as nobody writes to it
    try:
        line.send(json.dumps({"unfit": unfit} if unfit else {"ready": True}).encode())
        while not unfit:
            ready, _, _ = select.select([line.fileno(), wakes], [], [])
            if wakes in ready:
                with suppress(BlockingIOError):
                    os.read(wakes, 1 << 16)
                _tell_ended(line)
            if line.fileno() in ready:
                message, files, _, _ = socket.recv_fds(line, _LARGEST, 2)
                if not message:
                    break
                line.send(json.dumps({"pid": _fork(line, wakes, wake, message, files)}).encode())
                for file in files:
                    os.close(file)
    except OSError:
        pass  # the launcher is gone
    os._exit(0)


def _load(names: Sequence[str]) -> str:
    """What every rank needs; why no rank can be forked from this process, or empty."""
    try:
        for name in names:
            __import__(name)
    except BaseException as error:  # as each rank will find and tell by itself
        return f"{type(error).__name__}: {error}"
    held = [link for link in _open_files() if link.startswith(_DEVICES)]
    return f"{held[0]} is open" if held else ""


def _open_files() -> list[str]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(path.readlink()))
    return found


def _tell_ended(line: socket.socket) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            line.send(json.dumps({"ended": pid, "code": code}).encode())


def _fork(line: socket.socket, wakes: int, wake: int, message: bytes, files: list[int]) -> int:
    """The rank's process id, once it leads a group of its own."""
    begun, begins = os.pipe2(os.O_CLOEXEC)
    with warnings.catch_warnings():
        # Libraries may have threads that wait for work, and start others where they are forked.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        _rank((line.detach(), wakes, wake, begun), message, files, begins)
    os.close(begins)
    os.read(begun, 1)
    os.close(begun)
    return pid


def _rank(closed: Sequence[int], message: bytes, files: list[int], begins: int) -> NoReturn:
    """The whole life of a rank."""
    try:
        signal.set_wakeup_fd(-1)
        for one in closed:
            os.close(one)
        _become(json.loads(message), files, begins)
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
        _leave(code if isinstance(code, int) else int(code is not None))
    except BaseException:
        traceback.print_exc()
    _leave(1)


def _become(told: dict[str, Any], files: list[int], begins: int) -> None:
    """A rank, as if it had been started by itself."""
    os.setsid()
    end_with_parent()
    for one in (*_NOT_OURS, signal.SIGCHLD):
        signal.signal(one, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for file, number in zip(files, (1, 2), strict=False):
        os.dup2(file, number)
        os.close(file)
    os.close(begins)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())  # type: ignore[union-attr]
    for name, value in told["variables"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ[LAUNCHER] = str(os.getppid())  # who started it, as a rank sees that
    _unlike_others()
    command = told["command"]
    _show([sys.executable, *command])
    sys.argv = ["-m", *command[2:]]
    gc.enable()
    runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    _leave(0)


def _unlike_others() -> None:
    """What differs between processes that were started one by one, or was counted when they loaded it."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    said = os.environ.get("OMP_NUM_THREADS", "")
    if said and (torch := sys.modules.get("torch")) is not None:
        with suppress(ValueError):
            torch.set_num_threads(int(said.partition(",")[0]))


def _show(command: list[str]) -> None:
    """The rank's own command in `ps`, written over that of the template, which is longer."""
    with suppress(OSError, ValueError, IndexError):
        after = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(after[45]), int(after[46])
        text = b"\0".join(word.encode() for word in command)[: end - begin - 1]
        if 0 < end - begin < _LARGEST:
            ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
