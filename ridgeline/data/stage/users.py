"""Who uses a copy: processes, told from others that later got the same number.

Kept in a file of the copy and changed only under its lock (`held.py`). A process that was killed counts
no more, nor does one from before this host was started again; one of another host or container cannot
be looked up from here and counts as alive.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

_UNKNOWN = "-"


@dataclass(frozen=True)
class User:
    pid: int
    started: float
    """When the process began, as the system counts it."""
    world: str
    """Where `pid` means something: host/boot/namespace of process numbers."""

    def is_alive(self) -> bool:
        import psutil

        if self.world != this_world():
            return not self._is_of_an_earlier_boot()
        try:
            process = psutil.Process(self.pid)
            ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return not ended and abs(process.create_time() - self.started) < 1.0
        except psutil.Error:
            return False

    def _is_of_an_earlier_boot(self) -> bool:
        """Whether it is of this host, which was started again since."""
        host, boot, _ = _parts(self.world)
        here, now, _ = _parts(this_world())
        return host == here and boot != now and _UNKNOWN not in (boot, now)


def this_process() -> User:
    import psutil

    return User(os.getpid(), psutil.Process().create_time(), this_world())


@cache
def this_world() -> str:
    namespace = _UNKNOWN
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}/{this_boot()}/{namespace}"


@cache
def this_boot() -> str:
    """Changes when the machine starts again; after that, what was not yet on disk is lost."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return _UNKNOWN


def _parts(world: str) -> tuple[str, str, str]:
    """Host, boot and namespace; what somebody else wrote may have fewer."""
    parts = (*world.split("/", 2), _UNKNOWN, _UNKNOWN)
    return parts[0], parts[1], parts[2]


def alive(users: Iterable[User]) -> list[User]:
    return [user for user in users if user.is_alive()]
