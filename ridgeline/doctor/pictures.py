"""The doctor's pictures: the step as a bar, its kernels on the roofline, and memory over a step.

Each is one SVG file that stands alone. Called by `ridgeline doctor`; imports without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ridgeline.doctor.measured import PART_NAMES, PARTS, Measured
from ridgeline.machine.picture import COLOURS, INK, PALE, amount, box, duration, label, line, svg
from ridgeline.machine.roofline import Mark, draw_roofline

Timeline = Sequence[tuple[float, float, str, float]]
_KINDS = {
    ("forward", "backward"): "activations",
    ("backward", "optimizer"): "gradients",
    ("backward", "forward"): "gradients",
    ("backward", ""): "gradients",
    ("optimizer", ""): "optimizer state",
    ("data", ""): "batches",
    ("data", "data"): "batches",
    ("data", "forward"): "batches",
    ("data", "backward"): "batches",
    ("data", "optimizer"): "batches",
}
_ORDER = (
    "held throughout",
    "optimizer state",
    "gradients",
    "activations",
    "batches",
    "temporaries",
)
_MOST_POINTS = 500


def write_pictures(folder: Path, measured: Measured, timeline: Timeline) -> list[Path]:
    """step.svg, roofline.svg where there is a roofline, memory.svg where memory was watched."""
    made = {"step.svg": draw_step(measured)}
    if measured.roofline is not None and measured.roofline.memory_bytes_per_s:
        made["roofline.svg"] = draw_roofline(measured.roofline, marks_of(measured))
    if timeline:
        made["memory.svg"] = draw_memory(measured, timeline)
    paths = []
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")
        paths.append(folder / name)
    return paths


def step_rows(measured: Measured) -> list[tuple[str, float]]:
    """The parts of a step with the kernels by class, in the order of a step."""
    rows: list[tuple[str, float]] = []
    for part in PARTS:
        if part == "compute_s" and measured.classes:
            rows += [(c.name, c.seconds) for c in measured.classes]
        else:
            rows.append((PART_NAMES[part], float(getattr(measured, part))))
    return [(name, seconds) for name, seconds in rows if seconds > 1e-9]


def draw_step(measured: Measured) -> str:
    """One bar, cut into what the step consists of, with the names below it."""
    rows = step_rows(measured)
    total = sum(seconds for _, seconds in rows) or 1.0
    width, left = 860.0, 20.0
    room = width - 2 * left
    title = f"a step of {duration(measured.step_s)}: {measured.source} on {measured.device_name}"
    shapes = [label(left, 24, title)]
    at = left
    for number, (name, seconds) in enumerate(rows):
        wide = room * seconds / total
        hint = f"{name}: {duration(seconds)} ({seconds / total:.1%})"
        shapes.append(box(at, 40, wide, 46, COLOURS[number % len(COLOURS)], hint))
        if wide > 44:
            shapes.append(label(at + wide / 2, 68, f"{seconds / total:.0%}", "middle", "white"))
        at += wide
    for number, (name, seconds) in enumerate(rows):
        y = 112 + 20 * number
        shapes.append(box(left, y - 10, 12, 12, COLOURS[number % len(COLOURS)]))
        shapes.append(label(left + 20, y, name))
        shapes.append(label(left + 300, y, duration(seconds), "end"))
        shapes.append(label(left + 360, y, f"{seconds / total:.1%}", "end"))
    height = 112 + 20 * len(rows) + 10
    if measured.comm_hidden_s:
        text = f"beside it {duration(measured.comm_hidden_s)} of communication that kernels hide"
        shapes.append(label(left, height, text))
        height += 20
    return svg(width, height, shapes, title)


def marks_of(measured: Measured) -> list[Mark]:
    return [
        Mark(c.name, c.flops / c.bytes, c.flops / c.seconds, f"({c.precision})")
        for c in measured.classes
        if c.flops and c.bytes and c.seconds
    ]


def sort_lives(timeline: Timeline) -> list[tuple[float, float, float, str]]:
    """(from, to, bytes, kind) of every tensor that came in the time; `to` is infinite for those that
    stayed. What came before it and went in it lives from minus infinity."""
    open_at: dict[float, tuple[float, float, str]] = {}
    lives = []
    for at, size, phase, address in timeline:
        if size > 0:
            open_at[address] = (at, size, phase)
            continue
        if address in open_at:
            start, num, born = open_at.pop(address)
            lives.append((start, at, num, _KINDS.get((born, phase), "temporaries")))
        else:
            kind = "gradients" if phase in ("optimizer", "forward") else "batches"
            lives.append((float("-inf"), at, -size, kind))
    for start, num, born in open_at.values():
        lives.append((start, float("inf"), num, _KINDS.get((born, ""), "temporaries")))
    return lives


def draw_memory(measured: Measured, timeline: Timeline) -> str:
    """What lives when: bands over the time of the watched steps, weights and optimizer state below."""
    lives = sort_lives(timeline)
    begin, end = min(row[0] for row in timeline), max(row[0] for row in timeline)
    memory = measured.memory
    held = memory.weights_bytes + memory.optimizer_bytes if memory is not None else 0.0
    times = sorted({row[0] for row in timeline})
    times = times[:: max(1, len(times) // _MOST_POINTS)]
    levels = {kind: _levels(lives, kind, times) for kind in _ORDER[1:]}
    levels["held throughout"] = [held] * len(times)
    width, height, left = 860.0, 400.0, 90.0
    top = max(sum(levels[kind][i] for kind in _ORDER) for i in range(len(times))) or 1.0

    def x(at: float) -> float:
        return left + (width - left - 20) * (at - begin) / max(end - begin, 1e-9)

    def y(size: float) -> float:
        return height - 70 - (height - 120) * size / top

    title = f"memory of tensors over the watched steps: {amount(top, 'B')} at the most"
    shapes = [label(left, 24, title)]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        shapes.append(line(left, y(share * top), width - 20, y(share * top), PALE))
        shapes.append(label(left - 8, y(share * top) + 4, amount(share * top, "B"), "end"))
    floor = [0.0] * len(times)
    for number, kind in enumerate(_ORDER):
        ceiling = [low + more for low, more in zip(floor, levels[kind], strict=True)]
        if any(levels[kind]):
            up = [f"{x(t):.1f},{y(c):.1f}" for t, c in zip(times, ceiling, strict=True)]
            down = [f"{x(t):.1f},{y(c):.1f}" for t, c in zip(times, floor, strict=True)]
            points = " ".join([*up, *reversed(down)])
            hint = f"<title>{kind}: {amount(max(levels[kind]), 'B')} at the most</title>"
            shapes.append(f'<polygon points="{points}" fill="{COLOURS[number]}">{hint}</polygon>')
        floor = ceiling
    for number, kind in enumerate(_ORDER):
        shapes.append(box(left + 125 * number, height - 30, 12, 12, COLOURS[number]))
        shapes.append(label(left + 125 * number + 17, height - 20, kind))
    shapes.append(line(left, y(0), width - 20, y(0), INK))
    shapes.append(label(width - 20, height - 50, f"{duration(end - begin)}", "end"))
    return svg(width, height, shapes, title)


def _levels(
    lives: Sequence[tuple[float, float, float, str]], kind: str, times: Sequence[float]
) -> list[float]:
    """Bytes of one kind at each of some times in order."""
    changes: list[tuple[float, float]] = []
    for start, stop, size, what in lives:
        if what == kind:
            changes += [(start, size), (stop, -size)]
    changes.sort()
    found, level, at = [], 0.0, 0
    for moment in times:
        while at < len(changes) and changes[at][0] <= moment:
            level += changes[at][1]
            at += 1
        found.append(max(level, 0.0))
    return found
