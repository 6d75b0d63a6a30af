"""What one rank of a simulated job measured, as plain values: they go from the rank's process to the
command and into JSON. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Traffic:
    """Communication of one step that is alike."""

    part: str
    """What it is for, as in `PARTS` of `simulate.py`."""
    kind: str
    num_bytes: int
    """Of one call: the result of a gather, the input of a reduction."""
    num_calls: int
    size: int
    """Ranks of the group; 2 for a send."""
    per_node: int
    """Those of them that share a node, at most."""
    beside: bool
    """Whether it runs beside the computation of forward or backward, and may be hidden."""


@dataclass(frozen=True)
class RankMeasured:
    """One rank, alone, with a fake process group around it."""

    rank: int
    stage: int
    """Its place in the pipeline; 0 without one."""
    asked_stage: int
    """Of the rank that was asked for, where another stands in its place."""
    device_kind: str
    device_name: str
    step_s: float
    """Median of the timed steps, nothing sent and nobody waited for."""
    steps_s: tuple[float, ...]
    optimizer_s: float
    backward_s: float
    """Of the last microbatch, which gradients can be reduced behind."""
    build_s: float
    weights_bytes: int
    gradients_bytes: int
    """At the end of backward."""
    optimizer_bytes: int
    host_bytes: int
    """Of these, what is kept on the host by `offload`."""
    held_bytes: int
    """Weights, optimizer state and whatever of gradients stays, between two steps."""
    step_bytes: int
    """Most that tensors made in a step take at a time, counted operation by operation."""
    allocated_bytes: int | None
    """The device's own count at its peak; None on a CPU."""
    reserved_bytes: int | None
    device_memory_bytes: int
    forward_s: tuple[float, ...] = ()
    """In a pipeline: of one microbatch, each piece of the model on this rank."""
    backward_chunk_s: tuple[float, ...] = ()
    weight_s: tuple[float, ...] = ()
    """Weight gradients, where the schedule does them apart."""
    traffic: tuple[Traffic, ...] = ()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of this rank's own part of each trained tensor."""
    stage_kinds: tuple[str, ...] = ()
    """One word a place in the pipeline, the same for places that hold the same layers."""
    block_costs: dict[str, float] | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The device's count, or on a CPU that of the tensors."""
        if self.allocated_bytes is not None:
            return self.allocated_bytes
        return self.held_bytes + self.step_bytes
