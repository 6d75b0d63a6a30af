"""A trace taken apart: where the time of the device and of the host went, and what memory held.

On CUDA the device's timeline is cut: kernels by class, communication that is alone, copies that are alone,
and gaps, each blamed on what the host was doing when it should have launched the next kernel. On a CPU the
main thread's timeline is cut likewise, since it is the device. Called by `measure.py`; without torch.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.doctor.kernels import (
    COMMUNICATION,
    FREE,
    class_of_kernel,
    class_of_op,
    on_tensor_cores,
    op_cost,
    product_of,
)
from ridgeline.doctor.measured import ATTENTION, CONVOLUTION, MATRIX, OPTIMIZER
from ridgeline.doctor.trace import (
    Allocations,
    Op,
    Sample,
    Span,
    Taken,
    Trace,
    clip,
    length,
    overlap,
    subtract,
    union,
)

SHORT_US = 200.0
"""A pause of the host shorter than this is one of many between two launches; a longer one has a cause."""
_UNUSUAL = 1.25
"""A step of so many times the median's length is left out where the host computes."""
_ENOUGH, _LONG = 8, 5.0
"""Among so many ops alike, one that takes so many times the median is another process's doing."""
_SYNC_REACH_US = 60.0
"""A gap on the device that begins so soon after the host waited for it is that wait's doing."""
_SYNCS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize",
    "hipDeviceSynchronize", "hipEventSynchronize", "cudaMemcpy", "cuStreamSynchronize",
)  # fmt: skip
_ALLOCATIONS = ("cudaMalloc", "cudaFree", "hipMalloc", "hipFree", "cuMemCreate", "cuMemMap")


def take_apart(trace: Trace, op_overhead_s: float = 0.0, num_ranks: int = 1) -> Taken:
    """Seconds over the window; on CUDA those of the device, else those of the main thread."""
    return _on_device(trace) if trace.device else _on_host(trace, op_overhead_s, num_ranks)


# ---- the device's timeline -------------------------------------------------------------------------


def _on_device(trace: Trace) -> Taken:
    taken = Taken(num_steps=len(trace.steps))
    begin = trace.window[0]
    end = max([trace.window[1], *(e for _, e, *_ in trace.device)])
    window = (begin, end)
    taken.window_s = (end - begin) / 1e6
    launches = {op.args.get("correlation"): op for op in trace.runtime if "correlation" in op.args}
    kernels: list[Span] = []
    talks: list[Span] = []
    copies: list[Span] = []
    counted: set[int] = set()
    # Kernels of several streams may overlap: each counts for what no earlier one has covered.
    covered = begin
    for start, stop, name, args, category in sorted(trace.device, key=lambda d: d[:2]):
        op = trace.by_id.get(args.get("External id"))
        if category == "gpu_memcpy" and "HtoD" in name:
            copies.append((start, stop))
            size = float(args.get("bytes", 0))
            taken.h2d_bytes += size
            taken.h2d_pageable_bytes += size if "Pageable" in name else 0.0
            continue
        launch = launches.get(args.get("correlation"))
        around = list(op.ancestors()) if op is not None else []
        asked = launch.start if launch is not None else start
        in_optimizer = overlap((asked, asked + 1e-3), trace.optimizer) > 0
        kind = class_of_kernel(name, [o.name for o in around], in_optimizer)
        if kind == COMMUNICATION:
            talks.append((start, stop))
            continue
        kernels.append((start, stop))
        taken.num_launches += 1
        taken.num_optimizer_launches += kind == OPTIMIZER
        seconds = max(0.0, stop - max(start, covered)) / 1e6
        covered = max(covered, stop)
        _count(taken, kind, seconds, name, around, counted, device=True)
    busy, talking = clip(kernels, window), clip(talks, window)
    alone = subtract(talking, busy)
    taken.comm_exposed_s = length(alone) / 1e6
    taken.comm_hidden_s = (length(talking) - length(alone)) / 1e6
    occupied = union([*busy, *talking])
    taken.h2d_s = length(subtract(clip(copies, window), occupied)) / 1e6
    everything = union([*occupied, *clip(copies, window)])
    _blame_gaps(trace, taken, subtract([window], everything), launches)
    taken.retry_s = (
        sum(
            op.end - op.start
            for op in trace.runtime
            if op.name.startswith(_ALLOCATIONS) and _inside(op, trace.window)
        )
        / 1e6
    )
    return taken


def _count(
    taken: Taken,
    kind: str,
    seconds: float,
    kernel: str,
    around: Sequence[Op],
    counted: set[int],
    device: bool,
) -> None:
    """Add a kernel's time to its class, and its op's cost once."""
    cost = taken.classes[kind]
    cost.seconds += seconds
    cost.num += 1
    owner = _owner(around)
    precision = ""
    if owner is not None:
        args = owner.args
        dims = args.get("Input Dims") or []
        flops, size, precision = op_cost(
            owner.name, dims, args.get("Input type"), args.get("Concrete Inputs")
        )
        if id(owner) not in counted:
            counted.add(id(owner))
            cost.flops += flops
            cost.bytes += size
        product = product_of(owner.name, dims)
        if product is not None and kind == MATRIX:
            sizes = tuple(product) if product[0] > 1 else tuple(product[1:])
            on = device and on_tensor_cores(kernel, precision)
            taken.products[sizes, precision, on] += seconds
    cost.by_precision[precision] += seconds
    if device and kind in (MATRIX, ATTENTION, CONVOLUTION):
        taken.tensor_able_s += seconds
        taken.tensor_core_s += seconds if on_tensor_cores(kernel, precision) else 0.0


def _owner(around: Sequence[Op]) -> Op | None:
    """The op whose operands say what it costs: the innermost whose formula is known, else the innermost."""
    for op in around:
        if op_cost(op.name, *_noted(op))[0] > 0:
            return op
    return next((op for op in around if op.args.get("Input Dims")), None)


def _noted(op: Op) -> tuple[Any, Any, Any]:
    args = op.args
    return args.get("Input Dims"), args.get("Input type"), args.get("Concrete Inputs")


def _blame_gaps(
    trace: Trace, taken: Taken, gaps: Sequence[Span], launches: Mapping[Any, Op]
) -> None:
    """Each gap on the device, by what kept the host from launching earlier."""
    syncs = sorted(
        (op for op in trace.runtime if op.name in _SYNCS and _inside(op, trace.window)),
        key=lambda op: op.end,
    )
    taken.num_syncs = len(syncs)
    ends = [op.end for op in syncs]
    after = sorted(
        (start, launches[args["correlation"]], name)
        for start, _, name, args, _ in trace.device
        if args.get("correlation") in launches
    )
    starts = [row[0] for row in after]
    host = trace.ops.get(trace.main, []) + trace.runtime
    working = union((op.start, op.end) for op in host)
    for gap in gaps:
        size = (gap[1] - gap[0]) / 1e6
        at = bisect.bisect_left(starts, gap[1] - 1e-3)
        launch, name = (after[at][1], after[at][2]) if at < len(after) else (None, "")
        asked = launch.start if launch is not None else gap[1]
        if asked <= gap[0]:  # it was queued already: the device's own pace
            _launch_gap(trace, taken, gap, size)
            continue
        late = (gap[0], min(asked, gap[1]))
        waited = overlap(late, trace.data)
        if waited > 0.5 * (late[1] - late[0]):
            taken.data_s += size
            continue
        if "HtoD" in name and "Pageable" in name and launch is not None and launch.start <= gap[1]:
            taken.h2d_s += size  # the host copies it into a pinned buffer first
            continue
        last = bisect.bisect_left(ends, late[0] - _SYNC_REACH_US)
        sync = next((s for s in syncs[last:] if s.start < late[1]), None)
        if sync is not None:
            taken.host_s += size
            where, code = _place_of(trace, sync)
            taken.stall(where, _reason_of(trace, sync), code, size)
        elif overlap(late, working) > 0.5 * (late[1] - late[0]) or late[1] - late[0] < SHORT_US:
            _launch_gap(trace, taken, gap, size)
        else:
            taken.host_s += size
            where, code = _most(trace.samples_in(*late))
            taken.stall(where or "between two ops", "Python", code, size)


def _launch_gap(trace: Trace, taken: Taken, gap: Span, size: float) -> None:
    taken.launch_s += size
    inside = overlap(gap, trace.optimizer) > 0.5 * (gap[1] - gap[0])
    taken.launch_in["optimizer" if inside else "the rest"] += size


def _inside(op: Op, window: Span) -> bool:
    return op.start >= window[0] and op.end <= window[1]


def _reason_of(trace: Trace, sync: Op) -> str:
    """The op that made the host wait, or the call itself."""
    op = trace.by_id.get(sync.args.get("External id"))
    names = [o.name for o in op.ancestors()] if op is not None else []
    for word in ("aten::item", "aten::nonzero", "aten::is_nonzero", "aten::_local_scalar_dense"):
        if word in names:
            return f"{word} ({sync.name})"
    return f"{names[-1]} ({sync.name})" if names else sync.name


def _place_of(trace: Trace, sync: Op) -> tuple[str, str]:
    found = trace.samples_in(sync.start, sync.end)
    return _most(found) if found else _most(trace.samples_in(sync.start - 500, sync.end + 500))


def _most(samples: Sequence[Sample]) -> tuple[str, str]:
    """The place that most samples name."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for sample in samples:
        counts[sample.where, sample.code] += 1
    return max(counts, key=lambda key: counts[key]) if counts else ("", "")


# ---- the host's timeline ---------------------------------------------------------------------------


def _usual(steps: Sequence[Span]) -> list[Span]:
    """Steps that took about as long as most: another process may have had the core in the others."""
    by_length = sorted(steps, key=lambda s: s[1] - s[0])
    median = by_length[len(by_length) // 2]
    most = _UNUSUAL * (median[1] - median[0])
    return sorted(s for s in by_length if s[1] - s[0] <= most)


def _on_host(trace: Trace, overhead_s: float, num_ranks: int) -> Taken:
    """The main thread computes: its ops are the kernels, and its pauses the gaps."""
    taken = Taken()
    steps = _usual(trace.steps)
    taken.num_steps = len(steps)
    taken.window_s = length(steps) / 1e6
    window = union(steps)
    data = [part for span in window for part in clip(trace.data, span)]
    taken.data_s = length(data) / 1e6
    mine = [
        op
        for op in trace.ops.get(trace.main, [])
        if overlap((op.start, op.end), window) > 0.5 * (op.end - op.start) > 0
    ]
    counted: set[int] = set()
    _even_out(mine)
    for op in mine:
        if overlap((op.start, op.end), data) > 0.5 * (op.end - op.start) > 0:
            continue
        in_optimizer = overlap((op.start, op.end), trace.optimizer) > 0
        seconds = max(op.self_us, 0.0) / 1e6
        kind = class_of_op(op.name, in_optimizer)
        if kind == COMMUNICATION:
            taken.comm_exposed_s += seconds
            continue
        # What an op costs before it computes anything.
        fixed = seconds if kind == FREE else min(seconds, overhead_s)
        if kind == FREE and seconds > SHORT_US / 1e6:
            fixed = _long_pause(trace, taken, (op.start, op.end), seconds, num_ranks)
        taken.launch_s += fixed
        taken.launch_in["optimizer" if in_optimizer else "the rest"] += fixed
        if kind == FREE:
            continue
        taken.num_launches += 1
        taken.num_optimizer_launches += in_optimizer
        _count(taken, kind, seconds - fixed, op.name, list(op.ancestors()), counted, device=False)
    occupied = union([*((op.start, op.end) for op in mine if op.parent is None), *data])
    asked = sorted(op.end for op in mine if class_of_op(op.name) == COMMUNICATION)
    for gap in subtract(window, occupied):
        size = (gap[1] - gap[0]) / 1e6
        if num_ranks > 1 and _waits_for_ranks(trace, gap, asked):
            taken.comm_exposed_s += size
            continue
        if gap[1] - gap[0] > SHORT_US:
            size = _long_pause(trace, taken, gap, size, num_ranks)
        taken.launch_s += size
        inside = overlap(gap, trace.optimizer) > 0.5 * (gap[1] - gap[0])
        taken.launch_in["optimizer" if inside else "the rest"] += size
    _forget_rare(taken)
    talking = sum(overlap(span, trace.talks) for span in window) / 1e6
    taken.comm_hidden_s = max(talking - taken.comm_exposed_s, 0.0)
    return taken


def _waits_for_ranks(trace: Trace, gap: Span, asked: Sequence[float]) -> bool:
    """Whether a pause begins where communication was asked for, or is filled by it on other threads."""
    at = bisect.bisect_left(asked, gap[0] - _SYNC_REACH_US)
    if at < len(asked) and asked[at] <= gap[0] + 1.0:
        return True
    return overlap(gap, trace.talks) > 0.5 * (gap[1] - gap[0])


def _forget_rare(taken: Taken) -> None:
    """A pause at a line that most steps pass without one is not the line's doing: it stays unexplained."""
    for key, (seconds, times) in list(taken.stalls.items()):
        if times < 0.5 * taken.num_steps:
            taken.host_s = max(taken.host_s - seconds, 0.0)
            del taken.stalls[key]


def _even_out(ops: Sequence[Op]) -> None:
    """Cap ops that took far longer than the same op on the same sizes does: the core was taken away."""
    alike: dict[tuple[str, str], list[Op]] = defaultdict(list)
    for op in ops:
        alike[op.name, str(op.args.get("Input Dims"))].append(op)
    for group in alike.values():
        if len(group) >= _ENOUGH:
            usual = sorted(op.self_us for op in group)[len(group) // 2]
            for op in group:
                op.self_us = min(op.self_us, _LONG * max(usual, 1.0))


def _long_pause(trace: Trace, taken: Taken, gap: Span, seconds: float, num_ranks: int) -> float:
    """Blame a pause on communication or on a line of code; returns what of it counts as launching."""
    samples = trace.samples_in(*gap)
    if not samples:
        # A long one in which not even the thread that looks got to run is no line's doing: the process did
        # not have the core, or nobody can say. It stays unexplained.
        return seconds if gap[1] - gap[0] < 10 * SHORT_US else 0.0
    engine = sum(s.state == "backward" for s in samples) / len(samples)
    # Inside torch's engine there is no Python to blame: alone it is between two ops, with other ranks it
    # waits for them.
    talking = sum(s.state == "comm" for s in samples) / len(samples) + engine
    talking = talking if num_ranks > 1 else 0.0
    left = engine * seconds if num_ranks == 1 else 0.0
    taken.comm_exposed_s += talking * seconds
    rest = max(seconds - talking * seconds - left, 0.0)
    if rest > 0:
        taken.host_s += rest
        where, code = _most([s for s in samples if s.state == "run"] or samples)
        taken.stall(where, "Python", code, rest)
    return left


# ---- memory ----------------------------------------------------------------------------------------


def look_at_memory(trace: Trace) -> Allocations:
    """What came and went, where the profiler was asked to record it."""
    found = Allocations()
    on_cuda = any(args.get("Device Type") == 1 for _, args, _ in trace.memory)
    backward = union(
        (op.start, op.end)
        for op in trace.all_ops()
        if op.name.startswith("autograd::engine::evaluate_function")
    )
    for at, args, tid in sorted(trace.memory, key=lambda row: row[0]):
        if on_cuda and args.get("Device Type") != 1:
            continue
        size = float(args.get("Bytes", 0))
        here = (at, at + 1e-3)
        phase = "forward"
        if overlap(here, trace.optimizer):
            phase = "optimizer"
        elif overlap(here, backward):
            phase = "backward"
        elif overlap(here, trace.data):
            phase = "data"
        seconds = (at - trace.window[0]) / 1e6
        found.timeline.append((seconds, size, phase, float(args.get("Addr", 0))))
        if size > found.largest_bytes:
            found.largest_bytes = size
            found.largest_what = _maker(trace.ops.get(tid, ()), at)
    return found


def _maker(ops: Sequence[Op], at: float) -> str:
    """The outermost op of torch's around a moment."""
    found = ""
    for op in ops:
        if op.start > at:
            break
        if op.end >= at and op.name.startswith("aten::") and not found:
            found = op.name
    return found
