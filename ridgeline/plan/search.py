"""All layouts that the composition table allows for so many devices, and the best of them.

Pruning is sound: a layout is dropped without being played only when its weights alone do not fit, or when
a bound that no schedule can beat is already worse than the worst of the best found. What a model is, a
transformer's sizes or a traced module's facts, is `kinds.py`'s affair. Called by `cli_plan.py`; one core
looks through the layouts of 16,384 devices in seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.layout import Layout, check_available, check_layout
from ridgeline.plan.beside import loader_s, with_offload
from ridgeline.plan.kinds import AnyJob, Choices, Model, divisors, kind_of
from ridgeline.plan.machine import Machine
from ridgeline.plan.memory import StepMemory, fits, host_room
from ridgeline.plan.predict import predict, pressure
from ridgeline.plan.software import Software, own_program
from ridgeline.plan.time import StepTime

ORDERS = ("time", "memory", "cost")
TIE = 0.005
"""Layouts whose times differ by less are as good as each other for all the planner knows: the simplest of
them is the first."""
Candidate = tuple[float, float, int, Layout, AnyJob, StepMemory]
"""A bound of its time, the same without waiting for samples, its number, and what it is."""
Wanted = Callable[[Layout], bool]


@dataclass(frozen=True)
class Planned:
    """A layout with what it takes."""

    layout: Layout
    job: AnyJob
    time: StepTime
    memory: StepMemory

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def tokens_per_s(self) -> float:
        """Or samples: what the job's `unit` is."""
        return self.job.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Share of the devices' peak that the model's own FLOPs are, attention counted causally."""
        job = self.job
        peak = job.machine.device.peak_flops.get(job.precision, 0.0)
        flops = kind_of(job.model).flops(job)
        return flops / self.seconds / job.devices / peak if peak else 0.0

    def days(self, tokens: float) -> float:
        return tokens / self.tokens_per_s / 86_400

    def cost(self, tokens: float) -> float:
        """Of so many tokens, in what `price_per_device_hour` is in."""
        hours = tokens / self.tokens_per_s / 3600
        return hours * self.job.devices * self.job.machine.price_per_device_hour


@dataclass(frozen=True)
class Found:
    """What a search saw."""

    best: list[Planned]
    looked_at: int
    too_large: int
    """Layouts that do not fit."""
    played: int
    """Layouts that were predicted in full."""
    closest: tuple[Layout, float] | None
    """Where nothing fits: the layout that needs least, and its bytes."""


@dataclass(frozen=True)
class Looked:
    """What fits, by a bound of its time."""

    candidates: list[Candidate]
    looked_at: int
    too_large: int
    closest: tuple[Layout, float] | None

    def found(self, best: list[Planned], played: int) -> Found:
        closest = None if best else self.closest
        return Found(best, self.looked_at, self.too_large, played, closest)


def layouts(
    model: Model,
    machine: Machine,
    devices: int,
    batch: int,
    precision: str,
    said: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Layout, int]]:
    """Every layout worth a thought, with the samples of a microbatch; those that the table refuses are
    left out. `said`: fields that are not to be chosen, as `compile`."""
    choices = kind_of(model).choices(model, machine)
    sizes = [(tp, cp, tiles) for tp in choices.tp for cp in choices.cp for tiles in choices.spatial]
    for tp, cp, tiles in sizes:
        inner = tp * cp * tiles[0] * tiles[1]
        for pp in divisors(devices // inner) if devices % inner == 0 else []:
            if pp > choices.most_stages:
                break
            dp = devices // (inner * pp)
            if dp > batch or batch % dp:
                continue
            base: dict[str, Any] = {
                "dp": dp, "tp": tp, "cp": cp, "pp": pp, "spatial": tiles, "precision": precision,
                **(said or {}),
            }  # fmt: skip
            for ep in choices.ep if inner == 1 else (1,):
                if dp % ep == 0:
                    yield from _of_sizes(choices, {"ep": ep, **base}, batch // dp)


def _of_sizes(
    choices: Choices, sizes: dict[str, Any], per_replica: int
) -> Iterator[tuple[Layout, int]]:
    pp = sizes["pp"]
    for samples in divisors(per_replica):
        count = per_replica // samples
        for zero in (0, 1, 2, 3) if sizes["dp"] > 1 else (0,):
            for recompute in ("none", "selective", "full"):
                for sp in (True, False) if sizes["tp"] > 1 else (False,):
                    base = {**sizes, "zero": zero, "sp": sp, "recompute": recompute}
                    if pp == 1:
                        yield from _allowed(Layout(**base, accumulate=count), samples)
                        continue
                    for schedule, virtual in _schedules(choices, pp, count):
                        layout = Layout(
                            **base, schedule=schedule, microbatches=count, virtual=virtual
                        )
                        yield from _allowed(layout, samples)


def _schedules(choices: Choices, pp: int, count: int) -> Iterator[tuple[str, int]]:
    yield ("1f1b" if count >= pp else "gpipe"), 1
    if count % pp == 0:
        for virtual in (2, 4, 8):
            if choices.most_stages >= pp * virtual:
                yield "interleaved", virtual
        yield "zerobubble", 1


_KNOWN: dict[tuple[object, ...], bool] = {}
"""Whether the table allows a combination of techniques; sizes beyond 1 do not change that."""


def _allowed(layout: Layout, samples: int) -> Iterator[tuple[Layout, int]]:
    key = (
        layout.dp > 1, layout.tp > 1, layout.cp > 1, layout.pp > 1, layout.zero, layout.sp,
        layout.schedule, layout.recompute, layout.precision, layout.virtual > 1,
        layout.accumulate > 1, layout.spatial != (1, 1), layout.compile, layout.graphs, layout.sync,
        layout.compress, layout.offload, layout.shard and (layout.shard, layout.dp, layout.ep),
        layout.ep > 1,
    )  # fmt: skip
    if key not in _KNOWN:
        _KNOWN[key] = not check_layout(layout) and not check_available(layout)
    if _KNOWN[key]:
        yield layout, samples


def search(
    model: Model,
    machine: Machine,
    devices: int,
    batch: int,
    precision: str = "bf16",
    top: int = 10,
    by: str = "time",
    software: Software | None = None,
    sample_bytes: float = 0.0,
    said: Mapping[str, Any] | None = None,
    wanted: Wanted | None = None,
) -> Found:
    """The best layouts of a global batch on so many devices, by this library as the machine's profile knows
    it, or by another program; `said`: fields of a layout that are not to be chosen; `wanted`: which layouts
    may be. State goes to the host only where nothing fits without: it is never the faster way."""
    looked = look(
        model, machine, devices, batch, precision, software, sample_bytes, said, wanted
    )  # fmt: skip
    return choose(looked, top, by)


def look(
    model: Model,
    machine: Machine,
    devices: int,
    batch: int,
    precision: str,
    software: Software | None = None,
    sample_bytes: float = 0.0,
    said: Mapping[str, Any] | None = None,
    wanted: Wanted | None = None,
) -> Looked:
    """What fits, none of it played yet."""
    kind = kind_of(model)
    plain = [layout for layout, _ in layouts(model, machine, devices, batch, precision, said)]
    if wanted is not None:
        plain = [layout for layout in plain if wanted(layout)]
    given = (model, machine, batch, software or own_program(machine), sample_bytes)
    candidates, too_large, closest = _that_fit(plain, *given)
    looked_at = len(plain)
    if not candidates and kind.offloads and "offload" not in (said or {}):
        more = [other for layout in plain for other in with_offload(layout)]
        if wanted is not None:
            more = [layout for layout in more if wanted(layout)]
        candidates, still, nearer = _that_fit(more, *given)
        looked_at, too_large = looked_at + len(more), too_large + still
        closest = min((c for c in (closest, nearer) if c), key=lambda c: c[1], default=None)
    candidates.sort(key=lambda c: c[:3])
    return Looked(candidates, looked_at, too_large, closest)


def choose(looked: Looked, top: int, by: str = "time") -> Found:
    """The best of what fits."""
    if by == "memory":
        chosen = heapq.nsmallest(top, looked.candidates, key=lambda c: c[5].device)
        best = [Planned(c[3], c[4], predict(c[4], c[5]).time, c[5]) for c in chosen]
        return looked.found(best, len(best))
    found: list[Planned] = []
    played = 0
    for bound, own, _, layout, job, memory in looked.candidates:
        if len(found) >= top:
            last = found[top - 1]
            waits = last.time.storage > 0.0 and own >= last.seconds - last.time.storage
            if waits or bound >= last.seconds * (1.0 + TIE):
                break
        found.append(Planned(layout, job, predict(job, memory).time, memory))
        found.sort(key=lambda p: (p.seconds, p.seconds - p.time.storage))
        played += 1
    return looked.found(ranked(found)[:top], played)


def ranked(found: list[Planned]) -> list[Planned]:
    """By time, but the simplest of those that tie with the first comes first."""
    tied = [p for p in found if p.seconds <= found[0].seconds * (1.0 + TIE)]
    simplest = min(tied, key=lambda p: techniques_of(p.layout), default=None)
    return sorted(found, key=lambda p: p is not simplest)


def techniques_of(layout: Layout) -> tuple[int, int]:
    """How much has to work together: axes beside replicas, and what else is not plain."""
    sizes = (layout.tp, layout.cp, layout.pp, layout.ep)
    axes = sum(size > 1 for size in sizes) + (layout.spatial != (1, 1))
    rest = (
        layout.zero
        + (layout.recompute != "none")
        + (layout.virtual > 1)
        + (layout.offload != "none")
    )
    return axes, rest + (layout.schedule == "zerobubble")


def _that_fit(
    tried: list[Layout],
    model: Model,
    machine: Machine,
    batch: int,
    software: Software,
    sample_bytes: float,
) -> tuple[list[Candidate], int, tuple[Layout, float] | None]:
    """Those that the device has room for, with a bound of their time; how many it has not, and the one of
    these that needs least."""
    kind, room = kind_of(model), machine.device.memory_bytes
    candidates: list[Candidate] = []
    too_large = 0
    closest: tuple[Layout, float] | None = None
    full: set[tuple[object, ...]] = set()
    """What was too large with fewer samples at a time."""
    for number, layout in enumerate(tried):
        alike = _but_for_samples(layout)
        if alike in full:
            too_large += 1
            continue
        job = kind.arrange(model, machine, layout, batch, software)
        if sample_bytes:
            job = replace(job, sample_bytes=sample_bytes)
        if layout.offload == "none" and kind.least_bytes(job) > room:
            too_large += 1
            continue
        memory = kind.memory(job)
        if not fits(job, memory):
            too_large += 1
            near = closest is None or memory.device < closest[1]
            if near and memory.host <= host_room(machine):
                closest = (layout, memory.device)
            full.add(alike)
            continue
        own = kind.bound_s(job) * (1.0 + pressure(job, memory))
        candidates.append((max(own, loader_s(job)), own, number, layout, job, memory))
    return candidates, too_large, closest


def _but_for_samples(layout: Layout) -> tuple[object, ...]:
    """Of layouts that are alike in this, those with more samples at a time never take less memory: fewer
    microbatches are in flight then, of as many samples in all or more. Whether gradients are added up over
    several of them is a part of it."""
    several = layout.accumulate > 1 or layout.microbatches > 1
    return (
        layout.dp, layout.tp, layout.cp, layout.pp, layout.ep, layout.spatial, layout.zero, layout.sp,
        layout.schedule, layout.virtual, layout.recompute, layout.offload, several,
    )  # fmt: skip


def scale(
    model: Model, machine: Machine, nodes: list[int], batch: int, precision: str, weak: bool,
    software: Software | None = None, sample_bytes: float = 0.0, said: Mapping[str, Any] | None = None,
) -> list[tuple[int, Planned | None]]:  # fmt: skip
    """The best layout on each number of nodes: of one batch (strong), or of a batch that grows with
    the nodes (weak)."""
    rows = []
    for count in nodes:
        size = batch * count // nodes[0] if weak else batch
        found = search(
            model,
            machine,
            count * machine.devices_per_node,
            size,
            precision,
            1,
            "time",
            software,
            sample_bytes,
            said,
        )
        rows.append((count, found.best[0] if found.best else None))
    return rows
