"""A machine's parameters from a few measured rows: the most plausible values, not the closest fit.

Fifteen rows cannot say what twenty parameters are. So each parameter has a width: how far its true value
may well be from the shipped one. What is looked for is the point where the misfit of the rows and the
distance from the shipped values, each counted in its own widths, are least together; a row that nothing
explains weighs little (Student's t). Every value stays inside bounds that are physics. Two facts about
the program are decided by the rows as well, where they are clear about them: whether what is stated as
recomputed was, and whether the vocabulary was padded. Called by `validate.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ridgeline.plan import kernels, layer, own, schedule
from ridgeline.plan.job import Job
from ridgeline.plan.machine import Machine
from ridgeline.plan.memory import predict_memory
from ridgeline.plan.predict import pressure
from ridgeline.plan.software import Software
from ridgeline.plan.time import Times, pipeline_s, predict_time, shortest_s

Change = Callable[[Job], Job]


@dataclass(frozen=True)
class Parameter:
    """What may be fitted: between which values it is still physics, and how far it may well be from the
    shipped one (a standard deviation of its logarithm)."""

    low: float
    high: float
    width: float


PARAMETERS: Final[dict[str, Parameter]] = {
    "device.gemm_efficiency": Parameter(0.65, 0.97, 0.06),
    "device.memory_efficiency": Parameter(0.55, 0.95, 0.10),
    "device.tile_overhead": Parameter(16.0, 384.0, 0.5),
    "device.kernel_s": Parameter(1e-6, 8e-6, 0.4),
    "device.host_kernel_s": Parameter(5e-6, 120e-6, 0.5),
    "device.flash_efficiency": Parameter(0.25, 0.80, 0.15),
    "intra.efficiency": Parameter(0.45, 0.92, 0.12),
    "intra.latency_s": Parameter(5e-6, 120e-6, 0.5),
    "inter.efficiency": Parameter(0.15, 0.98, 0.3),
    "inter.pair_efficiency": Parameter(0.15, 0.98, 0.3),
    "overlap_cost": Parameter(0.0, 0.6, 0.7),
    "step_s": Parameter(0.0, 30e-3, 1.0),
    "software.optimizer_bytes_moved": Parameter(22.0, 80.0, 0.3),
    "software.element_passes": Parameter(0.7, 4.0, 0.25),
    "software.score_passes": Parameter(1.0, 2.5, 0.15),
    "software.narrow_products": Parameter(1.0, 1.8, 0.15),
    "software.narrow_heads": Parameter(0.6, 1.05, 0.15),
    "software.fp8_casts": Parameter(0.0, 2.0, 0.5),
    "software.pressure": Parameter(0.0, 2.0, 1.0),
    "skew": Parameter(0.0, 0.03, 0.5),
    "software.selective_products": Parameter(0.0, 1.0, 0.3),
}
"""Efficiencies end below what the best published kernels reach, latencies go from those of one hop to those
of a loaded machine, bytes of an optimizer from a fused Adam's alone to one kernel for each of its steps."""

OF_A_DEVICE: Final = "device.gemm_efficiency"
"""Fitted for each kind of device by itself, besides for all of them, where rows are of several: as
`device.gemm_efficiency@H100-SXM5-80GB`. Profiles were made apart, each from its own sources."""
APART: Final = 0.5
"""How far devices may well differ in it, of how far all together may be from what is shipped."""

FACTS: Final = ("recomputed", "padded_vocab")
"""1: as stated, or as the program is known for; 0: not so."""
NOISES: Final = (0.1, 0.03)
"""Of a measured time and of what the model lacks, one standard deviation of the logarithm: from one at
which no row is given up for lost before the parameters are near, to the one that counts."""
FREEDOM: Final = 3.0
"""Of Student's t: at 3, a row ten widths off pulls no more than one that is two off."""
CLEAR: Final = 4.0
"""By how much the misfit has to fall for a fact to be believed against what is stated."""
_ROUNDS: Final = 8
_STEP: Final = 0.02


def fit(jobs: Sequence[Job], seconds: Sequence[float]) -> dict[str, float]:
    """Factors on parameters, and facts as 1 or 0, that make these jobs' times most plausible."""
    coarse = []
    for denied in _worlds(jobs):
        misfits = Misfits(jobs, seconds, denied)
        place, cost = _descend(misfits, [0.0] * len(misfits.names), NOISES[0])
        coarse.append((cost + CLEAR * len(denied), misfits, place, denied))
    least = min(cost for cost, *_ in coarse)
    best, factors, facts = math.inf, dict[str, float](), dict[str, float]()
    for rough, misfits, place, denied in coarse:
        if rough > least + CLEAR:
            continue
        place, cost = _descend(misfits, place, NOISES[1])
        if cost + CLEAR * len(denied) < best:
            best, facts = cost + CLEAR * len(denied), denied
            pairs = zip(misfits.names, place, strict=True)
            factors = {name: math.exp(value) for name, value in pairs}
    clear_caches()
    return {**factors, **{name: facts.get(name, 1.0) for name in FACTS}}


def _worlds(jobs: Sequence[Job]) -> list[dict[str, float]]:
    """Every set of facts that could be denied and would change any of these jobs."""
    worlds: list[dict[str, float]] = [{}]
    for name in FACTS:
        if any(job != changed({name: 0.0})(job) for job in jobs):
            worlds += [{**world, name: 0.0} for world in worlds]
    return worlds


class Misfits:
    """Logarithms of predicted over measured times, in widths of their noise."""

    def __init__(self, jobs: Sequence[Job], seconds: Sequence[float], facts: Mapping[str, float]):
        self.jobs = [changed(facts)(job) for job in jobs]
        self.seconds = seconds
        self.memories = [predict_memory(job) for job in self.jobs]
        self.names = [
            name for name in _names(self.jobs) if any(_get(j, name) > 0 for j in self.jobs)
        ]
        self.noise = NOISES[0]
        self.stretch = [1.0] * len(jobs)
        """What the schedule takes, played out, compared with `shortest_s`."""
        self._drop_idle()

    def _drop_idle(self) -> None:
        """Leave out what would change no row by as much as a third of a per cent, even a width away."""
        slopes = self.slopes([0.0] * len(self.names))
        pairs = zip(self.names, slopes, strict=True)
        self.names = [
            name
            for name, slope in pairs
            if max(map(abs, slope)) * self.noise * parameter_of(name).width > 0.003
        ]

    def at(self, place: Sequence[float], played: bool) -> list[float]:
        """`played`: with every schedule played out; else stretched as when last played."""
        factors = {name: math.exp(v) for name, v in zip(self.names, place, strict=True)}
        change = changed(factors)
        found = []
        for i, job in enumerate(self.jobs):

            def pipeline(job: Job, forward: Times, backward: Times, i: int = i) -> float:
                short = shortest_s(job, forward, backward)
                if played:
                    self.stretch[i] = pipeline_s(job, forward, backward) / short
                return short * self.stretch[i]

            altered = change(job)
            said = predict_time(altered, pipeline).seconds
            said *= 1.0 + pressure(altered, self.memories[i])
            found.append(math.log(said / self.seconds[i]) / self.noise)
        return found

    def cost(self, rows: Sequence[float], place: Sequence[float]) -> float:
        pairs = zip(self.names, place, strict=True)
        far = sum((value / parameter_of(name).width) ** 2 for name, value in pairs)
        return sum((FREEDOM + 1) * math.log1p(r * r / FREEDOM) for r in rows) + far

    def slopes(self, place: Sequence[float]) -> list[list[float]]:
        clear_caches()
        rows = self.at(place, False)
        found = []
        for j, name in enumerate(self.names):
            aside = [*place]
            aside[j] += _STEP if _room(self.jobs, name, place[j] + _STEP) else -_STEP
            moved = self.at(aside, False)
            found.append(
                [(m - r) / (aside[j] - place[j]) for m, r in zip(moved, rows, strict=True)]
            )
        return found


def _descend(misfits: Misfits, place: list[float], noise: float) -> tuple[list[float], float]:
    """Damped Gauss-Newton steps on logarithms; where they end, and the cost there."""
    misfits.noise = noise
    rows = misfits.at(place, True)
    best, damping = misfits.cost(rows, place), 0.03
    for _ in range(_ROUNDS):
        slopes = misfits.slopes(place)
        weights = [(FREEDOM + 1) / (FREEDOM + r * r) for r in rows]
        gained = 0.0
        for _ in range(3):
            step = _newton_step(misfits.names, place, rows, slopes, weights, damping)
            trial = [
                _inside(misfits.jobs, name, value + by)
                for name, value, by in zip(misfits.names, place, step, strict=True)
            ]
            found = misfits.at(trial, True)
            if (then := misfits.cost(found, trial)) < best:
                gained = best - then
                place, rows, best, damping = trial, found, then, damping / 3
                break
            damping *= 6
        if gained < 0.1:
            break
    return place, best


def _newton_step(
    names: Sequence[str], place: Sequence[float], rows: Sequence[float],
    slopes: Sequence[Sequence[float]], weights: Sequence[float], damping: float,
) -> list[float]:  # fmt: skip
    count = len(names)
    matrix = [[0.0] * count for _ in range(count)]
    right = [0.0] * count
    for i in range(count):
        tight = parameter_of(names[i]).width ** -2
        for j in range(i, count):
            both = sum(w * a * b for w, a, b in zip(weights, slopes[i], slopes[j], strict=True))
            matrix[i][j] = matrix[j][i] = both
        pulled = sum(w * a * r for w, a, r in zip(weights, slopes[i], rows, strict=True))
        right[i] = -pulled - tight * place[i]
        matrix[i][i] = (matrix[i][i] + tight) * (1.0 + damping)
    return _solve(matrix, right)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss's elimination; the matrix is positive definite."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for k in range(i + 1, size):
            share = rows[k][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[k][j] -= share * rows[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = rest / rows[i][i]
    return found


def parameter_of(name: str) -> Parameter:
    """By a name as in a fit, where it may be one device's."""
    name, _, device = name.partition("@")
    found = PARAMETERS[name]
    return replace(found, width=APART * found.width) if device else found


def _names(jobs: Sequence[Job]) -> list[str]:
    """All parameters, and those of each kind of device where there are several."""
    devices = sorted({job.machine.device.name for job in jobs})
    return [*PARAMETERS, *(f"{OF_A_DEVICE}@{d}" for d in devices if len(devices) > 1)]


def _get(job: Job, name: str) -> float:
    """0 where it is another device's."""
    name, _, device = name.partition("@")
    if device and device != job.machine.device.name:
        return 0.0
    value: Any = job if name.startswith("software.") else job.machine
    for part in name.split("."):
        value = getattr(value, part)
    return float(value)


def _room(jobs: Sequence[Job], name: str, logarithm: float) -> bool:
    return any(
        parameter_of(name).low < _get(job, name) * math.exp(logarithm) < parameter_of(name).high
        for job in jobs
    )


def _inside(jobs: Sequence[Job], name: str, logarithm: float) -> float:
    """The nearest at which some job's value is still inside the bounds; the others' are clipped."""
    values = [value for job in jobs if (value := _get(job, name)) > 0]
    parameter = parameter_of(name)
    high = max(math.log(parameter.high / value) for value in values)
    low = min(math.log(max(parameter.low, 1e-9) / value) for value in values)
    return min(max(logarithm, min(low, 0.0)), max(high, 0.0))


def changed(values: Mapping[str, float]) -> Change:
    """A change of jobs: parameters multiplied, each kept within its bounds, and facts as found."""
    machines: dict[Machine, Machine] = {}
    programs: dict[Software, Software] = {}

    def change(job: Job) -> Job:
        if job.machine not in machines:
            machines[job.machine] = job.machine.replace(**_multiplied(values, job, False))
        if job.software not in programs:
            programs[job.software] = replace(job.software, **_multiplied(values, job, True))
        recompute = job.recompute if values.get("recomputed", 1.0) else "none"
        return job.replace(
            machine=machines[job.machine], software=programs[job.software], recompute=recompute
        )

    return change


def _multiplied(values: Mapping[str, float], job: Job, software: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    bounds: dict[str, Parameter] = {}
    for name, factor in values.items():
        if name in FACTS or name.startswith("software.") != software:
            continue
        parameter, now = parameter_of(name), _get(job, name)
        if now > 0:
            field = name.partition("@")[0].removeprefix("software.")
            found[field] = found.get(field, now) * factor
            bounds[field] = parameter
    for field, parameter in bounds.items():
        found[field] = min(max(found[field], parameter.low), parameter.high)
    if software and not values.get("padded_vocab", 1.0):
        found["pads_vocab"] = False
    return found


def clear_caches() -> None:
    """Results are kept by machine, and calibration makes very many machines."""
    kernels.gemm_s.cache_clear()
    layer.layer_cost.cache_clear()
    layer.end_cost.cache_clear()
    own.own_layer.cache_clear()
    own.own_ends.cache_clear()
    schedule._play.cache_clear()
