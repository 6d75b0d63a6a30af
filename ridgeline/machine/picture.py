"""Pictures that stand alone as SVG files: a few shapes and a chart with two logarithmic axes.

The report's plots live in its page and take their colours from there; these are opened by themselves.
Called by `roofline.py` and by the doctor's pictures; imports without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = (
    "#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#ff9da6",
    "#79706e",
)  # fmt: skip
INK, PALE = "#333", "#ddd"


def svg(width: float, height: float, shapes: Sequence[str], title: str) -> str:
    """A whole file on white ground."""
    inside = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="12" '
        f'fill="{INK}" role="img" aria-label="{escape(title)}">\n'
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>\n{inside}\n</svg>\n'
    )


def box(x: float, y: float, w: float, h: float, fill: str, hint: str = "") -> str:
    said = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(w, 0):.1f}" height="{max(h, 0):.1f}" '
        f'fill="{fill}">{said}</rect>'
    )


def label(x: float, y: float, text: str, anchor: str = "start", fill: str = INK) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{escape(text)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, colour: str = INK, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashed}/>'
    )


def dot(x: float, y: float, fill: str, hint: str = "", radius: float = 4.0) -> str:
    said = f"<title>{escape(hint)}</title>" if hint else ""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{fill}" fill-opacity="0.8">'
        f"{said}</circle>"
    )


@dataclass(frozen=True)
class LogScale:
    """Maps a positive value to pixels; powers of ten are equally far apart."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        low, high = math.log10(self.low), math.log10(self.high)
        share = (math.log10(min(max(value, self.low), self.high)) - low) / (high - low)
        return self.start + share * (self.stop - self.start)

    def powers(self) -> list[float]:
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1)]


def whole_powers(values: Sequence[float]) -> tuple[float, float]:
    """The powers of ten around some values, at least two of them."""
    low = math.floor(math.log10(min(values)) - 0.05)
    high = math.ceil(math.log10(max(values)) + 0.05)
    return 10.0**low, 10.0 ** max(high, low + 1)


def amount(value: float, unit: str) -> str:
    """A number with its prefix: 812 T, 4.27 G."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0"
