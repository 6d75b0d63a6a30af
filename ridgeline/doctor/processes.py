"""The processes of one state: one, or one for each rank of its training, which are asked and answer as one.

Each reads a line of JSON and writes one back. What the ranks of a training say is put together: the slowest
is how long a step takes, and one that fails is the whole state's failure, since its peers wait for it and
nothing else would end them. Used by `spares.py` and `states.py`; imports without torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ridgeline.errors import RunError
from ridgeline.launch.env import BIND, said_threads
from ridgeline.launch.failures import is_echo
from ridgeline.launch.local import rank_variables
from ridgeline.launch.topology import usable_cpus

AFTER_S = 3.0
"""How long the others may take to say what they know once a rank has failed: the first to be heard need not
be the first that failed."""
SLOWEST = ("data_s", "h2d_s")
"""Parts of a step in which all ranks wait for the one that takes longest."""

Process = subprocess.Popen[str]


class Processes:
    """What was started together, rank by rank."""

    def __init__(self, processes: Sequence[Process], started: float, logs: Sequence[Path]) -> None:
        self.processes = tuple(processes)
        self.started = started
        self.logs = tuple(logs)

    @property
    def is_alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def ask(self, asked: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """The same of every rank; what they answer, or a `RunError` for one that does not."""
        for rank in range(len(self.processes)):
            with contextlib.suppress(OSError):  # that it is gone is seen when it does not answer
                self.tell(rank, asked)
        return self.listen(timeout_s)

    def tell(self, rank: int, value: Mapping[str, Any]) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        print(json.dumps(value), file=stdin, flush=True)

    def listen(self, timeout_s: float) -> list[dict[str, Any]]:
        """One line of each. The first failure ends those that wait for that rank."""
        heard: dict[int, dict[str, Any]] = {}
        problems: list[tuple[int, str]] = []
        streams = [process.stdout for process in self.processes]
        waiting = {stream: rank for rank, stream in enumerate(streams) if stream is not None}
        until = time.monotonic() + timeout_s
        while waiting:
            ready = select.select(list(waiting), [], [], max(until - time.monotonic(), 0.0))[0]
            if not ready:
                break
            for stream in ready:
                rank = waiting.pop(stream)
                answer = _read(stream.readline())
                if answer is not None:
                    heard[rank] = answer
                    failed = answer.get("failed", "")
                else:
                    failed = (
                        f"its process ended ({self.processes[rank].wait()}); see {self.logs[rank]}"
                    )
                if failed:
                    problems.append((rank, failed))
                    until = min(until, time.monotonic() + AFTER_S)
        if len(self.processes) > 1 and (problems or waiting):
            self.end(0.0)
        if problems:
            raise self._failure(problems, heard)
        if waiting:
            raise RunError(f"no answer within {timeout_s:.0f} s{self._name(waiting.values())}")
        return [heard[rank] for rank in range(len(self.processes))]

    def _failure(
        self, problems: list[tuple[int, str]], heard: dict[int, dict[str, Any]]
    ) -> RunError:
        """Of the rank that said first what is no echo of another's end."""
        rank, text = next((p for p in problems if not is_echo(p[1])), problems[0])
        everyone = [known for _, known in problems] == [text] * len(self.processes)
        where = "" if everyone else f" on rank {rank}"
        return Failure(f"{text}{where}", bool(heard.get(rank, {}).get("usage", False)))

    def _name(self, ranks: Any) -> str:
        if len(self.processes) == 1:
            return ""
        return f" from rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def end(self, wait_s: float) -> None:
        """Let them end by themselves for so long, then end them."""
        for process in self.processes:
            if process.stdin is not None and not process.stdin.closed:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        until = time.monotonic() + wait_s
        for process in self.processes:
            try:
                process.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its loader's processes too
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _read(line: str) -> dict[str, Any] | None:
    """An answer; None from a process that ended, maybe in the middle of one."""
    with contextlib.suppress(ValueError):
        found: dict[str, Any] = json.loads(line)
        return found
    return None


class Failure(RunError):
    """What a state said of itself."""

    def __init__(self, text: str, usage: bool) -> None:
        super().__init__(text)
        self.usage = usage
        """Whether the user has to change something."""


def start(
    variables: Sequence[str], arguments: Sequence[str], log: Path, num_ranks: int = 1
) -> Processes:
    """Processes of Python with their output in `log` and files beside it, each in a session of its own: an
    interrupt is for the climb, which then ends what it started."""
    begun = time.time()  # on a loaded machine it may be well on its way before this one goes on
    logs = [log if rank == 0 else rank_log(log, rank) for rank in range(num_ranks)]
    shared = _of_ranks(num_ranks)
    processes: list[Process] = []
    for rank, file in enumerate(logs):
        place = [f"{name}={rank}" for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")] if shared else []
        with file.open("a") as errors:
            processes.append(
                subprocess.Popen(
                    ["env", *shared, *place, *variables, sys.executable, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,
                )
            )
    return Processes(processes, begun, logs)


def rank_log(log: Path, rank: int) -> Path:
    return log.with_name(f"{log.stem}.rank{rank}{log.suffix}")


def _of_ranks(num_ranks: int) -> list[str]:
    """What ranks find in their environment; nothing for one process, which is nobody's rank."""
    if num_ranks == 1:
        return []
    threads = said_threads() or max(1, len(usable_cpus()) // num_ranks)
    variables = rank_variables(num_ranks, threads, {BIND: "auto"})
    return [f"{name}={value}" for name, value in variables.items()]


def merge(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What ranks say of one turn, as what their training did: the first one's words, but for what is the
    largest of all, and for losses that are each rank's own. A script that is over on one is over."""
    whole = dict(next((answer for answer in answers if "ended" in answer), answers[0]))
    if len(answers) == 1 or "ended" in whole:
        return whole
    for name in ("step_s", "peak_bytes", "rest_bytes", "time"):
        if name in whole:
            whole[name] = max(answer.get(name, 0.0) for answer in answers)
    parts = {name for answer in answers for name in answer["parts"]}
    whole["parts"] = {
        name: (max if name in SLOWEST else statistics.fmean)(
            [answer["parts"].get(name, 0.0) for answer in answers]
        )
        for name in sorted(parts)
    }
    most = max(len(answer["losses"]) for answer in answers)
    curves = [answer["losses"] for answer in answers if len(answer["losses"]) == most]
    if any(curve != curves[0] for curve in curves):
        whole["losses"] = [statistics.fmean(each) for each in zip(*curves, strict=True)]
    else:
        whole["losses"] = curves[0]
    return whole
