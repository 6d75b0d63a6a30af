"""What each rank of `ridgeline doctor` runs: `python -m ridgeline.doctor.worker FOLDER`.

The folder says what to measure; each rank leaves its measurement there, or an account of its failure.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from ridgeline.doctor.request import TRACE, read_request, write_answer


def main(argv: list[str]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ridgeline.launch.bind import bind_as_told
    from ridgeline.launch.env import prepare_rank, read_rank_env
    from ridgeline.launch.failures import write_failure

    prepare_rank()
    folder = Path(argv[0])
    env = read_rank_env()
    bind_as_told(env)
    code = 0
    try:
        _measure(folder, env.rank)
    except Exception as error:
        write_failure(folder, env.rank, time.time(), error, traceback.format_exc(), None)
        code = 2 if getattr(error, "exit_code", 1) == 2 else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a communication thread could still wait for a peer


def _measure(folder: Path, rank: int) -> None:
    from ridgeline.config import load_config
    from ridgeline.doctor.measure import Options, measure
    from ridgeline.doctor.script import measure_script
    from ridgeline.launch.env import read_rank_env
    from ridgeline.rundir import CONFIG

    asked = read_request(folder)
    options = Options(
        steps=asked.steps,
        nvtx=asked.nvtx,
        machine=Path(asked.machine) if asked.machine else None,
        keep_trace=folder / TRACE if asked.trace and rank == 0 else None,
        climbs=asked.climbs,
    )
    if asked.script:
        seen = measure_script(Path(asked.script), list(asked.arguments), options)
    else:
        config = load_config(folder / CONFIG, []).config
        seen = measure(config, read_rank_env(), options)
    write_answer(folder, seen, read_rank_env().rank)


if __name__ == "__main__":
    main(sys.argv[1:])
