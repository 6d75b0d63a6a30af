"""A recipe's model made small: the same code path and structure, a size that a proof can afford.

Widths, depths and vocabularies shrink; what decides how the model is built stays (tied weights, kinds of
norm, grouped heads, dropout). A model of the user's own is taken as it is, and can be made small with
overrides. Called by `run.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ridgeline.config import LogConfig, RunConfig
from ridgeline.layout import Layout

_SMALL: dict[str, dict[str, Any]] = {
    "llama": {"width": 32, "depth": 4, "heads": 4, "kv_heads": None, "ffn": 64, "max_seq": 64},
    "bert": {"width": 32, "depth": 4, "heads": 4, "max_seq": 64},
    "vit": {"width": 32, "depth": 4, "heads": 4},
    "unet2d": {"width": 8},
    "unet3d": {"width": 8},
    "cifar_cnn": {"width": 8},
    "mlp": {"hidden": 16},
}
"""Arguments of the package's models; those of the recipe that are not here stay."""

_DEEP = frozenset({"llama", "bert", "vit"})
"""Those whose `depth` is their number of blocks."""

_CAPS: dict[str, int] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "embed_dim": 32,
    "depth": 4,
    "num_heads": 4,
    "max_position_embeddings": 64,
    "n_positions": 64,
}
"""Fields of configurations of `transformers` and arguments of `timm`, at most so large."""

_DATA_CAPS: dict[str, int] = {"seq_len": 64, "vocab": 320, "classes": 10}
_IMAGE = 64
_LARGEST_STEP = 16


def shrink(config: RunConfig, layouts: Iterable[Layout], steps: int) -> RunConfig:
    """The configuration of a proof: a few steps in float64 on the CPU, one thread a rank."""
    layouts = list(layouts)
    batch = _batch(config.train.batch, layouts)
    num_stages = max((x.pp * x.virtual for x in layouts), default=1)
    model, data = _shrink_model(config, num_stages), dict(config.data.args)
    for name, cap in _DATA_CAPS.items():
        if isinstance(data.get(name), int):
            data[name] = min(data[name], cap)
    shape = data.get("shape")
    if isinstance(shape, (list, tuple)) and len(shape) == 3:
        data["shape"] = [shape[0], *(min(size, _IMAGE) for size in shape[1:])]
    elif isinstance(shape, (list, tuple)) and len(shape) == 1:
        data["shape"] = [min(shape[0], _DATA_CAPS["seq_len"])]
    for name, cap in (("num_classes", 10), ("vocab", 320)):
        if isinstance(model.get(name), int):
            model[name] = min(model[name], cap)
    return replace(
        config,
        model=replace(config.model, args=model, dtype="float64", channels_last=False),
        data=replace(config.data, args=data, workers=0),
        train=replace(
            config.train,
            batch=batch,
            steps=steps,
            epochs=None,
            target={},
            eval_samples=batch + batch // 2 + 1,
        ),
        schedule=replace(config.schedule, warmup_steps=min(config.schedule.warmup_steps, 1)),
        log=LogConfig(tensorboard="no", weights=False),
        device="cpu",
        threads=1,
    )


def _shrink_model(config: RunConfig, num_stages: int) -> dict[str, Any]:
    """The model's arguments; as many blocks as the longest pipeline has stages, where that is known."""
    args = dict(config.model.args)
    name = config.model.name
    if name in _SMALL:
        grouped = args.get("kv_heads") is not None and args["kv_heads"] != args.get("heads")
        small = {k: v for k, v in _SMALL[name].items() if v is not None}
        if name in _DEEP:
            small["depth"] = max(small["depth"], num_stages)
        args |= small
        if grouped:
            args["kv_heads"] = 2
    elif name.startswith("transformers:") and isinstance(args.get("config"), dict):
        args["config"] = _capped(args["config"])
    elif name.startswith("timm:"):
        args = _capped(args)
    return args


def _capped(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: min(value, _CAPS[name]) if name in _CAPS and isinstance(value, int) else value
        for name, value in fields.items()
    }


def _batch(asked: int, layouts: Iterable[Layout]) -> int:
    """The smallest batch that every layout divides, two samples or more for each piece of the largest."""
    pieces = [x.dp * max(x.accumulate, x.microbatches) for x in layouts]
    common = math.lcm(*pieces) if pieces else 1
    wanted = min(asked, max(_LARGEST_STEP, common))
    return max(common, wanted // common * common)
