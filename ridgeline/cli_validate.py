"""`ridgeline plan validate` and `choose`: predictions beside what was measured, and which runs to measure.

`choose` says which of some runs tell most about the others, `validate --calibrate` fits the machine's
parameters on them and judges the rest. Needs no torch. Added to `ridgeline plan` by `cli_plan.py`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.errors import RunError, UsageError

if TYPE_CHECKING:
    from ridgeline.plan.rows import Row
    from ridgeline.plan.validate import Checked, Fitted, Summary


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
    from ridgeline.plan.validate import (
        changed,
        check_rows,
        fit_rows,
        fitted_machine,
        is_fitted,
        require_one_machine,
        summarize,
    )

    measured = load_rows(rows)
    if write_machine is not None and calibrate is None:
        raise UsageError("--write-machine writes what --calibrate finds; give rows to fit on")
    change = None
    used: Sequence[Row] = ()
    if calibrate is not None:
        given = load_rows(calibrate, "--calibrate")
        if write_machine is not None:
            require_one_machine(given)
        fitted = fit_rows(given)
        used = fitted.rows
        change = changed(fitted.values)
        _show_fit(fitted, check_rows(used), check_rows(used, change))
        if write_machine is not None:
            from ridgeline.plan.machine import machine_to_yaml

            machine = fitted_machine(used, fitted.values)
            text = machine_to_yaml(machine, f"Fitted on {len(used)} measured runs.")
            _write(write_machine, text, "--write-machine")
            typer.echo(f"{write_machine} written, for ridgeline plan --machine")
    everything = check_rows(measured, change)
    checked = [
        one
        for index, (row, one) in enumerate(zip(measured, everything, strict=True))
        if not is_fitted(row, index, used)
    ]
    if checked:
        _show_summaries(summarize(checked))
        _show_skipped(checked)
    else:
        typer.echo(f"every row of {rows} was used for fitting; give others to judge it by")
    if out is not None:
        _write(out, _as_json([c.values for c in everything]))
        typer.echo(f"\n{len(everything)} records in {out}")


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
    try:
        return json.dumps(_finite(records), indent=1, allow_nan=False) + "\n"
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the rows cannot be written to --out ({error}); leave out what is nested so deeply"
        ) from error


def _finite(value: Any) -> Any:
    """With null for what JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _figure(value: float, sign: str = "", digits: int = 2) -> str:
    """Never wider than a column."""
    return f"{value:{sign}.{digits}f}" if abs(value) < 1e7 else f"{value:{sign}.3g}"


def _some(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(_clipped, names[:most])) + rest


def _clipped(name: str) -> str:
    return name if len(name) <= 80 else f"{name[:76]}..."


def _write(path: Path, text: str, option: str = "--out") -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"cannot write {path} of {option} ({error.strerror}); name another file"
        ) from error


def _show_fit(fitted: Fitted, before: list[Checked], after: list[Checked]) -> None:
    """What was fitted, and what it does to the rows that it was fitted on."""
    from ridgeline.plan.calibrate import FACTS

    factors = {name: value for name, value in fitted.values.items() if name not in FACTS}
    typer.echo(
        f"factors fitted on {len(fitted.rows)} rows: "
        + ", ".join(f"{name} {value:.4g}" for name, value in factors.items())
    )
    found = {
        "recomputed": "nothing was recomputed",
        "padded_vocab": "the vocabulary was not padded",
    }
    for name, words in found.items():
        if not fitted.values.get(name, 1.0):
            typer.echo(f"found against what is stated or known of the program: {words}")
    means = [
        statistics.fmean(abs(c.time_error) for c in rows if c.time_error is not None)
        for rows in (before, after)
    ]
    typer.echo(f"mean error of these rows: {means[0]:.1%} as shipped, {means[1]:.1%} fitted")
    for name, reason in fitted.skipped:
        typer.echo(f"not fitted on: {_clipped(name)} ({reason})")


def _show_summaries(summaries: list[Summary]) -> None:
    head = ("set", "what", "rows", "mean %", "median %", "p90 %", "bias %", "worst")
    table: list[tuple[str, ...]] = [head]
    for s in summaries:
        worst = ", ".join(
            f"{_clipped(name)} {_figure(error, '+', 1)}" for name, error in s.worst[:3]
        )
        figures = tuple(_figure(value) for value in (s.mean, s.median, s.p90))
        table.append((_clipped(s.set), s.what, str(s.rows), *figures, _figure(s.bias, "+"), worst))
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        typer.echo("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())


def _show_skipped(checked: list[Checked]) -> None:
    reasons = Counter((c.set, c.skipped) for c in checked if c.skipped)
    if reasons:
        typer.echo("\nskipped:")
    for (name, reason), count in sorted(reasons.items()):
        ids = [c.id for c in checked if (c.set, c.skipped) == (name, reason)]
        typer.echo(f"  {_clipped(name)}: {count} ({reason}): {_some(ids)}")
    only_predicted = Counter(c.set for c in checked if not c.skipped and not c.values["measured"])
    if only_predicted:
        typer.echo("\npredicted, and not measured:")
    for name, count in sorted(only_predicted.items()):
        typer.echo(f"  {_clipped(name)}: {count}")
    _show_counted(checked, "misspelt", "fields that are not known:")
    _show_counted(checked, "ignored", "measured figures that do not count:")
    _show_counted(checked, "guessed", "software or devices that are not known:")
    refused = [c for c in checked if c.values.get("measured", {}).get("oom")]
    if refused:
        false = [c.id for c in refused if c.false_fit]
        typer.echo(
            f"\nout of memory when measured: {len(refused)}; said to fit: {len(false)}"
            + (f" ({', '.join(map(_clipped, false))})" if false else "")
        )


def _show_counted(checked: list[Checked], key: str, title: str) -> None:
    """What records say under a key, by set."""
    found = Counter((c.set, c.values[key]) for c in checked if key in c.values)
    if found:
        typer.echo(f"\n{title}")
    for (name, words), count in sorted(found.items()):
        typer.echo(f"  {_clipped(name)}: {count} ({words})")
