"""Plots as inline SVG, drawn by hand so that a report is one small file with no library behind it.

Colours are classes (`c0`, `c1`, ...) that `page.py` defines for light and dark, and each curve
carries its values in a `data-v` attribute for the page's hover script. Called by `build.py` and by those
beside it that add charts to a page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

NUM_COLOURS = 8
POINT_LIMIT = 500
"""More points than a plot is wide cannot be seen and only make the page heavy."""

_FULL, _HALF = (1020.0, 280.0), (480.0, 220.0)
"""Sizes in the pixels they are shown with, so that text is equally large in both."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 14.0, 10.0, 38.0

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve. A y that is not finite makes a gap; x rises."""

    name: str
    points: Sequence[Point]
    colour: int = 0


@dataclass(frozen=True)
class Part:
    """One part of a stacked bar."""

    name: str
    value: float
    label: str
    colour: int = 0


@dataclass(frozen=True)
class RankBar:
    """One rank in the per-rank chart: its own work, its waiting, and its slow steps."""

    name: str
    work_s: float
    wait_s: float
    p95_s: float
    label: str
    marked: bool = False


def number_text(value: float) -> str:
    """A number as people write it: four significant digits, thousands apart, tiny ones in e."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e7 or size < 1e-4:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def tick_text(value: float) -> str:
    """A short label for an axis: 20 k rather than 20,000."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if size <= abs(value) < 1e12 and abs(value) >= 1e4:
            return f"{number_text(value / size)} {unit}"
    return number_text(value)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) that lie between two ends."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # Rounded to the step's digits, or 3 * 0.1 would be labelled 0.30000000000000004.
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two ends, with 2s and 5s where the powers alone are too few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [10.0**e for e in exponents if low <= 10.0**e <= high]
    if len(inside) > 7:
        return inside[:: math.ceil(len(inside) / 7)]
    if len(inside) >= 3:
        return inside
    fine = [m * 10.0**e for e in exponents for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    return fine if len(fine) >= 2 else nice_ticks(low, high, 4)


def downsample(points: Sequence[Point], limit: int = POINT_LIMIT) -> list[Point]:
    """At most `limit` points that keep the ends, the extremes of every bucket and the gaps."""
    if len(points) <= limit:
        return list(points)
    gaps = any(not math.isfinite(y) for _, y in points)
    num_buckets = max(1, (limit - 2) // (3 if gaps else 2))
    kept = {0, len(points) - 1}
    for bucket in range(num_buckets):
        start = bucket * len(points) // num_buckets
        stop = (bucket + 1) * len(points) // num_buckets
        finite = [i for i in range(start, stop) if math.isfinite(points[i][1])]
        if finite:
            kept.add(min(finite, key=lambda i: points[i][1]))
            kept.add(max(finite, key=lambda i: points[i][1]))
        if len(finite) < stop - start:
            kept.add(next(i for i in range(start, stop) if not math.isfinite(points[i][1])))
    return [points[i] for i in sorted(kept)]


@dataclass(frozen=True)
class _Scale:
    """Maps values to pixels along one axis."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.stop - self.start)


def _range(values: Sequence[float], log: bool, from_zero: bool) -> tuple[float, float]:
    """The ends of an axis, with some room; a single value gets room on both sides."""
    low, high = min(values), max(values)
    if log:
        room = max((high / low) ** 0.04, 1.02)
        return low / room, high * room
    if from_zero:
        return min(low, 0.0), high * 1.06 if high > 0 else 1.0
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - room, high + room


def _path(points: Sequence[Point], x: _Scale, y: _Scale, log: bool) -> tuple[str, str]:
    """The path of a curve, and its values for the hover script in the same order."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]) and (not log or point[1] > 0):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    drawn = []
    for run in runs:
        pixels = [f"{x(a):.1f},{y(b):.1f}" for a, b in run]
        # A point alone between gaps has no line; `h0` with round ends makes it a dot.
        drawn.append("M" + "L".join(pixels) + ("h0" if len(pixels) == 1 else "") if pixels else "")
    values = " ".join(f"{a:.6g}:{b:.5g}" for run in runs for a, b in run)
    return "".join(drawn), values


def _axes(x: _Scale, y: _Scale, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> str:
    """Grid lines and the labels of both axes."""
    parts = []
    for tick in y_ticks:
        at = y(tick)
        parts.append(
            f'<line class="grid" x1="{x.start:.0f}" x2="{x.stop:.0f}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="tick" x="{x.start - 7:.0f}" y="{at + 4:.1f}" text-anchor="end">'
            f"{tick_text(tick)}</text>"
        )
    parts += [
        f'<text class="tick" x="{x(tick):.1f}" y="{y.start + 16:.0f}" text-anchor="middle">'
        f"{tick_text(tick)}</text>"
        for tick in x_ticks
    ]
    parts.append(
        f'<line class="axis" x1="{x.start:.0f}" x2="{x.stop:.0f}" '
        f'y1="{y.start:.1f}" y2="{y.start:.1f}"/>'
    )
    return "".join(parts)


def legend(items: Sequence[tuple[str, int]]) -> str:
    """Names beside their colours; HTML, because it wraps where SVG text does not."""
    entries = "".join(
        f'<li><span class="swatch c{colour % NUM_COLOURS}"></span>{escape(name)}</li>'
        for name, colour in items
    )
    return f'<ul class="legend">{entries}</ul>'


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "step",
    log: bool = False,
    from_zero: bool = False,
    full: bool = False,
    limit: int = POINT_LIMIT,
) -> str:
    """Curves over a common x axis, as a `<figure>` with its title and legend; `full` is for one
    that takes the width of the page."""
    width, height = _FULL if full else _HALF
    drawn = [Series(s.name, downsample(s.points, limit), s.colour) for s in series if s.points]
    shown = [(a, b) for s in drawn for a, b in s.points if math.isfinite(b)]
    log = log and all(b > 0 for _, b in shown)
    caption = f"<figcaption>{escape(title)}{' (log scale)' * log}</figcaption>"
    if not shown:
        said = "no finite value was recorded" if drawn else "nothing was recorded"
        return f'<figure class="chart">{caption}<p class="empty">{said}</p></figure>'
    low, high = (
        min(a for s in drawn for a, _ in s.points),
        max(a for s in drawn for a, _ in s.points),
    )
    if low == high:
        low, high = low - 1, high + 1
    x = _Scale(low, high, _LEFT, width - _RIGHT)
    y = _Scale(*_range([b for _, b in shown], log, from_zero), height - _BOTTOM, _TOP, log)
    y_ticks = log_ticks(y.low, y.high) if log else nice_ticks(y.low, y.high)
    x_ticks = nice_ticks(low, high, 7)
    if all(a == int(a) for a, _ in shown):
        x_ticks = [tick for tick in x_ticks if tick == int(tick)]
    curves = []
    for s in drawn:
        path, values = _path(s.points, x, y, log)
        curves.append(
            f'<path class="curve c{s.colour % NUM_COLOURS}" d="{path}" '
            f'data-n="{escape(s.name)}" data-v="{values}"/>'
        )
        if len(s.points) <= 40:
            curves += [
                f'<circle class="fill c{s.colour % NUM_COLOURS}" cx="{at}" cy="{up}" r="2.6"/>'
                for at, up in (p.split(",") for p in re.findall(r"[ML]([\d.]+,[\d.]+)", path))
            ]
    missing = sum(1 for s in series for _, b in s.points if not math.isfinite(b))
    many = "value is" if missing == 1 else "values are"
    note = f'<p class="note">{missing} {many} not finite and left out</p>' if missing else ""
    names = legend([(s.name, s.colour) for s in drawn]) if len(drawn) > 1 else ""
    return (
        f'<figure class="chart">{caption}{names}'
        f'<svg class="plot" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}" data-x="{escape(x_label)}">'
        f"{_axes(x, y, x_ticks, y_ticks)}{''.join(curves)}"
        f'<line class="cursor" y1="{_TOP:.0f}" y2="{height - _BOTTOM:.0f}" x1="-9" x2="-9"/>'
        f'<text class="tick" x="{(x.start + x.stop) / 2:.0f}" y="{height - 4:.0f}" '
        f'text-anchor="middle">{escape(x_label)}</text></svg>{note}</figure>'
    )


def stacked_bar(parts: Sequence[Part], *, title: str) -> str:
    """One horizontal bar cut into parts, each with its label where it has room."""
    total = sum(part.value for part in parts)
    if total <= 0:
        return ""
    width, height, at = 1000.0, 44.0, 0.0
    drawn = []
    for part in parts:
        wide = width * part.value / total
        text = (
            f'<text class="inbar" x="{at + wide / 2:.1f}" y="{height / 2 + 5:.0f}" '
            f'text-anchor="middle">{escape(part.label)}</text>'
            if wide > 62
            else ""
        )
        drawn.append(
            f"<g><title>{escape(part.name)}: {escape(part.label)}</title>"
            f'<rect class="fill c{part.colour % NUM_COLOURS}" x="{at:.1f}" y="0" '
            f'width="{wide:.1f}" height="{height:.0f}"/>{text}</g>'
        )
        at += wide
    return (
        f'<svg class="bar" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{"".join(drawn)}</svg>'
    )


def rank_chart(bars: Sequence[RankBar], *, title: str) -> str:
    """A row a rank: its own work, its waiting, and a dot at its 95th percentile."""
    bars = [b for b in bars if math.isfinite(b.work_s + b.wait_s + b.p95_s)]
    ends = [v for b in bars for v in (b.work_s + b.wait_s, b.p95_s)]
    if not ends or max(ends) <= 0:
        return ""
    row, left, width = 22.0, 80.0, _FULL[0]
    height = row * len(bars) + 24
    high = max(ends) * 1.04
    x = _Scale(0.0, high, left, width - 80)
    parts = []
    for tick in nice_ticks(0.0, high * 1000, 8):
        at = x(tick / 1000)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height - 20:.0f}"/>'
            f'<text class="tick" x="{at:.1f}" y="{height - 5:.0f}" text-anchor="middle">'
            f"{number_text(tick)} ms</text>"
        )
    for number, bar in enumerate(bars):
        top, middle = number * row + 4, number * row + row / 2
        weight = ' class="strong"' if bar.marked else ' class="tick"'
        mid, end = x(bar.work_s), x(bar.work_s + bar.wait_s)
        parts.append(
            f"<g><title>{escape(bar.name)}: {escape(bar.label)}</title>"
            f'<text{weight} x="{left - 8:.0f}" y="{middle + 4:.1f}" text-anchor="end">'
            f"{escape(bar.name)}</text>"
            f'<rect class="fill {"c1" if bar.marked else "c0"}" x="{left:.0f}" y="{top:.1f}" '
            f'width="{max(mid - left, 0):.1f}" height="{row - 8:.0f}"/>'
            f'<rect class="fill wait" x="{mid:.1f}" y="{top:.1f}" '
            f'width="{max(end - mid, 0):.1f}" height="{row - 8:.0f}"/>'
            f'<circle class="p95" cx="{x(bar.p95_s):.1f}" cy="{middle:.1f}" r="4"/></g>'
        )
    return (
        f'<svg class="ranks" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True)
class Dot:
    """One point of a scatter plot, with what is said when the mouse is over it."""

    x: float
    y: float
    label: str
    colour: int = 0


def scatter_chart(
    dots: Sequence[Dot],
    *,
    title: str,
    x_label: str,
    log_x: bool = False,
    x_names: Sequence[str] = (),
) -> str:
    """Points over an axis of numbers, or of `x_names` where x counts those."""
    width, height = _HALF
    if not dots:
        return ""
    x_range = (-0.5, len(x_names) - 0.5) if x_names else _range([d.x for d in dots], log_x, False)
    x = _Scale(*x_range, _LEFT, width - _RIGHT, log_x)
    y = _Scale(*_range([d.y for d in dots], False, False), height - _BOTTOM, _TOP)
    ticks = [] if x_names else log_ticks(x.low, x.high) if log_x else nice_ticks(x.low, x.high, 6)
    names = "".join(
        f'<text class="tick" x="{x(i):.1f}" y="{y.start + 16:.0f}" text-anchor="middle">'
        f"{escape(name)}</text>"
        for i, name in enumerate(x_names)
    )
    drawn = "".join(
        f'<circle class="fill c{d.colour % NUM_COLOURS}" cx="{x(d.x):.1f}" cy="{y(d.y):.1f}" r="4">'
        f"<title>{escape(d.label)}</title></circle>"
        for d in dots
    )
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{_axes(x, y, ticks, nice_ticks(y.low, y.high))}{names}{drawn}"
        f'<text class="tick" x="{(x.start + x.stop) / 2:.0f}" y="{height - 4:.0f}" '
        f'text-anchor="middle">{escape(x_label)}</text></svg></figure>'
    )
