"""The ladder of a climb: every state that was tried, as a table, as JSON and as a picture.

Its figures agree with each other: a factor is found in turns with the last kept state, the factor over the
baseline is the product of those, and a throughput is the baseline's times that factor. What each state's
own turns took stands beside them, with their spread. Called by `climb.py`; imports without torch.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ridgeline.doctor.losses import BEHIND, LONGER, WIDEST, WOBBLES, widen
from ridgeline.machine.picture import duration, label, svg

DISAGREE = (
    "these differ by more than their noise: the machine did other work meanwhile, or the remedies do not "
    "add up; climb again when it is idle"
)
KEPT, DROPPED = "#2f6fb0", "#b0562f"
"""Colours of the bars."""
UNSTEADY = 0.1
"""States whose turns are further apart than this share the machine: alone, steps of one are within some per
cent of each other."""
STEADY = 0.05
"""Own turns that are further than this from the baseline's pace are worth a line."""


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
    """Gain over the last kept state, measured in turns with it: the middle one of the turns' ratios."""
    noise: float = 0.0
    """What a gain has to exceed: from it down to the lower quartile of the turns' ratios."""
    step_s: float | None = None
    """Of its turn in the middle: the one that `gain` is of, and the baseline's own median."""
    rate: float | None = None
    """Units a second: the baseline's in its own turns, times `times`."""
    times: float | None = None
    """Over the baseline: the gains of the kept states and its own, multiplied."""
    peak_bytes: float | None = None
    loss_difference: float | None = None
    """Of the mean of the last quarter of the losses that were compared, relative to the baseline's."""
    tenth_step_s: float | None = None
    """From the start of the process to the end of its tenth step; later where others started beside it."""
    turns_s: tuple[float, ...] = ()
    """Seconds a step of each of its own turns."""
    before_turns_s: tuple[float, ...] = ()
    """Of the last kept state's turns, each beside the one in `turns_s` in the same place."""
    spread: float | None = None
    """Half the distance from the fastest of its turns to the slowest, as a share of the median."""
    before_s: float | None = None
    """Of the last kept state's turn beside the one of `step_s`; `gain` is this over that."""
    data_share: float | None = None
    """Of its step, in which it waited for data: the median of its turns."""
    beside: int = 0
    """Other states that started at the same time."""
    members: tuple[str, ...] = ()
    """Of one that is many remedies together, their names."""
    longer_losses: tuple[float, ...] = ()
    """Of a state that was looked at for longer, over all of those steps."""
    behind: float | None = None
    """Share of those steps by which it was behind the state that was kept before the first such look."""
    losses: tuple[float, ...] = ()
    """Those that were compared; none where one of them is no number."""

    @property
    def full_name(self) -> str:
        """With what it is made of."""
        return f"{self.name} ({', '.join(self.members)})" if self.members else self.name


@dataclass(frozen=True)
class Untried:
    """A remedy that was not tried."""

    name: str
    why: str
    """One of the reasons below."""
    predicted: float | None = None
    """Gain over the last kept state that it expects, where it applies."""
    helps: str = ""
    """Why it may help, where it applies."""
    budget_s: float | None = None
    """The budget that would have reached it, going by what the others took, where time was the reason."""


NO_TIME = "no time was left"
TOO_LITTLE = "they promise next to nothing"
FOR_GPUS = "they are for GPUs"
LEFT_OUT = "--without names them"
NOTHING_TO_DO = "they are there already, or this training has nothing that they change"


@dataclass(frozen=True)
class Raced:
    """The baseline and the last kept state once more, side by side."""

    times: float
    """The middle one of the turns' ratios."""
    low: float
    high: float
    """The least and the largest of them."""
    num_turns: int


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
    units_per_step: float = 0.0
    rounds: int = 0
    """Turns of each state in a comparison."""
    steps: int = 0
    """Timed steps a turn."""
    raced: Raced | None = None
    """None where one remedy or none was kept, so that its own turns say it already, or it could not be."""
    not_raced: str = ""
    """Why it could not be."""
    untried: tuple[Untried, ...] = ()
    budget_s: float | None = None
    """None where there was no end to it."""
    spent_s: float = 0.0
    device: str = ""
    """Its kind: cuda or cpu."""
    num_ranks: int = 1
    """Processes of each state."""
    wobble: float | None = None
    """How far the baseline is from itself when its first weights are nudged; None where nobody asked."""

    @property
    def best(self) -> Rung:
        return [rung for rung in self.rungs if rung.kept][-1]

    @property
    def times(self) -> float:
        """The whole climb's factor: raced where it was, else the product of the gains that were kept."""
        return self.raced.times if self.raced is not None else self.best.times or 1.0

    def write(self, folder: Path) -> None:
        values = dataclasses.asdict(self)
        (folder / "ladder.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        (folder / "ladder.svg").write_text(draw_ladder(self), encoding="utf-8")


HEAD = (
    "state",
    "step",
    "spread",
    "before",
    "x before",
    "predicted",
    "x baseline",
    "throughput",
    "memory",
    "loss",
    "10th step",
    "",
)


def show_ladder(ladder: Ladder) -> str:
    """The table that is printed, how each of its figures was found, and what was not tried."""
    rows = [_row(rung, ladder.unit) for rung in ladder.rungs]
    widths = [max(len(row[i]) for row in (HEAD, *rows)) for i in range(len(HEAD))]
    widths[-1] = 0
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (HEAD, tuple("-" * width for width in widths), *rows)
    ]
    for paragraph in (
        _whole(ladder),
        _busy(ladder),
        _notes(ladder),
        _untried(ladder),
        _advice(ladder),
    ):
        lines += ["", *paragraph] if paragraph else []
    return "\n".join(lines)


def _whole(ladder: Ladder) -> list[str]:
    """What the climb came to."""
    kept = [rung.full_name for rung in ladder.rungs[1:] if rung.kept]
    if not kept:
        tried = len(ladder.rungs) - 1
        if tried:
            return [f"nothing is kept: none of {tried} remedies is both faster and right"]
        late = any(one.why == NO_TIME for one in ladder.untried)
        if late or ladder.interrupted:
            return ["nothing is kept: no remedy was tried"]
        return ["nothing is kept: no remedy promises anything for this step"]
    product = ladder.best.times or 1.0
    raced = ladder.raced
    if raced is not None:
        unsure = sum(rung.noise / (rung.gain or 1.0) for rung in ladder.rungs if rung.kept)
        agree = raced.low * (1 - unsure) <= product <= raced.high * (1 + unsure)
        return [
            f"{raced.times:.2f} times the baseline with {', '.join(kept)}: the two once more in "
            f"{raced.num_turns} turns each ({raced.low:.2f} to {raced.high:.2f}); the product of the gains "
            f"is {product:.2f}",
            *([] if agree else [DISAGREE]),
        ]
    if len(kept) == 1:
        return [f"{product:.2f} times the baseline with {kept[0]}"]
    return [
        f"{product:.2f} times the baseline with {', '.join(kept)}: the product of the gains; the two were "
        f"not run side by side once more ({ladder.not_raced})"
    ]


def _busy(ladder: Ladder) -> list[str]:
    """Where it is plain that the states were not alone."""
    spreads = [rung.spread for rung in ladder.rungs if rung.spread is not None]
    usual = statistics.median(spreads) if spreads else 0.0
    if usual <= UNSTEADY:
        return []
    return [
        f"this machine did other work meanwhile: the turns of one state are ±{usual:.0%} apart as a rule, "
        "and gains that are smaller than that may not have been seen; climb again when it is idle"
    ]


def _notes(ladder: Ladder) -> list[str]:
    """How each column was found."""
    step = (
        f"step: of the turn in the middle of {ladder.rounds} (or of the first that leave no doubt), of up "
        f"to {ladder.steps} steps each; spread: half the distance from the fastest turn to the slowest"
    )
    compared = (
        "before: the last kept state's step in the turn beside it; x before: this over that, the middle "
        "one of the turns' ratios; x baseline: those that were kept and its own, multiplied",
        "throughput: the baseline's, times x baseline, so that slow minutes of the machine do not enter"
        + _pace(ladder),
        f"loss: mean of the last quarter of {ladder.check_steps} steps against the baseline's on the same "
        f"samples; {_loss_bound(ladder)}; up to {WIDEST * ladder.loss_bound:.2%} pass where losses fall so "
        f"fast that this is at most {BEHIND * ladder.check_steps:.1f} steps; what costs no digits is held "
        "to the last kept state that does" + _longer(ladder),
    )
    tenth = "10th step: from the start of the state's process to the end of its tenth step"
    if any(rung.beside and rung.tenth_step_s is not None for rung in ladder.rungs):
        tenth += "; where several started at once, each took longer than it does alone"
    if any(rung.peak_bytes for rung in ladder.rungs):
        whose = "tensors on the device" if ladder.device == "cuda" else "the whole process"
        whose += ", of the rank that has most" if ladder.num_ranks > 1 else ""
        tenth += f"; memory: {whose}, at its peak"
    many = [
        f"{rung.name}: {', '.join(rung.members)}; each promises too little to be told from noise by itself"
        for rung in ladder.rungs
        if rung.members
    ]
    return [step, *(compared if len(ladder.rungs) > 1 else ()), tenth, *many]


def _longer(ladder: Ladder) -> str:
    """Of states that cost digits and began too far apart, where there was one."""
    if not any(rung.longer_losses for rung in ladder.rungs):
        return ""
    return (
        f"; what costs digits and begins further apart may be {BEHIND:.0%} of "
        f"{LONGER * ladder.check_steps} steps behind, with what was kept before that, and has to gain more "
        "than it adds to that"
    )


def _loss_bound(ladder: Ladder) -> str:
    """What is dropped, and why that may be more than was asked for."""
    bound, wobble = ladder.loss_bound, ladder.wobble
    if wobble is None:
        return f"more than {bound:.2%} apart is dropped"
    itself = f"the baseline from nudged weights is {wobble:.2%} off itself"
    wide = widen(bound, wobble)
    if wide == bound:
        return f"more than {bound:.2%} apart is dropped ({itself})"
    most = ", at most four times that" if wide < WOBBLES * wobble else ""
    return f"more than {wide:.2%} apart is dropped: {bound:.2%}, and as {itself} twice that{most}"


def _pace(ladder: Ladder) -> str:
    """How far the states' own turns are from the pace of the baseline's."""
    off = [
        ladder.units_per_step / rung.step_s / rung.rate - 1
        for rung in ladder.rungs
        if rung.step_s and rung.rate
    ]
    most = max(off, key=abs, default=0.0)
    if abs(most) < STEADY:
        return ""
    return f" (their own turns are up to {abs(most):.0%} {'faster' if most > 0 else 'slower'})"


def _untried(ladder: Ladder) -> list[str]:
    """Those that time was too short for one by one, the others by reason."""
    late = [one for one in ladder.untried if one.why == NO_TIME]
    lines = []
    budget_s = ladder.budget_s or 0.0
    if late and ladder.spent_s < budget_s:
        left_s = budget_s - ladder.spent_s
        lines.append(
            f"not tried, since they take longer than the {left_s:.0f} s left of --budget {budget_s:.0f}:"
        )
    elif late:
        lines.append(
            f"not tried, since --budget {budget_s:.0f} was over after {ladder.spent_s:.0f} s:"
        )
    lines += [
        f"  {one.name} (up to x{one.predicted or 1.0:.2f}): {one.helps}; about --budget "
        f"{one.budget_s or 0:.0f} would reach it"
        for one in late
    ]
    for why in (LEFT_OUT, TOO_LITTLE, FOR_GPUS, NOTHING_TO_DO):
        names = [one.name for one in ladder.untried if one.why == why]
        lines += [f"not tried, since {why}: {', '.join(names)}"] if names else []
    return lines


def _advice(ladder: Ladder) -> list[str]:
    return ["by hand:", *(f"  {text}" for text in ladder.advice)] if ladder.advice else []


def _row(rung: Rung, unit: str) -> tuple[str, ...]:
    def text(value: float | None, pattern: str) -> str:
        return "" if value is None else pattern.format(value)

    return (
        rung.name,
        "" if rung.step_s is None else duration(rung.step_s),
        text(rung.spread, "±{:.1%}"),
        "" if rung.before_s is None else duration(rung.before_s),
        text(rung.gain, "{:.2f}"),
        text(rung.predicted, "{:.2f}"),
        text(rung.times, "{:.2f}"),
        "" if rung.rate is None else show_rate(rung.rate, unit),
        text(rung.peak_bytes and rung.peak_bytes / 1e9, "{:.1f} GB"),
        text(rung.loss_difference, "{:+.3%}"),
        text(
            rung.tenth_step_s, "{:.1f} s" + (f", {rung.beside + 1} at once" if rung.beside else "")
        ),
        f"{'kept' if rung.kept else 'dropped'}: {rung.why}",
    )


def show_rate(rate: float, unit: str) -> str:
    return f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.2f} {unit}/s"


def draw_ladder(ladder: Ladder) -> str:
    """Bars of throughput over the baseline, kept ones full and dropped ones outlined."""
    shown = [rung for rung in ladder.rungs if rung.times is not None]
    most = max((rung.times or 0.0) for rung in shown) if shown else 1.0
    height, left, width = 26, 190, 520
    total = height * len(shown) + 16
    shapes = []
    for number, rung in enumerate(shown):
        y = 8 + number * height
        length = width * (rung.times or 0.0) / most
        style = f'fill="{KEPT}"' if rung.kept else f'fill="none" stroke="{DROPPED}"'
        rate = f"{rung.times:.2f}x · {show_rate(rung.rate or 0.0, ladder.unit)}"
        shapes += [
            label(left - 8, y + 15, rung.name, "end"),
            f'<rect x="{left}" y="{y + 2}" width="{length:.1f}" height="{height - 8}" {style}>'
            f"<title>{escape(f'{rung.full_name}: {rung.why}')}</title></rect>",
            label(left + length + 6, y + 15, rate),
        ]
    return svg(left + width + 220, total, shapes, "Ladder of the climb")
