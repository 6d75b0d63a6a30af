"""A user's own script in the words of a recipe, as far as can be seen while it runs, so that the same
remedies serve both.

`script.py` and `script_candidate.py` look at the script with `look_at_script`; what they saw goes through
JSON, and `as_seen` puts it where a recipe has it. Imports torch only to look.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.config import RunConfig
from ridgeline.doctor.measured import ATTENTION, CONVOLUTION, MATRIX, Measured
from ridgeline.doctor.model_look import SCRIPT, Look
from ridgeline.layout import Layout

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ridgeline.train.job import Job

_NARROW = ("tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class SeenScript:
    layout: str = ""
    """Of its job; of a script without one what torch was told."""
    look: dict[str, float] = field(default_factory=dict)
    """Of its model (`model_look.py`)."""
    workers: int = 0
    """Processes of its loader."""
    fused: bool = False
    """Whether its optimizer is fused, or not ours to choose."""
    has_job: bool = True


def look_at_script(
    job: Job | None, model: nn.Module | None, look: Look, workers: int, optimizer: Optimizer
) -> SeenScript:
    """`look`: of the model before a job arranged it; `workers`: of the first loader."""
    return SeenScript(
        layout=str(job.layout if job is not None else _own_layout(model)),
        look=dataclasses.asdict(look),
        workers=workers,
        fused=_is_settled(optimizer),
        has_job=job is not None,
    )


def _is_settled(optimizer: Optimizer) -> bool:
    import torch

    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return True
    groups = optimizer.param_groups
    return any(g.get("fused") is not None or g.get("foreach") is not None for g in groups)


def _own_layout(model: nn.Module | None) -> Layout:
    """Of plain torch: ranks that each have a replica, and whether there is a compiled model."""
    import gc

    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    compiled = torch._dynamo.OptimizedModule
    is_compiled = model is not None and (
        getattr(model, "_compiled_call_impl", None) is not None
        or any(model in set(o.modules()) for o in gc.get_objects() if type(o) is compiled)
    )
    return Layout(dp=ranks, compile=is_compiled)


def of_script(script: Path) -> RunConfig:
    """A configuration of which nothing is known yet."""
    empty = RunConfig(name=script.stem or "script")
    return dataclasses.replace(
        empty,
        model=dataclasses.replace(empty.model, name=SCRIPT),
        data=dataclasses.replace(empty.data, source=SCRIPT),
        train=dataclasses.replace(empty.train, steps=1),
        tune=dataclasses.replace(empty.tune, search_convolutions=False),
    )


def as_seen(config: RunConfig, seen: SeenScript) -> RunConfig:
    return dataclasses.replace(
        config,
        layout=seen.layout,
        model=dataclasses.replace(config.model, name=SCRIPT, args=dict(seen.look)),
        data=dataclasses.replace(config.data, workers=seen.workers, prefetch=2),
        tune=dataclasses.replace(config.tune, fused_optimizer=seen.fused),
    )


def as_computed(seen: SeenScript, measured: Measured) -> SeenScript:
    """With the precision that most of the products were in, for a script that enters autocast itself."""
    layout = Layout.parse(seen.layout)
    rows = [row for row in measured.classes if row.name in (MATRIX, ATTENTION, CONVOLUTION)]
    longest = max(rows, key=lambda row: row.seconds, default=None)
    if layout.precision != "fp32" or longest is None or longest.precision not in _NARROW:
        return seen
    return dataclasses.replace(
        seen, layout=str(dataclasses.replace(layout, precision=longest.precision))
    )
