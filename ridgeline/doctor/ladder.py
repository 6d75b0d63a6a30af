"""The ladder of a climb: every state that was tried, as a table, as JSON and as a picture.

Called by `climb.py`; imports without torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from html import escape
from pathlib import Path


@dataclass(frozen=True)
class Rung:
    """One state that was tried."""

    name: str
    overrides: tuple[str, ...]
    """What it changes of the state before."""
    kept: bool
    why: str
    predicted: float | None = None
    """Gain over the last kept state that the remedy expected."""
    gain: float | None = None
    """Gain over the last kept state that was measured, in turns with it."""
    noise: float = 0.0
    """What a gain has to exceed: from the median of the turns' gains down to their lower quartile."""
    step_s: float | None = None
    rate: float | None = None
    """Units a second."""
    times: float | None = None
    """Over the baseline: the gains of the kept states, multiplied."""
    peak_bytes: float | None = None
    loss_difference: float | None = None
    """Of the mean of the last quarter of the losses that were compared, relative to the baseline's."""
    tenth_step_s: float | None = None
    """From the start of the process to the end of its tenth step."""


@dataclass(frozen=True)
class Ladder:
    unit: str
    check_steps: int
    loss_bound: float
    rungs: tuple[Rung, ...]
    overrides: tuple[str, ...]
    """All that was kept, as overrides of the recipe."""
    advice: tuple[str, ...] = ()
    """What would help and is in the user's own hands."""
    interrupted: bool = False

    @property
    def best(self) -> Rung:
        return [rung for rung in self.rungs if rung.kept][-1]

    def write(self, folder: Path) -> None:
        values = dataclasses.asdict(self)
        (folder / "ladder.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        (folder / "ladder.svg").write_text(draw_ladder(self), encoding="utf-8")


HEAD = (
    "step",
    "throughput",
    "x baseline",
    "predicted",
    "memory",
    "loss",
    "10th step",
    "",
)


def show_ladder(ladder: Ladder) -> str:
    """The table that is printed, and how the loss was compared."""
    rows = [_row(rung, ladder.unit) for rung in ladder.rungs]
    widths = [max(len(row[i]) for row in (HEAD, *rows)) for i in range(len(HEAD))]
    widths[-1] = 0
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (HEAD, tuple("-" * width for width in widths), *rows)
    ]
    lines.append("")
    lines.append(
        f"loss: mean of the last quarter of {ladder.check_steps} steps against the baseline's on the same "
        f"samples; more than {ladder.loss_bound:.2%} apart is dropped"
    )
    if ladder.advice:
        lines += ["", "by hand:", *(f"  {text}" for text in ladder.advice)]
    return "\n".join(lines)


def _row(rung: Rung, unit: str) -> tuple[str, ...]:
    def text(value: float | None, pattern: str) -> str:
        return "" if value is None else pattern.format(value)

    return (
        rung.name,
        text(
            rung.rate,
            "{:,.0f} " + unit + "/s" if (rung.rate or 0) >= 100 else "{:.2f} " + unit + "/s",
        ),
        text(rung.times, "{:.2f}"),
        text(rung.predicted, "{:.2f}"),
        text(rung.peak_bytes and rung.peak_bytes / 1e9, "{:.1f} GB"),
        text(rung.loss_difference, "{:+.3%}"),
        text(rung.tenth_step_s, "{:.1f} s"),
        f"{'kept' if rung.kept else 'dropped'}: {rung.why}",
    )


def draw_ladder(ladder: Ladder) -> str:
    """Bars of throughput over the baseline, kept ones full and dropped ones outlined."""
    shown = [rung for rung in ladder.rungs if rung.times is not None]
    most = max((rung.times or 0.0) for rung in shown) if shown else 1.0
    height, left, width = 26, 190, 520
    total = height * len(shown) + 16
    bars = []
    for number, rung in enumerate(shown):
        y = 8 + number * height
        length = width * (rung.times or 0.0) / most
        style = 'fill="#2f6fb0"' if rung.kept else 'fill="none" stroke="#b0562f"'
        rate = f"{rung.times:.2f}x · {rung.rate or 0:,.0f} {ladder.unit}/s"
        bars.append(
            f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(rung.name)}</text>'
            f'<rect x="{left}" y="{y + 2}" width="{length:.1f}" height="{height - 8}" {style}>'
            f"<title>{escape(rung.why)}</title></rect>"
            f'<text x="{left + length + 6:.1f}" y="{y + 15}">{escape(rate)}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 220} {total}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="Ladder of the climb">'
        f"<style>text{{fill:#333}}@media(prefers-color-scheme:dark){{text{{fill:#ddd}}}}</style>"
        + "".join(bars)
        + "</svg>\n"
    )
