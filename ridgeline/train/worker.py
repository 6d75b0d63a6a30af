"""What each rank of `ridgeline train` runs: `python -m ridgeline.train.worker RUNDIR`.

It reads the configuration the launcher left in the run directory, trains, and when it fails leaves an
account of why for the launcher to choose the cause from.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path


def _end_with_launcher() -> None:
    """A launcher that is killed outright cannot end its ranks; on Linux the kernel does."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main(argv: list[str]) -> int:
    # The launcher decides when ranks end; Ctrl-C reaches it and it tells them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_launcher()
    path = Path(argv[0])
    from ridgeline.config import load_config
    from ridgeline.launch.env import read_rank_env
    from ridgeline.launch.local import write_failure
    from ridgeline.rundir import CONFIG, LOGS, RunDir

    run = RunDir.open(path)
    env = read_rank_env()
    try:
        from ridgeline.train.run import run_training

        run_training(load_config(run.file(CONFIG)).config, env, run)
    except Exception as error:
        write_failure(run.file(LOGS), env.rank, time.time(), error, traceback.format_exc())
        # Skip interpreter shutdown, where a communication thread waiting for a peer could hang.
        sys.stdout.flush()
        os._exit(2 if getattr(error, "exit_code", 1) == 2 else 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
