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
from typing import NoReturn


def _end_with_launcher() -> None:
    """A launcher that is killed outright cannot end its ranks; on Linux the kernel does."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main(argv: list[str]) -> NoReturn:
    # The launcher alone hears Ctrl-C (ranks have sessions of their own) and passes it on; a rank that
    # hears it ends at once, also in the middle of a collective, where Python's handler would wait.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end_with_launcher()
    path = Path(argv[0])
    from ridgeline.config import load_config
    from ridgeline.launch.env import read_rank_env
    from ridgeline.launch.local import write_failure
    from ridgeline.rundir import CONFIG, LOGS, RunDir

    run = RunDir.open(path)
    env = read_rank_env()
    code = 0
    try:
        from ridgeline.train.run import run_training

        run_training(load_config(run.file(CONFIG)).config, env, run)
    except Exception as error:
        write_failure(run.file(LOGS), env.rank, time.time(), error, traceback.format_exc())
        code = 2 if getattr(error, "exit_code", 1) == 2 else 1
    # Skip interpreter shutdown, where a communication thread could still wait for a peer.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
