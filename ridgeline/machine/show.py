"""Measured file systems as a table, a column a path, and their verdicts below it; a device likewise.

Called by `cli_machine.py`; imports without torch. Into a file or a pipe the table goes as wide as it has to
be, on a terminal it is as wide as that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ridgeline.facts import QuotaFacts, StorageFacts
from ridgeline.machine.picture import amount, duration
from ridgeline.machine.roofline import ComputeFacts
from ridgeline.machine.storage import RANDOM_READ_BYTES
from ridgeline.machine.verdict import GOOD, POOR, judge

WIDE = 1000
_COLOURS = {GOOD: "green", POOR: "red"}


def show_storage(measured: Sequence[StorageFacts], console: Console | None = None) -> None:
    """Print the table, what was done otherwise than asked, and what each path is good for."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDE)
    console.print(build_table(measured))
    for facts in measured:
        console.print(Text(facts.path, style="bold"))
        for line in (*facts.notes, *(f"NOT MEASURED: {problem}" for problem in facts.problems)):
            console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))
        console.print(Padding(_verdicts(facts), (0, 0, 0, 2), expand=False))


def show_compute(facts: ComputeFacts, lines: Sequence[str], console: Console | None = None) -> None:
    """Print what a device reaches: a row a shape and a column a precision, then memory and launches."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=WIDE)
    console.print(Text(f"{facts.device_name}, {facts.num_threads} threads on the host"))
    precisions = list(facts.peak_flops)
    table = Table()
    table.add_column("FLOP/s")
    for precision in precisions:
        table.add_column(precision, justify="right")
    found = {(p.name, p.precision): p for p in facts.products}
    for name in dict.fromkeys(p.name for p in facts.products):
        cells = [found.get((name, precision)) for precision in precisions]
        table.add_row(name, *("-" if p is None else amount(p.flops_per_s, "") for p in cells))
    table.add_row("best", *(amount(facts.peak_flops[p], "") for p in precisions), style="bold")
    if facts.sustained:
        on = [facts.sustained.get(p) for p in precisions]
        words = [f"{amount(s.flops_per_s, '')}, {s.watts:.0f} W" if s else "-" for s in on]
        table.add_row("best, for a second and more", *words)
    ridges = [facts.ridge(p) for p in precisions]
    table.add_row("ridge, FLOPs a byte", *("-" if r is None else f"{r:.3g}" for r in ridges))
    console.print(table)
    rates = {
        "memory, copy": facts.copy_bytes_per_s,
        "memory, triad": facts.triad_bytes_per_s,
        "to the device, pinned": facts.h2d_pinned_bytes_per_s,
        "to the device, pageable": facts.h2d_pageable_bytes_per_s,
        "to the host, pinned": facts.d2h_pinned_bytes_per_s,
        "to the host, pageable": facts.d2h_pageable_bytes_per_s,
    }
    for name, rate in rates.items():
        if rate:
            console.print(Text(f"{name:<28}{amount(rate, 'B/s')}"))
    for name, seconds in {
        "kernel after kernel": facts.launch_s,
        "one kernel and its end": facts.round_trip_s,
    }.items():
        if seconds:
            console.print(Text(f"{name:<28}{duration(seconds)}"))
    for text in (*facts.notes, *lines):
        console.print(Text(text))


def build_table(measured: Sequence[StorageFacts]) -> Table:
    table = Table()
    table.add_column("")
    for facts in measured:
        table.add_column(Text(facts.path), justify="right", overflow="fold", max_width=48)
    for name, cell in ROWS:
        table.add_row(name, *(Text(cell(facts)) for facts in measured))
    return table


def _verdicts(facts: StorageFacts) -> Table:
    table = Table.grid(padding=(0, 2))
    for verdict in judge(facts):
        rating = Text(verdict.rating, style=_COLOURS.get(verdict.rating, "yellow"))
        table.add_row(verdict.use, rating, Text(verdict.reason))
    return table


def _bytes(count: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 2**10:,.0f} KiB"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value / 2**20:,.0f} MiB/s"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} /s"


def _file_system(facts: StorageFacts) -> str:
    return f"{facts.fs_type}, {facts.kind}"


def _disk(facts: StorageFacts) -> str:
    """What the kernel says; for a virtual disk it need not be so."""
    if not facts.device:
        return "-"
    return f"{facts.device}, {'rotational' if facts.rotational else 'not rotational'}"


def _room(facts: StorageFacts) -> str:
    return f"{_bytes(facts.free_bytes)} of {_bytes(facts.total_bytes)}"


def _inodes(facts: StorageFacts) -> str:
    if facts.num_inodes is None or facts.num_free_inodes is None:
        return "no fixed number"
    return f"{facts.num_free_inodes:,} of {facts.num_inodes:,}"


def _quotas(facts: StorageFacts) -> str:
    return "\n".join(_quota(quota) for quota in facts.quotas) or "none found"


def _quota(quota: QuotaFacts) -> str:
    space = "no limit" if quota.limit_bytes is None else _bytes(quota.limit_bytes)
    files = "no limit" if quota.max_files is None else f"{quota.max_files:,}"
    return f"{quota.owner}: {_bytes(quota.used_bytes)} of {space}, {quota.num_files:,} files of {files}"


def _sync(facts: StorageFacts) -> str:
    if facts.sync_write_median_s is None or facts.sync_write_p99_s is None:
        return "-"
    median, p99 = facts.sync_write_median_s * 1e3, facts.sync_write_p99_s * 1e3
    return f"{median:,.3f} / {p99:,.3f} ms"


def _random(reads_per_s: float | None) -> str:
    if reads_per_s is None:
        return "-"
    return f"{reads_per_s:,.0f} /s, {_rate(reads_per_s * RANDOM_READ_BYTES)}"


ROWS: tuple[tuple[str, Callable[[StorageFacts], str]], ...] = (
    ("file system", _file_system),
    ("mounted with", lambda facts: ",".join(facts.mount_options)),
    ("disk", _disk),
    ("free", _room),
    ("free inodes", _inodes),
    ("quota", _quotas),
    ("large file", lambda facts: _bytes(facts.size_bytes)),
    ("  write and fsync", lambda facts: _rate(facts.write_bytes_per_s)),
    ("  write, uncached", lambda facts: _rate(facts.uncached_write_bytes_per_s)),
    ("  read, uncached", lambda facts: _rate(facts.read_bytes_per_s)),
    (
        "  read by threads, uncached",
        lambda facts: f"{facts.num_threads}: {_rate(facts.threads_read_bytes_per_s)}",
    ),
    ("  read, cached", lambda facts: _rate(facts.cached_read_bytes_per_s)),
    ("  random 128 KiB, uncached", lambda facts: _random(facts.random_reads_per_s)),
    ("  random 128 KiB, cached", lambda facts: _random(facts.cached_random_reads_per_s)),
    ("  uncached by", lambda facts: facts.uncached_by),
    ("512-byte synchronous writes", lambda facts: _count(facts.sync_writes_per_s)),
    ("  median / 99th of 100", _sync),
    ("small files", lambda facts: f"{facts.num_files:,}"),
    ("  create", lambda facts: _count(facts.create_files_per_s)),
    ("  stat", lambda facts: _count(facts.stat_files_per_s)),
    ("  open and read", lambda facts: _count(facts.read_files_per_s)),
    ("measured in", lambda facts: f"{facts.measured_s:.1f} s"),
)
