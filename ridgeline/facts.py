"""Plain numbers about a model, a machine and its storage, with units in their names.

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
    """What one sample costs, counted before anything is trained."""

    name: str
    num_parameters: int
    num_trainable: int
    parameter_bytes: int
    train_flops_per_sample: float
    """Forward and backward; convolutions, matrix products and attention."""
    forward_flops_per_sample: float
    flops_source: str
    """`counted` on the meta device; where the module cannot run there, `forward counted` on the device that
    it trains on, with twice that for backward, or `6N` times the parameters."""
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


@dataclass(frozen=True)
class QuotaFacts:
    """What one user or group may still put on a file system; None where there is no limit."""

    owner: str
    """`user` or `group`."""
    used_bytes: int
    limit_bytes: int | None
    num_files: int
    max_files: int | None
    source: str
    """The command that said so."""

    @property
    def free_bytes(self) -> int | None:
        return None if self.limit_bytes is None else max(self.limit_bytes - self.used_bytes, 0)

    @property
    def num_files_left(self) -> int | None:
        return None if self.max_files is None else max(self.max_files - self.num_files, 0)


@dataclass(frozen=True)
class StorageFacts:
    """One directory's file system, and what it did when it was measured.

    Rates are None where they were not measured; `problems` then says why. All are of one thread unless
    the name says otherwise.
    """

    path: str
    host: str
    time: float
    """When it was measured, in seconds since 1970."""
    fs_type: str
    kind: str
    """`local`, `network`, `memory` or `unknown`."""
    mount_point: str
    mount_source: str
    mount_options: tuple[str, ...]
    device: str
    """The disk under it, as /sys names it; empty where there is none."""
    rotational: bool | None
    total_bytes: int
    free_bytes: int
    num_inodes: int | None
    """None where the file system has no fixed number of them."""
    num_free_inodes: int | None
    quotas: tuple[QuotaFacts, ...] = ()
    size_bytes: int = 0
    """Of the large file."""
    num_files: int = 0
    """Small files."""
    num_threads: int = 1
    uncached_by: str = ""
    """How the page cache was kept out: `O_DIRECT`, `fadvise`, or `memory` where it cannot be."""
    write_bytes_per_s: float | None = None
    """Sequential, through the page cache, with the fsync at its end."""
    uncached_write_bytes_per_s: float | None = None
    """Sequential with O_DIRECT and an fsync; not measured without O_DIRECT."""
    read_bytes_per_s: float | None = None
    """Sequential, not from the page cache."""
    threads_read_bytes_per_s: float | None = None
    """The same by `num_threads` threads at once, all of them together."""
    cached_read_bytes_per_s: float | None = None
    sync_writes_per_s: float | None = None
    """512 bytes each, every one on the disk before the next."""
    sync_write_median_s: float | None = None
    sync_write_p99_s: float | None = None
    create_files_per_s: float | None = None
    """Made, written and closed; nothing waits for the disk."""
    stat_files_per_s: float | None = None
    """Of files just made, so from the client's caches where it has any."""
    read_files_per_s: float | None = None
    """Opened, read and closed in shuffled order; the content not from the page cache."""
    random_reads_per_s: float | None = None
    """128 KiB each at places in shuffled order, not from the page cache."""
    cached_random_reads_per_s: float | None = None
    measured_s: float = 0.0
    """How long measuring took."""
    notes: tuple[str, ...] = ()
    """What was done otherwise than asked."""
    problems: tuple[str, ...] = ()
    """What could not be measured, and why."""

    @property
    def room_bytes(self) -> int:
        """What may still be written: the file system's room, or a quota's where that is less."""
        left = (quota.free_bytes for quota in self.quotas)
        return min([self.free_bytes, *(room for room in left if room is not None)])

    @property
    def room_files(self) -> int | None:
        """Files that may still be made; None where nothing limits them."""
        left = [self.num_free_inodes, *(quota.num_files_left for quota in self.quotas)]
        return min((count for count in left if count is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def facts_from_dict(cls: type[Any], values: Mapping[str, Any]) -> Any:
    """Rebuild any kind from JSON; keys of a newer version are passed over."""
    names = {f.name for f in dataclasses.fields(cls)}
    kept = {key: value for key, value in values.items() if key in names}
    for key in ("sample_shape", "mount_options", "notes", "problems"):
        if key in kept:
            kept[key] = tuple(kept[key])
    if "quotas" in kept:
        kept["quotas"] = tuple(facts_from_dict(QuotaFacts, quota) for quota in kept["quotas"])
    return cls(**kept)
