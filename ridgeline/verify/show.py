"""The table of `ridgeline verify`: a row as soon as it is known, then the verdict. Called by `cli.py`."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ridgeline.config import RunConfig
from ridgeline.errors import RunError, UsageError
from ridgeline.layout import Layout
from ridgeline.verify.compare import Sizes
from ridgeline.verify.run import Row, Verifier

_LONGEST_REASON = 400


def show_rows(
    config: RunConfig, layouts: list[Layout], steps: int, precision: str, survey: bool, full: bool
) -> None:
    """Prove the layouts one by one and print what is found; raises when one is not the same.

    In a survey of everything the table allows, a layout that the model cannot take is no failure.
    """
    console = Console(highlight=False, soft_wrap=True)
    verifier = Verifier(config, layouts, steps)
    rows: list[Row] = []
    work = [(layout, "float64") for layout in layouts]
    # A layout that names a precision is tried in that, the others in the recipe's.
    work += [(x, x.precision if x.precision != "fp32" else precision) for x in layouts]
    header, width = header_of(layouts)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            task = progress.add_task("", total=len(work))
            progress.console.print(header)
            refused: set[Layout] = set()
            told: set[str] = set()
            for layout, kind in work:
                progress.update(task, description=f"{layout} in {kind}")
                known = any(row.layout == layout and row.precision == kind for row in rows)
                if layout not in refused and not known:  # said once; no precision changes a refusal
                    row = verifier.check(layout, kind)
                    rows.append(row)
                    if row.refused:
                        refused.add(layout)
                    if full or not (row.refused and survey):
                        progress.console.print(row_of(row, width), markup=False)
                    if full or not survey:
                        for note in row.notes:
                            if note not in told:
                                progress.console.print(f"  {note}", markup=False)
                        told.update(row.notes)
                progress.advance(task)
    finally:
        verifier.close()
    _conclude(console, rows, steps, survey)


def header_of(layouts: list[Layout]) -> tuple[str, int]:
    """The names of the columns, and the width of the first."""
    width = max(len("layout"), *(len(str(layout)) for layout in layouts))
    columns = " ".join(f"{name:<8}" for name in ("in", "loss", "gradient", "weight", "eval"))
    return f"{'layout':<{width}}  {columns} verdict", width


def row_of(row: Row, width: int) -> str:
    found = row.comparison
    shown = _numbers(found.sizes) if found is not None else " " * 35
    bounds = ""
    if found is not None and row.precision != "float64":
        bounds = f" (bounds {_numbers(found.bounds).rstrip()})"
    detail = f": {row.detail[:_LONGEST_REASON]}" if row.detail else ""
    return f"{row.layout!s:<{width}}  {row.precision:<8} {shown} {row.verdict}{detail}{bounds}"


def _numbers(sizes: Sizes) -> str:
    return " ".join(f"{size:<8.1e}" for size in astuple(sizes))


def _conclude(console: Console, rows: list[Row], steps: int, survey: bool) -> None:
    counts = Counter(row.verdict for row in rows)
    proven = len(rows) - counts["refused"]
    step = "step" if steps == 1 else "steps"
    refused = f", {counts['refused']} refused" if counts["refused"] else ""
    unclear = f", {counts['unclear']} unclear" if counts["unclear"] else ""
    console.print(f"{counts['same']} of {proven} same after {steps} {step}{unclear}{refused}")
    if counts["refused"] and survey:
        console.print("refused: the model cannot be arranged so (--full shows why)")
    for row in rows:
        if row.verdict in ("differs", "failed"):
            raise RunError(f"{row.layout} in {row.precision} {row.verdict}: {row.detail}")
    for row in rows:
        if row.refused and not survey:
            raise UsageError(row.refused, key=row.key)
