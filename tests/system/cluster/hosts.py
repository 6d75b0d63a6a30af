"""Several hosts on one machine: each has its own address, name and processes, and all see the same files.

A host is a network, host-name, process and mount namespace. They hang on a bridge that lies in a world of
its own, whose first process dies with the tests: nothing of it is seen outside, so that addresses and
ports are the same in every world and two worlds, or what a crash has left, cannot collide. Host 0 is the
head, with the bridge, from which tests give their commands.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[3]
HEAD = "head"
_NETWORK = "10.77.0"
_NEW = ("--net", "--uts", "--pid", "--mount")
_UP_S = 20
# What a command on a host gets of the tests' environment: not what a launcher around them has set.
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "USER", "LOGNAME", "TMPDIR", "VIRTUAL_ENV")


def base_environment() -> dict[str, str]:
    """For commands on a host: this checkout, and one thread a process."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}:/usr/sbin:/sbin"
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"HOME": "/root", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **kept, **threads}


def wait_until(what: str, test: Callable[[], Any], timeout_s: float, every_s: float = 0.1) -> Any:
    """What `test` returns once it is something; fails with `what` when that takes too long."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = test()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(every_s)


class Hosts:
    """`num` hosts, `host1` and so on. `close` ends every process on them."""

    def __init__(self, folder: Path, num: int, prefix: str = "host") -> None:
        self.folder = folder
        self.names = (HEAD, *(f"{prefix}{i}" for i in range(1, num + 1)))
        """By index; 0 is the head."""
        self.num = num
        self.environ = {**base_environment(), "XDG_STATE_HOME": str(folder / "state-of-user")}
        """Given to every command; what a test adds here, all later ones get."""
        self._inits: dict[int, psutil.Process] = {}
        self._started: list[subprocess.Popen[str]] = []
        self._hosts_file = folder / "hosts"

    def start(self) -> None:
        lines = [
            "127.0.0.1 localhost",
            *(f"{self.address(i)} {n}" for i, n in enumerate(self.names)),
        ]
        self._hosts_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self._boot(0)
        self._head("ip link add bridge type bridge")
        self._head(f"ip addr add {self.address(0)}/24 dev bridge")
        self._head("ip link set bridge up")
        for index in range(1, self.num + 1):
            self.up(index)
        self.rsh = self._write_rsh()

    def close(self) -> None:
        """The head's first process is an ancestor of everything here."""
        self.kill(0)
        for process in self._started:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def address(self, index: int) -> str:
        return f"{_NETWORK}.{index or 254}"

    def index(self, name: str) -> int:
        return self.names.index(name)

    def is_up(self, index: int) -> bool:
        return index in self._inits and self._inits[index].is_running()

    def up(self, index: int) -> None:
        """Switch a host on, with its link to the others."""
        if self.is_up(index):
            return
        self._boot(index)
        pid, port = self._inits[index].pid, f"port{index}"
        # Of a host that lost its power the kernel takes down the network when it finds time to.
        self._head(f"ip link del {port}", check=False)
        self._head(f"ip link add {port} type veth peer name eth0 netns {pid}")
        self._head(f"ip link set {port} master bridge up")
        inside = f"nsenter --target {pid} --net"
        self._do(f"{inside} ip addr add {self.address(index)}/24 dev eth0")
        self._do(f"{inside} ip link set eth0 up")

    def kill(self, index: int) -> None:
        """Power loss: every process of the host is gone at once, and nobody is told. Its link goes first,
        because the kernel would still close the connections of processes that it ends."""
        init = self._inits.pop(index, None)
        if init is None:
            return
        if index:
            self.cut(index)
        with suppress(psutil.NoSuchProcess):
            init.kill()
        psutil.wait_procs([init], timeout=_UP_S)

    def cut(self, index: int) -> None:
        """Take the host off the network; its processes go on."""
        self._head(f"ip link set port{index} down")

    def mend(self, index: int) -> None:
        self._head(f"ip link set port{index} up")

    def enter(
        self,
        index: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> list[str]:
        """The command that runs `argv` on a host, from outside."""
        given = {**self.environ, **(env or {})}
        place = ["nsenter", "--target", str(self._inits[index].pid), *_NEW, "--"]
        names = [f"{name}={value}" for name, value in given.items()]
        return [*place, "env", "-i", f"--chdir={cwd}", *names, *argv]

    def popen(
        self,
        index: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command and come back; it is ended by `close` at the latest."""
        process = subprocess.Popen(self.enter(index, argv, env, cwd), text=True, **options)
        self._started.append(process)
        return process

    def run(
        self,
        index: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        timeout: float = 480,
        check: bool = False,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `check` shows what it said when it fails."""
        command = self.enter(index, argv, env, cwd)
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, input=stdin)
        if check and done.returncode != 0:
            raise AssertionError(
                f"{shlex.join(argv)} on {self.names[index]} ended with {done.returncode}\n"
                f"{done.stdout}{done.stderr}"
            )
        return done

    def processes(self, index: int) -> list[psutil.Process]:
        """What runs on a host, without its first process and what has ended already."""
        init = self._inits[index]
        space = os.readlink(f"/proc/{init.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                same = os.readlink(f"/proc/{process.pid}/ns/pid") == space
                if same and process.pid != init.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def matching(self, word: str) -> dict[str, list[str]]:
        """By name of the host, the commands on it that have this word in them."""
        found: dict[str, list[str]] = {}
        for index in (i for i in range(self.num + 1) if self.is_up(i)):
            for process in self.processes(index):
                with suppress(psutil.Error):
                    line = shlex.join(process.cmdline())
                    if word in line:
                        found.setdefault(self.names[index], []).append(line)
        return found

    def _boot(self, index: int) -> None:
        """A first process in new namespaces; those of other hosts lie within the head's."""
        inner = ["unshare", *_NEW, "--fork", "--kill-child", "--mount-proc", "--"]
        first = [sys.executable, "-S", str(Path(__file__).with_name("init.py"))]
        command = [*inner, *first, self.names[index], str(self._hosts_file)]
        if index:
            command = ["nsenter", "--target", str(self._inits[0].pid), *_NEW, "--", *command]
        said = self.folder / f"{self.names[index]}.boot"
        with said.open("w") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._started.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{self.names[index]} did not come up: {said.read_text().strip()}")
        # unshare and nsenter each wait for one child, and the last in the line is the first process.
        last = psutil.Process(process.pid)
        while children := last.children():
            last = children[0]
        self._inits[index] = last

    def _write_rsh(self) -> Path:
        """A stand-in for ssh: `rsh HOST COMMAND...`, the words joined to one line for a shell there, in a
        fresh environment and the home folder, with stdin passed on. From the head or from outside; it
        goes past the network, so it reaches a host that is cut off."""
        path = self.folder / "rsh"
        path.write_text(
            f"#!{sys.executable} -S\n"
            "import os, sys\n"
            "args = sys.argv[1:]\n"
            "while args and args[0].startswith('-'):\n"
            "    del args[: 2 if args[0] in ('-o', '-l', '-p', '-i', '-F') else 1]\n"
            "host, words = args[0].rpartition('@')[2], args[1:]\n"
            f"hosts = {self.names!r}\n"
            "if host not in hosts:\n"
            "    sys.exit(f'rsh: Could not resolve hostname {host}: Name or service not known')\n"
            "for entry in filter(str.isdigit, os.listdir('/proc')):\n"
            "    try:\n"
            "        line = open(f'/proc/{entry}/cmdline').read().split('\\0')\n"
            "    except OSError:\n"
            "        continue\n"
            f"    if line[-3:] == [host, {str(self._hosts_file)!r}, ''] and 'python' in line[0]:\n"
            "        break\n"
            "else:\n"
            "    sys.exit(f'rsh: connect to host {host}: No route to host')\n"
            f"place = ['nsenter', '--target', entry, *{_NEW!r}, '--']\n"
            "clean = ['env', '-i', '--chdir=/root', 'HOME=/root', 'USER=root', 'SHELL=/bin/bash',\n"
            "         'PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin']\n"
            "command = [*place, *clean, '/bin/bash', '-c', ' '.join(words)]\n"
            "os.execvp(command[0], command)\n",
            encoding="utf-8",
        )
        path.chmod(0o755)
        return path

    def _head(self, line: str, check: bool = True) -> None:
        self._do(f"nsenter --target {self._inits[0].pid} --net {line}", check)

    def _do(self, line: str, check: bool = True) -> None:
        done = subprocess.run(line.split(), capture_output=True, text=True, timeout=_UP_S)
        if check and done.returncode != 0:
            raise RuntimeError(f"{line}: {done.stderr.strip()}")
