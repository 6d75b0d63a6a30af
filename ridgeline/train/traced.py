"""Facts for the planner of a recipe's model, or of a module of the user's own: nothing is trained.

A recipe says what a sample looks like and what the loss is; for `package.module:factory` the caller gives
the shapes of one sample, and the loss is the module's own or a mean. Called by `cli_plan.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import torch

from ridgeline.config import RunConfig
from ridgeline.data.augment.apply import build_augment
from ridgeline.data.build import build_sources
from ridgeline.data.source import SourceInfo
from ridgeline.errors import UsageError, unknown_word
from ridgeline.models.build import build_model
from ridgeline.models.inputs import change_each
from ridgeline.models.trace import Batch, trace_module
from ridgeline.plan.module import ModuleFacts
from ridgeline.plan.recipe import optimizer_slots
from ridgeline.train.tasks import build_task

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def trace_recipe(config: RunConfig) -> ModuleFacts:
    """The model of a recipe, with its samples and its loss."""
    source, _ = build_sources(config.data.source, config.data.args, config.train.seed)
    augment = build_augment(config.data.augment, source.info, config.train.seed, train=True)
    info = source.info if augment is None else augment.output_info(source.info)
    task = build_task(config.train.task, info.task)

    def batch(count: int) -> Batch:
        dtype = DTYPES[config.model.dtype]
        inputs = change_each(
            info.zeros(count), lambda x: x.to(dtype) if x.is_floating_point() else x
        )
        targets = torch.zeros((count, *info.target_shape), dtype=info.target_dtype)
        return inputs if isinstance(inputs, tuple) else (inputs,), targets

    return trace_module(
        config.name or config.model.name,
        lambda: build_model(config.model.name, **config.model.args).to(DTYPES[config.model.dtype]),
        batch,
        task.loss,
        _describe_all(info),
        info.unit,
        info.units_per_sample,
        optimizer_slots(config),
    )


def trace_named(name: str, inputs: Sequence[str]) -> ModuleFacts:
    """A module that can be imported, run on tensors of the given shapes: `3x224x224`, `128:int64` or
    `input_ids=128:int64`, each of one sample."""
    if not inputs:
        raise UsageError(
            f"{name} needs --input, the shape of one sample without the batch, as in --input 3x224x224 or "
            "--input 128:int64; give it once for each argument"
        )
    read = [_read_input(text) for text in inputs]
    named = [key for key, _, _ in read if key]
    if named and len(named) != len(read):
        raise UsageError(
            f"--input {' --input '.join(inputs)} names some arguments and not others; name all or none"
        )

    def batch(count: int) -> Batch:
        tensors = [torch.zeros((count, *shape), dtype=dtype) for _, shape, dtype in read]
        if named:
            return (dict(zip(named, tensors, strict=True)),), None
        return tuple(tensors), None

    tokens = [
        shape[0] for _, shape, dtype in read if not dtype.is_floating_point and len(shape) == 1
    ]
    return trace_module(
        name,
        partial(build_model, name),
        batch,
        None,
        [f"{key}={_describe(s, d)}" if key else _describe(s, d) for key, s, d in read],
        "tokens" if tokens else "samples",
        tokens[0] if tokens else 1,
    )


def _read_input(text: str) -> tuple[str, tuple[int, ...], torch.dtype]:
    key, equals, rest = text.rpartition("=")
    shape, _, dtype = rest.partition(":")
    sizes = re.split(r"[x,]", shape) if shape else []
    if not all(size.isdigit() and int(size) > 0 for size in sizes) or (
        equals and not key.isidentifier()
    ):
        raise UsageError(
            f"{text!r} of --input is no shape; write one sample's sizes and its type as in 3x224x224, "
            "128:int64 or input_ids=128:int64"
        )
    if dtype and dtype not in DTYPES:
        raise unknown_word("type", dtype, DTYPES, f"--input {text}")
    return key, tuple(int(size) for size in sizes), DTYPES[dtype or "float32"]


def _describe_all(info: SourceInfo) -> list[str]:
    if not info.arguments:
        return [_describe(info.input_shape, info.input_dtype)]
    return [(f"{a.name}=" if a.name else "") + _describe(a.shape, a.dtype) for a in info.arguments]


def _describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape)) or '1'}:{str(dtype).removeprefix('torch.')}"
