"""The timeline of one step of a pipeline: who did which microbatch when, as a trace in the run directory.

An early step is recorded, after the first ones have warmed the devices up. Called by `run.py` on every
rank; rank 0 writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.rundir import PIPELINE, TRACES, RunDir
from ridgeline.train.setup import Training

if TYPE_CHECKING:
    from ridgeline.parallel.staged import Staged

_TRACED_STEP = 3


class StepTrace:
    """Records the pipeline's third step, or the last one of a shorter run."""

    def __init__(self, training: Training) -> None:
        self._staged: Staged | None = training.arranged.staged
        self._step = min(_TRACED_STEP, training.num_steps)
        if self._staged is not None and self._step == 1:
            self._staged.record_next_step()

    def after(self, step: int, run: RunDir | None) -> str:
        """Called after each step; a sentence for the user when the trace is there."""
        if self._staged is None:
            return ""
        if step == self._step - 1:
            self._staged.record_next_step()
        if step != self._step:
            return ""
        from ridgeline.parallel.pipeline import timeline_svg, write_chrome_trace

        timeline = self._staged.timeline()
        if run is None:
            return ""
        text = timeline.describe()
        write_chrome_trace(timeline, run.file(TRACES) / f"{PIPELINE}.json")
        picture = timeline_svg(timeline.events, title=f"step {step}, {timeline.schedule}")
        (run.file(TRACES) / f"{PIPELINE}.svg").write_text(picture, encoding="utf-8")
        return f"pipeline, step {step}: {text} ({TRACES}/{PIPELINE}.json, .svg)"
