"""A job of any size from one rank of it on the device at hand: what is computed is measured, what would be
sent is priced by the planner's network, and stages are played through their schedule.

Each rank runs in a process of its own (`rank.py`), one for each kind of place in a pipeline: the first, the
last, and those between that hold the same layers. Called by `ridgeline plan simulate`; imports without
torch.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from ridgeline.config import RunConfig
from ridgeline.errors import RunError, UsageError
from ridgeline.layout import Layout, check_available, require_layout
from ridgeline.plan.machine import Machine
from ridgeline.plan.network import Group, collective_s, exposed_s, point_to_point_s
from ridgeline.plan.recipe import predict_recipe
from ridgeline.plan.schedule import play
from ridgeline.plan.search import Planned
from ridgeline.scaling.measured import RankMeasured, Traffic

PARTS: Final = {
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "tiles": "exchange between tiles",
    "shards": "gathering weights",
    "gradients": "reducing gradients",
    "stages": "sends between stages",
    "other": "buffers and agreements",
}

_INSIDE: Final = ("tensor", "context", "tiles")
"""What is sent while a stage works on a microbatch."""


@dataclass(frozen=True)
class Part:
    """Communication of one kind in a step, as the planner's network has it."""

    name: str
    """A key of `PARTS`."""
    seconds: float
    exposed_s: float
    """What is not hidden behind computation; sends between stages are in the bubble instead."""
    num_bytes: int
    num_calls: int


@dataclass(frozen=True)
class Simulated:
    """One step of a job, put together."""

    layout: Layout
    machine: Machine
    world_size: int
    ranks: tuple[RankMeasured, ...]
    """One for each kind of place in the pipeline, by place; else one."""
    shown: RankMeasured
    """The rank that was asked for, or the one that holds most."""
    compute_s: float
    """Measured: of the busiest rank, nothing sent and nobody waited for."""
    parts: tuple[Part, ...]
    """Of the rank that communicates most."""
    bubble_s: float
    """Waiting in the pipeline, and what stages send."""
    predicted: Planned | None
    why_not: str
    """Why there is no prediction."""

    @property
    def step_s(self) -> float:
        return self.compute_s + self.bubble_s + sum(part.exposed_s for part in self.parts)


@dataclass(frozen=True)
class Asked:
    """Which job, and which rank of it."""

    layout: str
    world_size: int
    machine: Machine
    rank: int | None = None
    stage: int | None = None
    steps: int = 5
    device: str = "auto"


def simulate(config: RunConfig, asked: Asked) -> Simulated:
    """Run the ranks and put their step together."""
    layout = check_asked(asked)
    ranks = _measure_all(config, asked, layout)
    places = _by_place(ranks, layout)
    costs = [_parts(m, layout, asked.machine) for m in ranks]
    parts = max(costs, key=lambda found: sum(part.exposed_s for part in found))
    compute, bubble = ranks[0].step_s, 0.0
    if layout.pp > 1:
        compute, bubble, inside = _play(places, layout, asked.machine)
        parts = _with_schedule(parts, inside)
    from ridgeline.train.traced import trace_recipe

    predicted, why_not = None, ""
    try:
        predicted = predict_recipe(config, asked.machine, layout, trace_recipe)
    except UsageError as error:
        why_not = str(error)
    shown = max(ranks, key=lambda m: m.peak_bytes)
    if asked.rank is not None or asked.stage is not None:
        wanted = ranks[0].asked_stage if asked.stage is None else asked.stage
        shown = places[wanted]
    return Simulated(
        layout, asked.machine, asked.world_size, tuple(ranks), shown, compute, tuple(parts), bubble,
        predicted, why_not,
    )  # fmt: skip


def check_asked(asked: Asked) -> Layout:
    """The layout on the whole world; what cannot be simulated is said before anything starts."""
    layout = Layout.parse_for(asked.layout, asked.world_size, "--layout")
    require_layout(layout, "--layout")
    for finding in check_available(layout):
        raise UsageError(str(finding))
    if asked.rank is not None and asked.stage is not None:
        raise UsageError("--rank and --stage both name a rank; leave one of them out")
    if asked.rank is not None and asked.rank >= asked.world_size:
        raise UsageError(f"--rank {asked.rank} of {asked.world_size} ranks; they count from 0")
    if asked.stage is not None and asked.stage >= layout.pp:
        raise UsageError(f"--stage {asked.stage} of pp={layout.pp}; stages count from 0")
    if layout.compress != "none":
        raise UsageError(
            f"compress={layout.compress} in --layout computes with what other ranks send, and a simulated "
            "rank gets nothing; leave compress out"
        )
    if layout.ep > 1:
        raise UsageError(
            f"ep={layout.ep} in --layout computes with tokens that other ranks send, and a simulated rank "
            "gets none; leave ep out, and see `ridgeline plan --explain` for what it costs"
        )
    if layout.precision == "fp16":
        raise UsageError(
            "precision=fp16 in --layout leaves a step out where a gradient is no number, and a simulated "
            "rank's are none; use precision=bf16, which takes as much time and memory"
        )
    return layout


def _measure_all(config: RunConfig, asked: Asked, layout: Layout) -> list[RankMeasured]:
    """A rank of each kind; the first one measures the blocks that the others cut the model by."""
    from ridgeline.scaling.request import RankRequest, for_one_rank

    request = RankRequest(
        config=for_one_rank(config, _stated(layout), asked.device),
        world_size=asked.world_size,
        devices_per_node=asked.machine.reach_of(asked.world_size),
        rank=asked.rank or 0,
        stage=0 if layout.pp > 1 else None,
        steps=asked.steps,
    )
    first = run_rank(request)
    if layout.pp == 1:
        return [first]
    wanted = first.asked_stage if asked.stage is None else asked.stage
    if asked.rank is None and asked.stage is None:
        wanted = 0
    chosen: dict[str, int] = {first.stage_kinds[wanted]: wanted}
    for place, kind in enumerate(first.stage_kinds):
        chosen.setdefault(kind, place)
    found = [first] if first.stage in chosen.values() else []
    for place in sorted(chosen.values()):
        if place != first.stage:
            again = dataclasses.replace(request, stage=place, block_costs=first.block_costs)
            found.append(run_rank(again))
    return sorted(found, key=lambda m: m.stage)


def run_rank(request: Any) -> RankMeasured:
    """One rank in a process of its own, so that its fake group goes with it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(request, theirs))
    process.start()
    theirs.close()
    try:
        kind, value = ours.recv()
    except EOFError:
        process.join()
        raise RunError(
            f"the simulated rank {request.rank} ended without a word (exit code {process.exitcode}); it "
            "may have used up the host's memory"
        ) from None
    except BaseException:
        process.terminate()
        raise
    finally:
        process.join()
    if kind == "usage":
        raise UsageError(value)
    if kind == "failed":
        raise RunError(value)
    measured: RankMeasured = value
    return measured


def _serve(request: Any, pipe: Connection) -> None:
    """The process of one rank."""
    from ridgeline.scaling.rank import measure_rank
    from ridgeline.train.memory import is_out_of_memory

    try:
        answer: tuple[str, Any] = ("measured", measure_rank(request))
    except UsageError as error:
        answer = ("usage", str(error))
    except RunError as error:
        answer = ("failed", str(error))
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        where = f"a rank of {request.config.layout} on {request.world_size} ranks"
        if is_out_of_memory(error):
            answer = ("failed", f"{where} does not fit on this device: {line}")
        else:
            traceback.print_exc()
            answer = ("failed", f"{where} cannot be simulated: {type(error).__name__}: {line}")
    pipe.send(answer)
    pipe.close()


def _stated(layout: Layout) -> str:
    text = str(layout)
    return text if text.startswith("dp=") else f"dp={layout.dp},{text}"


def _by_place(ranks: Sequence[RankMeasured], layout: Layout) -> list[RankMeasured]:
    """The rank that stands for each place of the pipeline."""
    if layout.pp == 1:
        return [ranks[0]]
    kinds = ranks[0].stage_kinds
    known = {kinds[m.stage]: m for m in ranks}
    return [known[kind] for kind in kinds]


def _seconds(traffic: Traffic, machine: Machine) -> float:
    """One call of it."""
    crosses = traffic.per_node < traffic.size
    if traffic.kind == "send":
        return point_to_point_s(machine, traffic.num_bytes, crosses)
    group = Group(traffic.size, traffic.per_node)
    return collective_s(machine, traffic.kind, traffic.num_bytes, group)


def _parts(m: RankMeasured, layout: Layout, machine: Machine) -> list[Part]:
    """A rank's communication by part. What runs beside computation costs what is longer than that, and at
    least its share of `overlap_cost`."""
    sums = {name: [0.0, 0.0, 0, 0] for name in PARTS}
    for traffic in m.traffic:
        seconds = traffic.num_calls * _seconds(traffic, machine)
        row = sums[traffic.part]
        row[0] += seconds
        row[1] += 0.0 if traffic.beside else seconds
        row[2] += traffic.num_calls * traffic.num_bytes
        row[3] += traffic.num_calls
    beside = sum(row[0] - row[1] for row in sums.values())
    room = m.backward_s
    if layout.zero >= 2 or layout.cp > 1 or layout.pp > 1:
        room = m.step_s - m.optimizer_s  # every microbatch sends
    share = exposed_s(machine, beside, room) / beside if beside else 0.0
    return [
        Part(name, row[0], row[1] + share * (row[0] - row[1]), int(row[2]), int(row[3]))
        for name, row in sums.items()
        if row[3]
    ]


def _with_schedule(parts: list[Part], inside_s: float) -> list[Part]:
    """In a pipeline, what a microbatch sends inside a stage costs what the schedule makes of it."""
    inside = [part for part in parts if part.name in _INSIDE]
    total = sum(part.seconds for part in inside)
    found = []
    for part in parts:
        exposed = part.exposed_s
        if part in inside:
            exposed = inside_s * part.seconds / total if total else 0.0
        found.append(dataclasses.replace(part, exposed_s=0.0 if part.name == "stages" else exposed))
    return found


def _play(
    places: list[RankMeasured], layout: Layout, machine: Machine
) -> tuple[float, float, float]:
    """Computation of the busiest rank; what the schedule and its sends add; and what communication inside
    the stages adds to both."""
    own = [
        layout.microbatches * sum((*m.forward_s, *m.backward_chunk_s, *m.weight_s)) for m in places
    ]
    rest = max(max(m.step_s - s, m.optimizer_s) for m, s in zip(places, own, strict=True))
    inside = [
        sum(t.num_calls * _seconds(t, machine) for t in m.traffic if t.part in _INSIDE)
        for m in places
    ]
    send = [
        max((_seconds(t, machine) for t in m.traffic if t.part == "stages"), default=0.0)
        for m in places
    ]
    alone = _played_s(places, [1.0] * len(places), send, layout)
    grown = [1.0 + extra / s if s else 1.0 for extra, s in zip(inside, own, strict=True)]
    return max(own) + rest, alone - max(own), _played_s(places, grown, send, layout) - alone


def _played_s(
    places: list[RankMeasured], grown: list[float], send: list[float], layout: Layout
) -> float:
    """Seconds of the schedule with each place's measured times, some of them longer by a factor."""
    split = layout.schedule == "zerobubble"
    forward, backward, weights = [], [], []
    for m, factor in zip(places, grown, strict=True):
        late = list(m.weight_s) or [0.0] * len(m.forward_s)
        early = [b if split else b + w for b, w in zip(m.backward_chunk_s, late, strict=True)]
        forward.append([factor * s for s in m.forward_s])
        backward.append([factor * s for s in early])
        weights.append([factor * s for s in late])
    played = play(
        layout.schedule, layout.microbatches, forward, backward, send, weights if split else None
    )
    return played.seconds
