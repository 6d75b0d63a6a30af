"""What holds a training back: one of seven things, the share of the step it explains, and the evidence.

Where more of the step is not explained than the largest of them explains, that is the verdict. A pure
function over `Measured`, so that recorded measurements can be judged, and so that every limit stands here
with its reason. Called by `ridgeline doctor`; imports without torch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.doctor.clock import CAPPED, HOT, clock_evidence
from ridgeline.doctor.measured import (
    ATTENTION,
    CONVOLUTION,
    ELEMENTWISE,
    FORWARD_BACKWARD,
    LOSS,
    MATRIX,
    OPTIMIZER,
    ClassTime,
    Measured,
    Pipelined,
    RankTime,
)
from ridgeline.layout import ideal_bubble
from ridgeline.machine.picture import amount, duration

DATA, HOST, LAUNCH, BANDWIDTH = "data", "host", "launch", "memory bandwidth"
SIZE, COMMUNICATION, COMPUTE = "memory size", "communication", "compute"
LIMITS = (DATA, HOST, LAUNCH, BANDWIDTH, SIZE, COMMUNICATION, COMPUTE)
UNEXPLAINED = "not explained"
"""In place of a limit: more of the step is nothing that was measured than the largest limit explains."""

MUCH = 0.25
"""From this share of the step on, the sentence begins with what is not explained: a cause that was not seen
could be as large as those that are usually named."""

FULL = 0.95
"""A device filled to this has no room for a larger batch: the allocator keeps the rest in pieces."""
SLOW_RANK = 0.2
"""A rank is slow when its own time is so much above that of the others, as a share of the step."""
SMALL_SIDE = 16
"""Products with a side below this read more than they compute on any device."""
BUSY = 0.7
"""A process that computes for so much of the wait for data is preparing them, not waiting for a disk."""
TENSOR_CORES = 0.5
"""Below this share of the products' time on tensor cores, getting them there comes before all else."""
ODD = 0.1
"""Share of the step in products with an odd dimension from which that is named as the cause."""
TOO_FAST = 1.25
"""Times of its peak at which a device is not believed to compute."""
_MICROBATCHES = 9
_UNEVEN = 1.3
"""Times as much work as another rank of the pipeline has, from which that is said first."""
"""As many for each other stage leave a tenth of a step to the bubble."""
A_CLASS = 0.02
"""Share of the step from which classes of arithmetic beside the longest are no part of its name."""
_READING = re.compile(
    r"\b(read|open|load|recv|fromfile|memmap|imread|get_item|seek|pread)\w*\(", re.I
)
_ARITHMETIC = (MATRIX, ATTENTION, CONVOLUTION)


@dataclass(frozen=True)
class Finding:
    """One limit and what speaks for it."""

    limit: str
    share: float
    """Of the step."""
    cause: str
    """In a few words, the same for the same fault."""
    within: str = ""
    """The class, line, rank or layer."""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What holds the job back most, and the others in order."""

    limit: str
    share: float
    cause: str
    within: str
    sentence: str
    evidence: tuple[str, ...]
    findings: tuple[Finding, ...]
    """All of them, the largest first; the first is the verdict's."""
    unexplained: float = 0.0
    """Share of the step that is nothing of what was measured."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def judge(measured: Measured, others: Sequence[Measured] = ()) -> Verdict:
    """The verdict on a job; `others` are the other ranks' measurements, where there are any."""
    everyone = {m.rank: m for m in (measured, *others)}
    # In a pipeline ranks have stages of their own, and one with more work is no slow rank.
    slow = find_slow_rank(measured.ranks) if measured.pipeline is None else None
    if slow is not None:
        at_fault = everyone.get(slow.rank)
        return _judge_slow_rank(measured, slow, at_fault)
    findings = sorted(_find(measured), key=lambda f: -f.share)
    first = findings[0]
    full = next((f for f in findings if f.limit == SIZE), None)
    if full is not None and first.limit in (BANDWIDTH, LAUNCH, SIZE):
        # What a larger batch would cure, and a full device forbids.
        share = max(full.share, first.share)
        evidence = (*full.evidence, *(first.evidence if first is not full else ()))
        first = dataclasses.replace(full, share=share, evidence=evidence)
        findings = [first, *(f for f in findings if f is not full)]
    if measured.share(measured.other_s) > first.share:
        findings = [_unexplained(measured, first), *findings]
    return _verdict(measured, findings)


def _verdict(measured: Measured, findings: Sequence[Finding]) -> Verdict:
    first = findings[0]
    return Verdict(
        limit=first.limit,
        share=first.share,
        cause=first.cause,
        within=first.within,
        sentence=_sentence(measured, findings),
        evidence=first.evidence,
        findings=tuple(findings),
        unexplained=measured.share(measured.other_s),
    )


def _sentence(measured: Measured, findings: Sequence[Finding]) -> str:
    first = findings[0]
    share = measured.share(measured.other_s)
    unexplained = f"{share:.0%} of the step is not explained by what was measured"
    if first.limit == UNEXPLAINED:
        known = findings[1]
        return (
            f"{unexplained}, more than the {known.share:.0%} that is {known.limit} ({known.cause}), the "
            "largest part that is"
        )
    if share > MUCH:
        return f"{unexplained}; the rest is {_known(measured, first)}"
    return _known(measured, first)


def _known(measured: Measured, first: Finding) -> str:
    if first.limit == COMPUTE:
        reached = reached_share(measured)
        of = f" at {reached:.0%} of what the device reaches" if reached is not None else ""
        why = "" if first.cause == "arithmetic" else f": {first.cause}"
        power = measured.power
        if power is not None and power.capped > CAPPED:
            of += f", at its power limit ({power.clock_mhz:,.0f} of {power.max_clock_mhz:,.0f} MHz)"
        return f"compute-bound{of}: {first.share:.0%} of the step is {_what(measured, first)}{why}"
    most = most_of(measured, first)
    what = f"work that memory limits, {most}" if most else first.cause
    where = f" ({first.within})" if first.within and not most else ""
    return f"held back by {first.limit}: {first.share:.0%} of the step is {what}{where}"


def _what(m: Measured, first: Finding) -> str:
    """The class that arithmetic is, or that most of it is."""
    most = most_of(m, first)
    return f"arithmetic, {most}" if most else first.within


def most_of(m: Measured, found: Finding) -> str:
    """Which class a finding of several is named by, and its own share; empty for one of one class."""
    alone = m.share(sum(row.seconds for row in m.classes if row.name == found.within))
    if found.limit not in (BANDWIDTH, COMPUTE) or found.share - alone < A_CLASS:
        return ""
    why = f": {found.cause}" if found.limit == BANDWIDTH and found.within in _ARITHMETIC else ""
    return f"most of it {found.within} ({alone:.0%}){why}"


def _unexplained(m: Measured, largest: Finding) -> Finding:
    """What is left over when all that was seen is taken from the step, as a finding of its own."""
    why = (
        "other work on the same cores looks so, and work that torch's profiler does not see: measure "
        "again on a machine that is idle, or with more --steps"
    )
    if not m.num_profiled:
        why = "records of a run do not show what the host does: `ridgeline doctor` with its recipe does"
    evidence = (
        f"the parts that were seen add up to {duration(m.step_s - m.other_s)} of a step of "
        f"{duration(m.step_s)}; the spread of the timed steps is {m.spread:.0%}",
        why,
    )
    cause = "nothing that was measured"
    return Finding(UNEXPLAINED, m.share(m.other_s), cause, "", (*evidence, *largest.evidence))


def _find(m: Measured) -> list[Finding]:
    return [
        _data(m),
        _host(m),
        _launch(m),
        _communication(m),
        *_kernels(m),
        *_size(m),
    ]


def _data(m: Measured) -> Finding:
    share = m.share(m.data_s + m.h2d_s)
    evidence = []
    if m.h2d_s > m.data_s:
        cause, within = "copies to the device", ""
        if m.h2d_pageable > 0.5:
            cause, within = "unpinned copies", "the batches are not in pinned memory"
        rate = amount(m.h2d_bytes / m.h2d_s, "B/s") if m.h2d_s else "0"
        evidence.append(
            f"{amount(m.h2d_bytes, 'B')} a step go to the device in {duration(m.h2d_s)} ({rate}), "
            f"{m.h2d_pageable:.0%} of them from pageable memory"
        )
        best = m.roofline.h2d_pinned_bytes_per_s if m.roofline else None
        if best:
            evidence.append(f"from pinned memory the link gives {amount(best, 'B/s')}")
        return Finding(DATA, share, cause, within, tuple(evidence))
    top = m.reading[0] if m.reading else None
    cause = "waiting for the loader"
    if m.data_busy is not None and m.data_busy > BUSY:
        cause = "preprocessing on the host"
        evidence.append(f"this process computes for {m.data_busy:.0%} of the wait for data")
    elif top is not None and _READING.search(top.code):
        cause = "reading files"
    elif m.data_busy is not None:
        evidence.append(f"this process computes for only {m.data_busy:.0%} of the wait for data")
    evidence.insert(
        0, f"{duration(m.data_s)} of a step of {duration(m.step_s)} wait for the loader"
    )
    evidence += [f"{s.where}: {s.code}" for s in m.reading[:3]]
    return Finding(DATA, share, cause, top.where if top is not None else "", tuple(evidence))


def _host(m: Measured) -> Finding:
    evidence = [
        f"{s.where}: {s.what}, {duration(s.seconds)} a step in {s.num:.3g} stalls: {s.code}".rstrip(
            ": "
        )
        for s in m.stalls[:5]
    ]
    top = m.stalls[0] if m.stalls else None
    synchronises = top is not None and top.what != "Python"
    if m.num_syncs:
        evidence.append(f"the host waits for the device {m.num_syncs:.3g} times a step")
    cause = "synchronisation with the device" if synchronises else "Python between the ops"
    return Finding(HOST, m.share(m.host_s), cause, top.where if top else "", tuple(evidence))


def _launch(m: Measured) -> Finding:
    word = "kernels" if m.device_kind == "cuda" else "ops"
    evidence = [
        f"{m.num_launches:,.0f} {word} a step; {duration(m.launch_s)} go by between them or before they "
        "compute anything"
    ]
    if m.num_launches and m.compute_s:
        evidence.append(f"one computes for {duration(m.compute_s / m.num_launches)} on average")
    if m.roofline is not None and m.roofline.launch_s:
        evidence.append(f"the device takes one every {duration(m.roofline.launch_s)} at best")
    inside = m.launch_in.get("optimizer", 0.0)
    if inside > 0.5 * m.launch_s:
        evidence.append(
            f"the optimizer alone launches {m.num_optimizer_launches:,.0f} of them "
            f"({duration(inside)} of the gaps)"
        )
        return Finding(
            LAUNCH, m.share(m.launch_s), "the optimizer's loop", OPTIMIZER, tuple(evidence)
        )
    return Finding(LAUNCH, m.share(m.launch_s), f"tiny {word}", "", tuple(evidence))


def _communication(m: Measured) -> Finding:
    if m.pipeline is not None and m.pipeline.bubble_s > 0.5 * m.comm_exposed_s:
        return _bubble(m, m.pipeline)
    total = m.comm_exposed_s + m.comm_hidden_s
    evidence = [
        f"{duration(m.comm_exposed_s)} of {duration(total)} of communication a step are hidden by nothing"
    ]
    if len(m.ranks) > 1:
        owns = [r.own_s for r in m.ranks]
        evidence.append(
            f"all {len(m.ranks)} ranks wait alike: their own work is {duration(min(owns))} to "
            f"{duration(max(owns))} a step"
        )
    return Finding(COMMUNICATION, m.share(m.comm_exposed_s), "the network", "", tuple(evidence))


def _bubble(m: Measured, pipe: Pipelined) -> Finding:
    evidence = [
        f"{duration(pipe.bubble_s)} of a step of {duration(m.step_s)} go by between microbatches, waiting "
        "for other stages and for what they send"
    ]
    within = ""
    if pipe.schedule != "zerobubble":  # which fills what this counts
        p, count, v = pipe.num_ranks, pipe.microbatches, pipe.virtual
        text = f"{p} even ranks with microbatches={count}" + (f" and virtual={v}" if v > 1 else "")
        text += f" are idle for {ideal_bubble(p, count, v):.0%} of a step"
        if more := _more_microbatches(pipe, m.batch):
            least = ideal_bubble(p, more, v)
            text += f", with microbatches={more} for {least:.0%}"
            within = f"microbatches={more} would leave even ranks {least:.0%}"
        evidence.append(text)
    if len(m.ranks) > 1:
        quick, slow = min(m.ranks, key=lambda r: r.own_s), max(m.ranks, key=lambda r: r.own_s)
        evidence.append(
            f"their own work is {duration(quick.own_s)} (rank {quick.rank}) to {duration(slow.own_s)} "
            f"(rank {slow.rank}) a step, and all go at the pace of the one with the most"
        )
        if slow.own_s > _UNEVEN * quick.own_s:
            within = (
                f"rank {slow.rank} has {duration(slow.own_s)} of work a step, rank {quick.rank} "
                + (duration(quick.own_s))
            )
    cause = "waiting for other stages of the pipeline"
    return Finding(COMMUNICATION, m.share(m.comm_exposed_s), cause, within, tuple(evidence))


def _more_microbatches(pipe: Pipelined, batch: int) -> int:
    """How many would do, of those that the samples of a replica can be cut into; 0 for no more than now."""
    p = pipe.num_ranks
    enough = math.ceil(_MICROBATCHES * (p - 1) / pipe.virtual / p) * p
    if enough <= pipe.microbatches:
        return 0
    if not batch:
        return enough
    step = p if pipe.schedule in ("interleaved", "zerobubble") else 1
    able = [n for n in range(pipe.microbatches + 1, batch + 1) if batch % n == 0 and n % step == 0]
    return next((n for n in able if n >= enough), able[-1] if able else 0)


def is_memory_bound(m: Measured, row: ClassTime) -> bool:
    """Whether memory limits a class; by its intensity where that is known, else by its nature."""
    if row.bytes and m.roofline is not None:
        ridge = m.roofline.ridge(row.precision or "fp32")
        if ridge is not None:
            return row.flops / row.bytes < ridge
    return row.name in (ELEMENTWISE, OPTIMIZER, LOSS)


def _kernels(m: Measured) -> list[Finding]:
    """Time in kernels, split into what memory limits and what arithmetic does."""
    bound = [row for row in m.classes if row.seconds > 0 and is_memory_bound(m, row)]
    free = [row for row in m.classes if row.seconds > 0 and row not in bound]
    found = []
    misses = m.tensor_core_share is not None and m.tensor_core_share < TENSOR_CORES
    if bound:
        top = max(bound, key=lambda row: row.seconds)
        share = m.share(sum(row.seconds for row in bound))
        found.append(
            Finding(BANDWIDTH, share, _bandwidth_cause(m, top), top.name, _rates(m, bound))
        )
    top = max(free, key=lambda row: row.seconds, default=ClassTime(MATRIX, 0.0))
    share = m.share(sum(row.seconds for row in free))
    cause, evidence = "arithmetic", [*_rates(m, free), *clock_evidence(m)]
    if misses and m.tensor_core_share is not None:
        cause = "products that miss the tensor cores"
        evidence.insert(0, f"{m.tensor_core_share:.0%} of their time is on tensor cores")
        evidence += [
            f"{'x'.join(map(str, miss.shape))} ({', '.join(miss.layers[:2]) or 'no parameter'}): "
            f"{miss.reason}, {duration(miss.seconds)} a step"
            for miss in m.missed[:4]
        ]
    elif m.odd_share > ODD:
        cause = "odd dimensions"
        evidence += m.odd[:4]
    elif m.power is not None and m.power.hot > HOT:
        cause = "a device that is too hot"
    found.append(Finding(COMPUTE, share, cause, top.name, tuple(evidence)))
    return found


def _bandwidth_cause(m: Measured, top: ClassTime) -> str:
    if top.name in _ARITHMETIC:
        return "a batch too small" if 0 < m.smallest_side < SMALL_SIDE else "thin products"
    return {OPTIMIZER: "the optimizer's update", LOSS: "the loss"}.get(
        top.name, "element-wise work"
    )


def _rates(m: Measured, rows: Sequence[ClassTime]) -> tuple[str, ...]:
    lines = []
    for row in sorted(rows, key=lambda r: -r.seconds)[:4]:
        text = f"{row.name}: {duration(row.seconds)} a step ({m.share(row.seconds):.0%})"
        if row.bytes and row.seconds:
            text += f", {amount(row.bytes / row.seconds, 'B/s')}"
        if row.flops and row.seconds:
            text += f", {amount(row.flops / row.seconds, 'FLOP/s')}"
            text += f" at {row.flops / row.bytes:.3g} a byte" if row.bytes else ""
        best = class_limit(m, row)
        if best is not None and row.seconds:
            reached = best / row.seconds
            # Bytes are counted as if each op went to memory; a cache that holds them is faster.
            beyond = f"; {reached:.1f} times what memory gives, so caches serve it"
            if not row.bytes or not is_memory_bound(m, row):
                beyond = f"; {reached:.1f} times the peak that was measured, so that was measured too low"
            text += f"; {reached:.0%} of what the device allows" if reached < 1.2 else beyond
        lines.append(text)
    if lines and 0 < m.smallest_side < SMALL_SIDE and rows[0].name == MATRIX:
        batch = f" with {m.batch} samples a step" if m.batch else ""
        lines.append(f"the longest product has a side of {m.smallest_side}{batch}")
    return tuple(lines)


def class_limit(m: Measured, row: ClassTime) -> float | None:
    """Seconds that the roofline allows for a class; None where its cost is not known."""
    if m.roofline is None or not (row.bytes or row.flops):
        return None
    memory = m.roofline.memory_bytes_per_s
    by_memory = row.bytes / memory if memory else 0.0
    peak = m.roofline.peak_flops.get(row.precision or "fp32")
    return max(by_memory, row.flops / peak if peak else 0.0)


def reached_share(m: Measured) -> float | None:
    """How near the arithmetic classes are to the roofline, together; None where they are so far beyond it
    that it was measured too low, on a machine that was busy."""
    rows = [r for r in m.classes if r.name in (*_ARITHMETIC, FORWARD_BACKWARD) and r.seconds > 0]
    limits = [class_limit(m, row) for row in rows]
    known = [(row.seconds, limit) for row, limit in zip(rows, limits, strict=True) if limit]
    if not known:
        return None
    reached = sum(limit for _, limit in known) / sum(seconds for seconds, _ in known)
    return min(reached, 1.0) if reached < TOO_FAST else None


def _size(m: Measured) -> list[Finding]:
    memory = m.memory
    if memory is None or (memory.fill < FULL and memory.num_retries < 1):
        return []
    full = (
        f"{amount(memory.peak_bytes, 'B')} of {amount(memory.capacity_bytes, 'B')} are in use at the peak "
        f"({memory.fill:.0%})"
    )
    if memory.weights_bytes:  # records of a run do not tell what its memory holds
        full += (
            f": weights {amount(memory.weights_bytes, 'B')}, gradients "
            f"{amount(memory.gradients_bytes, 'B')}, optimizer {amount(memory.optimizer_bytes, 'B')}, "
            f"activations {amount(memory.activations_bytes, 'B')}"
        )
    evidence = [full]
    if memory.num_retries >= 1:
        evidence.append(
            f"the allocator gives memory back and asks again {memory.num_retries:.3g} times a step "
            f"({duration(memory.retry_s)})"
        )
    if memory.largest_bytes > 0.1 * memory.peak_bytes:
        evidence.append(
            f"the largest tensor has {amount(memory.largest_bytes, 'B')}, made by {memory.largest_what}"
        )
    within = memory.largest_what if memory.largest_bytes > 0.1 * memory.peak_bytes else ""
    cause = "the allocator's retries" if memory.num_retries >= 1 else "a full device"
    return [Finding(SIZE, m.share(memory.retry_s), cause, within, tuple(evidence))]


def find_slow_rank(ranks: Sequence[RankTime]) -> RankTime | None:
    """The rank that the others wait for, if its own time stands out, and by more than even it waits."""
    if len(ranks) < 2:
        return None
    slow = max(ranks, key=lambda r: r.own_s)
    others = sorted(r.own_s for r in ranks if r.rank != slow.rank)
    typical = others[len(others) // 2]
    return slow if slow.own_s - typical > max(SLOW_RANK * slow.step_s, slow.comm_s) else None


def _judge_slow_rank(m: Measured, slow: RankTime, at_fault: Measured | None) -> Verdict:
    others = sorted(r.own_s for r in m.ranks if r.rank != slow.rank)
    typical = others[len(others) // 2]
    lost = slow.own_s - typical
    evidence = [
        f"rank {slow.rank} needs {duration(slow.own_s)} a step of its own, the others {duration(typical)}"
    ]
    if at_fault is None:
        limit = DATA if slow.data_s > 0.5 * lost else COMPUTE
        findings = sorted(_find(m), key=lambda f: -f.share)
    else:
        findings = sorted(_find(at_fault), key=lambda f: -f.share)
        # What all of them do is not what makes one of them slow.
        own = [f for f in findings if f.limit not in (COMMUNICATION, SIZE)] or findings
        limit = own[0].limit
        evidence += [f"on rank {slow.rank}: {text}" for text in own[0].evidence]
    share = lost / slow.step_s if slow.step_s else 0.0
    first = Finding(limit, share, "one slow rank", f"rank {slow.rank}", tuple(evidence))
    verdict = _verdict(m, [first, *findings])
    sentence = (
        f"held back by rank {slow.rank}: the others wait {duration(lost)} ({share:.0%}) of each step for "
        f"it, and it is its {limit}"
    )
    return dataclasses.replace(verdict, sentence=sentence)
