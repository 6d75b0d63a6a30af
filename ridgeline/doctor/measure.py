"""Measure a training: `measure(config, env)` builds one, watches some tens of steps and explains them.

The training is a recipe's, built as `ridgeline train` builds it, but nothing is written and its weights are
nobody's; a training that is somebody's (`measure_training`) gets its state back afterwards. Called by
`worker.py` on every rank of `ridgeline doctor`, and by tests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.config import RunConfig
from ridgeline.data.batch import Batch
from ridgeline.data.feed import Moving
from ridgeline.doctor.measured import (
    CLASSES,
    ClassTime,
    Measured,
    Memory,
    Missed,
    RankTime,
    Stall,
    pipelined,
    quartile_spread,
)
from ridgeline.doctor.probe import Probe, Watched
from ridgeline.doctor.seen import SeenScript, as_computed
from ridgeline.doctor.shapes import MULTIPLES, Used, find_cliffs, names_by_shape, parameters_of
from ridgeline.doctor.timeline import look_at_memory, take_apart
from ridgeline.doctor.trace import Allocations, Taken
from ridgeline.launch.env import RankEnv
from ridgeline.layout import Layout
from ridgeline.machine.compute import device_name, measure_compute
from ridgeline.machine.record import read_compute
from ridgeline.machine.roofline import ComputeFacts
from ridgeline.parallel.mesh import close_mesh
from ridgeline.train.checks import count_parts
from ridgeline.train.clock import Pending
from ridgeline.train.loop import train_loop
from ridgeline.train.setup import Training, build_training

OP_OVERHEAD_S = 3e-6
"""What an op costs on a CPU before it computes, where nothing was measured."""

Timeline = list[tuple[float, float, str, float]]


@dataclass(frozen=True)
class Options:
    """How to look."""

    steps: int = 30
    nvtx: bool = False
    machine: Path | None = None
    """A machine.json; without one the device is measured quickly."""
    keep_trace: Path | None = None
    climbs: bool = False
    """Whether remedies are to be tried afterwards, so that a script has to have a job."""


@dataclass(frozen=True)
class Facts:
    """What is known of a training beside its steps."""

    source: str
    batch: int = 0
    layout: Layout = field(default_factory=Layout)
    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    vocabulary: int | None = None
    notes: tuple[str, ...] = ()
    script: SeenScript | None = None
    bubble_s: float = 0.0
    """Waiting for other stages of a pipeline, of each step."""
    place: tuple[int, int] | None = None
    """Rank and number of ranks, of one that may have left its group by the end."""


@dataclass(frozen=True)
class Seen:
    """One rank's measurement, and what its pictures need beside it."""

    measured: Measured
    timeline: Timeline
    script: SeenScript | None = None
    """What a script of the user's own was seen to do."""


def measure(config: RunConfig, env: RankEnv, options: Options = Options()) -> Seen:  # noqa: B008
    """A recipe, on every rank; each gets its own measurement, with the times of all in it."""
    training = build_training(config, env)
    try:
        roofline = find_roofline(training.mesh.device, options.machine)
        return _measure(training, options, roofline)
    finally:
        training.close_loaders()
        training.staging.release()
        close_mesh(training.mesh)


def measure_training(training: Training, steps: int = 30, machine: Path | None = None) -> Measured:
    """A training that goes on afterwards: its weights, optimizer and generators are put back."""
    options = Options(steps=steps, machine=machine)
    roofline = find_roofline(training.mesh.device, machine)
    with state_kept(training):
        return _measure(training, options, roofline).measured


def _measure(training: Training, options: Options, roofline: ComputeFacts | None) -> Seen:
    device, config, layout = training.mesh.device, training.config, training.mesh.layout
    probe = Probe(device, options.steps, nvtx=options.nvtx, keep_trace=options.keep_trace)
    watched_training = replace(
        training,
        feed=_watch_feed(training, probe),
        update=_watch_update(training, probe),
        num_steps=probe.num_steps,
    )
    steps = train_loop(watched_training)
    bubbles = []
    try:
        for result in steps:
            if layout.pp > 1 and probe.is_timing:
                bubbles.append(result.times)
            if probe.step_done():
                break
    except BaseException:
        steps.close()
        probe.close()
        raise
    steps.close()
    watched = probe.finish()
    vocabulary = config.model.args.get("vocab")
    facts = Facts(
        source=f"recipe {config.name}",
        batch=config.train.batch // layout.dp,
        layout=layout,
        model=training.model,
        optimizer=training.optimizer,
        vocabulary=vocabulary if isinstance(vocabulary, int) else None,
        bubble_s=_median_part(bubbles, "bubble_s"),
        notes=tell_unheeded(options, device),
    )
    return explain(probe, watched, facts, roofline)


def _median_part(steps: Sequence[Pending], part: str) -> float:
    """Of steps that are over: the profiler has waited for the device since."""
    return statistics.median(step.read().get(part, 0.0) for step in steps) if steps else 0.0


def _watch_feed(training: Training, probe: Probe) -> Any:
    def feed(batches: Iterator[Batch]) -> Iterator[Moving]:
        moving = iter(training.feed(batches))
        while True:
            with probe.waiting_for_data():
                one = next(moving, None)
            if one is None:
                return
            yield one

    return feed


def _watch_update(training: Training, probe: Probe) -> Any:
    def update() -> Tensor | None:
        with probe.updating():
            return training.update()

    return update


def find_roofline(device: torch.device, machine: Path | None) -> ComputeFacts | None:
    """From a machine.json where it has this device, else a quick measurement."""
    if machine is not None:
        found = read_compute(machine, "", device.type, device_name(device))
        if found is not None:
            return found
    return measure_compute(device, quick=True)


def tell_unheeded(options: Options, device: torch.device) -> tuple[str, ...]:
    """What was asked for and could not be done on this device."""
    lines, name = [], device_name(device)
    machine = options.machine
    if machine is not None and read_compute(machine, "", device.type, name) is None:
        lines.append(
            f"{machine} of --machine has no figures of {name}, which was measured quickly instead: "
            f"`ridgeline machine compute --device {device.type} --out {machine}` adds them"
        )
    if options.nvtx and device.type != "cuda":
        lines.append(f"--nvtx marked nothing: its ranges are CUDA's, and this ran on {name}")
    return tuple(lines)


@contextmanager
def state_kept(training: Training) -> Iterator[None]:
    """Weights, buffers, optimizer state and generators as they were, whatever is done inside."""
    tensors = [t for part in training.arranged.parts for t in (*part.parameters(), *part.buffers())]
    values = [_local(t).detach().clone() for t in tensors]
    gradients = [None if t.grad is None else t.grad.detach().clone() for t in tensors]
    state = {
        key: {name: v.clone() if isinstance(v, Tensor) else v for name, v in row.items()}
        for key, row in training.optimizer.state.items()
    }
    groups = [
        {**group, "params": list(group["params"])} for group in training.optimizer.param_groups
    ]
    cuda = training.mesh.device.type == "cuda"
    generators = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value, gradient in zip(tensors, values, gradients, strict=True):
                _local(tensor).copy_(value)
                tensor.grad = gradient
        training.optimizer.state.clear()
        training.optimizer.state.update(state)
        for group, before in zip(training.optimizer.param_groups, groups, strict=True):
            group.update(before)
        torch.set_rng_state(generators[0])
        if generators[1] is not None:
            torch.cuda.set_rng_state(generators[1])


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def explain(probe: Probe, watched: Watched, facts: Facts, roofline: ComputeFacts | None) -> Seen:
    """From what was seen to what it means: seconds of one step, by part and by class."""
    device = probe.device
    rank, ranks = facts.place or find_place()
    overhead = roofline.launch_s if roofline is not None and roofline.launch_s else OP_OVERHEAD_S
    taken = take_apart(watched.trace, overhead, ranks)
    count, step_s = taken.num_steps, watched.step_s
    parts = fit_parts(taken, count, step_s)
    scale = parts["compute_s"] / max(sum(c.seconds for c in taken.classes.values()) / count, 1e-12)
    cuda = device.type == "cuda"
    names = names_by_shape(facts.model.named_parameters()) if facts.model is not None else {}
    # Nothing is left for kernels where every op is shorter than what one costs before it computes.
    per_step = count / scale if scale else math.inf
    missed, odd, odd_s = _products(taken, names, facts.vocabulary, cuda, per_step)
    longest = max(taken.products, key=lambda key: taken.products[key], default=None)
    window_s = taken.window_s / count
    allocations = look_at_memory(watched.memory_trace)
    measured = Measured(
        source=facts.source,
        device_kind=device.type,
        device_name=device_name(device),
        step_s=step_s,
        rank=rank,
        num_ranks=ranks,
        num_steps=len(watched.step_times),
        num_profiled=count,
        spread=quartile_spread(watched.step_times),
        overhead=max(window_s / step_s - 1, 0.0) if step_s else 0.0,
        batch=facts.batch,
        microbatches=count_parts(facts.layout),
        **parts,
        comm_hidden_s=taken.comm_hidden_s / count,
        classes=_classes(taken, count, scale, cuda),
        stalls=_stalls(taken, count, parts["host_s"], watched),
        reading=_reading(watched, parts["data_s"]),
        data_busy=watched.data_busy,
        launch_in=_share_out(taken.launch_in, parts["launch_s"]),
        num_launches=taken.num_launches / count,
        num_optimizer_launches=taken.num_optimizer_launches / count,
        num_syncs=taken.num_syncs / count,
        h2d_bytes=taken.h2d_bytes / count,
        h2d_pageable=taken.h2d_pageable_bytes / taken.h2d_bytes if taken.h2d_bytes else 0.0,
        tensor_core_share=_tensor_core_share(taken, device),
        missed=missed,
        odd=odd,
        odd_share=odd_s / step_s if step_s else 0.0,
        smallest_side=min(longest[0][-3:]) if longest is not None else 0,
        memory=_memory(watched, allocations, facts, device, taken.retry_s / count),
        roofline=roofline,
        power=watched.power,
        pipeline=pipelined(facts.layout, min(facts.bubble_s, parts["comm_exposed_s"])),
        notes=facts.notes,
    )
    measured = replace(measured, ranks=_gather_ranks(measured))
    script = as_computed(facts.script, measured) if facts.script is not None else None
    return Seen(measured, allocations.timeline, script)


def fit_parts(taken: Taken, count: int, step_s: float) -> dict[str, float]:
    """The parts of the profiled steps, fitted to those without the profiler.

    What the profiler adds lies before and between the ops, so it is taken from the launch gaps first.
    """
    parts = {
        "data_s": taken.data_s,
        "h2d_s": taken.h2d_s,
        "compute_s": sum(c.seconds for c in taken.classes.values()),
        "comm_exposed_s": taken.comm_exposed_s,
        "host_s": taken.host_s,
        "launch_s": taken.launch_s,
    }
    parts = {name: seconds / count for name, seconds in parts.items()}
    excess = max(sum(parts.values()) - step_s, 0.0)
    parts["launch_s"] -= min(parts["launch_s"], excess)
    total = sum(parts.values())
    if total > step_s:
        parts = {name: seconds * step_s / total for name, seconds in parts.items()}
    parts["other_s"] = max(step_s - sum(parts.values()), 0.0)
    return parts


def _classes(taken: Taken, count: int, scale: float, cuda: bool) -> tuple[ClassTime, ...]:
    rows = []
    tf32 = cuda and torch.get_float32_matmul_precision() != "highest"
    for name in CLASSES:
        cost = taken.classes[name]
        if not cost.num:
            continue
        precision = "tf32" if cost.precision == "fp32" and tf32 and cost.flops else cost.precision
        rows.append(
            ClassTime(
                name=name,
                seconds=cost.seconds / count * scale,
                num=round(cost.num / count),
                flops=cost.flops / count,
                bytes=cost.bytes / count,
                precision=precision,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _stalls(taken: Taken, count: int, host_s: float, watched: Watched) -> tuple[Stall, ...]:
    """By line; a wait too short to be seen there is the doing of the line that torch warned of most."""
    total = sum(seconds for seconds, _ in taken.stalls.values()) or 1.0
    rows: dict[tuple[str, str, str], list[float]] = {}
    for (where, what, code), (seconds, times) in taken.stalls.items():
        if watched.sync_places and what != "Python":
            known = [place for place, _ in watched.sync_places]
            where, code = (where, code) if (where, code) in known else known[0]
        row = rows.setdefault((where, what, code), [0.0, 0.0])
        row[0] += seconds
        row[1] += times
    stalls = [
        Stall(where or "a line too quick to be seen", s / total * host_s, n / count, what, code)
        for (where, what, code), (s, n) in rows.items()
    ]
    return tuple(sorted(stalls, key=lambda stall: -stall.seconds)[:8])


def _reading(watched: Watched, data_s: float) -> tuple[Stall, ...]:
    total = sum(ticks for _, ticks in watched.reading) or 1
    return tuple(
        Stall(where, data_s * ticks / total, 0.0, "loader", code)
        for (where, code), ticks in watched.reading
    )


def _share_out(parts: dict[str, float], total: float) -> dict[str, float]:
    known = sum(parts.values())
    return {name: total * s / known for name, s in parts.items()} if known else {}


def _tensor_core_share(taken: Taken, device: torch.device) -> float | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (7, 0):
        return None
    return taken.tensor_core_s / taken.tensor_able_s if taken.tensor_able_s else None


def _products(
    taken: Taken,
    names: dict[tuple[int, ...], tuple[str, ...]],
    vocabulary: int | None,
    cuda: bool,
    count: float,
) -> tuple[tuple[Missed, ...], tuple[str, ...], float]:
    """Products beside the tensor cores with the reason; odd dimensions; the time of products with one."""
    missed, odd, odd_s = [], {}, 0.0
    if not cuda:
        return (), (), 0.0
    for (sizes, precision, on), seconds in sorted(taken.products.items(), key=lambda kv: -kv[1]):
        layers = parameters_of(sizes, names)
        used = Used("matrix" if len(sizes) == 3 else "batched", sizes, 1, layers)
        needed = precision if precision in MULTIPLES else "fp32"
        cliffs = [
            c for c in find_cliffs(used, needed, vocabulary) if c.size % MULTIPLES[needed]
        ]  # fmt: skip
        if cliffs:
            odd_s += seconds / count
            for cliff in cliffs:
                odd[f"{cliff.reason} ({', '.join(layers[:2])})".replace(" ()", "")] = None
        if not on:
            missed.append(Missed(sizes, seconds / count, _why(precision, sizes, cliffs), layers))
    return tuple(missed[:8]), tuple(odd)[:8], odd_s


def _why(precision: str, sizes: tuple[int, ...], cliffs: list[Any]) -> str:
    if precision in ("fp32", ""):
        if torch.get_float32_matmul_precision() == "highest":
            return "fp32 without TF32 (precision=tf32 or bf16 puts it there)"
        return "fp32"
    if precision == "fp64":
        return "fp64"
    if cliffs:
        return cliffs[0].reason
    if min(sizes[-3:]) == 1:
        return "a product of a matrix and a vector"
    return "the library chose another kernel for this shape"


def _memory(
    watched: Watched, allocations: Allocations, facts: Facts, device: torch.device, retry_s: float
) -> Memory:
    weights = gradients = state = 0.0
    if facts.optimizer is not None:
        held = [p for group in facts.optimizer.param_groups for p in group["params"]]
        weights = float(sum(_bytes(p) for p in held))
        gradients = float(sum(_bytes(p) for p in held if p.requires_grad))
        state = float(
            sum(
                _bytes(v)
                for row in facts.optimizer.state.values()
                for v in row.values()
                if isinstance(v, Tensor)
            )
        )
    if device.type == "cuda":
        capacity = float(torch.cuda.get_device_properties(device).total_memory)
        peak, reserved = watched.peak_bytes, watched.reserved_bytes
    else:
        capacity = float(psutil.virtual_memory().total)
        peak = reserved = float(psutil.Process().memory_info().rss)
    return Memory(
        capacity_bytes=capacity,
        peak_bytes=peak,
        reserved_bytes=reserved,
        weights_bytes=weights,
        gradients_bytes=gradients,
        optimizer_bytes=state,
        largest_bytes=allocations.largest_bytes,
        largest_what=allocations.largest_what,
        num_retries=watched.num_retries,
        retry_s=retry_s if watched.num_retries else 0.0,
    )


def _bytes(tensor: Tensor) -> int:
    local = _local(tensor)
    return local.numel() * local.element_size()


def find_place() -> tuple[int, int]:
    """Rank, and number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _gather_ranks(mine: Measured) -> tuple[RankTime, ...]:
    own = RankTime(mine.rank, mine.step_s, mine.data_s, mine.comm_exposed_s)
    if mine.num_ranks == 1:
        return (own,)
    if not dist.is_initialized():
        return ()  # `read_answers` puts them together
    everyone: list[RankTime | None] = [None] * mine.num_ranks
    dist.all_gather_object(everyone, own)
    return tuple(one for one in everyone if one is not None)
