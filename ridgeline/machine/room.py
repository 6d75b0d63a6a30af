"""Memory that this process may still take: what the node has free, or what its job has left, if less.

A scheduler holds a job to its memory by cgroups, and ends it when it takes more. Called by
`collectives.py`; imports without torch.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Of the second version of cgroups, and of the first."""


def free_memory(proc_root: Path = Path("/proc"), sys_root: Path = Path("/sys")) -> int:
    """Bytes; never less than none."""
    found = [int(psutil.virtual_memory().available)]
    for line in _read(proc_root / "self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3 or (parts[1] and "memory" not in parts[1].split(",")):
            continue
        top = sys_root / "fs/cgroup" / ("memory" if parts[1] else "")
        folder = top / parts[2].strip("/")
        # A limit holds for all that is below it.
        for place in (folder, *folder.parents):
            found += [room for names in _FILES if (room := _room(place, *names)) is not None]
            if place == top:
                break
    return max(min(found), 0)


def _room(place: Path, limit: str, used: str) -> int | None:
    allowed, taken = _read(place / limit).strip(), _read(place / used).strip()
    if not allowed.isdigit() or not taken.isdigit():
        return None
    return int(allowed) - int(taken)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
