"""What a measured file system is good for, with the figures that say so.

Four uses, because they ask for different things and machines have a place for each: environments, packed
data, data in small files, checkpoints. The limits are named here, each with the reason for its height.
Called by `cli_machine.py`; pure, and without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ridgeline.facts import StorageFacts
from ridgeline.machine.storage import RANDOM_READ_BYTES

GOOD, POOR, UNKNOWN = "good", "poor", "not measured"

IMPORT_STATS, IMPORT_OPENS = 4_000, 1_000
"""`import torch` (2.13, Python 3.11) asks for some 4,000 names and opens some 1,000 files."""
IMPORT_S = 1.0
"""So long may that take for one process alone: a node starts eight, a job a hundred, all from one place."""
ENVIRONMENT_FILES = 40_000
"""An environment with torch and what comes with it has about this many, and a quota counts them."""
SAMPLES_PER_S = 4_000
"""One data-centre GPU takes 2,500 to 3,000 images a second for a ResNet-50; its loader has to be ahead."""
LOADER_WORKERS = 8
"""Processes that read for one GPU; each measured rate is that of one reader."""
SEQUENTIAL_BYTES_PER_S = SAMPLES_PER_S * RANDOM_READ_BYTES
"""A shard read from start to end has to bring as many samples: 500 MiB/s."""
CREATES_PER_S = 500
"""At this rate a million files are unpacked in half an hour, which one still waits for."""
CHECKPOINT_BYTES = 16e9
"""A thousand million parameters trained with Adam in mixed precision: 16 bytes each."""
CHECKPOINT_S = 60.0
"""So long may that take: with one every half hour, 3 % of the time where nothing is saved in the
background, and within what schedulers grant between their signal and the end."""


@dataclass(frozen=True)
class Verdict:
    """One use of one file system."""

    use: str
    rating: str
    """`good`, `poor` or `not measured`."""
    reason: str


def judge(facts: StorageFacts) -> tuple[Verdict, ...]:
    """The four verdicts, in the order in which a job meets them."""
    return (
        judge_environments(facts),
        judge_packed_data(facts),
        judge_small_files(facts),
        judge_checkpoints(facts),
    )


def judge_environments(facts: StorageFacts) -> Verdict:
    """Python environments: how long an import takes, and whether the files may be there at all."""
    if facts.stat_files_per_s is None or facts.read_files_per_s is None:
        return _unknown("environments", "small files were not measured")
    seconds = IMPORT_STATS / facts.stat_files_per_s + IMPORT_OPENS / facts.read_files_per_s
    reasons = [
        f"importing torch: {IMPORT_STATS:,} names at {facts.stat_files_per_s:,.0f}/s and {IMPORT_OPENS:,} "
        f"files at {facts.read_files_per_s:,.0f}/s are {seconds:.2f} s (at most {IMPORT_S:g})"
    ]
    left = facts.room_files
    short = left is not None and left < ENVIRONMENT_FILES
    if short:
        reasons.append(f"{left:,} files may be made, an environment has {ENVIRONMENT_FILES:,}")
    return _verdict("environments", seconds <= IMPORT_S and not short, reasons)


def judge_packed_data(facts: StorageFacts) -> Verdict:
    """Few large files: read from start to end, or a sample here and there."""
    one, many, random = (
        facts.read_bytes_per_s,
        facts.threads_read_bytes_per_s,
        facts.random_reads_per_s,
    )
    if one is None or many is None or random is None:
        return _unknown("packed data", "the large file was not read")
    # Parallel file systems are slow for one reader and fast for several; loaders are several.
    best = max(one, many)
    together = random * LOADER_WORKERS
    reasons = [
        f"{_mib(best)} in sequence (at least {SEQUENTIAL_BYTES_PER_S / 2**20:,.0f})",
        f"{random:,.0f} random 128 KiB reads/s, {_for_workers(together)}",
    ]
    good = best >= SEQUENTIAL_BYTES_PER_S and together >= SAMPLES_PER_S
    return _verdict("packed data", good, reasons)


def judge_small_files(facts: StorageFacts) -> Verdict:
    """A file a sample: opened anew each time, and all of them made once."""
    if facts.create_files_per_s is None or facts.read_files_per_s is None:
        return _unknown("small files", "small files were not measured")
    together = facts.read_files_per_s * LOADER_WORKERS
    minutes = 1e6 / facts.create_files_per_s / 60
    reasons = [
        f"{facts.read_files_per_s:,.0f} files read/s, {_for_workers(together)}",
        f"{facts.create_files_per_s:,.0f} made/s (at least {CREATES_PER_S}): a million in "
        f"{minutes:,.0f} min",
    ]
    good = together >= SAMPLES_PER_S and facts.create_files_per_s >= CREATES_PER_S
    return _verdict("small files", good, reasons)


def judge_checkpoints(facts: StorageFacts) -> Verdict:
    """Many bytes at once, that have to be on the disk and to stay there."""
    # A checkpoint goes through the page cache and then waits for fsync; O_DIRECT is not its way.
    rate = facts.write_bytes_per_s
    if rate is None:
        return _unknown("checkpoints", "the large file was not written")
    seconds = CHECKPOINT_BYTES / rate
    size = f"{CHECKPOINT_BYTES / 1e9:.0f} GB"
    reasons = [f"{_mib(rate)} with fsync: {size} in {seconds:,.0f} s (at most {CHECKPOINT_S:.0f})"]
    if facts.kind == "memory":
        reasons.append("it is memory, and gone when the node or the job ends")
    short = facts.room_bytes < CHECKPOINT_BYTES
    if short:
        reasons.append(f"{facts.room_bytes / 1e9:,.1f} GB may be written")
    good = seconds <= CHECKPOINT_S and facts.kind != "memory" and not short
    return _verdict("checkpoints", good, reasons)


def _for_workers(together: float) -> str:
    return f"{together:,.0f} at best for {LOADER_WORKERS} workers (at least {SAMPLES_PER_S:,})"


def _mib(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 2**20:,.0f} MiB/s"


def _verdict(use: str, good: bool, reasons: Iterable[str]) -> Verdict:
    return Verdict(use, GOOD if good else POOR, "; ".join(reasons))


def _unknown(use: str, why: str) -> Verdict:
    return Verdict(use, UNKNOWN, why)
