"""Ridgeline: take a PyTorch model that trains on one device to the whole machine, and know why it is fast.

Public names, each imported when it is first used, so that `import ridgeline` needs no torch:

    start         join the job this process belongs to; returns a Job, for a loop of your own
    Job           rank, device, parallelize(model), loader(dataset, ...), mean(value)
    Layout        the parallel arrangement, e.g. Layout.parse("dp=4,precision=bf16")
    parallelize   put a layout on any module
    run_recipe    run a whole recipe from a script
    RunDir        read what a run left behind
    UsageError    what was asked cannot be done as asked
    RunError      what was asked went wrong while it ran
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.errors import RunError, UsageError
    from ridgeline.layout import Layout
    from ridgeline.parallel.apply import parallelize
    from ridgeline.rundir import RunDir
    from ridgeline.train.job import Job, start
    from ridgeline.train.run import run_recipe

__version__ = "0.1.0"

_HOME = {
    "start": "ridgeline.train.job",
    "Job": "ridgeline.train.job",
    "Layout": "ridgeline.layout",
    "parallelize": "ridgeline.parallel.apply",
    "run_recipe": "ridgeline.train.run",
    "RunDir": "ridgeline.rundir",
    "UsageError": "ridgeline.errors",
    "RunError": "ridgeline.errors",
}

__all__ = [
    "Job",
    "Layout",
    "RunDir",
    "RunError",
    "UsageError",
    "parallelize",
    "run_recipe",
    "start",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
