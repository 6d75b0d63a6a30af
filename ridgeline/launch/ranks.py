"""Which processes the ranks of a run are: a small file each, for whoever has to find one from outside.

A rank writes its file once it listens to signals and removes it when it ends in order. The launcher
reads them to forward a request, a rank to see whether a peer is gone, and the account of a hang to look
at a rank that no longer answers. Process ids are checked against start times, because they are reused.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ridgeline.launch.env import RankEnv

RANKS = "ranks"
"""Folder below `logs/`."""


@dataclass(frozen=True)
class RankProcess:
    """One rank as it introduced itself."""

    rank: int
    local_rank: int
    pid: int
    host: str
    started: float
    """When the process began, as the system counts it."""
    attempt: int

    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def state(self) -> str:
        """`running`, `stopped` (SIGSTOP or a debugger), `dead`, or `unknown` on another host."""
        import psutil

        if not self.is_here():
            return "unknown"
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) > 1.0:
                return "dead"
            status = process.status()
        except psutil.Error:
            return "dead"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "dead"
        return "stopped" if status in (psutil.STATUS_STOPPED, "tracing-stop") else "running"

    def send(self, number: int) -> None:
        """A signal to the rank itself, not to the data workers of its process group."""
        if self.state() in ("running", "stopped"):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def introduce(log_dir: Path, env: RankEnv) -> None:
    """Called by a rank once it may be sent signals."""
    import psutil

    process = RankProcess(
        rank=env.rank,
        local_rank=env.local_rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        started=psutil.Process().create_time(),
        attempt=env.attempt,
    )
    write_aside(rank_file(log_dir, env.rank), json.dumps(asdict(process)))


def leave(log_dir: Path, rank: int) -> None:
    """Called by a rank that ends in order: it is not missing, it is done."""
    for path in (rank_file(log_dir, rank), stack_file(log_dir, rank)):
        path.unlink(missing_ok=True)
    with suppress(OSError):
        (log_dir / RANKS).rmdir()  # by the last one


def known_ranks(log_dir: Path, attempt: int = 0) -> list[RankProcess]:
    """Every rank of this attempt that has introduced itself and not left, by rank."""
    found = [read_rank(path) for path in (log_dir / RANKS).glob("rank-*.json")]
    mine = [process for process in found if process is not None and process.attempt == attempt]
    return sorted(mine, key=lambda process: process.rank)


def read_rank(path: Path) -> RankProcess | None:
    """One rank's file; None where it is not there, or is none."""
    with suppress(OSError, ValueError, TypeError):
        return RankProcess(**json.loads(path.read_text(encoding="utf-8")))
    return None


def rank_file(log_dir: Path, rank: int) -> Path:
    return log_dir / RANKS / f"rank-{rank}.json"


def stack_file(log_dir: Path, rank: int) -> Path:
    """Where a rank writes its Python stack when it is asked to."""
    return log_dir / RANKS / f"stack-{rank}.txt"


def write_aside(path: Path, text: str) -> None:
    """A reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)
