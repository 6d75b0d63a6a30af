"""Jobs that were given to a scheduler: what is remembered of them, so that an id is enough later.

The record is `job.json` in the job's folder; where that folder is stands in the user's state folder, in a
file named after the scheduler and the id. Written by `request.py`, read by `ridgeline launch status`,
`logs` and `cancel`.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ridgeline.errors import UsageError
from ridgeline.launch.job import RECORD
from ridgeline.launch.ranks import write_aside

_PART = re.compile(r"(\w+?)(?:_(\d+)|\[(\d+)\])(\..*)?")
"""One job of an array: `17_3` under Slurm, `17[3]` under LSF, `17[3].server` under PBS."""


@dataclass(frozen=True)
class JobRecord:
    """One job as it was submitted."""

    id: str
    scheduler: str
    name: str
    folder: str
    nodes: int
    per_node: int
    submitted: float
    array: str | None = None
    after: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    """All links of the chain it is one of, in order."""


def state_folder() -> Path:
    """Where records are found by id: `$XDG_STATE_HOME/ridgeline/jobs`."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "ridgeline" / "jobs"


def write_record(record: JobRecord) -> None:
    text = json.dumps(asdict(record), indent=1)
    write_aside(Path(record.folder) / RECORD, text)
    # A home that cannot be written to costs the short way of asking, not the job.
    with suppress(OSError):
        write_aside(state_folder() / f"{record.scheduler}-{record.id}.json", text)


def find_record(said: str) -> JobRecord:
    """The job with this id (`17`, or `slurm:17` where two schedulers have one), or in this folder; of an
    array also one part, as its scheduler writes it (`17_3`, `17[3]`)."""
    if (Path(said) / RECORD).is_file():
        return _read(Path(said) / RECORD)
    scheduler, _, number = said.rpartition(":")
    part = _PART.fullmatch(number)
    array, index = (part[1], part[2] or part[3]) if part else (number, "")
    found = [
        record
        for record in list_records()
        if scheduler in ("", record.scheduler)
        and (record.id == number or (index and record.id.partition("[]")[0] == array))
    ]
    if not found:
        raise UsageError(
            f"no job {said!r} was started from here; give its id as `ridgeline launch` printed it, or "
            f"its folder (the one with {RECORD})"
        )
    # Schedulers that are set up anew count from one again: the last is meant.
    newest = max(found, key=lambda record: record.submitted)
    others = {record.scheduler for record in found}
    if len(others) > 1:
        names = " or ".join(f"{name}:{number}" for name in sorted(others))
        raise UsageError(f"job {number} is known of several schedulers; say {names}")
    return newest if newest.id == number or not index else _part_of(newest, index)


def _part_of(record: JobRecord, index: str) -> JobRecord:
    """One job of an array, which has a folder of its own."""
    if record.array is None:
        raise UsageError(f"job {record.id} is no array; leave the index {index} out")
    number = f"{record.id}_{index}" if record.scheduler == "slurm" else f"{record.id}[{index}]"
    if "[]" in record.id:  # as PBS names an array
        number = record.id.replace("[]", f"[{index}]")
    return replace(record, id=number, folder=str(Path(record.folder) / index), chain=())


def list_records() -> list[JobRecord]:
    """All that are remembered, the newest first."""
    found = []
    for path in state_folder().glob("*.json"):
        with suppress(UsageError):
            found.append(_read(path))
    return sorted(found, key=lambda record: -record.submitted)


def _read(path: Path) -> JobRecord:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        lists = {name: tuple(value.get(name, ())) for name in ("after", "chain")}
        return JobRecord(**{**value, **lists})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is no record of a job: {error}") from error


def new_record(
    job_id: str,
    scheduler: str,
    name: str,
    folder: Path,
    nodes: int,
    per_node: int,
    array: str | None,
    after: tuple[str, ...],
) -> JobRecord:
    return JobRecord(
        job_id, scheduler, name, str(folder.absolute()), nodes, per_node, time.time(), array, after
    )
