"""Scaling curves as a picture: step time and efficiency over nodes, weak and strong, by the planner.

`ridgeline plan ... --scale 1..64 --picture FILE.svg` draws it; imports without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ridgeline.machine.picture import (
    COLOURS,
    PALE,
    LogScale,
    dot,
    duration,
    label,
    line,
    svg,
    whole_powers,
)
from ridgeline.plan.search import Planned

Rows = Sequence[tuple[int, Planned | None]]
"""Nodes, and the best layout there; None where nothing fits."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM, _BETWEEN = 960.0, 380.0, 64.0, 24.0, 62.0, 46.0, 76.0
_NAMES: Final = {"weak": COLOURS[0], "strong": COLOURS[1]}


def efficiencies(rows: Rows) -> list[tuple[int, float]]:
    """Tokens a second and node, compared with the fewest nodes on which anything fits."""
    known = [
        (count, planned.tokens_per_s / count) for count, planned in rows if planned is not None
    ]
    return [(count, rate / known[0][1]) for count, rate in known]


def draw_scaling(weak: Rows, strong: Rows, title: str) -> str:
    """Two charts side by side: seconds of a step, and efficiency; the layout of a point is its hint."""
    curves = {"weak": weak, "strong": strong}
    shapes = [label(_LEFT, 20, title)]
    for number, (name, words) in enumerate(
        (("weak", "weak scaling: the batch grows with the nodes"),
         ("strong", "strong scaling: the batch stays"))
    ):  # fmt: skip
        at = _LEFT + 300 * number
        shapes += [dot(at + 4, 38, _NAMES[name]), label(at + 14, 42, words)]
    half = (_WIDTH - _LEFT - _RIGHT - _BETWEEN) / 2
    counts = sorted({count for rows in curves.values() for count, _ in rows})
    shapes += _times(curves, counts, _LEFT, _LEFT + half)
    shapes += _shares(curves, counts, _LEFT + half + _BETWEEN, _WIDTH - _RIGHT)
    return svg(_WIDTH, _HEIGHT, shapes, title)


def _across(counts: Sequence[int], left: float, right: float) -> LogScale:
    low, high = counts[0], counts[-1]
    return LogScale(low / 1.08, high * 1.08, left, right)


def _axes(x: LogScale, counts: Sequence[int], words: str) -> list[str]:
    low, high = _HEIGHT - _BOTTOM, _TOP
    shapes = [line(x.start, low, x.stop, low), line(x.start, low, x.start, high)]
    shapes += [label(x(count), low + 16, str(count), "middle") for count in counts]
    shapes.append(label((x.start + x.stop) / 2, low + 34, f"nodes; {words}", "middle"))
    return shapes


def _times(curves: dict[str, Rows], counts: Sequence[int], left: float, right: float) -> list[str]:
    x = _across(counts, left, right)
    shapes = _axes(x, counts, "seconds of a step")
    seconds = [p.seconds for rows in curves.values() for _, p in rows if p is not None]
    if not seconds:
        return [*shapes, label((left + right) / 2, _HEIGHT / 2, "nothing fits", "middle")]
    y = LogScale(*whole_powers(seconds), _HEIGHT - _BOTTOM, _TOP)
    for power in y.powers():
        shapes.append(line(left, y(power), right, y(power), PALE))
        shapes.append(label(left - 6, y(power) + 4, duration(power), "end"))
    for name, rows in curves.items():
        points = [(x(count), y(p.seconds)) for count, p in rows if p is not None]
        hints = [f"{count} nodes: {duration(p.seconds)}, {p.layout}" for count, p in rows if p]
        shapes += _curve(points, hints, _NAMES[name])
    return shapes


def _shares(curves: dict[str, Rows], counts: Sequence[int], left: float, right: float) -> list[str]:
    x = _across(counts, left, right)
    found = {name: efficiencies(rows) for name, rows in curves.items()}
    # More than 100 % is real: more nodes, and what did not fit before does.
    top = max([1.0, *(share for shares in found.values() for _, share in shares)]) * 1.05
    low, high = _HEIGHT - _BOTTOM, _TOP

    def y(share: float) -> float:
        return low - share / top * (low - high)

    shapes = _axes(x, counts, "efficiency, per cent")
    for share in (0.25, 0.5, 0.75, 1.0):
        shapes.append(line(left, y(share), right, y(share), PALE))
        shapes.append(label(left - 6, y(share) + 4, f"{100 * share:.0f}", "end"))
    for name, shares in found.items():
        points = [(x(count), y(share)) for count, share in shares]
        hints = [f"{count} nodes: {100 * share:.1f} %" for count, share in shares]
        shapes += _curve(points, hints, _NAMES[name])
    return shapes


def _curve(points: Sequence[tuple[float, float]], hints: Sequence[str], colour: str) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    return drawn + [dot(x, y, colour, hint) for (x, y), hint in zip(points, hints, strict=True)]
