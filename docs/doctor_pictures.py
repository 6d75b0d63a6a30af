"""Draws the pictures of `doctor.md`, `climb.md` and the README, from what was measured on an H200.

    python docs/doctor_pictures.py        # writes docs/pictures/climb_*.svg and roofline_*.svg

They are the pictures that `ridgeline doctor --climb` and `ridgeline machine compute` leave. A test draws
them again and compares.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.doctor.ladder import Ladder, Rung, draw_ladder
from ridgeline.machine.record import read_compute
from ridgeline.machine.roofline import draw_roofline

FOLDER = Path(__file__).with_name("pictures")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
LONGEST = "1.3b, with fp8 in one go"


def known(cls: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Those that a class has; results are older than some of its fields."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {key: value for key, value in values.items() if key in names}


def climb() -> str:
    """A 1.3B Llama from plain float32, with fp8."""
    found = json.loads((RESULTS / "climb_h200.json").read_text(encoding="utf-8"))["climb"][LONGEST]
    rungs = tuple(Rung(**known(Rung, rung)) for rung in found["rungs"])
    return draw_ladder(Ladder(**{**known(Ladder, found), "rungs": rungs}))


def roofline() -> str:
    facts = read_compute(RESULTS / "machine_h200.json", "", "cuda", "NVIDIA H200")
    assert facts is not None
    return draw_roofline(facts)


PICTURES: dict[str, Callable[[], str]] = {"climb_1.3b": climb, "roofline_h200": roofline}


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(f"pictures/{name}.svg")


if __name__ == "__main__":
    main()
