"""Memory that this process may still take: what the node has free, or what its job has left, if less.

A scheduler holds a job to its memory by cgroups, and ends it when it takes more. Called by
`collectives.py` and `gauges.py`; imports without torch.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Of the second version of cgroups, and of the first."""


def free_memory(proc_root: Path = Path("/proc"), sys_root: Path = Path("/sys")) -> int:
    """Bytes; never less than none."""
    found = [int(psutil.virtual_memory().available)]
    found += [allowed - taken for _, allowed, taken in _limits(proc_root, sys_root)]
    return max(min(found), 0)


def used_memory(proc_root: Path = Path("/proc"), sys_root: Path = Path("/sys")) -> tuple[int, int]:
    """Bytes in use and in all: of the node, or of the tightest cgroup that has less than the node. Files
    that are cached and not in use do not count: they give way."""
    node = psutil.virtual_memory()
    limits = _limits(proc_root, sys_root)
    tightest = min(limits, key=lambda limit: limit[1], default=None)
    if tightest is None or tightest[1] >= node.total:
        return int(node.total - node.available), int(node.total)
    place, allowed, taken = tightest
    names = ("inactive_file ", "total_inactive_file ")  # version 2; version 1, with what is below
    cached = [
        int(line.split()[1])
        for line in _read(place / "memory.stat").splitlines()
        if line.startswith(names) and line.split()[1].isdigit()
    ]
    return max(taken - max(cached, default=0), 0), allowed


def _limits(proc_root: Path, sys_root: Path) -> list[tuple[Path, int, int]]:
    """Each cgroup around this process that limits memory: where, how much, and what is taken."""
    found = []
    for line in _read(proc_root / "self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3 or (parts[1] and "memory" not in parts[1].split(",")):
            continue
        top = sys_root / "fs/cgroup" / ("memory" if parts[1] else "")
        folder = top / parts[2].strip("/")
        # A limit holds for all that is below it.
        for place in (folder, *folder.parents):
            for names in _FILES:
                allowed, taken = (_read(place / name).strip() for name in names)
                if allowed.isdigit() and taken.isdigit():
                    found.append((place, int(allowed), int(taken)))
            if place == top:
                break
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
