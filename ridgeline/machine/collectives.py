"""Measure collectives and pairs of ranks, size by size, on every kind of group that the ranks make.

All cases share two buffers; the repetitions of all cases are interleaved, so that a neighbour that wakes up
hits all of them; the slowest rank counts, and the median over the repetitions. How often a case is repeated
and which sizes are left out is decided from what all ranks have seen, so that all do the same. Called by
`cli_machine.py` on every rank of a job.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.launch.env import RankEnv
from ridgeline.machine.compute import device_name
from ridgeline.machine.groups import Groups, is_even, number_nodes, plan_groups
from ridgeline.machine.links import (
    ACROSS_AT_ONCE,
    ALL,
    ALL_REDUCE,
    BETWEEN,
    COLLECTIVES,
    HIERARCHICAL,
    INSIDE,
    NODE,
    PAIR,
    PAIRS,
    NetworkFacts,
    RankFacts,
    Timing,
    show_bytes,
    sizes_between,
)
from ridgeline.machine.meeting import Meeting, Work
from ridgeline.machine.room import free_memory
from ridgeline.machine.stragglers import measure_pairs, measure_work

Tell = Callable[[str, float], None]

# torch 2.13 has renamed them, and warns of the names that 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ITEM = 4
_MOST_COUNT = 200
_LEAST_REPEATS = 3
_START_BYTES = 1 << 20
_MEMORY_SHARE = 4
"""Both buffers of all ranks of a node take at most one of so many parts of what is free there."""


@dataclass(frozen=True)
class Amounts:
    """How much is measured."""

    sizes: tuple[int, ...]
    repeats: int
    longest_s: float
    """What would take longer, judged by the size before it, is left out."""
    budget_s: float
    """For the repetitions of one collective of one size."""
    timed_s: float
    """A repetition does a short collective again until it is at least as long."""
    pair_bytes: int
    """Of a message from each rank to each."""


_NORMAL_SIZES = sizes_between(1 << 10, 1 << 30)
_QUICK_SIZES = sizes_between(1 << 10, 1 << 24)
AMOUNTS = {
    ("cuda", False): Amounts(_NORMAL_SIZES, 9, 2.0, 2.0, 5e-3, 1 << 25),
    ("cuda", True): Amounts(_NORMAL_SIZES, 5, 0.5, 0.2, 2e-3, 1 << 23),
    ("cpu", False): Amounts(_NORMAL_SIZES, 11, 1.0, 1.0, 5e-3, 1 << 20),
    ("cpu", True): Amounts(_QUICK_SIZES, 5, 0.2, 0.2, 2e-3, 1 << 18),
}


@dataclass
class _Case:
    """One collective of one size on one kind of group, as this rank takes part in it."""

    timing: Timing
    work: Work | None
    share: float = 1.0
    """Of what is timed that counts: of a message there and back, half."""
    count: int = 1
    repeats: int = 1


def measure_network(
    env: RankEnv,
    control: dist.ProcessGroup,
    device: torch.device,
    amounts: Amounts,
    kinds: Sequence[str] = (*COLLECTIVES, PAIR),
    tell: Tell | None = None,
) -> NetworkFacts:
    """What these ranks reach between them; every rank calls it, and has the same facts at the end."""
    tell = tell or (lambda _what, _share: None)
    began = time.perf_counter()
    backend = "nccl" if device.type == "cuda" else "gloo"
    meeting = Meeting(env.rank, env.world_size, control, device, backend)
    told = meeting.gather((env.node_rank, socket.gethostname(), env.local_rank))
    nodes = number_nodes([(node, host) for node, host, _ in told])
    amounts, buffers, notes = _prepare(meeting, nodes, amounts)
    groups = plan_groups(nodes, [kind for kind in kinds if kind in COLLECTIVES])
    cases = meeting.agree(
        "join its groups", partial(_build_cases, meeting, groups, nodes, buffers, amounts, kinds)
    )
    tell("first times", 0.02)
    cases, left_out = _calibrate(meeting, cases, amounts, tell)
    timings = _repeat(meeting, cases, tell)
    tell("pairs", 0.85)
    pairs = measure_pairs(meeting, nodes, amounts.pair_bytes, amounts.repeats)
    tell("ranks", 0.95)
    works = measure_work(meeting, amounts.repeats)
    ranks = [
        RankFacts(rank, nodes[rank], told[rank][1], told[rank][2], *works[rank])
        for rank in range(meeting.size)
    ]
    hosts = [next(r.host for r in ranks if r.node == node) for node in range(max(nodes) + 1)]
    return NetworkFacts(
        hosts=tuple(hosts),
        backend=backend,
        device_kind=device.type,
        device_name=device_name(device),
        ranks_per_node=tuple(nodes.count(node) for node in range(max(nodes) + 1)),
        time=time.time(),
        timings=tuple(timings),
        pairs=tuple(pairs),
        ranks=tuple(ranks),
        measured_s=time.perf_counter() - began,
        notes=(*notes, *left_out, *_shared_cores(meeting, nodes)),
    )


def _prepare(
    meeting: Meeting, nodes: list[int], amounts: Amounts
) -> tuple[Amounts, tuple[Tensor, Tensor], list[str]]:
    """The two buffers, as large as the largest size that all ranks have room for."""
    share = (
        _MEMORY_SHARE * 2 * (nodes.count(nodes[meeting.rank]) if meeting.backend == "gloo" else 1)
    )
    free = meeting.agree("see its memory", partial(_free_bytes, meeting.device))
    room = -meeting.slowest([-float(free // share)])[0]
    sizes = tuple(size for size in amounts.sizes if size <= room)
    notes = []
    if len(sizes) < len(amounts.sizes):
        first = next(size for size in amounts.sizes if size > room)
        notes.append(
            f"sizes of {show_bytes(first)} and more were left out: a rank has {show_bytes(room)} of "
            "memory for a buffer"
        )
    num = max(sizes or amounts.sizes[:1]) // _ITEM + meeting.size

    buffers = meeting.agree("get memory for its buffers", partial(_make_buffers, num, meeting))
    return replace(amounts, sizes=sizes or amounts.sizes[:1]), buffers, notes


def _make_buffers(num: int, meeting: Meeting) -> tuple[Tensor, Tensor]:
    # Written once: a page that never was is one page of zeros, whatever the size.
    send, receive = (torch.empty(num, device=meeting.device).fill_(0.0) for _ in range(2))
    return send, receive


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def _shared_cores(meeting: Meeting, nodes: list[int]) -> list[str]:
    if meeting.device.type != "cpu":
        return []
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    told = meeting.gather(tuple(cores))
    for node in range(max(nodes) + 1):
        seen = [set(told[rank]) for rank in range(meeting.size) if nodes[rank] == node]
        num = len(set().union(*seen))
        if 0 < num < len(seen):
            return [
                f"{len(seen)} ranks of a node share {num} cores: part of the times is waiting for them"
            ]
    return []


def _build_cases(
    meeting: Meeting,
    groups: Sequence[Groups],
    nodes: list[int],
    buffers: tuple[Tensor, Tensor],
    amounts: Amounts,
    kinds: Sequence[str],
) -> list[list[_Case]]:
    """Cases in lists of growing size; the same lists on every rank."""
    everyone = meeting.everyone
    by_level = {kind.level: kind for kind in groups}
    made = {kind.level: meeting.group(kind.lists) for kind in groups}
    found: list[list[_Case]] = []
    for kind in groups:
        for collective in kind.collectives:
            row = []
            for num_bytes in amounts.sizes:
                num = max(kind.size, num_bytes // _ITEM // kind.size * kind.size)
                group, ranks = made[kind.level], kind.of(meeting.rank)
                work = None
                if group is not None and ranks is not None:
                    work = _work(collective, buffers, num, group, ranks)
                row.append(_Case(_blank(collective, kind, num * _ITEM), work))
            found.append(row)
    if ALL_REDUCE in kinds and is_even(nodes):
        inner, outer = made[NODE], made[ACROSS_AT_ONCE]
        assert inner is not None
        assert outer is not None
        row = []
        for num_bytes in amounts.sizes:
            num = max(meeting.size, num_bytes // _ITEM // meeting.size * meeting.size)
            work = partial(_by_levels, buffers, num, inner, outer, by_level[NODE].size)
            row.append(_Case(_blank(HIERARCHICAL, by_level[ALL], num * _ITEM), work))
        found.append(row)
    if PAIR in kinds:
        found += _pair_cases(meeting, nodes, buffers, amounts.sizes, everyone)
    return found


def _blank(collective: str, kind: Groups, num_bytes: int) -> Timing:
    return Timing(collective, kind.level, kind.size, kind.per_node, kind.num_groups, num_bytes, 0.0)


def _work(
    collective: str,
    buffers: tuple[Tensor, Tensor],
    num: int,
    group: dist.ProcessGroup,
    ranks: tuple[int, ...],
) -> Work:
    send, receive = buffers
    part = num // len(ranks)
    works: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(send[:num], group=group),
        "all_gather": lambda: _all_gather(receive[:num], send[:part], group=group),
        "reduce_scatter": lambda: _reduce_scatter(receive[:part], send[:num], group=group),
        "all_to_all": lambda: dist.all_to_all_single(receive[:num], send[:num], group=group),
        "broadcast": lambda: dist.broadcast(send[:num], src=ranks[0], group=group),
    }
    return works[collective]


def _by_levels(
    buffers: tuple[Tensor, Tensor],
    num: int,
    inner: dist.ProcessGroup,
    outer: dist.ProcessGroup,
    per_node: int,
) -> None:
    """An all-reduce whose parts are summed in the node, then across nodes, then gathered in the node."""
    send, receive = buffers
    part = num // per_node
    _reduce_scatter(receive[:part], send[:num], group=inner)
    dist.all_reduce(receive[:part], group=outer)
    _all_gather(send[:num], receive[:part], group=inner)


def _pair_cases(
    meeting: Meeting,
    nodes: list[int],
    buffers: tuple[Tensor, Tensor],
    sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> list[list[_Case]]:
    """One pair alone, and every rank with the next one at once: inside nodes, and between them."""
    by_node = [[r for r, n in enumerate(nodes) if n == node] for node in range(max(nodes) + 1)]
    most, least = max(map(len, by_node)), min(map(len, by_node))
    found = []
    if most > 1:
        full = [ranks for ranks in by_node if len(ranks) == most]
        kind = Groups(INSIDE, ((full[0][0], full[0][1]),), 2, 1, ())
        found.append((PAIR, kind, [full[0][:2]]))
        if most > 2:
            found.append((PAIRS, replace(kind, per_node=most, num_groups=most), full))
    if len(by_node) > 1:
        rows = [[ranks[i] for ranks in by_node] for i in range(least)]
        kind = Groups(BETWEEN, ((rows[0][0], rows[0][1]),), 1, 1, ())
        found.append((PAIR, kind, [rows[0][:2]]))
        if least > 1 or len(by_node) > 2:
            found.append((PAIRS, replace(kind, num_groups=least), rows))
    cases = []
    for name, kind, rings in found:
        row = []
        for num_bytes in sizes:
            num = max(1, num_bytes // _ITEM)
            work, share = _pair_work(name, meeting.rank, rings, buffers, num, group)
            row.append(_Case(_blank(name, kind, num * _ITEM), work, share))
        cases.append(row)
    return cases


def _pair_work(
    name: str,
    rank: int,
    rings: list[list[int]],
    buffers: tuple[Tensor, Tensor],
    num: int,
    group: dist.ProcessGroup,
) -> tuple[Work | None, float]:
    """What this rank does, and which share of its time one message takes."""
    ring = next((ranks for ranks in rings if rank in ranks), None)
    if ring is None:
        return None, 1.0
    place = ring.index(rank)
    send, receive = buffers[0][:num], buffers[1][:num]
    after, before = ring[(place + 1) % len(ring)], ring[place - 1]
    if name == PAIRS:

        def both() -> None:
            ops = [
                dist.P2POp(dist.isend, send, after, group),
                dist.P2POp(dist.irecv, receive, before, group),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

        return both, 1.0

    def there_and_back() -> None:
        if place == 0:
            dist.send(send, after, group=group)
            dist.recv(receive, after, group=group)
        else:
            dist.recv(receive, before, group=group)
            dist.send(send, before, group=group)

    return there_and_back, 0.5


def _calibrate(
    meeting: Meeting, rows: list[list[_Case]], amounts: Amounts, tell: Tell
) -> tuple[list[_Case], list[str]]:
    """Warm every case up, choose how often it is repeated, and leave out what would take too long."""
    kept: list[_Case] = []
    notes: list[str] = []
    for number, row in enumerate(rows):
        for place, case in enumerate(row):
            meeting.time(case.work, 1)
            # The better of two: one that a neighbour has hit says nothing of the next size.
            first = min(meeting.slowest([meeting.time(case.work, 1) for _ in range(2)]))
            case.count = min(max(int(amounts.timed_s / max(first, 1e-9)), 1), _MOST_COUNT)
            often = int(amounts.budget_s / max(first * case.count, 1e-9))
            case.repeats = min(max(often, _LEAST_REPEATS), amounts.repeats)
            kept.append(case)
            larger = row[place + 1 :]
            # The time of a small message is its start, which does not grow.
            counted = max(case.timing.num_bytes, _START_BYTES)
            growth = larger[0].timing.num_bytes / counted if larger else 0.0
            if larger and 0.8 * growth * first > amounts.longest_s:
                t = case.timing
                notes.append(
                    f"{t.collective} ({t.level}) of {show_bytes(larger[0].timing.num_bytes)} and more was "
                    f"left out: {show_bytes(t.num_bytes)} took {first:.2g} s"
                )
                break
        tell("first times", 0.02 + 0.3 * (number + 1) / len(rows))
    return kept, notes


def _repeat(meeting: Meeting, cases: list[_Case], tell: Tell) -> list[Timing]:
    times: list[list[float]] = [[] for _ in cases]
    most = max((case.repeats for case in cases), default=0)
    for turn in range(most):
        for number, case in enumerate(cases):
            if turn < case.repeats:
                times[number].append(case.share * meeting.time(case.work, case.count))
        tell("repetitions", 0.32 + 0.53 * (turn + 1) / most)
    flat = meeting.slowest([seconds for row in times for seconds in row])
    found = []
    for case, row in zip(cases, times, strict=True):
        slowest, flat = flat[: len(row)], flat[len(row) :]
        median = statistics.median(slowest)
        low, _, high = statistics.quantiles(slowest, n=4, method="inclusive")
        spread = (high - low) / 2 / median if median > 0 else 0.0
        found.append(replace(case.timing, seconds=median, spread=spread, repeats=len(slowest)))
    return found
