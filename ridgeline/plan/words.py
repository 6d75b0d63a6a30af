"""The words of other people's tables: other names of fields, architectures and precisions, adapters.

A row may call its sizes by names that are not ours. What is certain is renamed, and what is nearly a name
that is read is told. What may be read in more than one way is `Unreadable`. Called by `rows.py` and
`programs.py`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import Any, Final

NAMES: Final[dict[str, dict[str, str]]] = {
    "model": {
        "num_layers": "layers", "n_layers": "layers", "depth": "layers",
        "hidden_size": "hidden", "d_model": "hidden", "width": "hidden",
        "num_heads": "heads", "num_attention_heads": "heads", "n_heads": "heads",
        "num_kv_heads": "kv_heads", "num_query_groups": "kv_heads",
        "ffn_hidden_size": "ffn", "intermediate_size": "ffn",
        "seq_len": "seq", "seq_length": "seq", "sequence_length": "seq",
        "vocab_size": "vocab", "num_experts": "experts", "topk": "top_k",
    },
    "layout": {
        "num_gpus": "gpus", "devices": "gpus", "world_size": "gpus",
        "data_parallel": "dp", "tensor_parallel": "tp", "pipeline_parallel": "pp",
        "context_parallel": "cp", "virtual": "vp", "micro_batch": "microbatch",
        "micro_batch_size": "microbatch", "global_batch_size": "global_batch",
        "microbatches": "num_microbatches", "dtype": "precision",
    },
    "measured": {"step_s": "iter_s", "seconds": "iter_s", "tokens_per_s": "tokens_per_s_all"},
}  # fmt: skip
"""Fields of other tables, by section, and what they are called here."""

FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "model": (
        "name", "arch", "layers", "hidden", "heads", "kv_heads", "ffn", "seq", "vocab", "experts",
        "top_k", "params_B",
    ),
    "layout": (
        "gpus", "dp", "tp", "pp", "cp", "ep", "vp", "zero", "fsdp", "sp", "schedule", "microbatch",
        "local_batch", "global_batch", "num_microbatches", "grad_accum", "recompute", "precision",
        "framework", "args", "compile", "mp_mode", "ddp", "act_offload", "async_tp", "peft",
    ),
    "hardware": (
        "gpu", "gpus_per_node", "inter_GBps_per_gpu", "inter_Gbps_per_node",
        "intra_GBps_per_gpu_unidir", "notes",
    ),
    "measured": (
        "iter_s", "iter_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "tflops_kind", "mem_GB",
        "mem_GiB", "mem_kind", "mem_max_allocated_bytes", "oom",
    ),
}  # fmt: skip
"""Fields that are read, by section; others are somebody's own."""
ADAPTERS: Final = (
    "peft",
    "lora",
    "lora_rank",
    "finetune",
    "finetuning",
    "adapter",
    "adapters",
    "task",
)
"""Fields that may say that small matrices beside the model's own are trained alone."""

LLAMAS: Final = ("llama", "mistral", "qwen", "yi", "deepseek-7b", "gemma")
GPTS: Final = ("gpt", "opt", "bloom", "megatron-lm")


Row = Mapping[str, Any]
"""A published row, in the words of its source."""


class Unreadable(Exception):
    """Why a row cannot be expressed."""


def is_own(framework: str) -> bool:
    """Whether a program, with or without its version, is this library."""
    return framework.lower().split()[:1] == ["ridgeline"]


def misspelt(row: Mapping[str, Any]) -> str:
    """Fields that are nearly ones that are read, and are not; empty where there are none."""
    found = []
    for section, known in FIELDS.items():
        stated = row.get(section)
        if not isinstance(stated, Mapping):
            continue
        missing = [name for name in known if name not in stated]
        for name in stated:
            if name in known or name in NAMES.get(section, {}) or name in ADAPTERS:
                continue
            if near := difflib.get_close_matches(str(name), missing, 1, 0.75):
                found.append(f"{section}.{shown(name)[1:-1]}, did you mean {near[0]}?")
    return "; ".join(found)


def trains_adapters(row: Mapping[str, Any]) -> bool:
    """Whether the row says that it is a LoRA; `Unreadable` for what is like it and is not modelled."""
    said = {
        name: f"{name} {value}".lower()
        for section in (row, row["source"], row["layout"], row["model"])
        for name in ADAPTERS
        if (value := section.get(name)) is not None
        and str(value).strip().lower() not in ("", "0", "false", "no", "none")
    }
    words = " ".join(said.values())
    if "qlora" in words:
        raise Unreadable("weights of 4 bits (QLoRA) are not modelled")
    is_lora = "lora" in words and not re.search(r"\b(no|without) lora", words)
    if not is_lora and "peft" in said:
        raise Unreadable(f"{shown(said['peft'])[1:-1]} is not modelled; LoRA is")
    if is_lora and is_own(str(row["layout"].get("framework"))):
        raise Unreadable("frozen weights of this library's runs are planned from the module itself")
    return is_lora


def shown(value: Any) -> str:
    """A value for a sentence: on one line, and not long."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:56]}..."


def number(value: Any) -> float | None:
    """A finite number, also where it is written as text; None where it is none, as true and false are."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def quantity(section: Mapping[str, Any], name: str) -> float:
    """A number of a section; 0 where it states none."""
    value = section.get(name)
    if value is None or value == "":
        return 0.0
    found = number(value)
    if found is None:
        raise Unreadable(f"the field {name} is missing or is no number: {shown(value)}")
    return found


def whole(section: Mapping[str, Any], name: str) -> int:
    """A whole number of a section; 0 where it states none."""
    found = quantity(section, name)
    if found != int(found):
        raise Unreadable(f"{name} is {shown(section[name])}, no whole number")
    return int(found)


def flag(section: Mapping[str, Any], name: str) -> bool:
    """Yes or no, by the words that people have for them; no where nothing is stated."""
    value = section.get(name)
    word = str(value).strip().lower() if isinstance(value, (str, int, float)) else value
    if word in (None, "", "false", "no", "off", "none", "0", "0.0"):
        return False
    if word in ("true", "yes", "on", "1", "1.0"):
        return True
    raise Unreadable(f"{name} is {shown(value)}, neither true nor false")


def sections(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with every section as one; a device or a source may be stated as one text."""
    found = dict(row)
    for name, alone in (("hardware", "gpu"), ("source", "text")):
        if isinstance(found.get(name), str):
            found[name] = {alone: found[name]}
    if isinstance(found.get("source"), list):
        found["source"] = {str(place): value for place, value in enumerate(found["source"])}
    for name in ("model", "layout", "hardware", "source", "measured"):
        value = found.get(name)
        if value is None:
            if name in ("model", "layout"):
                raise Unreadable(f"the row has no section {name}")
            value = {}
        if not isinstance(value, Mapping):
            raise Unreadable(f"{name} is {shown(value)}, no section with fields")
        found[name] = value
    args = found["layout"].get("args")
    if args is not None and not isinstance(args, Mapping):
        raise Unreadable(f"args is {shown(args)}, no section with fields")
    return found


def renamed(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with fields under the names used here; those it has already are left as they are."""
    found = sections(row)
    for section, names in NAMES.items():
        ours = dict(found[section])
        for theirs, name in names.items():
            if theirs in ours and ours.get(name) is None:
                ours[name] = ours[theirs]
        found[section] = ours
    return found


def architecture(word: str) -> str:
    """The kind of model by the first word that is known, or the word itself."""
    text = word.lower()
    if text in ("gpt", "llama", "mpt", "moe", "mixtral"):
        return text
    for kind, words in (("llama", LLAMAS), ("gpt", GPTS)):
        if any(text.startswith(known) for known in words):
            return kind
    return text


def precision(word: str) -> str:
    """One of ours; empty where the word is none that is known."""
    text = word.lower().replace("bfloat16", "bf16").replace("float16", "fp16")
    text = text.replace("float8", "fp8").replace("float32", "fp32").replace("half", "fp16")
    for known in ("fp4", "fp8", "bf16", "fp16", "tf32", "fp32"):
        if known in text:
            return known
    return "fp32" if text in ("single", "32") else ""


_NO_RECOMPUTE: Final = ("none", "no", "off", "false", "0", "disabled", "never", "-", "n/a", "")
_FULL_RECOMPUTE: Final = (
    "true", "yes", "on", "enabled", "all", "all layers", "every layer", "each layer", "uniform",
    "checkpointing", "activation checkpointing", "gradient checkpointing", "recomputation", "recompute",
    "activation recomputation", "activation recompute",
)  # fmt: skip
_SELECTIVE_RECOMPUTE: Final = ("attention core", "core attention", "core_attn", "sel")


def recomputed(value: Any) -> str:
    """`none`, `selective` or `full`; raises where the word is not known to mean one of them."""
    text = "" if value is None else "?"
    if isinstance(value, (str, bool, int)):
        text = " ".join(str(value).lower().split())
    if text in _NO_RECOMPUTE or re.match(r"(?:none|no|without)\b", text):
        return "none"
    if text in _FULL_RECOMPUTE or re.match(r"full(?![a-z0-9])", text):
        return "full"
    if text in _SELECTIVE_RECOMPUTE or text.startswith("selective"):
        return "selective"
    raise Unreadable(f"recompute is {shown(value)}, not known as full, selective or none")


def zero_stage(value: Any) -> int:
    """0 to 3, also as in ZeRO-3 or stage 3."""
    if value is None or value is False:
        return 0
    text = str(value).strip().lower() if isinstance(value, (str, int, float)) else "?"
    match = re.fullmatch(r"(?:(?:zero|stage|zero[- ]?stage)[- ]?)?([0-3])(?:\.0)?", text)
    if match is None and text not in ("", "none", "no", "off"):
        raise Unreadable(f"zero is {shown(value)}, which is none of 0, 1, 2 and 3")
    return int(match[1]) if match is not None else 0


def schedule_name(value: Any, virtual: int, pp: int) -> str:
    """One of ours, for that many chunks on each of that many stages."""
    text = str(value or "1f1b").lower()
    compact = re.sub(r"[^a-z0-9]", "", text)
    if pp == 1:
        return "1f1b"
    if "zb" in compact or "zerobubble" in compact:
        found = "zerobubble"
    elif "gpipe" in compact or compact == "afab":
        found = "gpipe"
    elif "1f1b" in compact or "interleav" in compact or "pipedreamflush" in compact:
        if virtual == 1 and "interleav" in compact and "noninterleav" not in compact:
            raise Unreadable(
                f"schedule is {shown(value)}, and vp, its chunks a stage, is not stated"
            )
        return "interleaved" if virtual > 1 else "1f1b"
    else:
        raise Unreadable(f"schedule is {shown(value)}, which is not modelled")
    if virtual > 1:
        raise Unreadable(f"schedule {found} with vp={virtual} is not modelled")
    return found
