"""Worker processes end with the rank they work for, however that one ended."""

from __future__ import annotations

import subprocess
import sys

import psutil

PROGRAM = """
import time, psutil
from ridgeline.data.build import build_sources
from ridgeline.data.loader import Loader
if __name__ == "__main__":
    source, _ = build_sources("text", {"max_bytes": 100_000}, 0)
    batches = Loader(source, batch=4, workers=2).epoch(0)
    next(batches)
    children = psutil.Process().children(recursive=True)
    print(*[child.pid for child in children], flush=True)
    time.sleep(600)
"""


def test_workers_of_a_killed_rank_end() -> None:
    rank = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    children = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
    assert len(children) >= 3  # the server it forks from, and two workers
    rank.kill()
    rank.wait()
    _, alive = psutil.wait_procs(children, timeout=100)
    for process in alive:
        process.kill()
    assert not alive
