"""The program that a row was run with: as its source, its layout and its arguments say, else a guess.

A program that is not known is guessed from what the row says about it, and the guess is said. Called by
`rows.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ridgeline.plan.software import (
    DEEPSPEED_ZERO3,
    FSDP,
    LLM_FOUNDRY,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_BRIDGE,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    RIDGELINE,
    TORCHTITAN,
    Software,
)
from ridgeline.plan.words import flag, is_own, whole, zero_stage

Row = Mapping[str, Any]

BRIDGE_OFFLOADS: Final = {"gb300": 20, "gb200": 40}
"""Layers whose activations go to the host in Megatron-Bridge's recipes for Llama 70B, fully sharded in fp8
(`scripts/performance/configs/llama/llama3_workload_base_configs.py`); its tables do not say so."""


def source_words(row: Row) -> str:
    """All that a row says of where it is from."""
    return " ".join(str(value) for value in row["source"].values())


def read_software(row: Row) -> tuple[Software, str]:
    """The program that the row's source says was run, and why where that is a guess."""
    known = _known_software(row)
    if known is not None:
        return known, ""
    words = f"{row['layout'].get('framework') or ''} {source_words(row)} {row.get('set') or ''}"
    return guess_software(row, words)


def _known_software(row: Row) -> Software | None:
    layout, source = row["layout"], source_words(row)
    framework = str(layout.get("framework") or "")
    args = layout.get("args") or {}
    if is_own(framework):
        return replace(RIDGELINE, compiled=flag(layout, "compile"))
    if "ZeRO-3" in framework:
        return DEEPSPEED_ZERO3
    if framework == "Megatron-DeepSpeed" or "bigscience" in source:
        software = MEGATRON_DEEPSPEED
        if "bigscience" in source:
            # Its runs hung unless every start of a kernel waited for the one before (CUDA_LAUNCH_BLOCKING,
            # in the same chronicle): what the host takes for a kernel comes on top.
            software = replace(software, sharpness=1.0)
        if "fp32 grad" in str(layout.get("precision")):
            # bf16 with float32 sums keeps the 16-bit gradients beside the sums.
            software = replace(software, gradient_bytes=6, reduce_bytes=4)
        return software
    if "Korthikanti" in source or "seqsel" in source:
        return MEGATRON_2022
    if "Narayanan" in source or framework.startswith("Megatron PTD"):
        ddp = str(layout.get("ddp") or "")
        overlaps = "overlap" in ddp and "not overlap" not in ddp
        return replace(MEGATRON_2021, overlap_dp=overlaps)
    if "Megatron" in source or framework.startswith("Megatron"):
        return _megatron_core(args, source, str(layout.get("precision")))
    if "torchtitan" in source or "llm-foundry" in source or _is_given(layout.get("fsdp")):
        pure = str(layout.get("mp_mode")) == "PURE"
        software = TORCHTITAN if "torchtitan" in source else FSDP
        software = LLM_FOUNDRY if "llm-foundry" in source else software
        software = replace(software, compiled=flag(layout, "compile"))
        return replace(software, reduce_bytes=2) if pure else software
    return None


def _is_given(value: Any) -> bool:
    return str(value or "").strip().lower() not in ("", "0", "none", "no", "off", "false")


def _megatron_core(args: Mapping[str, Any], source: str, precision: str) -> Software:
    """Megatron-Core as its arguments say. Without an argument for it, attention stores its scores in the
    `local` layers and in the earlier of its two test environments, which switched fused kernels off.
    Numbers of 8 bits with a scale for each block are written by kernels of their own."""
    backend = str(args.get("--attention-backend") or "")
    if not backend:
        local = args.get("--transformer-impl") == "local"
        short = whole(args, "--seq-length") <= 4096
        backend = "unfused" if args and short and (local or "dracooci" in source) else "flash"
    attention = "fused" if backend == "unfused" else "flash"
    overlaps = not args or bool(args.get("--overlap-grad-reduce"))
    base = MEGATRON_BRIDGE if "Megatron-Bridge" in source else MEGATRON_CORE
    software = replace(base, attention=attention, overlap_dp=overlaps)
    if "mx" in f"{precision} {args.get('--fp8-recipe')}".lower():
        software = replace(software, fp8_casts=1.0)
    if args.get("--transformer-impl") == "local":
        software = replace(software, buffer_bytes=software.buffer_bytes + 30e6)
    return software


def recipe_offload(row: Row, software: Software, profile: str) -> tuple[int, str]:
    """How many layers have their activations on the host though the row does not say so, and why."""
    layout, model = row["layout"], row["model"]
    is_recipe = (
        software.name == MEGATRON_BRIDGE.name
        and whole(layout, "fsdp") > 1
        and (whole(model, "layers"), whole(model, "hidden")) == (80, 8192)
        and "fp8" in str(layout.get("precision")).lower()
        and layout.get("recompute") is None
        and layout.get("act_offload") is None
    )
    count = BRIDGE_OFFLOADS.get(profile, 0) if is_recipe else 0
    why = f"activations of {count} layers are on the host, as in Megatron-Bridge's recipe"
    return count, why if count else ""


def guess_software(row: Mapping[str, Any], words: str) -> tuple[Software, str]:
    """The program that is most like what the row says, and why."""
    layout = row["layout"]
    text = words.lower()
    zero = zero_stage(layout.get("zero"))
    split = (whole(layout, "tp") or 1) * (whole(layout, "pp") or 1) > 1
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
    if split and flag(layout, "sp"):
        return MEGATRON_CORE, "taken as megatron-core, since layers are split with their sequence"
    if split:
        return MEGATRON_2022, "taken as megatron-2022, since layers or stages are split"
    return FSDP, "taken as fsdp, for want of a word"
