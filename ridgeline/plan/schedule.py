"""Pipelines, event by event: who does which microbatch when, with each stage's own times.

Not the closed form: stages differ (the first embeds, the last has the logits), sends take time, and
schedules differ in what they wait for. A long run of microbatches is periodic after its start, so only
some of them are played and the rest is added by the measured period. Called by `time.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Op = tuple[str, int, int]
"""`F`, `B` or `W`; the chunk of the model on this rank; the microbatch."""


@dataclass(frozen=True)
class Played:
    """How a schedule went."""

    seconds: float
    busy_s: float
    """Mean over ranks."""
    in_flight: tuple[int, ...]
    """Most microbatches (of one chunk's activations) that each rank holds at once."""

    @property
    def bubble(self) -> float:
        """Share of the time in which a rank waits."""
        return 1.0 - self.busy_s / self.seconds if self.seconds else 0.0


def orders(
    schedule: str, stages: int, microbatches: int, chunks: int, group: int = 0
) -> list[list[Op]]:
    """What each rank does, in order; `group`: microbatches that an interleaved schedule takes through
    one chunk before the next, at least as many as stages."""
    if schedule == "gpipe":
        return [
            [("F", 0, m) for m in range(microbatches)]
            + [("B", 0, m) for m in reversed(range(microbatches))]
            for _ in range(stages)
        ]
    split = schedule == "zerobubble"
    if chunks > 1:
        group = max(group, stages)
        return [_interleaved(stages, r, microbatches, chunks, group, split) for r in range(stages)]
    return [_one_forward_one_backward(stages, r, microbatches, split) for r in range(stages)]


def _one_forward_one_backward(stages: int, rank: int, count: int, split: bool) -> list[Op]:
    warm = min(stages - rank - 1, count)
    ops: list[Op] = [("F", 0, m) for m in range(warm)]
    for m in range(count):
        if warm + m < count:
            ops.append(("F", 0, warm + m))
        ops.append(("B", 0, m))
    return _with_weights(ops, rank) if split else ops


def _with_weights(ops: list[Op], rank: int) -> list[Op]:
    """Weight gradients, `rank` of them late, fill what would be a gap; those that wait still go last."""
    found: list[Op] = []
    pending: list[Op] = []
    for kind, chunk, micro in ops:
        found.append((kind, chunk, micro))
        if kind == "B":
            pending.append(("W", chunk, micro))
            if len(pending) > rank:
                found.append(pending.pop(0))
    return found + pending


def _interleaved(
    stages: int, rank: int, count: int, chunks: int, group: int, split: bool
) -> list[Op]:
    """Megatron's interleaving: groups of microbatches go through chunk after chunk. What does not
    divide is spread over the groups, so that none is smaller than the pipeline is deep."""
    forwards: list[Op] = []
    backwards: list[Op] = []
    groups = max(count // group, 1)
    base, rest = divmod(count, groups)
    sizes = [base + (index < rest) for index in range(groups)]
    first = 0
    for size in sizes:
        members = range(first, first + size)
        forwards += [("F", chunk, m) for chunk in range(chunks) for m in members]
        backwards += [("B", chunk, m) for chunk in reversed(range(chunks)) for m in members]
        first += size
    total = len(forwards)
    warm = min((stages - rank - 1) * 2 + (chunks - 1) * max(sizes), total)
    ops = forwards[:warm]
    for step in range(total):
        if warm + step < total:
            ops.append(forwards[warm + step])
        ops.append(backwards[step])
    return _with_weights(ops, rank) if split else ops


def play(
    schedule: str,
    microbatches: int,
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    send_s: Sequence[float],
    weight_s: Sequence[Sequence[float]] | None = None,
    blocking: bool = True,
    group: int = 0,
) -> Played:
    """Times of `forward_s[rank][chunk]`; `send_s[rank]` to the next rank (and back from it).

    `blocking`: a rank waits until what it sends has arrived, as simple pipelines do.
    """
    f = tuple(tuple(map(float, row)) for row in forward_s)
    b = tuple(tuple(map(float, row)) for row in backward_s)
    w = tuple(tuple(map(float, row)) for row in weight_s) if weight_s is not None else None
    return _play(schedule, microbatches, f, b, tuple(map(float, send_s)), w, blocking, group)


Times = tuple[tuple[float, ...], ...]


@lru_cache(maxsize=8192)
def _play(
    schedule: str, microbatches: int, f: Times, b: Times, send: tuple[float, ...],
    w: Times | None, blocking: bool, group: int,
) -> Played:  # fmt: skip
    stages = len(f)
    long_run = 3 * stages
    if microbatches <= long_run + stages or schedule == "gpipe" or group > stages:
        return _events(schedule, microbatches, f, b, send, w, blocking, group)
    rest = microbatches % stages
    first = _events(schedule, long_run - stages + rest, f, b, send, w, blocking, group)
    second = _events(schedule, long_run + rest, f, b, send, w, blocking, group)
    periods = (microbatches - long_run - rest) / stages
    return Played(
        second.seconds + periods * (second.seconds - first.seconds),
        second.busy_s + periods * (second.busy_s - first.busy_s),
        second.in_flight,
    )


def _events(
    schedule: str, microbatches: int, f: Times, b: Times, send: tuple[float, ...],
    w: Times | None, blocking: bool, group: int,
) -> Played:  # fmt: skip
    """Each rank does its operations in order, each as soon as what it needs has arrived."""
    stages, chunks = len(f), len(f[0])
    plan = orders(schedule, stages, microbatches, chunks, group)
    last = stages * chunks - 1
    # When the input of a global chunk's microbatch is there; None: not yet.
    ahead: list[list[float | None]] = [[None] * microbatches for _ in range(last + 2)]
    back: list[list[float | None]] = [[None] * microbatches for _ in range(last + 2)]
    ahead[0] = [0.0] * microbatches
    back[last] = [0.0] * microbatches
    clock = [0.0] * stages
    busy = [0.0] * stages
    place = [0] * stages
    most = [0] * stages
    held = [0] * stages
    waiting = True
    while waiting:
        waiting = False
        for rank in range(stages):
            ops, at, now = plan[rank], place[rank], clock[rank]
            worked, holds, begun = busy[rank], held[rank], at
            mine, theirs = send[rank], send[rank - 1]
            while at < len(ops):
                kind, chunk, micro = ops[at]
                where = chunk * stages + rank
                if kind == "F":
                    ready = ahead[where][micro]
                    if ready is None:
                        break
                    took = f[rank][chunk]
                    now = (now if now > ready else ready) + took
                    holds += 1
                    if holds > most[rank]:
                        most[rank] = holds
                    if where < last:
                        ahead[where + 1][micro] = now + mine
                        if blocking:
                            now += mine
                elif kind == "B":
                    ready = back[where][micro]
                    if ready is None:
                        break
                    took = b[rank][chunk]
                    now = (now if now > ready else ready) + took
                    holds -= w is None
                    if where > 0:
                        back[where - 1][micro] = now + theirs
                        if blocking:
                            now += theirs
                else:
                    assert w is not None
                    took = w[rank][chunk]
                    now += took
                    holds -= 1  # the weights' half reads the activations too
                worked += took
                at += 1
            if at > begun:
                waiting = True
                place[rank], clock[rank], busy[rank], held[rank] = at, now, worked, holds
    left = sum(len(ops) - at for ops, at in zip(plan, place, strict=True))
    assert left == 0, f"schedule {schedule} waits for itself with {left} operations left"
    return Played(max(clock), sum(busy) / stages, tuple(most))
