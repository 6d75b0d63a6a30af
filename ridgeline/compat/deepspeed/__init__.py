"""DeepSpeed's interface for training: `import ridgeline.compat.deepspeed as deepspeed`, and the script runs
on.

Its configuration becomes a layout, its engine ours (`train/engine.py`), so that a script gets what it had,
for the same numbers, and in the same file what DeepSpeed has no word for: `"ridgeline": {"layout":
"cp=2"}`. What is not here says so when it is asked for. Called by scripts alone.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ridgeline.compat.deepspeed import checkpointing, comm, ops, pipe, runtime, utils, zero
from ridgeline.compat.deepspeed.accelerator import get_accelerator
from ridgeline.compat.deepspeed.build import build
from ridgeline.compat.deepspeed.comm import init_distributed
from ridgeline.compat.deepspeed.engine import DeepSpeedEngine
from ridgeline.compat.deepspeed.missing import HERE
from ridgeline.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from ridgeline.compat.missing import tell_names
from ridgeline.errors import UsageError

__version__ = "0.19.8"
"""Of the interface: what it was held against."""
_DEPLOYED = "`ridgeline export` makes a package for C++ programs"
_ELSEWHERE = {
    "init_inference": _DEPLOYED,
    "InferenceEngine": _DEPLOYED,
    "DeepSpeedInferenceConfig": _DEPLOYED,
    "default_inference_config": _DEPLOYED,
    "PipelineEngine": "`deepspeed.initialize` gives a DeepSpeedEngine for pipelines, too",
    "moe": "`ridgeline.layout` with ep=n spreads the experts of any mixture",
    "tp_model_init": 'put "tensor_parallel": {"autotp_size": n} into the configuration',
    "profiling": "`ridgeline doctor train.py`",
}
__getattr__ = tell_names("deepspeed", HERE, _ELSEWHERE)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    example_input: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
) -> tuple[DeepSpeedEngine, Optimizer, Any, Any]:
    """(engine, optimizer, loader, schedule), as deepspeed has it.

    `example_input` and `loss_fn` are ours: for layouts that have to see the model run once (training_data
    does for that as well), and for `engine.train_batch` without a PipelineModule.
    """
    if model is None:
        raise UsageError("deepspeed.initialize(model=...): give the model")
    if mpu is not None or mesh_param is not None:
        raise UsageError(
            "deepspeed.initialize(mpu=..., mesh_param=...) is not here; say tensor_parallel.autotp_size or "
            "sequence_parallel_size in the configuration"
        )
    source = config if config is not None else config_params
    if source is None:
        source = getattr(args, "deepspeed_config", None)
    if source is None:
        raise UsageError(
            "deepspeed.initialize has no configuration; give config=, or args with deepspeed_config"
        )
    return build(
        source,
        model,
        optimizer,
        model_parameters,
        training_data,
        lr_scheduler,
        collate_fn,
        example_input,
        loss_fn,
    )


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """The options that scripts for DeepSpeed have: `--deepspeed`, `--deepspeed_config FILE`."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="taken for granted here")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the JSON file of settings")
    return parser


__all__ = [
    "DeepSpeedEngine",
    "LayerSpec",
    "PipelineModule",
    "TiedLayerSpec",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
]
