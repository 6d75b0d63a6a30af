"""What `ridgeline doctor` asks of its ranks, and what they answer, as files in a folder.

Written by `cli_doctor.py`, read by `worker.py` on each rank, and the other way round; without torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.doctor.measured import Measured, measured_from_dict
from ridgeline.doctor.seen import SeenScript

REQUEST = "request.json"
TRACE = "trace.json"
Timeline = list[tuple[float, float, str, float]]


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


def write_answer(
    folder: Path, measured: Measured, timeline: Timeline, script: SeenScript | None = None
) -> None:
    value: dict[str, Any] = {"measured": measured.to_dict(), "timeline": [], "script": None}
    if measured.rank == 0:
        value["timeline"] = timeline
        value["script"] = dataclasses.asdict(script) if script is not None else None
    path = folder / f"measured-{measured.rank}.json"
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
    return sorted(found, key=lambda m: m.rank), timeline, script
