"""A user's own script in the words of a recipe, as far as can be seen while it runs, so that the same
remedies serve both.

`script.py` and `script_candidate.py` look at the script with `look_at_script`; what they saw goes through
JSON, and `as_seen` puts it where a recipe has it. Imports torch only to look.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.config import DdpConfig, RunConfig
from ridgeline.doctor.measured import ATTENTION, CONVOLUTION, MATRIX, Measured
from ridgeline.doctor.model_look import SCRIPT, STREAMS, Look
from ridgeline.layout import Layout

if TYPE_CHECKING:
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
    streams: bool = False
    """Whether its loader's data set is one that only iterates, and shares nothing out by itself."""
    fused: bool = False
    """Whether its optimizer is fused, or not ours to choose."""
    tune: dict[str, Any] = field(default_factory=dict)
    """Settings that its job was started with."""
    dtype: str = "float32"
    """Of most of its parameters."""
    channels_last: bool = False
    searches: bool = False
    """Whether convolutions are chosen by timing them."""
    compiles: bool = False
    """Whether it compiles something by itself."""
    has_job: bool = True
    bucket_mb: float = DdpConfig().bucket_mb
    """Of its replicas' gradients."""


def look_at_script(
    job: Job | None,
    look: Look,
    workers: int,
    optimizer: Optimizer,
    streams: bool = False,
    bucket_mb: float = DdpConfig().bucket_mb,
) -> SeenScript:
    """After its first step. `look`: of the model before a job arranged it; `workers` and `streams`: of the
    loader that was asked for a batch; `bucket_mb`: what the job was told."""
    import torch

    settings = job.settings if job is not None else None
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    sizes: Counter[str] = Counter()
    for weight in weights:
        sizes[str(weight.dtype).removeprefix("torch.")] += weight.numel()
    images = [w for w in weights if w.dim() == 4 and not w.is_contiguous()]
    return SeenScript(
        layout=str(job.layout if job is not None else _own_layout()),
        look=dataclasses.asdict(look),
        workers=workers,
        streams=streams,
        fused=_is_settled(optimizer),
        tune=dataclasses.asdict(settings.tune) if settings is not None else {},
        dtype=max(sizes, key=lambda name: sizes[name], default="float32"),
        channels_last=any(w.is_contiguous(memory_format=torch.channels_last) for w in images),
        searches=torch.backends.cudnn.benchmark,
        compiles=_has_compiled(),
        has_job=job is not None,
        bucket_mb=bucket_mb,
    )


def _is_settled(optimizer: Optimizer) -> bool:
    import torch

    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        return True
    groups = optimizer.param_groups
    return any(g.get("fused") is not None or g.get("foreach") is not None for g in groups)


def _own_layout() -> Layout:
    """Of plain torch: ranks that each have a replica."""
    import torch.distributed as dist

    return Layout(dp=dist.get_world_size() if dist.is_initialized() else 1)


def _has_compiled() -> bool:
    """Whether code was compiled in this process: a model, a part of it, or a function of the loop's."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["ok"] > 0


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
    """With what the script has from its job: what a climb begins with."""
    tune = dataclasses.replace(config.tune, **seen.tune)
    # What a job does by itself is a setting of a job that has some.
    fused = seen.fused or (bool(seen.tune) and tune.fused_optimizer)
    return dataclasses.replace(
        config,
        layout=seen.layout,
        model=dataclasses.replace(config.model, name=SCRIPT, args=dict(seen.look)),
        data=dataclasses.replace(config.data, workers=seen.workers, prefetch=2),
        tune=dataclasses.replace(tune, fused_optimizer=fused),
        ddp=dataclasses.replace(config.ddp, bucket_mb=seen.bucket_mb),
    )


def as_listed(config: RunConfig, seen: SeenScript) -> RunConfig:
    """With what it does by its own means as well, which is nothing to recommend."""
    config = as_seen(config, seen)
    layout, tune = Layout.parse(config.layout), config.tune
    if seen.compiles and not layout.compile:
        layout = dataclasses.replace(layout, compile=True)
        tune = dataclasses.replace(tune, compile_mode="autotune", search_tiles=True)
    if seen.dtype in ("bfloat16", "float16"):
        tune = dataclasses.replace(tune, residual="bf16")
    tune = dataclasses.replace(tune, search_convolutions=tune.search_convolutions or seen.searches)
    model = dataclasses.replace(config.model, dtype=seen.dtype, channels_last=seen.channels_last)
    data = dataclasses.replace(config.data, args={STREAMS: True} if seen.streams else {})
    return dataclasses.replace(config, layout=str(layout), model=model, data=data, tune=tune)


def as_computed(seen: SeenScript, measured: Measured) -> SeenScript:
    """With the precision that most of the products were in, for a script that enters autocast itself."""
    layout = Layout.parse(seen.layout)
    rows = [row for row in measured.classes if row.name in (MATRIX, ATTENTION, CONVOLUTION)]
    longest = max(rows, key=lambda row: row.seconds, default=None)
    if layout.precision != "fp32" or longest is None or longest.precision not in _NARROW:
        return seen  # what it was told stands above what was seen
    return dataclasses.replace(
        seen, layout=str(dataclasses.replace(layout, precision=longest.precision))
    )
