"""Published rows into jobs: what was run, on what, with which software, and what was measured.

A row states its model, hardware, layout and measurement in the words of its source. `read_row` turns it
into a `Job` and the measured figures, or says in a sentence why it cannot. Facts that a source leaves out
because they are its program's defaults are filled in here, by program, never by row; its figures are
read in `figures.py`, and `possible.py` refuses what cannot have been run so. Called by `validate.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ridgeline.errors import UsageError
from ridgeline.plan.figures import Measured, devices_of, read_measured
from ridgeline.plan.job import Job
from ridgeline.plan.machine import Machine
from ridgeline.plan.own_machine import machine_of, mentioned_device, named_device
from ridgeline.plan.possible import require_one_work, require_possible
from ridgeline.plan.programs import read_software, recipe_offload, source_words
from ridgeline.plan.software import Software
from ridgeline.plan.transformer import Transformer
from ridgeline.plan.words import (
    Row,
    Unreadable,
    architecture,
    flag,
    misspelt,
    precision,
    quantity,
    recomputed,
    renamed,
    schedule_name,
    shown,
    trains_adapters,
    whole,
    zero_stage,
)

__all__ = [
    "Measured", "ReadRow", "Row", "Unreadable", "load_rows", "name_of", "read_row", "require_measured",
    "set_of",
]  # fmt: skip

ARCHITECTURES: Final = ("gpt", "llama", "mpt", "moe", "mixtral")
"""Decoders that `Transformer` describes."""
GPT2_VOCAB: Final = 50257
"""What Megatron's tests use where no vocabulary is stated."""


@dataclass(frozen=True)
class ReadRow:
    id: str
    set: str
    job: Job
    measured: Measured
    guessed: str = ""
    """What the row does not say and was guessed; empty where nothing was."""
    misspelt: str = ""
    """Fields that are not known and are nearly ones that are."""


def load_rows(path: Path, option: str = "--rows") -> list[Row]:
    """The rows of a file that was given with `option`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path} of {option} ({error.strerror}); name a file of rows"
        ) from error
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(
            f"{path} of {option} is no JSON ({why}); it should hold a list of rows"
        ) from error
    rows = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(
            f"{path} of {option} holds no list of rows; give {{'rows': [...]}} or a list"
        )
    if not rows:
        raise UsageError(f"{path} of {option} holds no rows; give at least one")
    return rows


def name_of(row: Row, index: int) -> str:
    """Its id, or its place in the file."""
    return f"row-{index}" if row.get("id") is None else _line(row["id"])


def set_of(row: Row) -> str:
    return "" if row.get("set") is None else _line(row["set"])


def _line(value: Any) -> str:
    """For one line of a table, which any terminal can show."""
    if not isinstance(value, str):
        return shown(value)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)


def require_measured(row: Row) -> None:
    """Raises `Unreadable` for rows of another kind."""
    kind = row.get("kind")
    if kind is not None and str(kind).strip().lower() != "measured":
        raise Unreadable(f"the row is {_line(kind)}, not measured")


def read_row(row: Row, index: int = 0) -> ReadRow:
    """The row as a job; raises `Unreadable` with the reason where it is none that we can express."""
    try:
        name, group, wrong = name_of(row, index), set_of(row), misspelt(row)
        row = renamed(row)
        job, guessed = _read_job(row)
        require_possible(row, job)
        measured = read_measured(row)
        require_one_work(job, measured)
        return ReadRow(name, group, job, measured, guessed, wrong)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise Unreadable(
            f"a field is missing or is no number ({shown(str(error))[1:-1]})"
        ) from error
    except RecursionError as error:
        raise Unreadable("a field is nested too deeply") from error


def _read_job(row: Row) -> tuple[Job, str]:
    """The job, and what of it is a guess."""
    layout = row["layout"]
    model = read_model(row)
    software, guessed = read_software(row)
    machine, likened = read_machine(row)
    if software.attention != "flash" and not _stated_heads(row):
        raise Unreadable("the number of heads is not stated, and attention stores scores for each")
    tp, pp, cp, ep, virtual = (whole(layout, name) or 1 for name in ("tp", "pp", "cp", "ep", "vp"))
    for name, size in (("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep), ("vp", virtual)):
        if size < 0:
            raise Unreadable(f"{name} is {size}")
    if ep > 1 and not model.experts:
        raise Unreadable(f"ep={ep} shares experts, and the row states none")
    devices = devices_of(row)
    if devices % (tp * pp * cp):
        raise Unreadable(f"{devices} devices do not divide into tp={tp}, pp={pp}, cp={cp}")
    dp = devices // (tp * pp * cp)
    stated = whole(layout, "dp")
    if stated and stated != dp:
        raise Unreadable(f"dp={stated} does not fit {devices} devices")
    samples, microbatches = _batches(row, dp)
    if virtual > 1 and pp == 1:
        raise Unreadable(f"vp={virtual} is of stages, and there is one")
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
    if flag(layout, "act_offload"):
        raise Unreadable("offloaded activations are not modelled")
    if args.get("--mtp-num-layers"):
        raise Unreadable("multi-token prediction is not modelled")
    away, why = recipe_offload(row, software, machine.name)
    job = Job(
        model=model,
        machine=machine,
        software=software,
        dp=dp,
        tp=tp,
        cp=cp,
        pp=pp,
        virtual=virtual,
        zero=_zero(row, software),
        sp=_splits_sequence(layout, software) and tp > 1,
        schedule=schedule_name(layout.get("schedule"), virtual, pp),
        samples=samples,
        microbatches=microbatches,
        recompute=recomputed(layout.get("recompute")),
        precision=_precision(str(layout.get("precision") or "bf16")),
        group=whole(args, "--microbatch-group-size-per-virtual-pipeline-stage"),
        offload="activations" if away else "none",
        offload_layers=away,
        ep=ep,
        expert_tp=whole(args, "--expert-tensor-parallel-size"),
        vocab_multiple=(whole(args, "--make-vocab-size-divisible-by") or 128)
        if "mega" in software.name
        else 1,
    )
    return job, "; ".join(filter(None, (guessed, likened, why)))


def _batches(row: Row, dp: int) -> tuple[int, int]:
    """Samples of a microbatch, and microbatches of a step."""
    layout = row["layout"]
    samples, batch = whole(layout, "microbatch"), whole(layout, "global_batch")
    if not samples and whole(layout, "pp") > 1:
        raise Unreadable("the size of a microbatch is not stated")
    samples = samples or whole(layout, "local_batch")
    if not samples:
        raise Unreadable("the size of a microbatch is not stated")
    if samples < 0 or batch < 0 or dp <= 0:
        raise Unreadable(f"microbatch is {samples}, global_batch {batch} and dp {dp}")
    count = whole(layout, "num_microbatches") or whole(layout, "grad_accum")
    if not count:
        if not batch:
            raise Unreadable("the global batch is not stated")
        if batch % (dp * samples):
            raise Unreadable(
                f"global_batch={batch} is no multiple of dp={dp} times microbatch={samples}"
            )
        count = batch // (dp * samples)
    if batch and batch != dp * samples * count:
        raise Unreadable(
            f"global_batch={batch} contradicts dp={dp}, microbatch={samples} and {count} microbatches"
        )
    return samples, count


def _splits_sequence(layout: Row, software: Software) -> bool:
    return software.always_sp if layout.get("sp") is None else flag(layout, "sp")


def _zero(row: Row, software: Software) -> int:
    layout = row["layout"]
    stage = zero_stage(layout.get("zero"))
    if layout.get("zero") is None:
        stage = 3 if whole(layout, "fsdp") > 1 else software.usual_zero
    return 1 if (layout.get("args") or {}).get("--use-distributed-optimizer") else stage


def _precision(text: str) -> str:
    found = precision(text)
    if found in ("fp4", ""):
        raise Unreadable(f"precision {_line(text)[:60]} is not modelled")
    return found


def _stated_heads(row: Row) -> int:
    args: Mapping[str, Any] = row["layout"].get("args") or {}
    return whole(row["model"], "heads") or whole(args, "--num-attention-heads")


def read_model(row: Row) -> Transformer:
    facts = row["model"]
    args: Mapping[str, Any] = row["layout"].get("args") or {}
    arch = architecture(str(facts.get("arch")))
    if arch not in ARCHITECTURES:
        raise Unreadable(f"models of the kind {shown(arch)} are not modelled")
    layers, hidden = whole(facts, "layers"), whole(facts, "hidden")
    if not layers or not hidden:
        raise Unreadable("the model's sizes are not stated")
    seq = whole(facts, "seq") or whole(args, "--seq-length")
    if not seq:
        raise Unreadable("the sequence length is not stated")
    if args.get("--hybrid-layer-pattern"):
        raise Unreadable("state-space layers are not modelled")
    experts = whole(facts, "experts") or whole(args, "--num-experts")
    if arch in ("moe", "mixtral") and not experts:
        raise Unreadable("the number of experts is not stated")
    if args.get("--moe-layer-freq"):
        raise Unreadable("models with experts in some layers only are not modelled")
    if args.get("--multi-latent-attention"):
        raise Unreadable("latent attention is not modelled")
    # The number of heads is left out of some rows; 128 wide is what such models have.
    heads = _stated_heads(row) or max(hidden // 128, 1)
    llama = arch == "llama"
    gated = llama or bool(args.get("--swiglu"))
    ffn = whole(facts, "ffn") or whole(args, "--ffn-hidden-size")
    if not ffn:
        ffn = 4 * hidden if not gated else int(4 * hidden * 2 / 3 / 64) * 64
    vocab = whole(facts, "vocab") or whole(args, "--vocab-size")
    if not vocab:
        if arch not in ("gpt", "moe") or row["layout"].get("global_batch") is None:
            raise Unreadable("the vocabulary is not stated")
        vocab = GPT2_VOCAB
    positions = str(args.get("--position-embedding-type") or "learned_absolute")
    dropout = not llama and arch != "mpt"
    if args:
        dropout = quantity({"--hidden-dropout": 0.1, **args}, "--hidden-dropout") > 0
    return Transformer(
        name=str(facts.get("name")),
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=ffn,
        seq=seq,
        vocab=vocab,
        kv_heads=whole(facts, "kv_heads") or whole(args, "--num-query-groups"),
        head_width=whole(args, "--kv-channels"),
        gated=gated,
        frozen=trains_adapters(row),
        tied=not llama and not args.get("--untie-embeddings-and-output-weights"),
        learned_positions=arch in ("gpt", "moe") and positions == "learned_absolute",
        rotary=llama or positions == "rope",
        rms_norm=llama or args.get("--normalization") == "RMSNorm",
        bias=arch in ("gpt", "moe") and not args.get("--disable-bias-linear"),
        dropout=dropout,
        experts=experts,
        top_k=whole(facts, "top_k") or whole(args, "--moe-router-topk") or 2,
        expert_ffn=whole(args, "--moe-ffn-hidden-size"),
        shared_ffn=whole(args, "--moe-shared-expert-intermediate-size"),
    )


def read_machine(row: Row) -> tuple[Machine, str]:
    """The shipped profile of the row's device, with the links that the row states; and what of it is a
    guess."""
    hardware = row["hardware"]
    gpu = str(hardware.get("gpu") or "")
    if gpu:
        named = named_device(gpu, str(hardware.get("notes") or ""))
    else:
        named = mentioned_device(source_words(row))  # test results carry the device in their name
    if named is None:
        raise Unreadable(f"the device {shown(hardware.get('gpu'))} has no profile")
    machine = machine_of(named)
    guessed = ""
    if named.is_other or named.is_vague or not gpu:
        size = f" with {named.memory_bytes / 1e9:.0f}e9 bytes" if named.memory_bytes else ""
        why = ", since its memory is not stated" if named.is_vague else ""
        name = shown(gpu) if gpu else "the device that its source names"
        guessed = f"{name} taken as {machine.device.name}{size}{why}"
    per_node = whole(hardware, "gpus_per_node") or machine.devices_per_node
    changes: dict[str, Any] = {"devices_per_node": per_node}
    if named.device in ("a800", "h800"):
        changes["intra.bandwidth"] = 200e9  # the same devices with fewer links
    if rate := quantity(hardware, "inter_Gbps_per_node"):
        changes["inter.bandwidth"] = rate * 1e9 / 8
    elif rate := quantity(hardware, "inter_GBps_per_gpu"):
        changes["inter.bandwidth"] = rate * 1e9 * per_node
    if rate := quantity(hardware, "intra_GBps_per_gpu_unidir"):
        changes["intra.bandwidth"] = rate * 1e9
    return machine.replace(**changes), guessed
