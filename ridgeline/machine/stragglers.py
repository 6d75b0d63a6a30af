"""Who is slow: the same work on every rank, and one message each way between ranks.

Called by `collectives.py` on every rank, with what they all have measured as the result.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.machine.groups import rounds_of_pairs
from ridgeline.machine.links import PairFacts
from ridgeline.machine.meeting import Meeting, Work

MOST_FOR_ALL_PAIRS = 16
_MESSAGES = 4
"""In a row, before the other side answers."""
_WORK_S = 3e-3
_SIZE = {"cuda": 1024, "cpu": 96}
_LEAST_TURNS = 9
_PAIR_TURNS = 15
"""Before the shortest time of a pair is taken for what its link can do."""


def measure_pairs(
    meeting: Meeting, nodes: list[int], num_bytes: int, repeats: int
) -> list[PairFacts]:
    """One way between ranks, both ways one after the other; pairs of a round at the same time."""
    group = meeting.everyone
    message = torch.zeros(max(1, num_bytes // 4), device=meeting.device)
    answer = torch.zeros(1, device=meeting.device)
    rounds = rounds_of_pairs(meeting.size, MOST_FOR_ALL_PAIRS)
    mine: dict[tuple[int, int], list[float]] = {}
    for turn in range(max(repeats, _PAIR_TURNS) + 1):
        for pairs in rounds:
            for back in (False, True):
                ways = [(b, a) if back else (a, b) for a, b in pairs]
                way = next((w for w in ways if meeting.rank in w), None)
                work = None if way is None else _one_way(meeting.rank, way, message, answer, group)
                seconds = meeting.time(work, 1)
                if way is not None and way[0] == meeting.rank and turn > 0:  # the first connects
                    mine.setdefault(way, []).append(seconds / _MESSAGES)
    told = meeting.gather({way: min(row) for way, row in mine.items()})
    seen = {way: seconds for row in told for way, seconds in row.items()}
    return [
        PairFacts(a, b, nodes[a] != nodes[b], message.numel() * 4, seconds)
        for (a, b), seconds in sorted(seen.items())
    ]


def _one_way(
    rank: int, way: tuple[int, int], message: Tensor, answer: Tensor, group: dist.ProcessGroup
) -> Work:
    source, target = way

    def send() -> None:
        for _ in range(_MESSAGES):
            dist.send(message, target, group=group)
        dist.recv(answer, target, group=group)

    def receive() -> None:
        for _ in range(_MESSAGES):
            dist.recv(message, source, group=group)
        dist.send(answer, source, group=group)

    return send if rank == source else receive


def measure_work(meeting: Meeting, repeats: int) -> list[tuple[float, float, float]]:
    """Of each rank: how long the same arithmetic takes it in the middle and at best, and how long it then
    waits for the last."""
    matrix = torch.zeros(_SIZE[meeting.device.type], _SIZE[meeting.device.type]).to(meeting.device)
    product = partial(do_work, matrix)
    product(1)
    first = min(meeting.time(lambda: product(1), 4) for _ in range(3))
    count = max(1, int(_WORK_S / max(meeting.slowest([first])[0], 1e-7)))
    works, waits = [], []
    for _ in range(max(repeats, _LEAST_TURNS)):
        seconds = meeting.time(lambda: product(count), 1)
        began = time.perf_counter()
        meeting.barrier()
        works.append(seconds)
        waits.append(time.perf_counter() - began)
    told = meeting.gather((statistics.median(works), min(works), statistics.median(waits)))
    return [(float(work), float(best), float(wait)) for work, best, wait in told]


def do_work(matrix: Tensor, count: int) -> None:
    for _ in range(count):
        torch.mm(matrix, matrix)
