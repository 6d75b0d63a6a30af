"""The page of a search: each setting against the metric, the trials' way up, and the table.

Takes plain values, since a search and its page know nothing of each other. Called by `cli_search.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ridgeline.report.page import page, paragraph, section, table
from ridgeline.report.svg import NUM_COLOURS, Dot, Series, legend, line_chart, scatter_chart

ScoredAt = tuple[str, Any, float, float]
"""A trial, its value of a setting, the metric that came of it, and the share of the run trained."""


def build_search_page(
    target: Path,
    *,
    title: str,
    metric: str,
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    best: str,
    said: Sequence[str],
    reports: Mapping[str, str],
    curves: Mapping[str, Sequence[tuple[float, float]]],
    points: Mapping[str, Sequence[ScoredAt]],
    log_keys: Sequence[str],
) -> Path:
    """Write the page, aside and then in place."""
    shares = sorted({share for dots in points.values() for _, _, _, share in dots})
    charts = [_setting(key, dots, metric, shares, key in log_keys) for key, dots in points.items()]
    shown = legend([(f"{100 * share:.3g} % of the run", i) for i, share in enumerate(shares)])
    settings = f"{shown}<div class=grid2>{''.join(charts)}</div>" if shares else ""
    marked = next((i for i, row in enumerate(rows) if row[0].split()[0] == best), None)
    links = " ".join(
        f'<a href="{escape(path)}">{escape(name)}</a>' for name, path in reports.items()
    )
    body = (
        f"<h1>{escape(title)}</h1>{''.join(paragraph(text) for text in said)}"
        + section("Settings", settings)
        + section("Trials", _ways(curves, best, metric))
        + section("Table", table(headers, rows, num_text=len(headers), marked=marked))
        + section("Reports of the trials", f"<p>{links}</p>" if links else "")
    )
    aside = target.with_name(target.name + ".part")
    aside.write_text(page(title, body), encoding="utf-8")
    aside.replace(target)
    return target


def _setting(
    key: str, dots: Sequence[ScoredAt], metric: str, shares: Sequence[float], log: bool
) -> str:
    """One setting: numbers along an axis, anything else side by side."""
    values = [value for _, value, _, _ in dots]
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    names: list[str] = [] if numbers else sorted({str(value) for value in values})
    drawn = [
        Dot(
            float(value) if numbers else float(names.index(str(value))),
            score,
            f"trial {name}: {key}={value}, {metric} {score:.5g}",
            shares.index(share),
        )
        for name, value, score, share in dots
    ]
    log_x = log and numbers and all(v > 0 for v in values)
    return scatter_chart(drawn, title=f"{metric} by {key}", x_label=key, log_x=log_x, x_names=names)


def _ways(curves: Mapping[str, Sequence[tuple[float, float]]], best: str, metric: str) -> str:
    """The metric over the share of the run, where trials were judged more than once; the best one apart."""
    if all(len(curve) < 2 for curve in curves.values()):
        return ""
    others = [
        Series(name, _percent(curve), 2 + number % (NUM_COLOURS - 2))
        for number, (name, curve) in enumerate(curves.items())
        if name != best
    ]
    last = [Series(f"{best}, the best", _percent(curves[best]), 1)] if best else []
    return line_chart([*others, *last], title=metric, x_label="per cent of the run", full=True)


def _percent(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(100 * share, score) for share, score in curve]
