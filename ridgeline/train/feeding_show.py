"""What `ridgeline data bench` found, as tables for people and as one object for programs. Called by
`cli_data.py`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ridgeline.train.feeding import PARTS, Parts, Supply
from ridgeline.train.feeding_run import Findings


def to_text(found: Findings) -> str:
    demand = found.demand
    lines = [
        f"{found.recipe}: source {found.source}, device {found.device}, {found.cores} cores",
        f"the step asks for {demand.samples_per_s:,.0f} samples/s a rank: {demand.batch} samples in "
        f"{1e3 * demand.step_s:.2f} ms (steady after {demand.warmup_s:.1f} s)",
        "",
        *_table(
            ("workers", "threads", "samples/s", "MB/s", "of the step", "start"),
            [_row(found, supply) for supply in found.supplies],
        ),
        "",
        *_parts_table(found.parts),
    ]
    if found.formats:
        lines += ["", *_formats_table(found)]
    lines += [f"{name}: not measured, {why}" for name, why in found.skipped.items()]
    return "\n".join([*lines, "", found.verdict, *found.notes])


def _row(found: Findings, supply: Supply) -> tuple[str, ...]:
    return (
        str(supply.workers),
        "-" if supply.workers else str(supply.threads),
        *_rates(found, supply),
        f"{supply.startup_s:.2f} s",
    )


def _rates(found: Findings, supply: Supply) -> tuple[str, ...]:
    return (
        f"{supply.samples_per_s:,.0f}",
        f"{supply.bytes_per_s / 1e6:,.1f}",
        f"{supply.samples_per_s / found.demand.samples_per_s:,.0%}",
    )


def _parts_table(parts: Parts) -> list[str]:
    rows = [
        (part, f"{1e6 * parts.seconds[part]:,.1f}", f"{parts.share(part):.0%}")
        for part in PARTS
        if part in parts.seconds
    ]
    rows.append(("in all", f"{1e6 * parts.total_s:,.1f}", ""))
    return _table(("in line", "µs a sample", "share"), rows)


def _formats_table(found: Findings) -> list[str]:
    shown = ("open", "read", "decode", "collate")
    rows = [
        (
            row.name,
            f"{row.disk_bytes / row.num_samples / 1e3:,.1f}",
            *_rates(found, row.supply),
            *(f"{1e6 * row.parts.seconds[part]:,.1f}" for part in shown),
        )
        for row in found.formats
    ]
    like = found.formats[0]
    header = (
        "format",
        "KB on disk",
        "samples/s",
        "MB/s",
        "of the step",
        *(f"{p} µs" for p in shown),
    )
    title = f"formats, {like.num_samples:,} samples, {like.supply}:"
    return [title, *_table(header, rows)]


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]


def to_dict(found: Findings) -> dict[str, Any]:
    enough = found.enough
    return {
        "recipe": found.recipe,
        "source": found.source,
        "device": found.device,
        "cores": found.cores,
        "ranks": found.num_ranks,
        "demand": asdict(found.demand),
        "supply": [asdict(supply) for supply in found.supplies],
        "enough": None
        if enough is None
        else {"workers": enough.workers, "threads": enough.threads},
        "parts": asdict(found.parts),
        "formats": [asdict(row) for row in found.formats],
        "skipped": found.skipped,
        "verdict": found.verdict,
        "notes": found.notes,
    }
