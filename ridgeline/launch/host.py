"""One host's share of a job that no scheduler starts: `python -m ridgeline.launch.host`, over ssh or here.

The first line of standard input says what to run (`hosts.py` writes it): variables and the secret of the
hub go that way, where no list of processes shows them. Then one `rank.py` is started for each rank of this
host. When standard input ends, the connection or the one who asked is gone, and so are they.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

_GRACE_S = 8.0
"""More than a rank's own time to end, so that it can report."""


def main() -> int:
    told: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    with suppress(OSError):
        os.chdir(told["workdir"])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    count = told["local_world_size"]
    wrappers = []
    for local in range(count):
        place = {
            "RANK": told["first_rank"] + local,
            "WORLD_SIZE": told["world_size"],
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": count,
            "GROUP_RANK": told["node_rank"],
        }
        environment = {**os.environ, **told["variables"], **{k: str(v) for k, v in place.items()}}
        wrappers.append(
            subprocess.Popen(told["command"], env=environment, stdin=subprocess.DEVNULL)
        )
    return _wait(wrappers, asked)


def _wait(wrappers: list[subprocess.Popen[bytes]], asked: list[int]) -> int:
    """The first bad exit code, or 0."""
    kill_at: float | None = None
    while any(wrapper.poll() is None for wrapper in wrappers):
        if kill_at is None:
            readable, _, _ = select.select([sys.stdin], [], [], 0.1)
            if asked or (readable and not os.read(0, 4096)):
                kill_at = time.monotonic() + _GRACE_S
                for wrapper in wrappers:
                    wrapper.terminate()
        else:
            time.sleep(0.1)
            if time.monotonic() > kill_at:
                for wrapper in wrappers:
                    wrapper.kill()
    return next((w.returncode for w in wrappers if w.returncode), 0) & 0xFF


if __name__ == "__main__":
    sys.exit(main())
