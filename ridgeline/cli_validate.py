"""`ridgeline plan validate` and `choose`: predictions beside what was measured, and which runs to measure.

`choose` says which of some runs tell most about the others, `validate --calibrate` fits the machine's
parameters on them and judges the rest. Needs no torch. Added to `ridgeline plan` by `cli_plan.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.errors import RunError, UsageError

if TYPE_CHECKING:
    from ridgeline.plan.rows import Row
    from ridgeline.plan.validate import Checked, Summary


def validate(
    rows: Annotated[Path, typer.Option(help="Measured rows, as JSON.")],
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="At most 15 rows to fit the machine's parameters on; they are not judged."
        ),
    ] = None,
    write_machine: Annotated[
        Path | None,
        typer.Option(
            help="Write machine and program as fitted to this YAML file, for plan --machine."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write one record a row to this JSON file.")
    ] = None,
) -> None:
    """Predict rows that others measured, and print the errors by set."""
    from ridgeline.plan.rows import load_rows
    from ridgeline.plan.validate import calibrate as fit
    from ridgeline.plan.validate import changed, check_rows, fitted_machine, summarize

    measured = load_rows(rows)
    if write_machine is not None and calibrate is None:
        raise UsageError("--write-machine writes what --calibrate finds; give rows to fit on")
    change = None
    chosen: Sequence[Row] = ()
    if calibrate is not None:
        chosen = load_rows(calibrate)
        values = fit(chosen)
        change = changed(values)
        typer.echo(f"factors fitted on {len(chosen)} rows: " + _show_values(values))
        if write_machine is not None:
            from ridgeline.plan.machine import machine_to_yaml

            machine = fitted_machine(chosen, values)
            text = machine_to_yaml(machine, f"Fitted on {len(chosen)} measured runs.")
            _write(write_machine, text, "--write-machine")
    everything = check_rows(measured, change)
    fitted_ids = {str(row["id"]) for row in chosen if "id" in row}
    checked = [
        one
        for row, one in zip(measured, everything, strict=True)
        if one.id not in fitted_ids and row not in chosen
    ]
    _show_summaries(summarize(checked))
    _show_skipped(checked)
    if out is not None:
        _write(out, _as_json([c.values for c in everything]))
        typer.echo(f"\n{len(everything)} records in {out}")
    if not checked:
        raise UsageError(f"{rows} of --rows has no row that was not used for fitting; give more")


def choose(
    rows: Annotated[Path, typer.Option(help="Runs that could be measured, as JSON.")],
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Runs to choose.")] = 15,
    only: Annotated[str | None, typer.Option("--set", help="Only runs of this set.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the chosen rows to this JSON file.")
    ] = None,
) -> None:
    """Say which runs to measure to calibrate on: those that tell most about the others."""
    from ridgeline.plan.rows import load_rows
    from ridgeline.plan.validate import choose_rows

    # As `validate` calls those without one.
    given = [{"id": f"row-{index}", **row} for index, row in enumerate(load_rows(rows))]
    known = [row for row in given if only is None or row.get("set") == only]
    if only is not None and not known:
        names = ", ".join(sorted({str(row.get("set")) for row in given})) or "none"
        raise UsageError(f"no row of {rows} is of set {only!r}; its sets are: {names}")
    chosen, skipped = choose_rows(known, count)
    typer.echo(f"{len(chosen)} of {len(known)} runs, the most telling first:")
    for row in chosen:
        typer.echo(f"  {row['id']}")
    for reason, number in sorted(Counter(skipped).items()):
        typer.echo(f"left out: {number} ({reason})")
    if out is not None:
        _write(out, _as_json(chosen))
        typer.echo(
            f"measure them, write their times into {out} (measured: {{iter_s: ...}}), and give it to "
            "ridgeline plan validate --calibrate"
        )


def _as_json(records: Sequence[Any]) -> str:
    return json.dumps(records, indent=1) + "\n"


def _write(path: Path, text: str, option: str = "--out") -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"cannot write {path} of {option} ({error.strerror}); name another file"
        ) from error


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
    only_predicted = Counter(c.set for c in checked if not c.skipped and not c.values["measured"])
    if only_predicted:
        typer.echo("\npredicted, and not measured:")
    for name, count in sorted(only_predicted.items()):
        typer.echo(f"  {name}: {count}")
    guesses = Counter((c.set, c.values["guessed"]) for c in checked if "guessed" in c.values)
    if guesses:
        typer.echo("\nsoftware that is not known:")
    for (name, words), count in sorted(guesses.items()):
        typer.echo(f"  {name}: {count} ({words})")
    refused = [c for c in checked if c.values.get("measured", {}).get("oom")]
    if refused:
        false = [c.id for c in refused if c.false_fit]
        typer.echo(
            f"\nout of memory when measured: {len(refused)}; said to fit: {len(false)}"
            + (f" ({', '.join(false)})" if false else "")
        )
