"""The layout: one value for how a job is spread over processes, its text form, and what composes.

`dp=4,zero=3,precision=bf16` means the same on the command line, in YAML, in a run directory and in
a test's name, because all of them go through `Layout.parse` and `str`. Which techniques go together is
the table of `composition.py`; which values of two fields do is `_NEEDS` below. Configuration checking,
the planner, the documentation's matrix and the parity tests read these and keep no list of their own.
Called by `config`, `plan`, `parallel`, `verify` and `cli`; imports nothing but the standard library.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from ridgeline.composition import APART, AVAILABLE, TECHNIQUES
from ridgeline.errors import UsageError, unknown_word


@dataclass(frozen=True)
class _Need:
    """A condition between two fields that is about their values, not only about being in use."""

    fields: tuple[str, str]
    """The one that is kept, then the one that is changed first when a cure is looked for."""
    text: str
    holds: Callable[[Layout], bool]


_NEEDS: Final[tuple[_Need, ...]] = (
    _Need(("tp", "sp"), "sp=true needs tp above 1", lambda x: not x.sp or x.tp > 1),
    _Need(("shard", "zero"), "shard needs zero=1 or more", lambda x: x.shard is None or x.zero > 0),
    _Need(
        ("dp", "shard"),
        "shard must divide dp, so that every group has the same size",
        lambda x: x.shard is None or x.dp % x.shard == 0,
    ),
    _Need(
        ("dp", "ep"),
        "ep must divide dp, because experts are spread over the data-parallel ranks",
        lambda x: x.dp % x.ep == 0,
    ),
    _Need(
        ("ep", "shard"),
        "one of ep and shard must divide the other, so that the replicas that share experts and those that "
        "share optimizer state lie in one another",
        lambda x: x.shard is None or x.shard % x.ep == 0 or x.ep % x.shard == 0,
    ),
    _Need(
        ("pp", "schedule"),
        "a schedule other than 1f1b needs pp above 1",
        lambda x: x.pp > 1 or x.schedule == "1f1b",
    ),
    _Need(
        ("pp", "microbatches"),
        "microbatches above 1 need pp above 1; without a pipeline use accumulate",
        lambda x: x.pp > 1 or x.microbatches == 1,
    ),
    _Need(
        ("schedule", "virtual"),
        "virtual above 1 needs schedule=interleaved or schedule=zerobubble",
        lambda x: x.virtual == 1 or x.schedule in ("interleaved", "zerobubble"),
    ),
    _Need(
        ("schedule", "virtual"),
        "schedule=interleaved needs virtual above 1",
        lambda x: x.virtual > 1 or x.schedule != "interleaved",
    ),
    _Need(
        ("pp", "microbatches"),
        "1f1b needs at least as many microbatches as pp has stages",
        lambda x: x.pp == 1 or x.schedule != "1f1b" or x.microbatches >= x.pp,
    ),
    _Need(
        ("pp", "microbatches"),
        "interleaved and zerobubble need microbatches to be a multiple of pp",
        lambda x: (
            x.pp == 1
            or x.schedule not in ("interleaved", "zerobubble")
            or x.microbatches % x.pp == 0
        ),
    ),
    _Need(
        ("graphs", "compile"),
        "graphs=true captures compiled code and needs compile=true",
        lambda x: not x.graphs or x.compile,
    ),
    _Need(
        ("compile", "recompute"),
        "under tp what recompute=selective keeps is chosen function by function, and a compiled block is "
        "one function; use recompute=full or none",
        lambda x: x.recompute != "selective" or x.tp == 1 or not x.compile,
    ),
    _Need(
        ("offload", "zero"),
        "offload=params needs zero=3, which brings weights in block by block",
        lambda x: x.offload != "params" or x.zero == 3,
    ),
)

_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "schedule": ("gpipe", "1f1b", "interleaved", "zerobubble"),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "optimizer", "params", "activations"),
    "precision": ("fp32", "tf32", "bf16", "fp16", "fp8"),
    "compress": ("none", "fp16", "bf16", "powersgd:r"),
    "sync": ("every", "local:k", "async"),
}
"""Allowed values of the fields that are words; after a colon stands a positive number."""

_GENTLEST: Final[dict[str, tuple[str, ...]]] = {
    "schedule": ("1f1b", "gpipe"),
    "recompute": ("selective", "none"),
    "offload": ("optimizer", "none"),
    "precision": ("bf16", "tf32", "fp32"),
    "compress": ("none",),
    "sync": ("every",),
}
"""What to try, in this order, when a word has to give way."""


@dataclass(frozen=True)
class Layout:
    """How a job is spread over processes. Values are checked one by one when it is made; whether
    they go together is `check_layout`'s question, so that a wrong layout can still be talked about.

    `zero`, `compress` and `sync` with `dp=1` are allowed and do nothing, so that the same text runs
    on one process.
    """

    dp: int = 1
    """Data-parallel replicas."""
    zero: int = 0
    """What replicas shard: 0 nothing, 1 optimizer state, 2 and gradients, 3 and weights."""
    shard: int | None = None
    """Replicas in a sharding group; None: all of them."""
    tp: int = 1
    """Tensor-parallel ranks."""
    sp: bool = False
    """Also shard norms and residuals along the sequence, among the tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks (sequence length)."""
    pp: int = 1
    """Pipeline stages."""
    schedule: str = "1f1b"
    microbatches: int = 1
    """Parts that a pipeline cuts each batch into."""
    virtual: int = 1
    """Pieces of the model on each stage."""
    spatial: tuple[int, int] = (1, 1)
    """Tiles of the image by height and width; the text `4` is four bands by height."""
    ep: int = 1
    """Expert-parallel ranks. They are the data-parallel ranks in groups of `ep`, not further
    processes, so `ep` divides `dp` and does not count in `world_size`."""
    recompute: str = "none"
    offload: str = "none"
    precision: str = "fp32"
    compile: bool = False
    graphs: bool = False
    accumulate: int = 1
    """Forward and backward passes before each optimizer step."""
    compress: str = "none"
    sync: str = "every"

    def __post_init__(self) -> None:
        for name in FIELDS:
            given = getattr(self, name)
            if given is not _DEFAULTS[name]:
                # Through the text and back: one place that knows what is allowed, one spelling of it.
                object.__setattr__(self, name, _read_shown(name, _show_value(given)))

    def __str__(self) -> str:
        """The canonical text: fields in order, only those that are not the default."""
        changed = [
            f"{name}={_show_value(getattr(self, name))}"
            for name in FIELDS
            if getattr(self, name) != _DEFAULTS[name]
        ]
        return ",".join(changed) or "dp=1"

    @classmethod
    def parse(cls, text: str, place: str = "layout") -> Layout:
        """The layout that a text names; empty text is one process with nothing switched on."""
        if read_auto(text, place) is not None:
            raise UsageError(
                f"{text!r} in {place} is chosen when `ridgeline train` starts its ranks; name the fields "
                "here, as in dp=4,zero=1"
            )
        items = _read_items(text, place)
        return cls(**{name: _read_value(name, value, place) for name, value in items.items()})

    @classmethod
    def parse_for(
        cls, text: str, num_processes: int, place: str = "layout", per_node: int = 0
    ) -> Layout:
        """The layout that a text names on so many processes: a `dp` it does not state is filled in.

        Give the text as the user wrote it: `str` leaves `dp=1` out, and then it is not stated. Where whole
        nodes are asked for (`-N`), `per_node` is the processes of one.
        """
        if num_processes < 1:
            raise UsageError(f"{num_processes} processes for {place}; use 1 or more")
        layout = cls.parse(text, place)
        stated = "dp" in _read_items(text, place)
        rest = layout.world_size // layout.dp
        fits = num_processes % rest == 0
        if fits and not stated:
            return layout.replace(dp=num_processes // rest)
        if layout.world_size == num_processes and stated:
            return layout
        if not stated:
            unit = math.lcm(rest, per_node or 1)
            below = num_processes // unit * unit
            counts, other = [below, below + unit], ""
            problem = f"{text!r} in {place} needs a multiple of {rest} processes"
        else:
            counts, other = [layout.world_size], ""
            problem = f"{text!r} in {place} needs {layout.world_size} processes"
            if fits:
                other = f"dp={num_processes // rest}"
            elif layout.dp > 1 and (least := _asked_for(rest, per_node)):
                other = f"dp=1 with {least}"
        choices = [*filter(None, (_asked_for(count, per_node) for count in counts)), other]
        use = " or ".join(filter(None, choices)) or "sizes whose product divides that"
        raise UsageError(f"{problem} but there are {num_processes}; use {use}")

    @property
    def world_size(self) -> int:
        """Processes that the layout needs; `ep` reuses data-parallel ranks and adds none."""
        return self.dp * self.tp * self.cp * self.pp * math.prod(self.spatial)

    def replace(self, **changes: Any) -> Layout:
        """The same layout with some fields given new values."""
        for name in changes:
            _require_field(name, "Layout.replace")
        return dataclasses.replace(self, **changes)

    def with_field(self, name: str, text: str, place: str = "layout") -> Layout:
        """The same layout with one field read from text, as in `layout.precision=bf16`."""
        _require_field(name, place)
        return dataclasses.replace(self, **{name: _read_value(name, text, place)})


_DEFAULTS: Final[dict[str, Any]] = {f.name: f.default for f in dataclasses.fields(Layout)}
FIELDS: Final[tuple[str, ...]] = tuple(_DEFAULTS)
"""The names of a layout's fields, in the order of the canonical text."""


AUTO: Final = "auto"
"""A layout that the planner chooses for as many ranks as there are."""


def ideal_bubble(num_ranks: int, num_microbatches: int, virtual: int = 1) -> float:
    """The part of a step in which ranks of a pipeline compute nothing, where all stages take as long:
    (p-1) / (m v + p-1), v stages a rank."""
    return (num_ranks - 1) / (num_microbatches * virtual + num_ranks - 1)


def read_auto(text: str, place: str = "layout") -> Layout | None:
    """What a text that leaves the layout to the planner says nevertheless: its precision, as in
    `auto,precision=bf16`. None for any other text."""
    head, _, rest = text.partition(",")
    if head.strip() != AUTO:
        return None
    for name in _read_items(rest, place):
        if name != "precision":
            raise UsageError(
                f"{text!r} in {place}: beside auto only precision can be said, because {name} is the "
                "planner's to choose; leave it out, or auto"
            )
    return Layout.parse(rest, place)


def check_text(text: str, place: str = "layout") -> None:
    """Refuse a text that is no layout and does not leave it to the planner either."""
    if read_auto(text, place) is None:
        Layout.parse(text, place)


def override_text(text: str, name: str, value: str, place: str = "layout") -> str:
    """A layout text with one field set, otherwise as written, so that a stated `dp=1` stays stated
    for `Layout.parse_for`."""
    if read_auto(text, place) is not None:
        rest = override_text(text.partition(",")[2], name, value, place)
        read_auto(f"{AUTO},{rest}", place)
        return f"{AUTO},{rest}"
    items = _read_items(text, place)
    _require_field(name, place)
    items[name] = _show_value(_read_value(name, value, place))
    return ",".join(f"{key}={items[key]}" for key in FIELDS if key in items)


def _require_field(name: str, place: str) -> None:
    if name not in _DEFAULTS:
        raise unknown_word("layout field", name, FIELDS, place)


def _read_items(text: str, place: str) -> dict[str, str]:
    """The fields a text states, with their values still as text."""
    items: dict[str, str] = {}
    if not text.strip():
        return items
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise UsageError(
                f"{item.strip()!r} in {place} is no field=value; write for example 'dp=4,tp=2'"
            )
        _require_field(name, place)
        if name in items:
            raise UsageError(f"{name} is given twice in {place}, as {items[name]} and {value}")
        items[name] = value
    return items


def _positive(text: str) -> int | None:
    """The number that a text is, or None; nine digits are enough for any count of processes."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else 0
    return number if number > 0 else None


def _read_word(text: str, words: tuple[str, ...]) -> str | None:
    """The canonical spelling of one of the words; `powersgd:r` stands for any positive r."""
    head, colon, tail = text.partition(":")
    for word in words:
        if ":" not in word and text == word:
            return word
        if colon and word.startswith(head + ":") and (number := _positive(tail)) is not None:
            return f"{head}:{number}"
    return None


def _read_value(name: str, text: str, place: str) -> Any:
    """The value of one field; the error says what is allowed."""
    value: Any = None
    if name in _WORDS:
        value, allowed = _read_word(text, _WORDS[name]), ", ".join(_WORDS[name])
    elif name == "zero":
        value = int(text) if text in ("0", "1", "2", "3") else None
        allowed = "0, 1, 2, 3"
    elif name == "spatial":
        height, _, width = text.partition("x")
        tiles = (_positive(height), _positive(width) if "x" in text else 1)
        value = None if None in tiles else tiles
        allowed = "a positive whole number, or two as in 2x4"
    elif isinstance(_DEFAULTS[name], bool):
        value, allowed = {"true": True, "false": False}.get(text.lower()), "true, false"
    elif name == "shard" and text.lower() == "none":
        return None
    else:
        value, allowed = _positive(text), "a positive whole number"
    if value is None:
        raise UsageError(f"{name}={text} in {place} is not allowed; {name} can be {allowed}")
    return value


@lru_cache(maxsize=4096)
def _read_shown(name: str, text: str) -> Any:
    """Remembered, because a planner makes tens of thousands of layouts of the same few values."""
    return _read_value(name, text, "Layout")


def _show_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(str(n) for n in (value[:1] if value[1:] == (1,) else value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def techniques(layout: Layout) -> tuple[str, ...]:
    """The techniques a layout uses, named as in `TECHNIQUES`; fp32 on one device uses none."""
    used = {f"{name}={str(getattr(layout, name)).partition(':')[0]}" for name in FIELDS}
    used |= {name for name in FIELDS if getattr(layout, name) != _DEFAULTS[name]}
    return tuple(name for name in TECHNIQUES if name in used)


def _asked_for(count: int, per_node: int) -> str:
    """How one asks for so many processes; empty where they are no whole nodes."""
    if not per_node:
        return f"-n {count}" if count else ""
    return f"-N {count // per_node}" if count and count % per_node == 0 else ""


def why_apart(first: str, second: str) -> str | None:
    """Why two techniques do not compose, or None when they do."""
    for left, right, reason in APART:
        if (first in left and second in right) or (second in left and first in right):
            return reason
    return None


@dataclass(frozen=True)
class Finding:
    """Something wrong with a layout."""

    fields: tuple[str, ...]
    """The field, or the two fields, that it is about."""
    reason: str
    nearest: str
    """The text of the nearest layout that works."""

    def __str__(self) -> str:
        return f"{self.reason}; the nearest layout that works is {self.nearest!r}"


def check_layout(layout: Layout) -> list[Finding]:
    """What in a layout does not go together; empty when everything does."""
    broken = list(_broken(layout))
    nearest = str(_nearest(layout)) if broken else ""
    return [Finding(fields, reason, nearest) for fields, reason in broken]


def require_layout(layout: Layout, place: str = "layout") -> None:
    """Refuse a layout whose fields do not go together, with the first reason."""
    for finding in check_layout(layout):
        raise UsageError(f"{str(layout)!r} in {place}: {finding}")


def check_available(layout: Layout) -> list[Finding]:
    """What in a layout this release cannot run; the remedy keeps the number of processes."""
    missing = [name for name in techniques(layout) if name not in AVAILABLE]
    if not missing:
        return []
    kept = layout
    for name in missing:
        field = name.partition("=")[0]
        for text in (*_GENTLEST.get(field, ()), _show_value(_DEFAULTS[field])):
            trial = kept.with_field(field, text)
            if not any(t.partition("=")[0] == field for t in set(techniques(trial)) - AVAILABLE):
                kept = trial
                break
    kept = kept.replace(dp=kept.dp * layout.world_size // kept.world_size)
    kept = _nearest(kept)
    groups: dict[str, list[str]] = {}
    for name in (t for t in TECHNIQUES if t in AVAILABLE):
        groups.setdefault(name.partition("=")[0], []).append(name.partition("=")[2])
    has = ", ".join(f"{k}={'|'.join(v)}" if v[0] else k for k, v in groups.items())
    findings = []
    for name in missing:
        field = name.partition("=")[0]
        shown = f"{field}={_show_value(getattr(layout, field))}"
        reason = f"{shown}: {TECHNIQUES[name]} is not in this release (it has {has})"
        findings.append(Finding((field,), reason, str(kept)))
    return findings


def _broken(layout: Layout) -> Iterator[tuple[tuple[str, str], str]]:
    """Each pair of fields that does not go together, and why."""
    for need in _NEEDS:
        if not need.holds(layout):
            first, second = need.fields
            shown = [f"{n}={_show_value(getattr(layout, n))}" for n in need.fields]
            yield (first, second), f"{shown[0]} and {shown[1]} do not compose: {need.text}"
    used = techniques(layout)
    for left, right, reason in APART:
        for first in (name for name in used if name in left):
            for second in (name for name in used if name in right):
                fields = (first.partition("=")[0], second.partition("=")[0])
                shown = [f"{n}={_show_value(getattr(layout, n))}" for n in fields]
                yield fields, f"{shown[0]} and {shown[1]} do not compose: {reason}"


def _neighbours(layout: Layout, field: str, other: str) -> Iterator[Layout]:
    """Layouts that differ in one field, gentlest change first."""
    value, default = getattr(layout, field), _DEFAULTS[field]
    if field == "zero":
        texts = [str(n) for n in sorted(range(4), key=lambda n: (abs(n - value), n))]
    elif field in _GENTLEST:
        texts = [*_GENTLEST[field], _show_value(default)]
    elif isinstance(value, int) and not isinstance(value, bool):
        partner = getattr(layout, other)
        partner = partner if isinstance(partner, int) else 1
        numbers = {n for n in range(1, partner + 1) if partner % n == 0} if partner < 4096 else {1}
        numbers |= {
            2,
            partner * (value // max(partner, 1)),
            partner * (value // max(partner, 1) + 1),
        }
        ordered = sorted(numbers - {0}, key=lambda n: (abs(n - value), n))
        texts = [str(n) for n in ordered] + [_show_value(default)]
    elif isinstance(value, bool):
        texts = ["true", "false"]
    else:
        texts = [_show_value(default)]
    for text in texts:
        if text != _show_value(value):
            yield layout.with_field(field, text)


def _nearest(layout: Layout) -> Layout:
    """The nearest layout that works: change one of the two fields of the first finding, keeping the
    number of processes where that is possible, until nothing is left to find."""
    for _ in range(2 * len(FIELDS)):
        broken = list(_broken(layout))
        if not broken:
            return layout
        keep, change = broken[0][0]
        trials = [*_neighbours(layout, change, keep), *_neighbours(layout, keep, change)]
        size = layout.world_size
        # min() keeps the first of equals, so the order of the trials decides what is gentlest.
        layout = min(trials, key=lambda x: (len(list(_broken(x))), x.world_size != size))
    return Layout(dp=layout.dp)


def composition_matrix() -> str:
    """The composition table as Markdown: which pairs compose, why the others do not, and which
    fields need one another."""
    reasons: list[str] = []

    def cell(first: str, second: str) -> str:
        if first.partition("=")[0] == second.partition("=")[0]:
            return " "
        reason = why_apart(first, second)
        if reason is None:
            return "✓"
        if reason not in reasons:
            reasons.append(reason)
        return str(reasons.index(reason) + 1)

    names = list(TECHNIQUES)
    lines = ["| |" + "|".join(f" `{name}` " for name in names) + "|"]
    lines.append("|---|" + ":-:|" * len(names))
    lines += [f"| `{a}` |" + "|".join(f" {cell(a, b)} " for b in names) + "|" for a in names]
    lines += ["", "✓ composes; a number is the reason why not:", ""]
    lines += [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    lines += ["", "Fields that need one another:", ""]
    lines += [f"- {need.text}" for need in _NEEDS]
    return "\n".join(lines) + "\n"
