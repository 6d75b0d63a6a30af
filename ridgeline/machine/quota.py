"""What a user may still write and how many files, as `quota` and `lfs quota` say.

Shared file systems limit both bytes and files, and an environment or an unpacked data set meets the limit
on files first. The parsers are pure; `find_quotas` runs the commands, gives each a few seconds, and is
silent where there are none. Called by `storage.py`; imports without torch.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable

from ridgeline.facts import QuotaFacts
from ridgeline.machine.mount import Mount

COMMAND_S = 10.0
"""A quota server that does not answer in this time is left out: `quota` waits for ever for a dead one."""

_NUMBER = re.compile(r"\[?(\d+(?:\.\d+)?)([kKmMgGtTpPeE]?)\]?\*?\]?")
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}

Columns = tuple[int, int, int, int, int, int]
"""Bytes used, soft and hard limit; files used, soft and hard limit. A limit of 0 is none."""


def parse_quota(text: str, source: str) -> Columns | None:
    """The row of `quota`'s table for one file system, named as in its first column.

    Numbers are KiB unless they carry a unit (`quota -s`); an asterisk marks what is over its limit. A
    long name stands on a line of its own. The grace columns are empty where nothing is over.
    """
    for name, cells in _rows(text):
        if name == source:
            return _columns(cells)
    return None


def parse_lfs_quota(text: str) -> Columns | None:
    """The first row of `lfs quota`'s table, which is the whole file system's; with -v rows of its
    servers follow. Figures in brackets are those a server did not confirm."""
    for _, cells in _rows(text):
        return _columns(cells)
    return None


def _rows(text: str) -> list[tuple[str, list[str]]]:
    """Name and cells of each row below a heading `Filesystem ...`, long names joined with the next
    line."""
    rows: list[tuple[str, list[str]]] = []
    name, inside = "", False
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["Filesystem"]:
            name, inside = "", True
            continue
        if not inside or not words:
            continue
        if name:
            rows.append((name, words))
            name = ""
        elif len(words) == 1:
            name = words[0]
        else:
            rows.append((words[0], words[1:]))
    return [(name, cells) for name, cells in rows if _columns(cells) is not None]


def _columns(cells: list[str]) -> Columns | None:
    """The six numbers of a row; None where the row is none, as the notes below the table."""
    numbers = [cell for cell in cells if _NUMBER.fullmatch(cell)]
    # With raw grace times (`quota -p`) those are numbers as well, and always there.
    if len(numbers) == 8:
        numbers = [*numbers[:3], *numbers[4:7]]
    if len(numbers) != 6:
        return None
    space = [_count(cell, 1024, 1024) for cell in numbers[:3]]
    files = [_count(cell, 1, 1000) for cell in numbers[3:]]
    return (space[0], space[1], space[2], files[0], files[1], files[2])


def _count(cell: str, plain: int, step: int) -> int:
    """A cell's number: `plain` is what it counts where it has no unit, `step` what a unit multiplies."""
    match = _NUMBER.fullmatch(cell)
    assert match is not None
    unit = match[2].lower()
    return round(float(match[1]) * (step ** _POWER[unit] if unit else plain))


def find_quotas(
    mount: Mount, run: Callable[[list[str]], str] | None = None
) -> tuple[QuotaFacts, ...]:
    """The limits of this user, and on Lustre of the user's group, on a file system."""
    run = run or _run
    found: list[QuotaFacts] = []
    if mount.fs_type == "lustre":
        for owner, flag, number in (("user", "-u", os.getuid()), ("group", "-g", os.getgid())):
            columns = parse_lfs_quota(run(["lfs", "quota", flag, str(number), mount.point]))
            found += _facts(owner, columns, f"lfs quota {flag}")
    elif mount.kind != "memory":
        found += _facts("user", parse_quota(run(["quota", "-w"]), mount.source), "quota")
    return tuple(found)


def _facts(owner: str, columns: Columns | None, source: str) -> list[QuotaFacts]:
    """Nothing where neither bytes nor files are limited. The soft limit counts: past it a clock runs,
    and then it is the limit."""
    if columns is None:
        return []
    used, soft, hard, files, soft_files, hard_files = columns
    limit, most = soft or hard or None, soft_files or hard_files or None
    if limit is None and most is None:
        return []
    return [QuotaFacts(owner, used, limit, files, most, source)]


def _run(command: list[str]) -> str:
    """What a command prints, whatever its exit code: `quota` ends with 1 for who is over the limit."""
    try:
        done = subprocess.run(
            # The heading is what the table is found by: in English, whatever the user speaks.
            ["env", "LC_ALL=C", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
