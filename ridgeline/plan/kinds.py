"""The kinds of model that can be planned, and what planning asks of each: one line a kind.

`search.py`, `predict.py` and `show.py` call through this table and ask nowhere else what a model is. A job
of any kind has `model`, `machine`, `devices`, `samples`, `tokens` (of a step, in its `unit`) and
`precision`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, isqrt
from typing import Any, Final

from ridgeline.layout import Layout
from ridgeline.plan.beside import assumptions
from ridgeline.plan.general import ModuleJob, module_job, tell_parts
from ridgeline.plan.general_memory import module_memory, module_stage_memory
from ridgeline.plan.general_time import (
    module_alone_s,
    module_bound_s,
    module_flops,
    module_least_bytes,
    module_time,
)
from ridgeline.plan.job import Job, job_from_layout
from ridgeline.plan.machine import Machine
from ridgeline.plan.memory import StepMemory, predict_memory, stage_memory
from ridgeline.plan.module import ModuleFacts
from ridgeline.plan.software import Software
from ridgeline.plan.time import (
    StepTime,
    lower_bound_s,
    parameters_of,
    predict_time,
    rank_alone_s,
)
from ridgeline.plan.transformer import Transformer

LEAST_PIECE: Final = 1024
"""Tokens of a sequence that a rank of context parallelism has at least: with fewer it waits for others."""

Model = Transformer | ModuleFacts
AnyJob = Job | ModuleJob


@dataclass(frozen=True)
class Choices:
    """Sizes that are worth a look for a model on a machine."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    most_stages: int
    """Parts that a pipeline can be cut into."""
    spatial: tuple[tuple[int, int], ...] = ((1, 1),)
    ep: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Kind:
    """What planning asks of a kind of model."""

    arrange: Callable[[Any, Machine, Layout, int, Software], Any]
    """The job of a layout and a global batch."""
    memory: Callable[[Any], StepMemory]
    time: Callable[[Any], StepTime]
    bound_s: Callable[[Any], float]
    """What no schedule can beat."""
    least_bytes: Callable[[Any], float]
    """What no layout of these sizes can do without."""
    flops: Callable[[Any], float]
    """The model's own, of a step, attention counted causally."""
    choices: Callable[[Any, Machine], Choices]
    stage_memory: Callable[[Any, int], StepMemory]
    """Of a rank in one place of the pipeline."""
    alone_s: Callable[[Any, int], float]
    """A step of one such rank that waits for nobody and sends nothing."""
    offloads: bool = False
    """Whether `offload` is known of it."""
    assumptions: Callable[[Any], list[str]] = lambda job: []
    """What was not known of the machine and had to be assumed, and what is not as the layout says, as
    sentences."""


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    low = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*low, *(number // n for n in low)}))


MOST_SPLIT: Final = 16
"""Ranks of several nodes that layers are split over at most: every doubling makes a search half as long
again, and what each rank has left of a layer's products is small."""


def _splits(model: Transformer, machine: Machine) -> tuple[int, ...]:
    """Numbers of ranks to split layers over: parts of a node, or two or four nodes of a rack, as far as
    keys and values are split with them."""
    found = list(divisors(machine.devices_per_node))
    kv_heads = model.kv_heads or model.heads
    beyond = 2 * machine.devices_per_node
    while beyond <= min(machine.reach, MOST_SPLIT) and kv_heads % beyond == 0:
        found.append(beyond)
        beyond *= 2
    return tuple(n for n in found if model.heads % n == 0)


def _transformer_choices(model: Transformer, machine: Machine) -> Choices:
    return Choices(
        _splits(model, machine),
        tuple(c for c in (1, 2, 4, 8, 16) if c == 1 or model.seq // c >= LEAST_PIECE),
        model.layers,
    )


def _module_choices(model: ModuleFacts, machine: Machine) -> Choices:
    inside = divisors(machine.devices_per_node)
    tiles = [(1, 1)]
    convolves = any(block.halos for block in model.blocks)
    attends = any(block.costs["wide"].forward.attention for block in model.blocks)
    if convolves and not attends:
        tiles += [(n, 1) for n in inside if n > 1]
    return Choices(
        tp=tuple(t for t in inside if model.splits % t == 0),
        cp=(1,),
        most_stages=model.most_stages,
        spatial=tuple(tiles),
        ep=_expert_parts(model),
    )


def _expert_parts(model: ModuleFacts) -> tuple[int, ...]:
    """What the experts of all layers can be divided into."""
    numbers = [one.number for block in model.blocks for one in block.experts]
    return divisors(gcd(*numbers)) if numbers else (1,)


def _transformer_flops(job: Job) -> float:
    return job.model.step_flops(job.tokens, "model causal")


def _least_bytes(job: Job) -> float:
    """Weights and optimizer state as sharded."""
    count = parameters_of(job, job.pp // 2)
    shards = job.sharers
    state = 4.0 + 4.0 * job.model.optimizer_slots
    if job.zero == 3:
        return state * count / shards
    if job.zero:
        return 2.0 * count + state * count / shards
    return state * count


KINDS: Final[dict[type, Kind]] = {
    Transformer: Kind(
        job_from_layout, predict_memory, predict_time, lower_bound_s, _least_bytes,
        _transformer_flops, _transformer_choices, stage_memory, rank_alone_s,
        offloads=True, assumptions=assumptions,
    ),
    ModuleFacts: Kind(
        module_job, module_memory, module_time, module_bound_s, module_least_bytes, module_flops,
        _module_choices, module_stage_memory, module_alone_s, assumptions=tell_parts,
    ),
}  # fmt: skip


def kind_of(model: Model) -> Kind:
    return KINDS[type(model)]
