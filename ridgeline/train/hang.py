"""A hang told as a table: where each rank is, which one is missing, and what that one is doing.

Made from the files that the ranks' watchdogs left (`watch.py`), without a collective or a store, since
any rank may be the one that is stuck. On each host the lowest rank that can still write looks at those
that did not: whether their process is stopped, dead or running, and their Python stack. The lowest of
all makes the table and the one sentence that becomes the job's error.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path

from ridgeline.config import WatchConfig
from ridgeline.errors import RunError
from ridgeline.launch.failures import write_failure
from ridgeline.launch.ranks import RankProcess, known_ranks, stack_file, write_aside
from ridgeline.parallel.mesh import JOIN_TIMEOUT
from ridgeline.train.clock import BETWEEN

HANG = "hang"
"""Folder below `logs/`, and the name of the table beside it."""
GRACE_S = 2.0
"""Ranks that wait for one another notice within moments of each other; this is for the last of them."""
_STACK_S = 1.5
_TABLE_S = 10.0
_FRAMES = 12


@dataclass(frozen=True)
class Account:
    """Where one rank is, in its own words or, for a missing one, in those of a neighbour."""

    rank: int
    host: str
    pid: int
    attempt: int
    step: int
    phase: str
    idle_s: float
    collective: str = ""
    stack: list[str] = field(default_factory=list)
    """Of the main thread, innermost last; of all threads as faulthandler writes it when missing."""
    final: bool = False
    """Whether the rank has reached the limit itself."""
    missing: bool = False

    @property
    def waits(self) -> bool:
        """Whether it waits for others, as far as can be seen."""
        return not self.missing and self.phase != "data" and bool(self.waits_in)

    @property
    def waits_in(self) -> str:
        """The collective by torch's record, else by the innermost call into torch.distributed, else
        by a part of the step that is nothing but communication."""
        if self.collective:
            return self.collective.partition(",")[0]
        for text in reversed(self.stack):
            found = re.search(r"torch/distributed/\w+\.py\", line \d+, in (\w+)", text)
            if found and found[1] not in ("wrapper", "wait"):
                return found[1]
        return self.phase if self.phase in ("gradient exchange", BETWEEN) else ""

    @property
    def line(self) -> str:
        """The line of code it is in: the innermost that is neither Python's own nor torch's."""
        for text in self.stack if self.missing else reversed(self.stack):
            found = re.search(r'File "([^"<]+)", line (\d+),? in (\w+)', text)
            if found and "/site-packages/" not in found[1] and "/lib/python" not in found[1]:
                return f"{Path(found[1]).name}:{found[2]} in {found[3]}"
        return ""


def collective_timeout(watch: WatchConfig) -> timedelta:
    """For torch's groups: longer than any limit of the watchdog, which has more to say."""
    if not watch.timeout_s:
        return JOIN_TIMEOUT
    return max(JOIN_TIMEOUT, timedelta(seconds=max(watch.timeout_s, watch.first_step_s) + 300))


def account_file(log_dir: Path, rank: int) -> Path:
    return log_dir / HANG / f"rank-{rank}.json"


def table_file(log_dir: Path) -> Path:
    return log_dir / f"{HANG}.txt"


def conclude(log_dir: Path, mine: Account, num_ranks: int, limit_s: float) -> None:
    """Called by each rank that has reached the limit, from its watchdog thread, before it ends."""
    time.sleep(GRACE_S)
    accounts = read_accounts(log_dir, mine.attempt)
    here = [a.rank for a in accounts if a.final and a.host == mine.host]
    silent = set(range(num_ranks)) - {a.rank for a in accounts}
    if mine.rank == min(here, default=mine.rank):
        _look_at_missing(log_dir, mine, silent)
    if mine.rank != min((a.rank for a in accounts if a.final), default=mine.rank):
        _await_table(log_dir)
        return
    if {p.host for p in known_ranks(log_dir, mine.attempt) if p.rank in silent} - {mine.host}:
        time.sleep(_STACK_S + 1.0)  # other hosts look at their own
    accounts = read_accounts(log_dir, mine.attempt)
    sentence, culprit = tell(accounts, num_ranks, limit_s)
    write_aside(table_file(log_dir), f"{sentence}\n\n{table(accounts, num_ranks)}")
    error = RunError(f"{sentence}; every rank's place: {table_file(log_dir)}")
    step = max(a.step for a in accounts)
    write_failure(log_dir, culprit, time.time(), error, "", step=step, decisive=True)
    _end_missing(log_dir, mine, silent)


def read_accounts(log_dir: Path, attempt: int) -> list[Account]:
    """What every rank of this attempt left, and what was found out about missing ones, by rank."""
    found = []
    for path in (log_dir / HANG).glob("rank-*.json"):
        with suppress(OSError, ValueError, TypeError):
            account = Account(**json.loads(path.read_text(encoding="utf-8")))
            if account.attempt == attempt:
                found.append(account)
    return sorted(found, key=lambda account: account.rank)


def _look_at_missing(log_dir: Path, mine: Account, silent: set[int]) -> None:
    """Ask the silent ranks of this host for their stacks, and write down what is seen of them."""
    asked: list[tuple[RankProcess, str]] = []
    for process in known_ranks(log_dir, mine.attempt):
        if process.rank in silent and process.is_here():
            asked.append((process, process.state()))
            process.send(signal.SIGUSR2)
            process.send(signal.SIGCONT)  # a stopped one writes nothing before it goes on
    if asked:
        time.sleep(_STACK_S)
    for process, state in asked:
        stack: list[str] = []
        with suppress(OSError):
            text = stack_file(log_dir, process.rank).read_text(encoding="utf-8", errors="replace")
            stack = main_thread(text)
        account = Account(
            rank=process.rank,
            host=process.host,
            pid=process.pid,
            attempt=process.attempt,
            step=mine.step,
            phase=state,
            idle_s=mine.idle_s,
            stack=stack,
            missing=True,
        )
        path = account_file(log_dir, process.rank)
        if not path.exists():
            write_aside(path, json.dumps(asdict(account), indent=1))


def main_thread(dump: str) -> list[str]:
    """The main thread's part of faulthandler's text, innermost call first: the last thread listed."""
    last = dump.rstrip().split("\n\n")[-1]
    return [line.strip() for line in last.splitlines() if line.lstrip().startswith("File ")]


def _end_missing(log_dir: Path, mine: Account, silent: set[int]) -> None:
    """A rank that does not answer does not end when it is told to, and would hold up a restart."""
    for process in known_ranks(log_dir, mine.attempt):
        if process.rank in silent and process.is_here():
            process.send(signal.SIGKILL)


def _await_table(log_dir: Path) -> None:
    """Leave the maker of the table its neighbours until it is done: agents end all when one ends."""
    began = time.time()
    while time.time() - began < _TABLE_S:
        with suppress(OSError):
            if os.path.getmtime(table_file(log_dir)) >= began - GRACE_S:
                return
        time.sleep(0.1)


def tell(accounts: Sequence[Account], num_ranks: int, limit_s: float) -> tuple[str, int]:
    """One sentence about who holds up whom, and the rank to blame."""
    told = {a.rank: a for a in accounts if not a.missing}
    silent = sorted(set(range(num_ranks)) - set(told))
    seen = {a.rank: a for a in accounts if a.missing}
    step = max(a.step for a in accounts)
    waiting = [a for a in told.values() if a.waits]
    stuck = [a for a in told.values() if not a.waits]
    if silent:
        states = {seen[r].phase for r in silent if r in seen}
        how = f" (its process is {states.pop()})" if len(states) == 1 and len(silent) == 1 else ""
        what = f"{_ranks(silent)} stopped answering at step {step}{how}"
        lines = [seen[r].line for r in silent if r in seen and seen[r].phase == "running"]
        what += f", in {lines[0]}" if any(lines) else ""
        culprit = silent[0]
    elif stuck:
        first = stuck[0]
        what = f"{_ranks([a.rank for a in stuck])} made no progress for {limit_s:g} s at step "
        what += f"{first.step} in {first.phase}" + (f" ({first.line})" if first.line else "")
        culprit = first.rank
    else:
        what = f"all ranks wait for one another at step {step}"
        culprit = waiting[0].rank
    by_place: dict[str, list[int]] = {}
    for account in waiting:
        by_place.setdefault(account.waits_in, []).append(account.rank)
    clauses = []
    for place, ranks in by_place.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        whom = " for it" if len(silent or stuck) == 1 else ""
        clauses.append(f"{_ranks(ranks)} {verb}{whom} in {place}")
    return "; ".join([what, *clauses]), culprit


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 2`, `ranks 0, 1, 3`; many are shortened."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def table(accounts: Sequence[Account], num_ranks: int) -> str:
    """Every rank, where it is, and the stacks below."""
    rows = [("rank", "host", "step", "where", "for", "waits in")]
    known = {a.rank: a for a in accounts}
    for rank in range(num_ranks):
        a = known.get(rank)
        if a is None:
            rows.append((str(rank), "?", "?", "missing: wrote nothing", "", ""))
        elif a.missing:
            rows.append((str(rank), a.host, "?", f"missing: its process is {a.phase}", "", ""))
        else:
            place = a.waits_in if a.waits else f"nothing: {a.line or 'its own code'}"
            rows.append((str(rank), a.host, str(a.step), a.phase, f"{a.idle_s:.0f} s", place))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for a in accounts:
        lines += ["", f"rank {a.rank}, main thread, process {a.pid} on {a.host}:"]
        frames = a.stack[:_FRAMES][::-1] if a.missing else a.stack[-_FRAMES:]
        lines += [f"  {part}" for text in frames for part in text.rstrip().splitlines()]
        if a.collective:
            lines.append(f"  pending: {a.collective}")
    return "\n".join(lines) + "\n"
