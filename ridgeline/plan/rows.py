"""Published rows into jobs: what was run, on what, with which software, and what was measured.

A row states its model, hardware, layout and measurement in the words of its source. `read_row` turns it
into a `Job` and the measured figures, or says in a sentence why it cannot. Facts that a source leaves out
because they are its program's defaults are filled in here, by program, never by row. Called by
`validate.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ridgeline.errors import UsageError
from ridgeline.plan.job import Job
from ridgeline.plan.machine import Machine, load_machine
from ridgeline.plan.software import (
    DEEPSPEED_ZERO3,
    FSDP,
    LLM_FOUNDRY,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    RIDGELINE,
    TORCHTITAN,
    Software,
)
from ridgeline.plan.transformer import Transformer
from ridgeline.plan.words import architecture, guess_software, precision, renamed

Row = Mapping[str, Any]

ARCHITECTURES: Final = ("gpt", "llama", "mpt", "moe", "mixtral")
"""Decoders that `Transformer` describes."""
GPT2_VOCAB: Final = 50257
"""What Megatron's tests use where no vocabulary is stated."""


class Unreadable(Exception):
    """Why a row cannot be expressed."""


@dataclass(frozen=True)
class Measured:
    """A row's figures; None where it has none."""

    seconds: float | None
    tflops: float | None
    flops_kind: str
    """As `Transformer.step_flops` names it."""
    tokens_per_s: float | None
    """A device."""
    memory_bytes: float | None
    memory_kind: str
    """`allocated`, `reserved` or `device`."""
    memory_rank: str
    """`last` for the last stage, `max` for the one that needs most."""
    out_of_memory: bool


@dataclass(frozen=True)
class ReadRow:
    id: str
    set: str
    job: Job
    measured: Measured
    guessed: str = ""
    """What the row does not say and was guessed; empty where nothing was."""


def load_rows(path: Path) -> list[Row]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path} of --rows ({error.strerror}); name a file of rows"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"{path} of --rows is no JSON ({error}); it should hold a list of rows"
        ) from error
    rows = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(
            f"{path} of --rows holds no list of rows; give {{'rows': [...]}} or a list"
        )
    return rows


def read_row(row: Row, index: int = 0) -> ReadRow:
    """The row as a job; raises `Unreadable` with the reason where it is none that we can express."""
    try:
        row = renamed(row)
        job, guessed = _read_job(row)
        _require_positive(job)
        name, group = str(row.get("id", f"row-{index}")), str(row.get("set", ""))
        return ReadRow(name, group, job, read_measured(row), guessed)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise Unreadable(f"a field is missing or is no number ({error})") from error


def _read_job(row: Row) -> tuple[Job, str]:
    """The job, and what of it is a guess."""
    layout = row["layout"]
    model = read_model(row)
    software, guessed = read_software(row)
    machine = read_machine(row)
    tp, pp = int(layout.get("tp") or 1), int(layout.get("pp") or 1)
    cp, ep = int(layout.get("cp") or 1), int(layout.get("ep") or 1)
    if ep > 1 and not model.experts:
        raise Unreadable(f"ep={ep} shares experts, and the row states none")
    devices = _devices(row)
    if devices % (tp * pp * cp):
        raise Unreadable(f"{devices} devices do not divide into tp={tp}, pp={pp}, cp={cp}")
    dp = devices // (tp * pp * cp)
    stated = layout.get("dp")
    if stated and int(stated) != dp and int(stated) * tp * pp * cp != devices:
        raise Unreadable(f"dp={stated} does not fit {devices} devices")
    samples, microbatches = _batches(row, dp)
    virtual = int(layout.get("vp") or 1)
    # The embedding and the loss may have a place of their own.
    if model.layers + 2 < pp * virtual:
        raise Unreadable(f"{model.layers} layers do not fill {pp * virtual} stages")
    args = layout.get("args") or {}
    if args.get("--use-megatron-fsdp"):
        raise Unreadable("Megatron's own FSDP is not modelled")
    if args.get("--grpo-group-size"):
        raise Unreadable("reinforcement learning with generation is not a training step")
    if args.get("--cuda-graph-impl") or args.get("--fine-grained-activation-offloading"):
        raise Unreadable("captured graphs and offloaded activations are not modelled")
    if args.get("--mtp-num-layers"):
        raise Unreadable("multi-token prediction is not modelled")
    job = Job(
        model=model,
        machine=machine,
        software=software,
        dp=dp,
        tp=tp,
        cp=cp,
        pp=pp,
        virtual=virtual,
        zero=_zero(row),
        sp=bool(layout.get("sp")) and tp > 1,
        schedule=_schedule(str(layout.get("schedule") or "1f1b"), virtual),
        samples=samples,
        microbatches=microbatches,
        recompute=_recompute(layout.get("recompute")),
        precision=_precision(str(layout.get("precision") or "bf16")),
        group=int(args.get("--microbatch-group-size-per-virtual-pipeline-stage") or 0),
        ep=ep,
        expert_tp=int(args.get("--expert-tensor-parallel-size") or 0),
        vocab_multiple=int(args.get("--make-vocab-size-divisible-by") or 128)
        if "mega" in software.name
        else 1,
    )
    return job, guessed


def _require_positive(job: Job) -> None:
    """Numbers that nothing can be divided by, or into, are said to be wrong by name."""
    model, machine = job.model, job.machine
    numbers = {
        "dp": job.dp, "tp": job.tp, "cp": job.cp, "pp": job.pp, "vp": job.virtual,
        "microbatch": job.samples, "num_microbatches": job.microbatches, "layers": model.layers,
        "hidden": model.hidden, "heads": model.heads, "kv_heads": model.kv_heads, "ffn": model.ffn,
        "seq": model.seq, "vocab": model.vocab, "gpus_per_node": machine.devices_per_node,
        "bandwidth": min(machine.inter.bandwidth, machine.intra.bandwidth),
    }  # fmt: skip
    for name, number in numbers.items():
        if number <= 0:
            raise Unreadable(f"{name} is {number:g}")
    most = {"pp": (job.pp, 4096), "layers": (model.layers, 100_000), "tp": (job.tp, 65_536),
            "num_microbatches": (job.microbatches, 10**7), "seq": (model.seq, 10**9)}  # fmt: skip
    for name, (number, limit) in most.items():
        if number > limit:
            raise Unreadable(f"{name} is {number}, more than the {limit} that are predicted")
    if model.heads < job.tp or model.hidden < model.heads or model.seq < job.cp:
        raise Unreadable(
            f"{model.heads} heads of a width of {model.hidden} do not split over tp={job.tp}"
        )


def _devices(row: Row) -> int:
    layout = row["layout"]
    gpus = int(layout.get("gpus") or 0)
    if not gpus:
        if not layout.get("dp"):
            raise Unreadable("the number of devices is not stated")
        gpus = math.prod(int(layout.get(name) or 1) for name in ("dp", "tp", "pp", "cp"))
    hardware = row.get("hardware") or {}
    # Megatron's tests named so run on one node, and a GB200 node has four devices.
    if "GB200" in str(hardware.get("gpu")) and str(row["model"].get("name")).endswith("_1node"):
        return min(gpus, 4)
    return gpus


def _batches(row: Row, dp: int) -> tuple[int, int]:
    """Samples of a microbatch, and microbatches of a step."""
    layout = row["layout"]
    samples, batch = layout.get("microbatch"), layout.get("global_batch")
    if not samples and layout.get("pp", 1) and int(layout.get("pp") or 1) > 1:
        raise Unreadable("the size of a microbatch is not stated")
    samples = int(samples or layout.get("local_batch") or 0)
    if not samples:
        raise Unreadable("the size of a microbatch is not stated")
    count = layout.get("num_microbatches") or layout.get("grad_accum")
    if not count:
        if not batch:
            raise Unreadable("the global batch is not stated")
        count = max(1, round(int(batch) / (dp * samples)))
    return samples, int(count)


def _zero(row: Row) -> int:
    layout = row["layout"]
    if (layout.get("args") or {}).get("--use-distributed-optimizer"):
        return 1
    return int(layout.get("zero") or 0)


def _schedule(text: str, virtual: int) -> str:
    if "zb" in text.lower() or "zero" in text.lower():
        return "zerobubble"
    if "gpipe" in text.lower():
        return "gpipe"
    return "interleaved" if virtual > 1 else "1f1b"


def _recompute(text: Any) -> str:
    words = str(text or "none").lower()
    if words.startswith("full"):
        return "full"
    return "selective" if words.startswith("sel") else "none"


def _precision(text: str) -> str:
    found = precision(text)
    if found in ("fp4", ""):
        raise Unreadable(f"precision {text} is not modelled")
    return found


def _source(row: Row) -> str:
    return " ".join(str(value) for value in (row.get("source") or {}).values())


def read_software(row: Row) -> tuple[Software, str]:
    """The program that the row's source says was run, and why where that is a guess."""
    known = _known_software(row)
    if known is not None:
        return known, ""
    words = f"{row['layout'].get('framework') or ''} {_source(row)} {row.get('set') or ''}"
    return guess_software(row, words)


def _known_software(row: Row) -> Software | None:
    layout, source = row["layout"], _source(row)
    framework = str(layout.get("framework") or "")
    args = layout.get("args") or {}
    if framework.lower() == RIDGELINE.name:
        return replace(RIDGELINE, compiled=bool(layout.get("compile")))
    if "ZeRO-3" in framework:
        return DEEPSPEED_ZERO3
    if framework == "Megatron-DeepSpeed" or "bigscience" in source:
        software = MEGATRON_DEEPSPEED
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
    if "torchtitan" in source or "llm-foundry" in source or layout.get("fsdp"):
        pure = str(layout.get("mp_mode")) == "PURE"
        software = TORCHTITAN if "torchtitan" in source else FSDP
        software = LLM_FOUNDRY if "llm-foundry" in source else software
        software = replace(software, compiled=bool(layout.get("compile")))
        return replace(software, reduce_bytes=2) if pure else software
    if "Megatron" in source or framework.startswith("Megatron"):
        return _megatron_core(args, source)
    return None


def _megatron_core(args: Mapping[str, Any], source: str) -> Software:
    """Megatron-Core as its arguments say. Without an argument for it, attention stores its scores in the
    `local` layers and in the earlier of its two test environments, which switched fused kernels off."""
    backend = str(args.get("--attention-backend") or "")
    if not backend:
        local = args.get("--transformer-impl") == "local"
        short = int(args.get("--seq-length") or 0) <= 4096
        backend = "unfused" if args and short and (local or "dracooci" in source) else "flash"
    attention = "fused" if backend == "unfused" else "flash"
    overlaps = not args or bool(args.get("--overlap-grad-reduce"))
    software = replace(MEGATRON_CORE, attention=attention, overlap_dp=overlaps)
    if args.get("--transformer-impl") == "local":
        software = replace(software, buffer_bytes=software.buffer_bytes + 30e6)
    return software


def read_model(row: Row) -> Transformer:
    facts = row["model"]
    args: Mapping[str, Any] = row["layout"].get("args") or {}
    arch = architecture(str(facts.get("arch")))
    if arch not in ARCHITECTURES:
        raise Unreadable(f"models of the kind {arch!r} are not modelled")
    layers, hidden = facts.get("layers"), facts.get("hidden")
    if not layers or not hidden:
        raise Unreadable("the model's sizes are not stated")
    seq = facts.get("seq") or args.get("--seq-length")
    if not seq:
        raise Unreadable("the sequence length is not stated")
    if args.get("--hybrid-layer-pattern"):
        raise Unreadable("state-space layers are not modelled")
    experts = int(facts.get("experts") or args.get("--num-experts") or 0)
    if arch in ("moe", "mixtral") and not experts:
        raise Unreadable("the number of experts is not stated")
    if args.get("--moe-layer-freq"):
        raise Unreadable("models with experts in some layers only are not modelled")
    if args.get("--multi-latent-attention"):
        raise Unreadable("latent attention is not modelled")
    layers, hidden, seq = int(layers), int(hidden), int(seq)
    # The number of heads is left out of some rows; 128 wide is what such models have.
    heads = int(facts.get("heads") or max(hidden // 128, 1))
    llama = arch == "llama"
    gated = llama or bool(args.get("--swiglu"))
    ffn = facts.get("ffn") or args.get("--ffn-hidden-size")
    if not ffn:
        ffn = 4 * hidden if not gated else int(4 * hidden * 2 / 3 / 64) * 64
    vocab = facts.get("vocab") or args.get("--vocab-size")
    if not vocab:
        if arch not in ("gpt", "moe") or row["layout"].get("global_batch") is None:
            raise Unreadable("the vocabulary is not stated")
        vocab = GPT2_VOCAB
    positions = str(args.get("--position-embedding-type") or "learned_absolute")
    dropout = not llama and arch != "mpt"
    if args:
        dropout = float(args.get("--hidden-dropout", 0.1)) > 0
    return Transformer(
        name=str(facts.get("name")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=int(ffn),
        seq=seq,
        vocab=int(vocab),
        kv_heads=int(facts.get("kv_heads") or args.get("--num-query-groups") or 0),
        head_width=int(args.get("--kv-channels") or 0),
        gated=gated,
        tied=not llama and not args.get("--untie-embeddings-and-output-weights"),
        learned_positions=arch in ("gpt", "moe") and positions == "learned_absolute",
        rotary=llama or positions == "rope",
        rms_norm=llama or args.get("--normalization") == "RMSNorm",
        bias=arch in ("gpt", "moe") and not args.get("--disable-bias-linear"),
        dropout=dropout,
        experts=experts,
        top_k=int(facts.get("top_k") or args.get("--moe-router-topk") or 2),
        expert_ffn=int(args.get("--moe-ffn-hidden-size") or 0),
        shared_ffn=int(args.get("--moe-shared-expert-intermediate-size") or 0),
    )


_PROFILES: Final = (
    # What the device is called, a word there or in the notes, and the profile; the first that fits.
    ("v100", "", "summit"),
    ("gb200", "", "gb200"),
    ("b200", "", "gb200"),
    ("gb300", "", "gb300"),
    ("h200", "", "h200"),
    ("h100", "500w", "h100-96g-500w"),
    ("h100", "", "h100"),
    ("h800", "", "h100"),
    ("a100", "jean zay", "jean-zay"),
    ("a100_40", "", "a100-40g"),
    ("a100 40", "", "a100-40g"),
    ("a100-sxm4-40", "", "a100-40g"),
    ("a100", "", "selene"),
    ("a800", "", "selene"),
)


def read_machine(row: Row) -> Machine:
    """The shipped profile of the row's device, with the links that the row states."""
    hardware = row.get("hardware") or {}
    gpu = str(hardware.get("gpu") or "").lower()
    if not gpu:
        gpu = _source(row).lower()  # test results carry the device in their name
    place = str(hardware.get("notes") or "").lower()
    for device, also, name in _PROFILES:
        if device in gpu and (also in gpu or also in place):
            machine = load_machine(name)
            break
    else:
        raise Unreadable(f"the device {hardware.get('gpu')!r} has no profile")
    per_node = int(hardware.get("gpus_per_node") or machine.devices_per_node)
    changes: dict[str, Any] = {"devices_per_node": per_node}
    if "a800" in gpu or "h800" in gpu:
        changes["intra.bandwidth"] = 200e9  # the same devices with fewer links
    if hardware.get("inter_Gbps_per_node"):
        changes["inter.bandwidth"] = float(hardware["inter_Gbps_per_node"]) * 1e9 / 8
    elif hardware.get("inter_GBps_per_gpu"):
        changes["inter.bandwidth"] = float(hardware["inter_GBps_per_gpu"]) * 1e9 * per_node
    if hardware.get("intra_GBps_per_gpu_unidir"):
        changes["intra.bandwidth"] = float(hardware["intra_GBps_per_gpu_unidir"]) * 1e9
    return machine.replace(**changes)


def read_measured(row: Row) -> Measured:
    found = row.get("measured") or {}
    kind = str(found.get("mem_kind") or "")
    memory: float | None = None
    if found.get("mem_max_allocated_bytes"):
        memory = float(found["mem_max_allocated_bytes"])
    elif found.get("mem_GiB"):
        memory = float(found["mem_GiB"]) * 2**30
    elif found.get("mem_GB"):
        # nvidia-smi shows MiB; people write them down as GB.
        memory = float(found["mem_GB"]) * 2**30
    tokens = _number(found.get("tokens_per_s_per_gpu"))
    if tokens is None and _number(found.get("tokens_per_s_all")):
        tokens = float(found["tokens_per_s_all"]) / _devices(row)
    seconds = _number(found.get("iter_s"))
    if seconds is None and _number(found.get("iter_ms")):
        seconds = float(found["iter_ms"]) / 1e3
    return Measured(
        seconds=seconds,
        tflops=_number(found.get("tflops_per_gpu")),
        flops_kind=_flops_kind(row),
        tokens_per_s=tokens,
        memory_bytes=memory,
        memory_kind="device"
        if "smi" in kind
        else "reserved"
        if "reserved" in kind
        else "allocated",
        memory_rank="last" if "last rank)" in kind else "max",
        out_of_memory=bool(found.get("oom")),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and value > 0 else None


def _flops_kind(row: Row) -> str:
    kind = str((row.get("measured") or {}).get("tflops_kind") or "")
    if kind.startswith("hardware x4"):
        return "hardware x4"
    if kind.startswith("hardware"):
        return "hardware"
    if "llm-foundry" in _source(row):
        return "6n"
    if "Bridge" in _source(row):
        return "model causal"  # attention counted as far as the mask lets it look
    return "model"
