"""What `ridgeline doctor` asks of its ranks, and what they answer, as files in a folder.

Written by `cli_doctor.py`, read by `worker.py` on each rank, and the other way round; without torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ridgeline.doctor.measured import Measured, RankTime, measured_from_dict
from ridgeline.doctor.seen import SeenScript

REQUEST = "request.json"
TRACE = "trace.json"
Timeline = list[tuple[float, float, str, float]]


class Answer(Protocol):
    """What a rank found: `measure.Seen`, which needs torch."""

    @property
    def measured(self) -> Measured: ...
    @property
    def timeline(self) -> Timeline: ...
    @property
    def script(self) -> SeenScript | None: ...


@dataclass(frozen=True)
class Request:
    """One measurement; a recipe's configuration lies beside it."""

    steps: int
    script: str = ""
    arguments: tuple[str, ...] = ()
    nvtx: bool = False
    machine: str = ""
    trace: bool = False
    climbs: bool = False

    def write(self, folder: Path) -> None:
        (folder / REQUEST).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


def read_request(folder: Path) -> Request:
    values = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    return Request(**{**values, "arguments": tuple(values["arguments"])})


def write_answer(folder: Path, seen: Answer, rank: int) -> None:
    """Of the `rank`-th process."""
    value: dict[str, Any] = {"measured": seen.measured.to_dict(), "timeline": [], "script": None}
    if rank == 0:
        value["timeline"] = seen.timeline
        value["script"] = dataclasses.asdict(seen.script) if seen.script is not None else None
    path = folder / f"measured-{rank}.json"
    path.write_text(json.dumps(value), encoding="utf-8")


def read_answers(folder: Path) -> tuple[list[Measured], Timeline, SeenScript | None]:
    """The measurements by rank, rank 0's timeline of memory, and what it saw of a script."""
    found: list[Measured] = []
    timeline: Timeline = []
    script = None
    for path in folder.glob("measured-*.json"):
        value = json.loads(path.read_text(encoding="utf-8"))
        found.append(measured_from_dict(value["measured"]))
        timeline = [tuple(row) for row in value["timeline"]] or timeline
        script = SeenScript(**value["script"]) if value["script"] else script
    found.sort(key=lambda m: m.rank)
    if len(found) > 1 and not found[0].ranks:
        # Their group was gone by the time that there was something to tell each other.
        ranks = tuple(RankTime(m.rank, m.step_s, m.data_s, m.comm_exposed_s) for m in found)
        found = [dataclasses.replace(m, ranks=ranks) for m in found]
    return found, timeline, script
