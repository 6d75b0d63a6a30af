"""What each node does while a run goes on, into `resources/` of the run directory (`log.resources_s`).

One thread on the node's first rank asks `machine/gauges.py` every few seconds and writes one line. It takes
no part in the training: it is not waited for, and what goes wrong in it is nobody's loss. Made and ended by
`run.py`; read by `ridgeline watch` and by the report.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from ridgeline.launch.env import RankEnv
from ridgeline.launch.ranks import RankProcess, rank_file, read_rank
from ridgeline.machine.gauges import Gauges, Gpus
from ridgeline.rundir import LOGS, ResourceRecord, RunDir
from ridgeline.train.setup import Training

FIRST_S = 1.0
"""The first line comes after so long, or sooner: short runs have one too."""
END_S = 0.2
"""The end of a run waits for the thread no longer than this."""


class ResourceLog:
    """On one rank of each node; on the others, and where there is no run directory, nothing."""

    def __init__(self, training: Training, run: RunDir | None) -> None:
        env, every_s = training.mesh.env, training.config.log.resources_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if run is None or every_s <= 0 or env.local_rank != 0:
            return
        uuids = _uuids(training.mesh.device, env.local_world_size)
        find_ranks = _FindRanks(run.file(LOGS), env)

        def build() -> Gauges:  # in the thread: drivers can take their time
            return Gauges(find_ranks, Gpus(uuids) if uuids != [] else None, env.local_world_size)

        self._thread = threading.Thread(
            target=_record,
            args=(build, run.append_resources, every_s, self._over),
            name="resources",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """A driver or a disk that hangs is left behind."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(END_S)


def _record(
    build: Callable[[], Gauges],
    write: Callable[[ResourceRecord], None],
    every_s: float,
    over: threading.Event,
) -> None:
    """Until it is over, or until something is so wrong that it would be so again."""
    try:
        gauges = build()
        gauges.sample()  # rates and shares are over the time since the sample before
        wait_s = min(every_s, FIRST_S)
        while not over.wait(wait_s):
            write(gauges.sample())
            wait_s = every_s
    except Exception:
        return


def _uuids(device: torch.device, num_ranks: int) -> list[str] | None:
    """GPUs of the node's ranks; none on the CPU. None, which is all that the job may use, where each rank
    sees only its own."""
    if device.type != "cuda":
        return []
    if torch.cuda.device_count() < num_ranks:
        return None
    try:
        return [str(torch.cuda.get_device_properties(n).uuid) for n in range(num_ranks)]
    except (RuntimeError, AttributeError):
        return None


class _FindRanks:
    """Process ids of the node's ranks. Launchers number the ranks of a node in a row or in turn, so that
    the files of a few are read, and not those of the whole job."""

    def __init__(self, log_dir: Path, env: RankEnv) -> None:
        num_nodes = max(1, env.world_size // max(1, env.local_world_size))
        in_turn = range(env.rank, env.world_size, num_nodes)
        in_a_row = range(env.rank, min(env.rank + env.local_world_size, env.world_size))
        self._files = [rank_file(log_dir, rank) for rank in sorted({*in_a_row, *in_turn})]
        self._env, self._found = env, {env.rank: os.getpid()}

    def __call__(self) -> list[int]:
        if len(self._found) < self._env.local_world_size:
            for path in self._files:
                process = read_rank(path)
                if process is not None and self._is_ours(process):
                    self._found[process.rank] = process.pid
        return list(self._found.values())

    def _is_ours(self, process: RankProcess) -> bool:
        return process.attempt == self._env.attempt and process.is_here()
