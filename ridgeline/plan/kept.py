"""What was predicted of a run beside what it measured: small rows for the doctor and the report.

`plan.json` holds the prediction of one layout; a run that went on in another, on fewer ranks, has none.
Called by `ridgeline doctor RUNDIR` and by the report; needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.rundir import LAYOUT, PLAN, RunDir


@dataclass(frozen=True)
class Compared:
    """One quantity, predicted and measured."""

    name: str
    unit: str
    """`s` or `B`."""
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "predicted": self.predicted,
            "measured": self.measured,
            "error": self.error,
        }


def read_plan(run: RunDir) -> dict[str, Any] | None:
    """The plan of a run; one that a kill cut short counts as none."""
    try:
        plan = run.read_json(PLAN)
    except (json.JSONDecodeError, OSError):
        return None
    return plan if isinstance(plan, dict) else None


def compare_run(
    run: RunDir, step_s: float | None, memory_bytes: float | None, on_gpu: bool
) -> list[Compared]:
    """Predictions of a run's layout that were measured too. What a process takes of a host's memory is
    mostly Python and libraries, so memory is compared on GPUs alone."""
    plan = read_plan(run)
    if plan is None or not plan.get("predicted") or not _same_layout(run, plan):
        return []
    said = plan["predicted"]
    rows = []
    if step_s and said.get("step_s"):
        rows.append(Compared("step", "s", float(said["step_s"]), step_s))
    if on_gpu and memory_bytes and said.get("allocated_bytes"):
        rows.append(Compared("peak memory", "B", float(said["allocated_bytes"]), memory_bytes))
    return rows


def machine_of(run: RunDir) -> str:
    plan = read_plan(run) or {}
    return str(plan.get("machine", ""))


def _same_layout(run: RunDir, plan: dict[str, Any]) -> bool:
    path = run.file(LAYOUT)
    try:
        ran = Layout.parse(path.read_text(encoding="utf-8").strip(), LAYOUT)
        return ran == Layout.parse(str(plan.get("layout", "")), PLAN)
    except (OSError, UsageError):
        return False
