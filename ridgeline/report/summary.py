"""The figures of one run, computed from its directory: what reports say and compare.

Medians leave out the first steps, in which caches fill and kernels are compiled. Everything that a
run may lack (facts, layout, evaluations, ranks, even steps) is None or empty here, never an error:
a report of a run that broke is the one that is needed most. Called by `build.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from ridgeline import rundir
from ridgeline.errors import UsageError
from ridgeline.facts import MachineFacts, ModelFacts, facts_from_dict
from ridgeline.layout import Layout
from ridgeline.rundir import EvalRecord, Event, RankRecord, RunDir, StepRecord

OTHER = "other"
"""The part of a step that no part of `rundir.SPLIT` covers."""

_LOWER_IS_BETTER = ("loss", "error", "mse", "mae", "rmse", "perplexity", "nll", "distance")


@dataclass(frozen=True)
class Best:
    """The best value of an evaluation metric, the step it came at, and the last value."""

    value: float
    step: int
    last: float


@dataclass(frozen=True)
class Slowest:
    """The rank with the most work of its own, and how much more than the median rank has."""

    rank: RankRecord
    work_s: float
    excess: float


@dataclass(frozen=True)
class RunSummary:
    """What was read from one run directory, and the figures that follow from it."""

    name: str
    status: str
    layout_text: str
    config_text: str
    env: dict[str, Any]
    steps: list[StepRecord]
    evals: list[EvalRecord]
    ranks: list[RankRecord]
    events: list[Event]
    model: ModelFacts | None
    machine: MachineFacts | None

    @cached_property
    def steady(self) -> list[StepRecord]:
        """The steps after warm-up, without the first tenth, at most five: of those since the run has had
        the ranks and the layout that it has now."""
        steps = rundir.newest_stretch(self.steps, self.events)
        count = len(steps)
        return steps[min(5, math.ceil(count / 10)) :] if count > 1 else steps

    @cached_property
    def num_before(self) -> int:
        """Steps on other ranks, or in another layout, than the last."""
        return len(self.steps) - len(rundir.newest_stretch(self.steps, self.events))

    @property
    def final_loss(self) -> float | None:
        return number(self.steps[-1].loss) if self.steps else None

    @property
    def first_bad_step(self) -> int | None:
        """The first step whose loss is not finite."""
        return next((s.step for s in self.steps if not math.isfinite(number(s.loss))), None)

    @property
    def unit(self) -> str:
        return self.model.unit if self.model else "samples"

    @property
    def units_per_sample(self) -> int:
        return self.model.units_per_sample if self.model else 1

    @property
    def throughput(self) -> float | None:
        """Median of `unit` a second."""
        found = median_of(s.samples_per_s for s in self.steady if s.step_s > 0)
        return None if found is None else found * self.units_per_sample

    @property
    def step_s(self) -> float | None:
        return median_of(s.step_s for s in self.steady)

    @property
    def mfu(self) -> float | None:
        return median_of(s.mfu for s in self.steady if s.mfu is not None)

    @property
    def precision(self) -> str | None:
        try:
            return Layout.parse(self.layout_text).precision
        except UsageError:
            return None

    @property
    def peak_flops(self) -> float | None:
        """What the MFU is a share of, per device."""
        peaks = self.machine.peak_flops if self.machine else {}
        return peaks.get(self.precision or "")

    @property
    def total_s(self) -> float | None:
        """From the first thing recorded to the last."""
        times = [e.time for e in self.events] + [e.time for e in self.evals]
        times += [s.time for s in self.steps] + [s.time - s.step_s for s in self.steps[:1]]
        return max(times) - min(times) if times else None

    @property
    def peak_memory_bytes(self) -> int | None:
        """The largest over all ranks."""
        seen = [s.memory_bytes for s in self.steps] + [r.peak_memory_bytes for r in self.ranks]
        return max((m for m in seen if m is not None), default=None)

    @property
    def metric_names(self) -> list[str]:
        return list(dict.fromkeys(name for e in self.evals for name in e.metrics))

    def metric(self, name: str) -> list[tuple[float, float]]:
        """The curve of one evaluation metric."""
        return [(e.step, number(e.metrics[name])) for e in self.evals if name in e.metrics]

    def best(self, name: str) -> Best | None:
        finite = [(y, int(x)) for x, y in self.metric(name) if math.isfinite(y)]
        if not finite:
            return None
        lower = any(word in name.lower() for word in _LOWER_IS_BETTER)
        value, step = min(finite, key=lambda p: p[0] if lower else -p[0])
        return Best(value, step, finite[-1][0])

    def split(self) -> dict[str, float]:
        """Median seconds of each part of a step, with what no part covers as `other`."""
        if not self.steady:
            return {}
        parts: dict[str, float] = {}
        for name in rundir.SPLIT:
            if name == "bubble_s" and not any(s.bubble_s for s in self.steps):
                continue  # no pipeline
            parts[name] = median_of(getattr(s, name) for s in self.steady) or 0.0
        rest = (s.step_s - sum(getattr(s, name) for name in rundir.SPLIT) for s in self.steady)
        parts[OTHER] = max(0.0, median_of(rest) or 0.0)
        return parts

    def slowest(self) -> Slowest | None:
        """Ranks that wait for one another have equal steps; the one that is waited for shows by its
        own work, which is the step without exposed communication."""
        if not self.ranks:
            return None
        worst = max(self.ranks, key=own_work_s)
        usual = median(own_work_s(r) for r in self.ranks)
        excess = own_work_s(worst) / usual - 1 if usual > 0 else 0.0
        return Slowest(worst, own_work_s(worst), excess)


def own_work_s(rank: RankRecord) -> float:
    return max(0.0, rank.step_s - rundir.waits_s(rank))


def number(value: Any) -> float:
    """A float, or not-a-number for what is none (a null that another tool wrote)."""
    return float(value) if isinstance(value, int | float) else math.nan


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of what is finite, or None when nothing is."""
    finite = [v for v in (number(value) for value in values) if math.isfinite(v)]
    return median(finite) if finite else None


def percentages(values: Sequence[float]) -> list[float]:
    """Shares in percent with one decimal that add up to exactly 100 (largest remainders get the
    tenths that plain rounding would lose)."""
    total = sum(values)
    if total <= 0:
        return [0.0 for _ in values]
    exact = [1000 * value / total for value in values]
    tenths = [math.floor(e) for e in exact]
    order = sorted(range(len(exact)), key=lambda i: tenths[i] - exact[i])
    for i in order[: 1000 - sum(tenths)]:
        tenths[i] += 1
    return [t / 10 for t in tenths]


def read_run(run: RunDir) -> RunSummary:
    """Everything a report needs, read once."""
    (steps, evals, ranks), events = run.history(), run.events()
    facts = _read_json(run, rundir.FACTS)
    return RunSummary(
        name=run.path.resolve().name,
        status=run.status(),
        layout_text=_read_text(run, rundir.LAYOUT).strip(),
        config_text=_read_text(run, rundir.CONFIG),
        env=_read_json(run, rundir.ENV),
        steps=steps,
        evals=evals,
        ranks=rundir.newest_ranks(ranks, events),
        events=events,
        model=_facts(ModelFacts, facts.get("model")),
        machine=_facts(MachineFacts, facts.get("machine")),
    )


def _read_text(run: RunDir, name: str) -> str:
    path = run.file(name)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _read_json(run: RunDir, name: str) -> dict[str, Any]:
    """A JSON object of the run; a file that a kill cut short counts as absent."""
    try:
        value = run.read_json(name)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _facts(cls: type[Any], values: Any) -> Any:
    """Facts of either kind, or None where a field is missing (an older or a broken run)."""
    if not isinstance(values, dict):
        return None
    try:
        return facts_from_dict(cls, values)
    except TypeError:
        return None


def flatten_config(text: str) -> dict[str, str]:
    """The resolved configuration as dotted keys and the text of their values.

    Reads the block style that `config.yaml` is written in (one `key: value` a line, nesting by
    indentation, `- item` lists, wrapped lines), which is all that a comparison needs.
    """
    flat: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    for line in text.splitlines():
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        indent = len(line) - len(line.lstrip())
        if content.startswith("- ") or content == "-":
            while stack and stack[-1][0] > indent:
                stack.pop()
            key = ".".join(name for _, name in stack)
            flat[key] = f"{flat[key]}, {content[2:]}" if flat.get(key) else content[2:]
            continue
        name, colon, value = content.partition(":")
        if not colon or (value and not value.startswith(" ")):
            last = next(reversed(flat), None)
            if last is not None:
                flat[last] = f"{flat[last]} {content}".strip()
            continue
        while stack and stack[-1][0] >= indent:
            stack.pop()
        stack.append((indent, name.strip("'\"")))
        key = ".".join(part for _, part in stack)
        parent = key.rpartition(".")[0]
        if flat.get(parent) == "":
            del flat[parent]
        flat[key] = value.strip()
    return flat


def differing_keys(configs: Sequence[dict[str, str]]) -> list[str]:
    """The keys whose value is not the same in all configurations, in order of appearance."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({config.get(key) for config in configs}) > 1]
