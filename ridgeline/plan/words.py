"""The words of other people's tables: other names of fields, architectures, precisions and programs.

A row may call its sizes or its program by names that are not ours. What is certain is renamed; a program
that is not known is guessed from what the row says about it, and the guess is said. Called by `rows.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ridgeline.plan.software import (
    DEEPSPEED_ZERO3,
    FSDP,
    MEGATRON_2022,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    Software,
)

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

LLAMAS: Final = ("llama", "mistral", "qwen", "yi", "deepseek-7b", "gemma")
GPTS: Final = ("gpt", "opt", "bloom", "megatron-lm")


def renamed(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with fields under the names used here; those it has already are left as they are."""
    found = dict(row)
    for section, names in NAMES.items():
        values = found.get(section)
        if not isinstance(values, Mapping):
            continue
        ours = dict(values)
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


def guess_software(row: Mapping[str, Any], words: str) -> tuple[Software, str]:
    """The program that is most like what the row says, and why."""
    layout = row["layout"]
    text = words.lower()
    zero = int(layout.get("zero") or 0)
    split = int(layout.get("tp") or 1) * int(layout.get("pp") or 1) > 1
    for known, software in (
        ("deepspeed", DEEPSPEED_ZERO3 if zero == 3 else MEGATRON_DEEPSPEED),
        ("megatron", MEGATRON_CORE),
        ("nemo", MEGATRON_CORE),
        ("transformer engine", MEGATRON_CORE),
        ("fsdp", FSDP),
        ("torch", FSDP),
        ("composer", FSDP),
        ("lightning", FSDP),
    ):
        if known in text:
            return software, f"taken as {software.name}, for the word {known!r}"
    if zero == 3 and not split:
        return FSDP, "taken as fsdp, since weights are sharded and nothing is split"
    if split and bool(layout.get("sp")):
        return MEGATRON_CORE, "taken as megatron-core, since layers are split with their sequence"
    if split:
        return MEGATRON_2022, "taken as megatron-2022, since layers or stages are split"
    return FSDP, "taken as fsdp, for want of a word"
