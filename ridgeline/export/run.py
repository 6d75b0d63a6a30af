"""The model of a run, whatever layout trained it, with its data's own samples: `ridgeline export RUN`.

Everything is built with what evaluation is built with: the model and its weights, the source,
`data.augment` without its random steps, the way to the device. What the package does to inputs is
compared with that, bit for bit, before anything is compiled. Called by `cli_export.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.augmenting import AugmentConfig
from ridgeline.checkpoint.damage import Advance
from ridgeline.checkpoint.manifest import MODEL, Manifest, read_manifest
from ridgeline.checkpoint.weights import fill_model
from ridgeline.config import RunConfig, parse_config
from ridgeline.data.augment.apply import Augment, build_augment
from ridgeline.data.augment.change import AugmentBatch
from ridgeline.data.batch import read_batch
from ridgeline.data.build import build_sources
from ridgeline.data.order import BatchPlan
from ridgeline.data.source import Source
from ridgeline.errors import RunError, UsageError, UserCodeFailed, tell_where
from ridgeline.export.check import difference, largest_value
from ridgeline.export.deployed import Prepare, flatten_outputs
from ridgeline.export.package import Exported, check_target, export_model
from ridgeline.export.request import Wanted
from ridgeline.launch.env import read_rank_env
from ridgeline.models.inputs import Inputs, call_arguments, change_each, tensors_of
from ridgeline.parallel.mesh import choose_device
from ridgeline.parallel.precision import build_precision
from ridgeline.train.setup import DTYPES, build_adapt, build_to_device, build_weights, convert

_SAMPLES = 5
"""In the sample of a package for any number: more than the 1 and 2 that are tried too, and no size that a
model is likely to have anywhere else."""
_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

Bar = Callable[[str, int], AbstractContextManager[Advance]]


@dataclass(frozen=True)
class Subject:
    """What is exported, and a batch of what it takes."""

    model: nn.Module
    prepare: Prepare | None
    inputs: Inputs
    config: RunConfig
    notes: tuple[str, ...]


def export_run(
    path: Path, out: Path, wanted: Wanted, bar: Bar, say: Callable[[str], None]
) -> Exported:
    """Export the checkpoint at `path` to the new folder `out`."""
    check_target(out)
    manifest = read_manifest(path)
    subject = build_subject(path, manifest, wanted, bar)
    for note in subject.notes:
        say(note)
    return export_model(
        subject.model,
        subject.inputs,
        out,
        varies=wanted.batch is None,
        check=wanted.check,
        prepare=subject.prepare,
        about=_about(path, manifest, subject, wanted),
        say=say,
    )


def build_subject(path: Path, manifest: Manifest, wanted: Wanted, bar: Bar) -> Subject:
    """The model of the checkpoint with its weights, on one device, and samples of its data."""
    own = _config(path, manifest, wanted)
    dtype = _TYPES[wanted.dtype] if wanted.dtype is not None else own.model.dtype
    config = replace(own, model=replace(own.model, dtype=dtype))
    device = choose_device(own.device, read_rank_env({}))
    build_precision("fp32", device)  # products as wide as the weights
    # Samples first: where the data is not here, nothing has to be read to know it.
    source = _source(own)
    augment = build_augment(own.data.augment, source.info, own.train.seed, train=False)
    count = wanted.batch or _SAMPLES
    model = build_weights(own, torch.device("cpu"), "")
    num_bytes = sum(s.num_bytes for n, s in manifest.tensors.items() if n.startswith(MODEL))
    with bar(f"weights of {path.name}", num_bytes) as advance:
        notes = fill_model(model, path, manifest, advance, wanted.live)
    model = model.to(device).eval()
    raw, evaluated = _samples(own, source, augment, count, device)
    before = _run(model, evaluated, wanted.batch)
    if config != own:
        convert(model, DTYPES[dtype])
        raw, evaluated = _samples(config, source, augment, count, device)
        notes += _say_type(before, _run(model, evaluated, wanted.batch), own, config)
    prepare = _build_prepare(config, augment)
    _require_same(prepare(_on(raw, device)), evaluated)
    if wanted.bare:
        return Subject(model, None, evaluated, config, tuple(notes))
    told = f"inputs are as data.source={config.data.source} has them"
    steps = describe_steps(config.data.augment, augment)
    if steps:
        told += f"; the package prepares them as evaluation does: {', '.join(steps)}"
    return Subject(model, prepare, raw, config, (*notes, told))


def _say_type(
    before: dict[str, Tensor], after: dict[str, Tensor], own: RunConfig, config: RunConfig
) -> list[str]:
    """What another type costs, beside which the rounding of the package is small."""
    return [
        f"{name}: {config.model.dtype} differs from the run's {own.model.dtype} by at most "
        f"{difference(after[name], value):.2g} (largest value {largest_value(value):.3g})"
        for name, value in before.items()
    ]


def _config(path: Path, manifest: Manifest, wanted: Wanted) -> RunConfig:
    if not manifest.config:
        raise UsageError(
            f"{path} was saved by a loop of its own and names no model that could be built; call "
            "ridgeline.export.package.export_model(model, inputs, OUT) in that script"
        )
    config = parse_config(manifest.config, f"the configuration in {path}", wanted.overrides)
    return replace(config, device=wanted.device or config.device)


def _source(config: RunConfig) -> Source:
    """What evaluations read, else what training does."""
    train, held_out = build_sources(config.data.source, config.data.args, config.train.seed)
    return held_out if len(held_out) else train


def _samples(
    config: RunConfig, source: Source, augment: Augment | None, count: int, device: torch.device
) -> tuple[Inputs, Inputs]:
    """The first samples as the source has them, and as an evaluation gives them to the model."""
    indices = np.arange(count, dtype=np.int64) % len(source)
    plan = BatchPlan(0, 0, count, (indices,), (float(count),))
    raw = read_batch(source, plan).inputs[0]
    change = None if augment is None else AugmentBatch(augment)
    batch = build_to_device(config, device)(read_batch(source, plan, change))
    return raw, batch.inputs[0]


def _build_prepare(config: RunConfig, augment: Augment | None) -> Prepare:
    """What `read_batch` and `build_to_device` do to inputs, for any number of them."""
    adapt = build_adapt(config)
    change = augment.alone() if augment is not None else None

    def prepare(inputs: Inputs) -> Inputs:
        if change is not None:
            assert isinstance(inputs, Tensor)
            inputs = change(inputs)
        return change_each(inputs, adapt)

    return prepare


def _on(inputs: Inputs, device: torch.device) -> Inputs:
    return change_each(inputs, lambda value: value.to(device))


def _require_same(prepared: Inputs, evaluated: Inputs) -> None:
    """The package sees what evaluation sees, bit for bit; else its figures would be of another model."""
    for mine, theirs in zip(tensors_of(prepared), tensors_of(evaluated), strict=True):
        if not torch.equal(mine, theirs):
            raise RunError(
                "the package would prepare inputs in another way than evaluation does; use --bare, which "
                "leaves that to the program that calls, and please report this"
            )


def _run(model: nn.Module, inputs: Inputs, batch: int | None) -> dict[str, Tensor]:
    """What the model gives. An error of its own is told as what it is, before anything is exported."""
    args, kwargs = call_arguments(inputs)
    try:
        with torch.no_grad():
            return flatten_outputs(model(*args, **kwargs))[0]
    except (UsageError, RunError):
        raise
    except Exception as error:
        hint = "" if batch else "; where it is made for batches of one size, say so with --batch N"
        raise UserCodeFailed(
            f"the model does not run on {len(tensors_of(inputs)[0])} samples of its data: "
            f"{type(error).__name__}: {str(error).strip():.300}{tell_where(error)}{hint}"
        ) from error


def describe_steps(config: AugmentConfig, augment: Augment | None) -> list[str]:
    """What is done to inputs, in words and numbers."""
    if augment is None:
        return []
    found = []
    if config.crop != "none":
        size = "x".join(map(str, config.size)) or "the whole"
        found.append(f"the centre of crop={config.crop} to {size}")
    given = {name: getattr(config, name) for name in ("scale", "offset", "mean", "std")}
    found += [f"{name} {', '.join(f'{n:g}' for n in v)}" for name, v in given.items() if v]
    return found or ["to floating point"]


def _about(path: Path, manifest: Manifest, subject: Subject, wanted: Wanted) -> dict[str, Any]:
    """Where the model is from, for model.json."""
    augment = subject.config.data.augment
    prepared = {name: list(getattr(augment, name)) for name in ("scale", "offset", "mean", "std")}
    return {
        "run": subject.config.name,
        "checkpoint": str(path),
        "step": manifest.step,
        "layout": manifest.layout,
        "metrics": manifest.metrics,
        "averaged": manifest.has_average and not wanted.live,
        "model": {"name": subject.config.model.name, "args": subject.config.model.args},
        "prepares": None
        if wanted.bare
        else {"crop": augment.crop, "size": list(augment.size), **prepared},
    }
