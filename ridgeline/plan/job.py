"""A job to be planned: a model, a machine, and how the one is spread over the other.

A `Layout` says less than the planner needs (how many samples, which software) and a published row says it
in other words; both become a `Job`. `time.py` and `memory.py` read nothing else. `Placed` is what a job of
a traced module (`general.py`) has in common with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ridgeline.layout import Layout
from ridgeline.plan.layer import Slice
from ridgeline.plan.machine import Machine
from ridgeline.plan.network import Group, group_of
from ridgeline.plan.software import RIDGELINE, Software
from ridgeline.plan.transformer import Transformer, spread_heads


class Placed:
    """Sizes of an arrangement and what follows from them: groups of ranks and their places."""

    machine: Machine
    software: Software
    dp: int
    tp: int
    cp: int
    pp: int
    shard: int
    samples: int
    microbatches: int
    sample_bytes: float
    spatial: tuple[int, int] = (1, 1)
    """Tiles of an image; only modules that were traced have them."""

    @property
    def tiles(self) -> int:
        return self.spatial[0] * self.spatial[1]

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.cp * self.pp * self.tiles

    @property
    def global_batch(self) -> int:
        return self.dp * self.samples * self.microbatches

    @property
    def sharpness(self) -> float:
        """How sharply the slower of host and device wins; 1 is one after the other."""
        return 1.0 if self.machine.device.is_host else self.software.sharpness

    @property
    def sharers(self) -> int:
        """Ranks that share one copy of sharded state."""
        return self.shard or self.dp * self.cp

    def tp_group(self) -> Group:
        return group_of(self.machine, self.tp, 1)

    def dp_group(self) -> Group:
        return group_of(self.machine, self.dp * self.cp * self.tiles, self.tp)

    def crosses_nodes(self, rank: int) -> bool:
        """Whether the link from a stage to the next leaves the node."""
        return self.crossings()[rank]

    def crossings(self) -> tuple[bool, ...]:
        """The same of every stage."""
        stride = self.tp * self.cp * self.dp * self.tiles
        return _crossings(self.machine.reach_of(self.devices), self.devices, stride, self.pp)


@dataclass(frozen=True)
class Job(Placed):
    """One training step of one arrangement."""

    model: Transformer
    machine: Machine
    software: Software
    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    virtual: int = 1
    zero: int = 0
    shard: int = 0
    """Replicas that shard among themselves; 0: all."""
    sp: bool = False
    schedule: str = "1f1b"
    samples: int = 1
    """Of one microbatch on one replica."""
    microbatches: int = 1
    recompute: str = "none"
    precision: str = "bf16"
    group: int = 0
    """Microbatches that an interleaved schedule takes through a chunk at a time; 0: `pp`."""
    vocab_multiple: int = 1
    """The embedding's rows are padded to a multiple of this and of `tp`."""
    offload: str = "none"
    compress: str = "none"
    sync: str = "every"
    """These three as in `Layout`."""
    offload_layers: int = 0
    """Of a stage, those whose activations `offload` moves; 0: all."""
    sample_bytes: float = 0.0
    """Of one sample in storage; 0: nothing is read."""
    ep: int = 1
    """Ranks that share the experts of a layer, taken from the replicas."""
    expert_tp: int = 0
    """Ranks that each expert is split over; 0: `tp`."""

    @property
    def unit(self) -> str:
        return "tokens"

    @property
    def tokens(self) -> int:
        """Of a step, on all devices."""
        return self.global_batch * self.model.seq

    @property
    def part(self) -> Slice:
        return Slice(self.samples, self.tp, self.cp, self.sp, self.precision)

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return max(1, self.devices // (self.pp * self.ep * (self.expert_tp or self.tp)))

    def layers_of(self, rank: int) -> tuple[int, ...]:
        """Layers of each chunk of a stage; what does not divide goes to the stages in the middle,
        which have neither embedding nor head."""
        return _layers_of(self.model.layers, self.pp, self.virtual, rank)

    def replace(self, **changes: Any) -> Job:
        return replace(self, **changes)


@lru_cache(maxsize=65536)
def _layers_of(layers: int, pp: int, virtual: int, rank: int) -> tuple[int, ...]:
    places = pp * virtual
    base, rest = divmod(layers, places)
    first = (places - rest) // 2
    chunks = (chunk * pp + rank for chunk in range(virtual))
    return tuple(base + (first <= place < first + rest) for place in chunks)


@lru_cache(maxsize=65536)
def _crossings(per_node: int, devices: int, stride: int, pp: int) -> tuple[bool, ...]:
    if devices <= per_node:
        return (False,) * pp
    far = stride >= per_node
    return tuple(far or (rank + 1) * stride % per_node == 0 for rank in range(pp))


def job_from_layout(
    model: Transformer, machine: Machine, layout: Layout, batch: int, software: Software = RIDGELINE,
    sample_bytes: float = 0.0,
) -> Job:  # fmt: skip
    """What this library does with a layout and a global batch."""
    parts = layout.microbatches if layout.pp > 1 else layout.accumulate
    samples = max(1, -(-batch // (layout.dp * parts)))
    return Job(
        model=spread_heads(model, layout.tp),
        machine=machine,
        software=replace(software, compiled=True) if layout.compile else software,
        dp=layout.dp,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        virtual=layout.virtual,
        zero=layout.zero if layout.dp > 1 or layout.offload == "params" else 0,
        shard=layout.shard or 0,
        sp=layout.sp,
        schedule=layout.schedule,
        samples=samples,
        microbatches=parts,
        recompute=layout.recompute,
        precision=layout.precision,
        offload=layout.offload,
        compress=layout.compress if layout.dp > 1 else "none",
        sync=layout.sync if layout.dp > 1 else "every",
        sample_bytes=sample_bytes,
    )
