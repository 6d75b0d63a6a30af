"""Plain numbers about a model and about a machine, with units in their names.

They are written to `facts.json` and `machine.json`, and are all that the planner and the reports know
of either: no torch is needed to read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelFacts:
    """What one sample costs, counted on the meta device before anything runs."""

    name: str
    num_parameters: int
    num_trainable: int
    parameter_bytes: int
    train_flops_per_sample: float
    """Forward and backward; convolutions, matrix products and attention."""
    forward_flops_per_sample: float
    flops_source: str
    """`counted` on the meta device, or `6N` where the module cannot run there."""
    sample_shape: tuple[int, ...]
    units_per_sample: int = 1
    """How many of `unit` are in a sample: tokens in a sequence, else 1."""
    unit: str = "samples"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class MachineFacts:
    """One node and its devices, as the run found them."""

    host: str
    num_cores: int
    memory_bytes: int
    device_kind: str
    """`cpu` or `cuda`."""
    device_name: str
    num_devices: int
    device_memory_bytes: int
    peak_flops: dict[str, float] = field(default_factory=dict)
    """Per precision, per device (for the CPU: per rank, with its threads)."""
    peak_source: str = "unknown"
    """`datasheet` or `measured`, so that a reader knows what an MFU is a share of."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def facts_from_dict(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """Rebuild either kind from JSON; keys of a newer version are passed over."""
    names = {f.name for f in dataclasses.fields(cls)}
    kept = {key: value for key, value in values.items() if key in names}
    if "sample_shape" in kept:
        kept["sample_shape"] = tuple(kept["sample_shape"])
    return cls(**kept)
