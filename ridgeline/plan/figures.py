"""What a published row has measured: its figures, and the units and counts that they are in.

Called by `rows.py`, which says what was run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ridgeline.plan.programs import source_words
from ridgeline.plan.words import Row, Unreadable, flag, number, shown, whole


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
    ignored: str = ""
    """Figures that are no positive numbers, and do not count; empty where there are none."""


def devices_of(row: Row) -> int:
    layout = row["layout"]
    gpus = whole(layout, "gpus")
    if not gpus:
        if not layout.get("dp"):
            raise Unreadable("the number of devices is not stated")
        gpus = math.prod(whole(layout, name) or 1 for name in ("dp", "tp", "pp", "cp"))
    hardware = row["hardware"]
    # Megatron's tests named so run on one node, and a GB200 node has four devices.
    if "GB200" in str(hardware.get("gpu")) and str(row["model"].get("name")).endswith("_1node"):
        return min(gpus, 4)
    return gpus


_SECONDS: Final = {"iter_s": 1.0, "iter_ms": 1e-3}
_BYTES: Final = {
    "mem_max_allocated_bytes": 1.0,
    "mem_GiB": 2.0**30,
    "mem_GB": 2.0**30,  # nvidia-smi shows MiB; people write them down as GB
}


def read_measured(row: Row) -> Measured:
    """The figures that are positive numbers; of the others it is said that they do not count."""
    found = row["measured"]
    kind = str(found.get("mem_kind") or "")
    wrong: list[str] = []

    def first(units: Mapping[str, float]) -> float | None:
        counted = None
        for name, unit in units.items():
            value = found.get(name)
            figure = number(value)
            if figure is not None and 0 < figure * unit < math.inf:
                counted = figure * unit if counted is None else counted
            elif value is not None:
                wrong.append(f"{name} is {shown(value)}")
        return counted

    tokens = first({"tokens_per_s_per_gpu": 1.0, "tokens_per_s_all": 1.0 / devices_of(row)})
    seconds, memory = first(_SECONDS), first(_BYTES)
    tflops = first({"tflops_per_gpu": 1.0})
    try:
        out_of_memory = flag(found, "oom")
    except Unreadable as error:
        out_of_memory = False
        wrong.append(str(error))
    return Measured(
        seconds=seconds,
        tflops=tflops,
        flops_kind=_flops_kind(row),
        tokens_per_s=tokens,
        memory_bytes=memory,
        memory_kind="device"
        if "smi" in kind
        else "reserved"
        if "reserved" in kind
        else "allocated",
        memory_rank="last" if "last rank)" in kind else "max",
        out_of_memory=out_of_memory,
        ignored="; ".join(wrong),
    )


def _flops_kind(row: Row) -> str:
    kind = str(row["measured"].get("tflops_kind") or "")
    if kind.startswith("hardware x4"):
        return "hardware x4"
    if kind.startswith("hardware"):
        return "hardware"
    if "llm-foundry" in source_words(row):
        return "6n"
    if "Bridge" in source_words(row):
        return "model causal"  # attention counted as far as the mask lets it look
    return "model"
