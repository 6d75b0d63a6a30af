"""Draws the pictures of `plan.md`, from the planner itself and the rows that it is tested with.

    python docs/plan_pictures.py        # writes docs/pictures/plan_*.svg

A test draws them again and compares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ridgeline.plan.rows import load_rows, read_row
from ridgeline.plan.schedule import play
from ridgeline.plan.validate import check_row

FOLDER = Path(__file__).with_name("pictures")
ROWS = Path(__file__).parents[1] / "tests" / "golden" / "plan" / "rows.json"
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
INK = "#333"
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 560, 320, 60, 46, 30

Points = Sequence[tuple[float, float]]


def chart(
    title: str, x_name: str, y_name: str, lines: dict[str, Points], dots: dict[str, Points],
    y_top: float,
) -> str:  # fmt: skip
    """Lines are predictions, dots measurements (or the law); x is logarithmic."""
    xs = [x for points in (*lines.values(), *dots.values()) for x, _ in points]
    low, high = math.log2(min(xs)), math.log2(max(xs))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low) / (high - low)
        right = LEFT + across * (WIDTH - LEFT - 150)
        return right, HEIGHT - BOTTOM - y / y_top * (HEIGHT - BOTTOM - TOP)

    style = f'font-family="sans-serif" font-size="12" fill="{INK}"'
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" {style}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18">{title}</text>',
    ]
    for step in range(5):
        y = y_top * step / 4
        _, down = place(min(xs), y)
        shapes.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 150}" y1="{down:.1f}" y2="{down:.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{y:g}</text>'
        )
    for x in sorted(set(xs)):
        right, _ = place(x, 0)
        shapes.append(
            f'<text x="{right:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle" '
            f'font-size="10">{x:g}</text>'
        )
    shapes.append(f'<text x="{LEFT}" y="{HEIGHT - 8}">{x_name}; {y_name}</text>')
    names = list(dict.fromkeys([*lines, *dots]))
    for number, name in enumerate(names):
        colour = COLOURS[number % len(COLOURS)]
        placed = [place(*point) for point in lines.get(name, [])]
        if placed:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            shapes.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
        for x, y in (place(*point) for point in dots.get(name, [])):
            shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        down = TOP + 14 + 18 * number
        shapes.append(f'<text x="{WIDTH - 142}" y="{down}" fill="{colour}">{name}</text>')
    return "\n".join([*shapes, "</svg>\n"])


def draw_crossover() -> str:
    """Throughput of two models as devices grow and the batch stays: ZeRO-3 falls, PTD-P holds."""
    lines: dict[str, list[tuple[float, float]]] = {}
    dots: dict[str, list[tuple[float, float]]] = {}
    for row in load_rows(ROWS):
        if row["set"] != "megatron_ptd_vs_zero3":
            continue
        job = read_row(row).job
        kind = "ZeRO-3" if job.zero == 3 else "PTD-P"
        name = f"{row['model']['name'].removeprefix('GPT-')} {kind}"
        said = check_row(row, 0).values["predicted_tflops_per_gpu"]
        lines.setdefault(name, []).append((job.devices, said))
        dots.setdefault(name, []).append((job.devices, row["measured"]["tflops_per_gpu"]))
    return chart(
        "ZeRO-3 and PTD-P: line predicted, dot measured", "devices", "TFLOP/s a device", lines, dots,
        200.0,
    )  # fmt: skip


def bubble(schedule: str, stages: int, count: int, chunks: int) -> float:
    """Idle share of a pipeline of even stages, played event by event."""
    forward = [[1.0 / chunks] * chunks for _ in range(stages)]
    backward = [[2.0 / chunks] * chunks for _ in range(stages)]
    if schedule == "zerobubble":
        half = [[1.0]] * stages
        return play(schedule, count, forward, half, [0.0] * stages, half).bubble
    return play(schedule, count, forward, backward, [0.0] * stages).bubble


def draw_bubble() -> str:
    """The bubble of eight stages: lines are played, dots are (p-1)/(vm + p-1)."""
    counts, stages = (8, 16, 32, 64, 128), 8
    lines = {
        "1f1b, gpipe": [(m, 100 * bubble("1f1b", stages, m, 1)) for m in counts],
        "interleaved, v=2": [(m, 100 * bubble("interleaved", stages, m, 2)) for m in counts],
        "interleaved, v=4": [(m, 100 * bubble("interleaved", stages, m, 4)) for m in counts],
        "zerobubble": [(m, 100 * bubble("zerobubble", stages, m, 1)) for m in counts],
    }
    dots = {
        name: [(m, 100 * (stages - 1) / (v * m + stages - 1)) for m in counts]
        for name, v in (("1f1b, gpipe", 1), ("interleaved, v=2", 2), ("interleaved, v=4", 4))
    }
    return chart(
        "Bubble of 8 stages: line played, dot (p-1)/(vm+p-1)", "microbatches", "per cent idle",
        lines, dots, 50.0,
    )  # fmt: skip


PICTURES = {"plan_crossover": draw_crossover, "plan_bubble": draw_bubble}


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
