"""What the planner said of a run before it started, beside what it measured; nothing if it was not asked.

Called by `build.py`.
"""

from __future__ import annotations

from ridgeline.plan.kept import compare_run, machine_of
from ridgeline.report.page import bytes_text, paragraph, seconds_text, table
from ridgeline.report.summary import RunSummary
from ridgeline.rundir import RunDir


def predicted(run: RunDir, summary: RunSummary) -> str:
    on_gpu = summary.machine is not None and summary.machine.device_kind == "cuda"
    compared = compare_run(run, summary.step_s, summary.peak_memory_bytes, on_gpu)
    if not compared:
        return ""
    rows = []
    for one in compared:
        text = seconds_text if one.unit == "s" else _bytes
        rows.append(
            [one.name, text(one.predicted), text(one.measured), f"{100 * one.error:+.1f} %"]
        )
    note = (
        f"Predicted for {machine_of(run)} before the run; the difference is over what was measured."
    )
    return table(["", "predicted", "measured", "difference"], rows) + paragraph(note, "note")


def _bytes(value: float) -> str:
    return bytes_text(int(value))
