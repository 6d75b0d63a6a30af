"""Draws the pictures of `parallel.md`, from the code they are about.

    python docs/pictures.py        # writes docs/pictures/*.svg

A test draws them again and compares, so that a picture cannot outlive what it shows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ridgeline.parallel.expert.stacked import plan_route
from ridgeline.parallel.pipeline import Event

FOLDER = Path(__file__).with_name("pictures")
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
INK = "#333"


def svg(width: int, height: int, *shapes: str) -> str:
    style = f'font-family="sans-serif" font-size="12" fill="{INK}"'
    inside = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" {style}>\n<rect width="{width}" height="{height}" fill="white"/>\n'
        f"{inside}\n</svg>\n"
    )


def box(
    x: float, y: float, w: float, h: float, fill: str, text: str = "", ink: str = "white"
) -> str:
    shape = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" fill="{fill}" '
        'stroke="white"/>'
    )
    if text:
        shape += label(x + w / 2, y + h / 2 + 4, text, "middle", ink)
    return shape


def label(x: float, y: float, text: str, anchor: str = "start", fill: str = INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{text}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}" '
        f'stroke-width="1.5"/><circle cx="{x2:.1f}" cy="{y2:.1f}" r="3"/>'
    )


def draw_dp() -> str:
    """Backward of four layers on two ranks; each bucket is averaged as soon as it is there."""
    shapes = []
    for rank in range(2):
        y = 30 + 75 * rank
        shapes.append(label(10, y + 20, f"rank {rank}"))
        for layer in range(4):
            x = 70 + 90 * layer
            shapes.append(box(x, y, 86, 28, COLOURS[0], f"backward {4 - layer}"))
            shapes.append(box(x + 90, y + 32, 86, 16, COLOURS[1], f"average {4 - layer}"))
        shapes.append(box(70 + 90 * 5, y, 60, 28, COLOURS[2], "update"))
    return svg(600, 170, *shapes, label(70, 18, "time, from left to right"))


def draw_zero() -> str:
    """Bytes a parameter with Adam in mixed precision, d = 8, by the formulas of the tests."""
    d = 8
    stages = {
        "dp": (2.0, 2.0, 12.0),
        "zero=1": (2.0, 2.0, 12 / d),
        "zero=2": (2.0, 2 / d, 12 / d),
        "zero=3": (4 / d, 4 / d, 8 / d),
    }
    shapes = []
    for row, (name, parts) in enumerate(stages.items()):
        x, y = 80.0, 30 + 34 * row
        shapes.append(label(10, y + 18, name))
        for colour, value in zip(COLOURS, parts, strict=False):
            shapes.append(box(x, y, 28 * value, 26, colour))
            x += 28 * value
        shapes.append(label(x + 6, y + 18, f"{sum(parts):.4g} bytes"))
    for i, name in enumerate(("weights", "gradients", "optimizer, master weights")):
        shapes.append(box(80 + 110 * i, 172, 14, 14, COLOURS[i]))
        shapes.append(label(98 + 110 * i, 184, name))
    return svg(620, 200, label(80, 18, f"bytes a parameter on each of {d} ranks"), *shapes)


def draw_tp() -> str:
    """A pair of matrices on four ranks."""
    shapes = [box(20, 50, 60, 60, "#bbb", "x", INK)]
    for rank in range(4):
        shapes.append(box(120 + 24 * rank, 40, 24, 80, COLOURS[rank], str(rank)))
        shapes.append(box(290, 40 + 20 * rank, 80, 20, COLOURS[rank], str(rank)))
    shapes += [arrow(84, 80, 114, 80), arrow(222, 80, 282, 80), arrow(376, 80, 430, 80)]
    shapes += [label(252, 70, "f(.)", "middle"), box(440, 50, 60, 60, "#bbb", "y", INK)]
    shapes += [label(168, 30, "columns", "middle"), label(330, 30, "rows", "middle")]
    shapes.append(label(403, 70, "sum", "middle"))
    return svg(520, 140, *shapes)


def draw_cp() -> str:
    """Which queries see which keys, coloured by the rank that computes them: 4 ranks, balanced."""
    from ridgeline.parallel.ring import planned_work

    ranks, cell = 4, 24
    pieces = 2 * ranks
    shapes = [label(30, 20, "queries down, keys across; colour = rank that computes it")]
    for row in range(pieces):
        owner = min(row, pieces - 1 - row)
        shapes += [
            box(30 + cell * column, 30 + cell * row, cell, cell, COLOURS[owner], str(owner))
            for column in range(row + 1)
        ]
    lengths = [64] * ranks
    for i, balance in enumerate((True, False)):
        work = planned_work(lengths, is_causal=True, balance=balance)
        name = "an early and a late piece each" if balance else "one stretch each"
        shapes.append(label(260, 60 + 90 * i, f"{name}: scores computed"))
        for rank, value in enumerate(work):
            size = 220 * value / sum(work)
            shapes.append(box(260, 66 + 90 * i + 15 * rank, size * 2, 13, COLOURS[rank], str(rank)))
    return svg(620, 240, *shapes)


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> list[Event]:
    """The events of a step whose stages all take one unit forward and two backward."""
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * num_ranks
    work: list[list[tuple[str, int]]] = []
    for rank in range(num_ranks):
        warm = min(num_ranks - rank, num_microbatches)
        order = [("F", i) for i in range(warm)]
        for i in range(num_microbatches):
            order.append(("B", i))
            if warm + i < num_microbatches:
                order.append(("F", warm + i))
        work.append(order)
    events: list[Event] = []
    while any(work):
        for rank, order in enumerate(work):
            if not order:
                continue
            kind, index = order[0]
            before = ("F", rank - 1, index) if kind == "F" else ("B", rank + 1, index)
            if not 0 <= before[1] < num_ranks:
                before = ("F", rank, index) if kind == "B" else ("", 0, 0)
            if before[0] and before not in ends:
                continue
            start = max(free[rank], ends.get(before, 0.0))
            free[rank] = ends[(kind, rank, index)] = start + (1.0 if kind == "F" else 2.0)
            events.append(Event(rank, rank, kind, index, start, free[rank]))
            order.pop(0)
    return events


def draw_pp() -> str:
    from ridgeline.parallel.pipeline import timeline_svg

    title = "1f1b, 4 stages, 8 microbatches: forward, then backward of twice the time"
    return timeline_svg(one_forward_one_backward(4, 8), title=title)


def draw_spatial() -> str:
    from ridgeline.parallel.spatial import tile_map_svg

    return tile_map_svg(96, 128, (2, 2), 6)


def draw_ep() -> str:
    """Tokens of two ranks, each with two of four experts, and what is sent for them."""
    index = [[[0, 1], [0, 2], [3, 2]], [[1, 0], [2, 3], [3, 1]]]
    shapes = [label(10, 18, "tokens and the experts they chose"), label(430, 18, "experts")]
    for rank in range(2):
        y = 34 + 100 * rank
        shapes.append(label(10, y + 44, f"rank {rank}"))
        route = plan_route(torch.tensor(index[rank]), num_experts=4, num_ranks=2)
        sent = route.numbers[:, 0].tolist()
        ranks = [other for other in range(2) for _ in range(sent[other])]
        places = list(zip(route.tokens.tolist(), ranks, strict=True))
        for token, chosen in enumerate(index[rank]):
            row = y + 26 * token
            shapes.append(box(60, row, 60, 22, INK, f"token {token}"))
            for slot, expert in enumerate(chosen):
                shapes.append(box(124 + 26 * slot, row, 24, 22, COLOURS[expert], str(expert)))
            ends = [34 + 100 * other + 37 + 8 * (token - 1) for t, other in places if t == token]
            shapes += [arrow(178, row + 11, 424, end) for end in ends]
        shapes += [
            box(430, y + 8 + 30 * (expert % 2), 70, 26, COLOURS[expert], f"expert {expert}")
            for expert in range(2 * rank, 2 * rank + 2)
        ]
        shapes.append(label(510, y + 42, f"rank {rank}"))
    return svg(
        600, 240, *shapes, label(10, 232, "a token goes once to each rank that has an expert of it")
    )


def draw_recompute() -> str:
    """What is alive between forward and backward of six blocks, in parts of one block's activations."""
    shapes = [label(20, 20, "kept between forward and backward, six blocks")]
    kinds = {"none": (0.1, 0.5, 0.4), "selective": (0.1, 0.5, 0.0), "full": (0.1, 0.0, 0.0)}
    for row, (name, parts) in enumerate(kinds.items()):
        y = 34 + 34 * row
        shapes.append(label(20, y + 18, name))
        for block in range(6):
            x = 100.0 + 80 * block
            for colour, value in zip(COLOURS, parts, strict=False):
                shapes.append(box(x, y, 76 * value, 26, colour) if value else "")
                x += 76 * value
    for i, name in enumerate(("block input", "products, attention", "element-wise results")):
        shapes.append(box(100 + 150 * i, 142, 14, 14, COLOURS[i]))
        shapes.append(label(118 + 150 * i, 154, name))
    return svg(600, 170, *shapes)


PICTURES: dict[str, Callable[[], str]] = {
    "dp": draw_dp,
    "zero": draw_zero,
    "tp": draw_tp,
    "cp": draw_cp,
    "pp": draw_pp,
    "spatial": draw_spatial,
    "ep": draw_ep,
    "recompute": draw_recompute,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    sys.exit(main())
