"""Ranks on the CPU: processes forked from one that has torch loaded, joined by gloo.

Starting n interpreters takes seconds each; a fork takes milliseconds, and a proof of fifty layouts is
fifty short trainings. One set of ranks serves all layouts of its size; a set in which a rank failed is
given up, because nobody knows what its other ranks wait for. Called by `verify/run.py`, by
`train/reshard.py` and by the parity tests.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ridgeline.errors import RunError, UsageError
from ridgeline.launch.env import RankEnv

_SETTLE_S = 0.5
_GROUP_TIMEOUT = timedelta(minutes=30)


class Ranks:
    """`ranks(function, *args)` calls `function(env, *args)` on each of n ranks; rank 0's result."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._folder = tempfile.TemporaryDirectory(prefix="ridgeline-ranks-")
        import torch._dynamo  # a second that building an optimizer costs every rank
        import torch.utils.flop_counter  # noqa: F401

        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, num_ranks, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any, timeout_s: float = 600.0) -> Any:
        """What rank 0 returns. A rank's error is raised here; a usage error as one."""
        call = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        answers: dict[int, Any] = {}
        waiting = dict(zip(self._pipes, range(self.num_ranks), strict=True))
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = RunError(f"rank {rank} died without a word")
                if isinstance(answers[rank], Exception):
                    deadline = min(deadline, time.monotonic() + _SETTLE_S)
        failed = [rank for rank in answers if isinstance(answers[rank], Exception)]
        if failed:
            if waiting:  # the others wait for a rank that is not coming
                self.close()
            usage = [rank for rank in failed if isinstance(answers[rank], UsageError)]
            raise answers[(usage or failed)[0]]
        if waiting:
            self.close()
            raise RunError(
                f"ranks {sorted(waiting.values())} of {self.num_ranks} did not end in {timeout_s:g} s"
            )
        return answers[0]

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(p.is_alive() for p in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()


def _serve(rank: int, num_ranks: int, folder: str, pipe: Connection) -> None:
    """A rank's whole life: join, do what it is sent, end when nobody is left to send."""
    import torch
    import torch.distributed as dist

    # Ctrl-C reaches every process of the terminal; the one that forked these ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # The same kernels whatever ran before: bf16 on a CPU without it switches mkldnn off for good.
    torch.backends.mkldnn.enabled = False
    env = RankEnv(rank, num_ranks, rank, num_ranks, "127.0.0.1", 0, "forked ranks")
    if num_ranks > 1:
        store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=_GROUP_TIMEOUT
        )
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        torch.manual_seed(0)
        try:
            answer = function(env, *args)
        except Exception as error:
            answer = _sendable(error, rank)
        pipe.send_bytes(
            pickle.dumps(answer if rank == 0 or isinstance(answer, Exception) else None)
        )


def _sendable(error: Exception, rank: int) -> Exception:
    if isinstance(error, UsageError):
        return UsageError(str(error), key=error.key)
    text = "".join(traceback.format_exception(error))
    return RunError(f"rank {rank}: {type(error).__name__}: {error}\n{text}")
