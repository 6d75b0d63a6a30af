"""From a configuration and a model to DeepSpeed's engine: what `initialize` does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from ridgeline.compat.deepspeed.comm import get_world_size, init_distributed
from ridgeline.compat.deepspeed.config import Asked, read_config, read_source
from ridgeline.compat.deepspeed.engine import DeepSpeedEngine, build_loader
from ridgeline.compat.deepspeed.ops.adam import FusedAdam
from ridgeline.compat.deepspeed.pipe import PipelineModule
from ridgeline.compat.deepspeed.schedules import build_schedule
from ridgeline.errors import OURS, UsageError
from ridgeline.parallel.blocks import find_blocks
from ridgeline.parallel.precision import Scaler
from ridgeline.train.job import start
from ridgeline.train.uncaught import install_sentences

_NOT_HERE = {
    "lamb": "use optim.name=lamb of `ridgeline train`, or AdamW",
    "muon": "use AdamW",
    "onebitadam": 'use AdamW with "ridgeline": {"layout": "compress=powersgd:4"}',
    "onebitlamb": 'use AdamW with "ridgeline": {"layout": "compress=powersgd:4"}',
    "zerooneadam": 'use AdamW with "ridgeline": {"layout": "compress=powersgd:4"}',
    "muadam": "use Adam, with the rates of the groups as muP has them",
    "muadamw": "use AdamW, with the rates of the groups as muP has them",
    "musgd": "use SGD, with the rates of the groups as muP has them",
}


def build(
    source: Any,
    model: nn.Module,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None,
    model_parameters: Iterable[Any] | None,
    training_data: Any,
    lr_scheduler: Any,
    collate: Callable[..., Any] | None,
    example: Any,
    loss: Callable[[Any, Any], Any] | None,
) -> tuple[DeepSpeedEngine, Optimizer, Any, Any]:
    install_sentences().come_first()
    config = read_source(source)
    init_distributed()
    stages = model.num_stages if isinstance(model, PipelineModule) else 1
    asked = read_config(config, get_world_size(), stages)
    asked, notes = _recompute(asked, model)
    if isinstance(model, PipelineModule):
        loss = loss or model.loss_fn
        if asked.layout.pp > 1 and loss is None:
            raise UsageError("PipelineModule(loss_fn=...): give the function of outputs and labels")
    job = start(asked.layout, seed=_agree_on_seed())
    for note in (f"layout {job.layout}", *notes, *asked.notes) if job.is_main else ():
        print(f"{OURS}{note}", file=sys.stderr)
    model = model.to(job.device)
    made = _optimizer(asked, optimizer, model, model_parameters)
    looks = asked.layout.world_size > asked.layout.dp
    if example is None and (looks or asked.layout.ep > 1) and training_data is not None:
        example = _example(training_data, collate)
    engine = job.engine(
        model,
        made,
        clip=asked.clip,
        loss=loss,
        example_input=example,
        elementwise=asked.allows_untested,
        scaler=Scaler(job.device.type, **asked.loss_scale) if asked.loss_scale else None,
    )
    loader = None
    if training_data is not None:
        loader = build_loader(job, training_data, asked.batch, collate, asked.drop_last)
    schedule = _schedule(asked, lr_scheduler, made)
    wrapped = DeepSpeedEngine(job, engine, asked, loader, schedule, collate)
    return wrapped, made, loader, schedule


def _recompute(asked: Asked, model: nn.Module) -> tuple[Asked, list[str]]:
    """`activation_checkpoint_interval` of a pipeline."""
    if not isinstance(model, PipelineModule):
        return asked, []
    notes = [f"PipelineModule: without a meaning here: {', '.join(model.ignored)}"] * bool(
        model.ignored
    )
    if not model.recomputes or asked.layout.recompute != "none":
        return asked, notes
    if not find_blocks(model):
        return asked, [
            *notes,
            "activation_checkpoint_interval does nothing: the layers are all of other kinds",
        ]
    return replace(asked, layout=asked.layout.replace(recompute="full")), notes


def _agree_on_seed() -> int:
    """The first rank's, of whatever the script has seeded torch with."""
    box = [torch.initial_seed() % 2**31]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _optimizer(
    asked: Asked,
    given: Optimizer | Callable[[Any], Optimizer] | None,
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
) -> Optimizer:
    if isinstance(given, Optimizer):
        return given
    parameters: Any = (
        list(model_parameters) if model_parameters is not None else list(model.parameters())
    )
    if parameters and isinstance(parameters[0], torch.Tensor):
        parameters = [p for p in parameters if p.requires_grad]
    if given is not None:
        return given(parameters)
    if asked.optimizer is None:
        raise UsageError(
            "deepspeed.initialize has no optimizer: give optimizer=, or a section optimizer in the "
            "configuration"
        )
    name, params = asked.optimizer
    lowered = name.lower()
    if lowered in _NOT_HERE:
        raise UsageError(
            f"optimizer.type={name} of deepspeed's configuration is not here; {_NOT_HERE[lowered]}"
        )
    try:
        if lowered in ("adam", "adamw"):
            decouples = params.pop("adam_w_mode", True) or lowered == "adamw"
            params.pop("torch_adam", None)
            return FusedAdam(parameters, adam_w_mode=decouples, **params)
        kind = getattr(torch.optim, name, None) or getattr(torch.optim, name.upper(), None)
        if kind is None and lowered == "adagrad":
            kind = torch.optim.Adagrad
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise UsageError(
                f"optimizer.type={name} of deepspeed's configuration is not known; use Adam, AdamW, or a "
                "class of "
                "torch.optim"
            )
        return kind(parameters, **params)
    except TypeError as error:
        raise UsageError(
            f"optimizer.params of {name} in deepspeed's configuration: {error}"
        ) from None


def _schedule(asked: Asked, given: Any, optimizer: Optimizer) -> Any:
    """The script's own, or a function that makes it of the optimizer, or that of the configuration."""
    if given is not None:
        makes = callable(given) and not hasattr(given, "step")
        return given(optimizer) if makes else given
    if asked.scheduler is None:
        return None
    return build_schedule(*asked.scheduler, optimizer)


def _example(training_data: Any, collate: Callable[..., Any] | None) -> Any:
    """The inputs of two samples."""
    first = (collate or default_collate)([training_data[0], training_data[0]])
    inputs = first[0] if isinstance(first, (tuple, list)) else first
    return tuple(inputs) if isinstance(inputs, list) else inputs
