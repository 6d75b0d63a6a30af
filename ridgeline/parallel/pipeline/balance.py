"""Which of the possible cuts to take, so that the most expensive stage is cheapest.

The cost of a stage is the caller's measurement or an estimate from its FLOPs and parameters; the choice
is exact, by dynamic programming over the candidates in order. Called by `plan.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn

from ridgeline.errors import UsageError
from ridgeline.parallel.pipeline.record import Recording

# A stage's time goes with its arithmetic; its memory and its update with its weights.
_PARAMETER_SHARE = 0.1


class UnknownModule(UsageError):
    """A cost of something that the model does not run; who gave it can say where it came from."""

    def __init__(self, path: str) -> None:
        super().__init__(f"pipeline costs: the forward pass calls no module {path!r}")
        self.path = path


class Weigher:
    """The cost of the part of a model between any two candidates, each a (clock, FLOPs so far)."""

    def __init__(
        self,
        model: nn.Module,
        seen: Recording,
        points: Sequence[tuple[int, int]],
        costs: Mapping[str, float] | None,
    ) -> None:
        self.clocks = [-1, *(clock for clock, _ in points), seen.end]
        self.flops = [0, *(flops for _, flops in points), seen.flops]
        self.sizes = {name: p.numel() for name, p in model.named_parameters()}
        self.total_size = sum(self.sizes.values()) or 1
        self.held = [set[str]() for _ in range(len(points) + 1)]
        for name in self.sizes:
            for clock, _ in seen.uses.get(name, []):
                self.held[self._segment(clock)].add(name)
        self.given: list[float] | None = None
        if costs is not None:
            self.given = [0.0] * len(self.held)
            starts = {call.path: call.start for call in reversed(seen.calls)}
            for path, cost in costs.items():
                if path not in starts:
                    raise UnknownModule(path)
                self.given[self._segment(starts[path] + 1)] += cost

    def _segment(self, clock: int) -> int:
        return bisect_left(self.clocks, clock) - 1

    def cost(self, first: int, last: int) -> float | None:
        """Of segments first to last - 1; None where they hold no parameter."""
        held = set().union(*self.held[first:last])
        if not held:
            return None
        if self.given is not None:
            return sum(self.given[first:last])
        flops = self.flops[last] - self.flops[first]
        size = sum(self.sizes[name] for name in held)
        share = size / self.total_size
        if not self.flops[-1]:
            return share
        return (1 - _PARAMETER_SHARE) * flops / self.flops[-1] + _PARAMETER_SHARE * share

    def costs_of(self, chosen: list[int]) -> list[float]:
        bounds = [0, *(index + 1 for index in chosen), len(self.held)]
        return [self.cost(a, b) or 0.0 for a, b in pairwise(bounds)]

    def most_stages(self) -> int:
        """How many stages with a parameter each the candidates allow."""
        return max(1, sum(1 for held in self.held if held))


def balance(weigh: Weigher, sent: list[int], num_stages: int) -> list[int] | None:
    """The candidates to cut at, so that the largest stage is smallest; None where too few.

    `sent` is what crosses each candidate. Of equal choices, the more even, then the one that sends
    less: after a pooling layer rather than before it.
    """
    num_segments = len(sent) + 1
    if num_stages > num_segments:
        return None
    table = {
        (a, b): weigh.cost(a, b)
        for a in range(num_segments)
        for b in range(a + 1, num_segments + 1)
    }
    # best[b]: (largest cost, sum of squares, sent, cuts) of the first b segments in so many stages.
    best: dict[int, tuple[float, float, int, list[int]]] = {}
    for b in range(1, num_segments + 1):
        cost = table[0, b]
        if cost is not None:
            best[b] = (cost, cost**2, 0, [])
    for _ in range(num_stages - 1):
        longer: dict[int, tuple[float, float, int, list[int]]] = {}
        for a, (largest, squares, size, cuts) in best.items():
            for b in range(a + 1, num_segments + 1):
                cost = table[a, b]
                if cost is None:
                    continue
                worst, spread = max(largest, cost), round(squares + cost**2, 12)
                found = (worst, spread, size + sent[a - 1], [*cuts, a - 1])
                if b not in longer or found < longer[b]:
                    longer[b] = found
        best = longer
    return best[num_segments][3] if num_segments in best else None
