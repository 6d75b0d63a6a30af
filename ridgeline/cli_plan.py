"""`ridgeline plan`: memory and time of layouts before anything runs, and how far to trust them.

Needs no torch. Added to the app by `cli.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.errors import RunError, UsageError

if TYPE_CHECKING:
    from ridgeline.plan.validate import Checked, Summary

plan_app = typer.Typer(help="Plan layouts before anything runs.", no_args_is_help=True)


@plan_app.callback()
def plan() -> None:
    """Plan layouts before anything runs."""


@plan_app.command()
def validate(
    rows: Annotated[Path, typer.Option(help="Measured rows, as JSON.")],
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="At most 15 rows to fit the machine's parameters on; they are not judged."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write one record a row to this JSON file.")
    ] = None,
) -> None:
    """Predict rows that others measured, and print the errors by set."""
    from ridgeline.plan.rows import load_rows
    from ridgeline.plan.validate import calibrate as fit
    from ridgeline.plan.validate import changed, check_rows, summarize

    measured = load_rows(rows)
    change, fitted_ids = None, set[str]()
    if calibrate is not None:
        chosen = load_rows(calibrate)
        values = fit(chosen)
        change = changed(values)
        fitted_ids = {str(row.get("id")) for row in chosen}
        typer.echo(f"factors fitted on {len(chosen)} rows: " + _show_values(values))
    everything = check_rows(measured, change)
    checked = [c for c in everything if c.id not in fitted_ids]
    _show_summaries(summarize(checked))
    _show_skipped(checked)
    if out is not None:
        try:
            text = json.dumps([c.values for c in everything], indent=1)
            out.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise RunError(
                f"cannot write {out} of --out ({error.strerror}); name another file"
            ) from error
        typer.echo(f"\n{len(everything)} records in {out}")
    if not checked:
        raise UsageError(f"{rows} of --rows has no row that was not used for fitting; give more")


def _show_values(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def _show_summaries(summaries: list[Summary]) -> None:
    head = ("set", "what", "rows", "mean %", "median %", "p90 %", "bias %", "worst")
    table: list[tuple[str, ...]] = [head]
    for s in summaries:
        worst = ", ".join(f"{name} {error:+.1f}" for name, error in s.worst[:3])
        figures = tuple(f"{value:.2f}" for value in (s.mean, s.median, s.p90))
        table.append((s.set, s.what, str(s.rows), *figures, f"{s.bias:+.2f}", worst))
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        typer.echo("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def _show_skipped(checked: list[Checked]) -> None:
    reasons = Counter((c.set, c.skipped) for c in checked if c.skipped)
    if reasons:
        typer.echo("\nskipped:")
    for (name, reason), count in sorted(reasons.items()):
        typer.echo(f"  {name}: {count} ({reason})")
    refused = [c for c in checked if c.values.get("measured", {}).get("oom")]
    if refused:
        false = [c.id for c in refused if c.false_fit]
        typer.echo(
            f"\nout of memory when measured: {len(refused)}; said to fit: {len(false)}"
            + (f" ({', '.join(false)})" if false else "")
        )
