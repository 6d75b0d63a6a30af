"""Ranks of one host forked from one process that has loaded what every rank loads.

Python with torch takes seconds of a core, and thousands of small reads of a shared file system, before a
rank has done anything; n ranks take it n times at once, and every restart again. Here one process, the
template, does it once. It forks a rank in some hundredths of a second, and stands by for restarts. Only
what computes nothing is done before the fork: where loading has opened a device, which no child could use
then, or a tool is to watch every process from its start, ranks are started one by one as before, and so
they are where anything else is in the way.

`Template` is the launcher's side and imports without torch; `main` is the template's. Used by `local.py`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from ridgeline.errors import say
from ridgeline.launch.env import LAUNCHER, wants_warm
from ridgeline.launch.rank import end_with_parent

WORKER = "ridgeline.train.worker"
"""The module whose ranks a template is for."""
LOADED = ("ridgeline.train.run", "torch._dynamo", "torch.utils.flop_counter")
"""What each of them imports, or building its optimizer does."""
_AT_LOADING = (
    *("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"),
    *(
        "LD_PRELOAD",
        "LD_AUDIT",
        "KINETO_USE_DAEMON",
        "CUDA_INJECTION64_PATH",
        "NVTX_INJECTION64_PATH",
    ),
    *("ROCP_TOOL_LIB", "HSA_TOOLS_LIB", "INTEL_LIBITTNOTIFY64"),
)
"""By these, threads get cores when a library is loaded, the same in all that is forked then, or profilers
begin with a process, and know nothing of those that are forked from it."""
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
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
_FORK_S = 120.0
_END_S = 5.0
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
        if self.returncode is None and not self._template.is_alive:
            self.returncode = _LOST
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
        self.unfit = ""
        """Why no rank can be forked from it."""
        self._waits = select.poll()  # a launcher may have more files open than select can name
        self._waits.register(self._socket, select.POLLIN)
        # Ranks write their own command over this one, for which there has to be room.
        shown = f"ranks of: {shlex.join([sys.executable, *command])}"
        ignored = [number for number in _NOT_OURS if signal.getsignal(number) is signal.SIG_IGN]
        numbers = ",".join(str(int(number)) for number in ignored)
        words = (str(theirs.fileno()), ",".join(LOADED), numbers, shown)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ridgeline.launch.warm", *words],
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                preexec_fn=_prepare,
            )

    def is_ready(self, stop: Callable[[], bool]) -> bool:
        """Whether it can fork, once it knows; False also where `stop` says so first."""
        answer = self._await(stop)
        self.unfit = (answer or {}).get("unfit", "")
        if answer is None or self.unfit:
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
        if "pid" not in answer:  # whoever starts it otherwise will meet the reason
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
        while self.is_alive and self._waits.poll(1000 * wait_s):
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
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:  # a file system that hangs, say
            say(
                f"the process that loads torch for ranks ({self._process.pid}) does not end when killed"
            )
        for rank in self._ranks.values():
            rank.returncode = _LOST
        self._ranks.clear()


class Templates:
    """At most one, kept between the attempts of a run."""

    def __init__(self, is_wanted: bool = True) -> None:
        self._template: Template | None = None
        self._is_off = not is_wanted or sys.platform != "linux"
        self.is_stopped = False
        """Whether nothing is to be started any more."""

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
        if any(environment.get(name) for name in _AT_LOADING):
            return None
        if None in (sys.stdin, sys.stdout, sys.stderr):  # closed, and files get their numbers
            return None
        template = self._template
        if template is not None:
            template.hear(0.0)
            if not template.is_alive or template.differs(environment) - told:
                self.close()
                template = None
        if template is None:
            template = self._template = Template(command, environment)
            if not template.is_ready(stop):
                self._template = None
                if template.unfit:
                    self._is_off = True
                    say(f"ranks are started one by one: {template.unfit}")
                return None
        return template

    def close(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None


def _prepare() -> None:
    end_with_parent()
    for number in _NOT_OURS:
        signal.signal(number, signal.SIG_IGN)


# In the template


def main(argv: list[str]) -> NoReturn:
    line = socket.socket(fileno=int(argv[0]))
    os.set_inheritable(line.fileno(), False)
    ignored = {signal.Signals(int(number)) for number in argv[2].split(",") if number}
    wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    gc.disable()  # what is imported stays: looking for garbage in it takes a tenth of the time
    unfit = _load(argv[1].split(","))
    gc.freeze()  # and it is shared with the ranks, as long as nobody writes to it
    waits = select.poll()
    for file in (line.fileno(), wakes):
        waits.register(file, select.POLLIN)
    with suppress(OSError):  # of the socket: the launcher is gone
        _send(line, {"unfit": unfit} if unfit else {"ready": True})
        while not unfit:
            ready = [file for file, _ in waits.poll()]
            if wakes in ready:
                with suppress(BlockingIOError):
                    os.read(wakes, 1 << 16)
                _tell_ended(line)
            if line.fileno() in ready:
                message, files, _, _ = socket.recv_fds(line, _LARGEST, 2)
                if not message:
                    break
                _send(line, _fork((line.fileno(), wakes, wake), message, files, ignored))
                for file in files:
                    os.close(file)
    os._exit(0)


def _send(line: socket.socket, message: Mapping[str, Any]) -> None:
    line.send(json.dumps(message).encode())


def _load(names: Sequence[str]) -> str:
    """What every rank needs; why no rank can be forked from this process, or empty."""
    try:
        before = _devices()
        for name in names:
            __import__(name)
        opened = sorted(_devices() - before)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "loading torch has opened a GPU"
    return f"loading torch has opened {opened[0]}" if opened else ""


def _devices() -> set[str]:
    """Those that this process has open."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that this very listing needs
            if stat.S_ISCHR(path.stat().st_mode):
                found.add(str(path.readlink()))
    return found.difference(_HARMLESS)


def _tell_ended(line: socket.socket) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            _send(line, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _fork(
    own: Sequence[int], message: bytes, files: list[int], ignored: set[signal.Signals]
) -> dict[str, Any]:
    """The rank's process id, once it leads a group of its own; or why there is none."""
    begun, begins = os.pipe2(os.O_CLOEXEC)
    try:
        with warnings.catch_warnings():
            # Libraries may have threads that wait for work, and start others where they are forked.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            _rank((*own, begun), message, files, begins, ignored)
    except OSError as error:
        os.close(begun)
        return {"failed": str(error)}
    finally:
        os.close(begins)
    os.read(begun, 1)
    os.close(begun)
    return {"pid": pid}


def _rank(
    closed: Sequence[int],
    message: bytes,
    files: list[int],
    begins: int,
    ignored: set[signal.Signals],
) -> NoReturn:
    """The whole life of a rank. What would be done at an interpreter's end is not, as in the worker, which
    ends by itself in this way."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for one in closed:
            os.close(one)
        _become(json.loads(message), files, begins, ignored)
        code = 0
    except SystemExit as end:
        code = _code_of(end)
    except BaseException:
        with suppress(BaseException):
            sys.excepthook(*sys.exc_info())
    finally:
        # Whatever happens, nothing of this process goes on as a template.
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        os._exit(code)


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    with suppress(BaseException):
        print(end.code, file=sys.stderr)
    return 1


def _become(
    told: dict[str, Any], files: list[int], begins: int, ignored: set[signal.Signals]
) -> None:
    """A rank, as if it had been started by itself."""
    os.setsid()
    end_with_parent()
    for one in (*_NOT_OURS, signal.SIGCHLD):
        signal.signal(one, signal.SIG_IGN if one in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
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
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own is seeded anew in every fork
    command = told["command"]
    _show([sys.executable, *command])
    sys.argv = ["-m", *command[2:]]
    gc.enable()
    runpy.run_module(command[1], run_name="__main__", alter_sys=True)


def _show(command: list[str]) -> None:
    """The rank's own command in `ps`, in the place of the template's, which is longer. The system takes
    what does not end with a zero for a text of the program's own, up to the first zero."""
    with suppress(OSError, ValueError, IndexError):
        after = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(after[45]), int(after[46])
        text = " ".join(command).encode(errors="surrogateescape")[: end - begin - 2]
        if 2 < end - begin < _LARGEST:
            ctypes.memmove(begin, text.ljust(end - begin - 1, b"\0") + b"\1", end - begin)


if __name__ == "__main__":
    main(sys.argv[1:])
