"""What each rank of `ridgeline train` runs: `python -m ridgeline.train.worker RUNDIR [KEY=VALUE]...`.

It reads the configuration the launcher left in the run directory, trains, and when it fails leaves an
account of why for the launcher to choose the cause from. Also under plain torchrun, which starts it
again after a failure with `--max-restarts`; asked to stop, it then ends with the code for a requeue.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ridgeline.launch.env import RankEnv
    from ridgeline.rundir import RunDir
    from ridgeline.train.signals import Requests


def main(argv: list[str]) -> NoReturn:
    # The launcher alone hears Ctrl-C (ranks have sessions of their own) and passes it on; a rank that
    # hears it ends at once, also in the middle of a collective, where Python's handler would wait.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ridgeline.launch.rank import end_with_parent

    end_with_parent()  # a launcher that is killed outright cannot end its ranks
    from ridgeline.launch.env import prepare_rank, read_rank_env
    from ridgeline.launch.ranks import introduce
    from ridgeline.rundir import LOGS, RunDir
    from ridgeline.train.signals import Requests, listening

    prepare_rank()
    run = RunDir.open(Path(argv[0]))
    log_dir = run.file(LOGS)
    env = read_rank_env()
    _bind(env)
    if env.rank == 0 and env.attempt:
        _tell_restart(run, env)
    requests = Requests()
    with listening(requests, lambda: _end_if_orphaned(log_dir, env, requests)):
        introduce(log_dir, env)
        code = _train(run, env, argv[1:], requests)
        # Skip interpreter shutdown, where a communication thread could still wait for a peer.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _bind(env: RankEnv) -> None:
    from ridgeline.launch.bind import bind_as_told, show_bindings

    bound = bind_as_told(env)
    if bound is not None and bound.held and env.rank == 0:
        print(show_bindings(bound.node), flush=True)


def _train(run: RunDir, env: RankEnv, overrides: list[str], requests: Requests) -> int:
    """The exit code; after a failure also the account of it."""
    from ridgeline.errors import Requeue
    from ridgeline.launch.env import under_launcher
    from ridgeline.launch.failures import write_failure
    from ridgeline.launch.ranks import leave
    from ridgeline.rundir import CONFIG, LOGS

    log_dir = run.file(LOGS)
    try:
        from ridgeline.config import load_config

        # Imports make half a million objects that stay: looking for garbage among them over and over
        # takes a tenth of their time and more.
        gc.disable()
        try:
            from ridgeline.train.run import run_training
        finally:
            gc.enable()
        from ridgeline.train.watch import answer_stack_requests

        answer_stack_requests(log_dir, env.rank)
        summary = run_training(load_config(run.file(CONFIG), overrides).config, env, run, requests)
    except Exception as error:
        trace = traceback.format_exc()
        write_failure(log_dir, env.rank, time.time(), error, trace, requests.step)
        return 2 if getattr(error, "exit_code", 1) == 2 else 1
    leave(log_dir, env.rank)
    return Requeue.exit_code if summary.stopped and not under_launcher() else 0


def _end_if_orphaned(log_dir: Path, env: RankEnv, requests: Requests) -> None:
    """Whoever started them tells the others to end, by SIGTERM, when one has died. They cannot finish the
    step without it, so that is no request to stop but the end."""
    from ridgeline.launch.failures import write_failure
    from ridgeline.launch.ranks import known_ranks

    here = [p for p in known_ranks(log_dir, env.attempt) if p.is_here() and p.rank != env.rank]
    states = {process.rank: process.state() for process in here}
    if "dead" not in states.values():
        return
    for process in here:
        if states[process.rank] == "stopped":  # it would not hear that
            process.send(signal.SIGKILL)
    dead = next(rank for rank, state in states.items() if state == "dead")
    error = ConnectionError(f"lost its peer, rank {dead}")
    write_failure(log_dir, env.rank, time.time(), error, "", requests.step)
    os._exit(1)


def _tell_restart(run: RunDir, env: RankEnv) -> None:
    """Under an agent that starts ranks again by itself, rank 0 writes down that it did, and why."""
    from ridgeline.launch.failures import failure_file, first_failure, read_failures
    from ridgeline.rundir import LOGS

    failures = read_failures(run.file(LOGS))
    cause = first_failure(failures) if failures else None
    text = cause.message if cause else "ended without a word"
    rank = cause.rank if cause else None
    run.add_event("restart", cause=text, rank=rank, attempt=env.attempt)
    print(f"restart {env.attempt}: rank {'?' if rank is None else rank}: {text}", flush=True)
    for failure in failures:
        failure_file(run.file(LOGS), failure.rank).unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
