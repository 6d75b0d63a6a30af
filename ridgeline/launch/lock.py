"""One run directory, one launcher: a file that says who trains in it, and is told from one left behind.

On the same host a process that is gone has left it behind; from another host, a file that nobody has
touched for a while. The launcher touches it while its ranks run. A job that takes the place of one that was
killed on another node waits until that is clear. Called by `ridgeline train`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ridgeline.errors import OURS, UsageError

NAME = ".lock"
TOUCH_S = 20.0
STALE_S = 120.0
"""A lock of another host that was not touched for so long is no one's."""


@contextmanager
def locked(directory: Path, instead: str = "choose another --run") -> Iterator[None]:
    """Nobody else trains in `directory` meanwhile; refuses when somebody does, and says what to do
    instead of waiting."""
    import psutil

    path = directory / NAME
    _require_free(path, instead)
    mine = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }
    with suppress(OSError):  # a full disk is no reason not to train
        path.write_text(json.dumps(mine), encoding="utf-8")
    ended = threading.Event()
    thread = threading.Thread(target=_touch, args=(path, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            path.unlink()


def _touch(path: Path, ended: threading.Event) -> None:
    while not ended.wait(TOUCH_S):
        with suppress(OSError):
            os.utime(path)


def _require_free(path: Path, instead: str) -> None:
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        age_s = time.time() - path.stat().st_mtime
    except (OSError, ValueError):
        return
    if _is_alive(owner, path, age_s):
        raise UsageError(
            f"{path.parent} is being trained in by process {owner['pid']} on {owner['host']}; wait for it, "
            f"or {instead} (if it is gone, remove {path})"
        )


def _is_alive(owner: dict[str, Any], path: Path, age_s: float) -> bool:
    import psutil

    if owner["host"] != socket.gethostname():
        return age_s < STALE_S and _is_touched(owner, path, min(STALE_S - age_s, STALE_S))
    if owner["pid"] == os.getpid():
        return False
    try:
        return abs(psutil.Process(owner["pid"]).create_time() - float(owner["started"])) < 1.0
    except psutil.Error:
        return False


def _is_touched(owner: dict[str, Any], path: Path, wait_s: float) -> bool:
    """Whether somebody on another host touches the file; nobody does once it is stale."""
    print(
        f"{OURS}{path.parent} was trained in on {owner['host']} a moment ago; waiting for up to "
        f"{wait_s:.0f} s to see whether it still is",
        file=sys.stderr,
        flush=True,
    )
    until = time.monotonic() + wait_s
    try:
        first = path.stat().st_mtime_ns
        while time.monotonic() < until:
            time.sleep(min(1.0, wait_s))
            if path.stat().st_mtime_ns != first:
                return True
    except OSError:  # gone: it has ended in order
        return False
    return False
