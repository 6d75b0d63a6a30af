"""DeepSpeed's configuration, a JSON file or a dictionary, as a layout and what a loop needs beside it.

What it says of the training (batches, clipping, optimizer, schedule, precision, sharding, offload) is
carried out. What tunes DeepSpeed's own machinery has no meaning here and is named once; what would change
the training and is not here is refused. Called by `initialize` of this folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ridgeline.errors import UsageError
from ridgeline.layout import Layout

CLIP_BY_DEFAULT: Final = 1.0
"""DeepSpeed's, of 0.17 and later; 0 switches clipping off."""

_READ: Final = frozenset(
    {
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
        *(
            "optimizer",
            "scheduler",
            "gradient_clipping",
            "zero_optimization",
            "fp16",
            "bf16",
            "bfloat16",
        ),
        *("torch_autocast", "tensor_parallel", "sequence_parallel_size", "steps_per_print"),
        *("zero_allow_untested_optimizer", "dataloader_drop_last", "ridgeline"),
    }
)
_CHANGES: Final = {
    "amp": "use bf16 or fp16",
    "autotuning": "`ridgeline plan` and `ridgeline doctor --climb` choose layouts and settings",
    "compression_training": "it prunes and quantizes while it trains",
    "curriculum_learning": "it changes the samples; order them in the data set",
    "data_efficiency": "it changes the samples; order them in the data set",
    "elasticity": "it changes the batch; set train_batch_size",
    "hybrid_engine": "it is for generation between steps",
    "progressive_layer_drop": "it leaves out layers; do that in the model",
    "quantize_training": "it quantizes while it trains",
    "sparse_attention": "use scaled_dot_product_attention with a mask",
}
"""Sections that change what is trained, or ask for another program, with what to do."""
_WATCHED: Final = {
    "comet": "`ridgeline track`",
    "csv_monitor": "the records of `ridgeline train`",
    "flops_profiler": "`ridgeline doctor train.py`",
    "tensorboard": "the records of `ridgeline train`",
    "wandb": "`ridgeline track`",
    "wall_clock_breakdown": "`ridgeline doctor train.py`",
}
_ZERO: Final = frozenset({"stage", "offload_optimizer", "offload_param", "mics_shard_size"})
_ZERO_CHANGES: Final = {
    "zero_quantized_weights": "weights are gathered as they are",
    "zero_quantized_gradients": "use compress in ridgeline.layout, with zero_optimization.stage 0",
    "zenflow": "it leaves out updates",
}


@dataclass(frozen=True)
class Asked:
    """What a configuration asks for."""

    layout: Layout
    micro_batch: int
    """Samples of one forward pass on a replica."""
    clip: float | None
    optimizer: tuple[str, dict[str, Any]] | None
    scheduler: tuple[str, dict[str, Any]] | None
    loss_scale: dict[str, float] = field(default_factory=dict)
    """Of fp16: what torch's scaler is made with; `fixed` for one that stays."""
    steps_per_print: int | None = None
    drop_last: bool = False
    allows_untested: bool = False
    notes: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        """Microbatches of a step."""
        return self.layout.microbatches if self.layout.pp > 1 else self.layout.accumulate

    @property
    def batch(self) -> int:
        return self.micro_batch * self.parts * self.layout.dp


def read_source(source: Any) -> dict[str, Any]:
    """The dictionary, or that of the JSON file named."""
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, Path)):
        raise UsageError(
            f"deepspeed.initialize(config=...) is a {type(source).__name__}; give a dictionary or the path "
            "of "
            "a JSON file"
        )
    try:
        found = json.loads(Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"deepspeed's configuration {source}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"deepspeed's configuration {source} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"deepspeed's configuration {source} holds no object of settings")
    return found


def read_config(config: Mapping[str, Any], num_ranks: int, num_stages: int = 1) -> Asked:
    """The layout for `num_ranks` processes, `num_stages` of them one behind the other, and the rest."""
    _refuse(config)
    tp = _number(_section(config, "tensor_parallel"), "autotp_size", 1, "tensor_parallel.") or 1
    cp = _number(config, "sequence_parallel_size", 1) or 1
    extra = _extra(config)
    places = {"pp": num_stages, "tp": tp, "cp": cp}
    for name in ("tp", "cp", "pp", "spatial"):
        if name in extra:
            if name in places and places[name] != 1:
                raise UsageError(
                    f"ridgeline.layout sets {name}, and {name}={places[name]} is asked for elsewhere; "
                    "leave one out"
                )
            places.pop(name, None)
    layout = Layout.parse(",".join(f"{k}={v}" for k, v in (places | extra).items() if k in _SPLITS))
    in_replica = layout.world_size
    if num_ranks % in_replica:
        raise UsageError(
            f"{num_ranks} processes do not divide into replicas of {in_replica} ({layout}); start a "
            "multiple "
            f"of {in_replica}"
        )
    micro, parts = _batches(config, num_ranks // in_replica)
    layout = layout.replace(dp=num_ranks // in_replica)
    layout = layout.replace(**{"microbatches" if layout.pp > 1 else "accumulate": parts})
    zero, notes = _zero(_section(config, "zero_optimization"), layout)
    layout = layout.replace(**zero)
    layout = layout.replace(precision=_precision(config))
    for name, value in extra.items():
        layout = layout.with_field(name, value, "ridgeline.layout")
    clip = _decimal(config, "gradient_clipping", CLIP_BY_DEFAULT)
    return Asked(
        layout=layout,
        micro_batch=micro,
        clip=clip or None,
        optimizer=_typed(config, "optimizer"),
        scheduler=_typed(config, "scheduler"),
        loss_scale=_loss_scale(_section(config, "fp16")),
        steps_per_print=_number(config, "steps_per_print", None),
        drop_last=bool(config.get("dataloader_drop_last", False)),
        allows_untested=bool(config.get("zero_allow_untested_optimizer", False)),
        notes=(*notes, *_say_ignored(config)),
    )


_SPLITS: Final = ("pp", "tp", "cp", "spatial")


def _refuse(config: Mapping[str, Any]) -> None:
    for name, reason in _CHANGES.items():
        if _is_on(config.get(name)):
            raise UsageError(
                f"{name} of deepspeed's configuration is not here; {reason}, and leave it out"
            )
    for name, reason in _ZERO_CHANGES.items():
        if _is_on(_section(config, "zero_optimization").get(name)):
            raise UsageError(f"zero_optimization.{name} is not here; {reason}, and leave it out")


def _is_on(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value.get("enabled", True))
    return bool(value)


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name) or {}
    if isinstance(found, bool):  # `"zero_optimization": true` of old files
        return {"stage": 1} if found and name == "zero_optimization" else {}
    if not isinstance(found, Mapping):
        raise UsageError(
            f"{name} of deepspeed's configuration is {found!r}; it is an object of settings"
        )
    return found


def _number(config: Mapping[str, Any], name: str, default: Any, place: str = "") -> Any:
    value = config.get(name, default)
    if value is None:
        return None
    if value == "auto":
        raise _auto(place + name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise UsageError(
            f"{place}{name} of deepspeed's configuration is {value!r}; it is a whole number"
        )
    if int(value) < 1:
        raise UsageError(f"{place}{name} of deepspeed's configuration is {value}; it is 1 or more")
    return int(value)


def _decimal(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if value == "auto":
        raise _auto(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise UsageError(
            f"{name} of deepspeed's configuration is {value!r}; it is a number, 0 or more"
        )
    return float(value)


def _auto(place: str) -> UsageError:
    return UsageError(
        f'{place} of deepspeed\'s configuration is "auto", which only the Trainer of transformers fills '
        "in; "
        "write a value"
    )


def _batches(config: Mapping[str, Any], replicas: int) -> tuple[int, int]:
    """Samples of a forward pass, and forward passes of a step, of the two or three numbers given."""
    batch = _number(config, "train_batch_size", None)
    micro = _number(config, "train_micro_batch_size_per_gpu", None)
    parts = _number(config, "gradient_accumulation_steps", None)
    if batch is None and micro is None:
        raise UsageError(
            "deepspeed's configuration has neither train_batch_size nor train_micro_batch_size_per_gpu; "
            "give one"
        )
    if batch is None:
        return micro, parts or 1
    if micro is None:
        micro, rest = divmod(batch, (parts or 1) * replicas)
        if rest or not micro:
            raise UsageError(
                f"train_batch_size={batch} does not divide into gradient_accumulation_steps={parts or 1} x "
                f"{replicas} replicas; make it a multiple of {(parts or 1) * replicas}"
            )
        return micro, parts or 1
    if parts is None:
        parts, rest = divmod(batch, micro * replicas)
        if rest or not parts:
            raise UsageError(
                f"train_batch_size={batch} does not divide into train_micro_batch_size_per_gpu={micro} x "
                f"{replicas} replicas; make it a multiple of {micro * replicas}"
            )
        return micro, parts
    if micro * parts * replicas != batch:
        raise UsageError(
            f"train_batch_size={batch} is not train_micro_batch_size_per_gpu={micro} x "
            f"gradient_accumulation_steps={parts} x {replicas} replicas = {micro * parts * replicas}; "
            "leave "
            "one of the three out"
        )
    return micro, parts


def _zero(section: Mapping[str, Any], layout: Layout) -> tuple[dict[str, Any], list[str]]:
    stage = section.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise (
            _auto("zero_optimization.stage")
            if stage == "auto"
            else UsageError(
                f"zero_optimization.stage of deepspeed's configuration is {stage!r}; it is 0, 1, 2 or 3"
            )
        )
    found: dict[str, Any] = {"zero": stage}
    notes: list[str] = []
    where = {name: _device(section, name) for name in ("offload_param", "offload_optimizer")}
    if where["offload_param"] and stage == 3:
        found["offload"] = "params"  # and with them the optimizer's work
    elif where["offload_optimizer"]:
        found["offload"] = "params" if stage == 3 else "optimizer"
        if stage == 3:
            notes.append(
                "zero_optimization.offload_optimizer in stage 3 keeps the shards of weights on the host, "
                "too"
            )
    shard = section.get("mics_shard_size", -1)
    if stage == 3 and isinstance(shard, int) and shard > 0:
        found["shard"] = shard
    if layout.dp == 1 and found.get("offload") != "params":
        found.pop("shard", None)
    return found, notes


def _device(section: Mapping[str, Any], name: str) -> str:
    """Where it goes; empty for nowhere."""
    old = {"offload_param": "cpu_offload_params", "offload_optimizer": "cpu_offload"}[name]
    if section.get(old) is True:
        return "cpu"
    value = section.get(name) or {}
    device = value.get("device", "none") if isinstance(value, Mapping) else value
    if device in ("none", None, False):
        return ""
    if device != "cpu":
        raise UsageError(
            f"zero_optimization.{name}.device of deepspeed's configuration is {device!r}; it is none or "
            "cpu here"
        )
    return "cpu"


def _precision(config: Mapping[str, Any]) -> str:
    wanted = []
    for name, precision in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
        on = _section(config, name).get("enabled", False)
        if on == "auto":
            raise _auto(f"{name}.enabled")
        wanted += [precision] * bool(on)
    cast = _section(config, "torch_autocast")
    if cast.get("enabled"):
        name = str(cast.get("dtype", "bfloat16")).removeprefix("torch.")
        known = {
            "bfloat16": "bf16",
            "bf16": "bf16",
            "float16": "fp16",
            "fp16": "fp16",
            "half": "fp16",
        }
        if name not in known:
            raise UsageError(
                f"torch_autocast.dtype of deepspeed's configuration is {name!r}; use bfloat16 or float16"
            )
        wanted.append(known[name])
    if len(set(wanted)) > 1:
        raise UsageError(
            "deepspeed's configuration switches on fp16 and bf16; leave one of them out"
        )
    return wanted[0] if wanted else "fp32"


def _loss_scale(section: Mapping[str, Any]) -> dict[str, float]:
    if not section.get("enabled"):
        return {}
    if fixed := float(section.get("loss_scale", 0)):
        return {"fixed": fixed}
    return {
        "init_scale": 2.0 ** float(section.get("initial_scale_power", 16)),
        "growth_interval": int(section.get("loss_scale_window", 1000)),
    }


def _typed(config: Mapping[str, Any], name: str) -> tuple[str, dict[str, Any]] | None:
    section = _section(config, name)
    if not section:
        return None
    kind, params = section.get("type"), section.get("params") or {}
    if not isinstance(kind, str):
        raise UsageError(f"{name}.type of deepspeed's configuration is {kind!r}; name one")
    for key, value in params.items():
        if value == "auto":
            raise _auto(f"{name}.params.{key}")
    return kind, dict(params)


def _extra(config: Mapping[str, Any]) -> dict[str, str]:
    """The fields of `"ridgeline": {"layout": "..."}`: what deepspeed has no word for."""
    section = _section(config, "ridgeline")
    strange = sorted(set(section) - {"layout"})
    if strange:
        raise UsageError(
            f"ridgeline.{strange[0]} of deepspeed's configuration is not known; it has layout alone"
        )
    fields = {}
    for item in filter(None, (part.strip() for part in str(section.get("layout", "")).split(","))):
        name, _, value = item.partition("=")
        if name in ("dp", "zero", "accumulate", "microbatches", "precision"):
            raise UsageError(
                f"ridgeline.layout of deepspeed's configuration sets {name}, which its own settings say; "
                "leave it out"
            )
        fields[name] = value
    return fields


def _say_ignored(config: Mapping[str, Any]) -> list[str]:
    zero = _section(config, "zero_optimization")
    tunes = [f"zero_optimization.{name}" for name in zero if name not in (*_ZERO, *_ZERO_CHANGES)]
    tunes = [one for one in tunes if not one.endswith(("cpu_offload", "cpu_offload_params"))]
    rest = [n for n in config if n not in _READ and n not in _WATCHED and n not in _CHANGES]
    notes = []
    if rest + tunes:
        notes.append(f"without a meaning here: {', '.join(rest + tunes)}")
    notes += [f"{n} is not written; see {w}" for n, w in _WATCHED.items() if _is_on(config.get(n))]
    return notes
