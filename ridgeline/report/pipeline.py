"""The report's section on a pipeline: what of a step ranks wait for each other, and a step as a picture.

Called by `build.py`.
"""

from __future__ import annotations

from ridgeline.errors import UsageError
from ridgeline.layout import Layout, ideal_bubble
from ridgeline.report.page import paragraph
from ridgeline.report.summary import RunSummary, percentages
from ridgeline.rundir import PIPELINE, TRACES, RunDir


def pipeline(run: RunDir, summary: RunSummary) -> str:
    """Nothing where the layout has no stages."""
    try:
        layout = Layout.parse(summary.layout_text)
    except UsageError:
        return ""
    if layout.pp == 1:
        return ""
    said = ""
    parts = summary.split()
    # As the table of the step's parts has it: a share of the sum of medians.
    share = dict(zip(parts, percentages(list(parts.values())), strict=True)).get("bubble_s", 0.0)
    if share:
        said = (
            f"Rank 0 waits for other stages, and for what they send, for {share:.1f} % of a step."
        )
    if layout.schedule != "zerobubble":
        idle = ideal_bubble(layout.pp, layout.microbatches, layout.virtual)
        said += (
            f" Ranks with as much work each would be idle for {idle:.0%} of a step with microbatches="
            f"{layout.microbatches}; more of them make that less."
        )
    path = run.file(TRACES) / f"{PIPELINE}.svg"
    picture = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    note = paragraph(f"{TRACES}/{PIPELINE}.json has the same for Perfetto.", "note")
    figure = f"<figure>{picture}</figure>{note}" if picture.startswith("<svg") else ""
    return paragraph(said.strip()) + figure
