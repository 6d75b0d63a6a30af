"""Pipelines: a model cut into stages that lie on several ranks, microbatches flowing through them."""

from ridgeline.parallel.pipeline.plan import Cut, StagePlan, StageSpec, Tied, plan_stages
from ridgeline.parallel.pipeline.run import SCHEDULES, Pipeline, check_schedule
from ridgeline.parallel.pipeline.stage import Stage, build_stages, stale_buffers
from ridgeline.parallel.pipeline.timeline import (
    Event,
    Timeline,
    chrome_trace,
    ideal_bubble,
    timeline_svg,
    write_chrome_trace,
)

__all__ = [
    "SCHEDULES",
    "Cut",
    "Event",
    "Pipeline",
    "Stage",
    "StagePlan",
    "StageSpec",
    "Tied",
    "Timeline",
    "build_stages",
    "check_schedule",
    "chrome_trace",
    "ideal_bubble",
    "plan_stages",
    "stale_buffers",
    "timeline_svg",
    "write_chrome_trace",
]
