"""Who is slow, by how much, and whether it is data, arithmetic or the network.

A step takes as long as its slowest rank, and that rank is the one that waits least: so a rank's own time is
its step less the communication that nothing hides and, in a pipeline, the waiting for other stages. A rank
whose own time stands out holds the others up, by its data or by its arithmetic; where all own times are
alike and everybody still waits, it is the network. Fed by `alive.py` with the paces that ranks exchange;
what is found goes to `events.jsonl`, to the terminal, and from there to the report.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ridgeline.rundir import RunDir
from ridgeline.train.pulse import RankPace

WINDOW = 8
"""Exchanges that a judgement is made over: one slow step is no straggler."""
EXCESS = 0.2
"""A rank is slow when its own time is so much above that of the others, as a share of the step."""
NETWORK = 0.4
"""The network is slow when even the rank that waits least spends this share of the step waiting."""
AGAIN_S = 300.0
_SKIPPED_STEPS = 5


@dataclass(frozen=True)
class Finding:
    """One slow rank, or a slow network (rank -1)."""

    rank: int
    part: str
    """data, compute or network."""
    own_s: float
    """Its own time a step; for the network what every rank waits."""
    others_s: float
    """The median of the others' own time; for the network the median step."""
    step_s: float
    stage: int | None = None
    """Of the pipeline that the rank computes, where there is one: it may have more to do than others."""

    @property
    def excess(self) -> float:
        """What it costs, as a share of the step."""
        lost = self.own_s if self.rank < 0 else self.own_s - self.others_s
        return lost / self.step_s if self.step_s > 0 else 0.0

    def __str__(self) -> str:
        if self.rank < 0:
            return (
                f"network: every rank waits {self.own_s * 1e3:.3g} ms of a step of "
                f"{self.step_s * 1e3:.3g} ms ({self.excess:.0%}), and none of them is slow"
            )
        stage = "" if self.stage is None else f" in stage {self.stage} of the pipeline"
        return (
            f"straggler: rank {self.rank} needs {self.own_s * 1e3:.3g} ms a step of its own, the "
            f"others {self.others_s * 1e3:.3g} ms; it is {self.part}{stage}, and costs {self.excess:.0%}"
        )


def find_stragglers(
    windows: Sequence[Sequence[RankPace]], stage_of: Callable[[int], int] | None = None
) -> list[Finding]:
    """What stands out over several exchanges; medians, so that a pause of one does not count. In a pipeline
    ranks are compared with those that have the same stage, where there are any."""
    by_rank: dict[int, list[RankPace]] = {}
    for paces in windows:
        for pace in paces:
            by_rank.setdefault(pace.rank, []).append(pace)
    typical = [_median(rank, paces) for rank, paces in sorted(by_rank.items())]
    if len(typical) < 2:
        return []
    step_s = statistics.median(pace.step_s for pace in typical)
    found = []
    for pace in typical:
        others = [other for other in typical if other.rank != pace.rank]
        if stage_of is not None:
            mine = stage_of(pace.rank)
            others = [other for other in others if stage_of(other.rank) == mine] or others
        others_s = statistics.median(other.own_s for other in others)
        if pace.own_s - others_s > EXCESS * step_s:
            more_data = pace.data_s - statistics.median(other.data_s for other in others)
            part = "data" if more_data > 0.5 * (pace.own_s - others_s) else "compute"
            found.append(Finding(pace.rank, part, pace.own_s, others_s, step_s))
    least_wait_s = min(pace.comm_s for pace in typical)
    if not found and least_wait_s > NETWORK * step_s:
        found.append(Finding(-1, "network", least_wait_s, step_s, step_s))
    return found


def _median(rank: int, paces: Sequence[RankPace]) -> RankPace:
    names = ("step_s", "data_s", "compute_s", "comm_s", "bubble_s")
    medians = {name: statistics.median(getattr(pace, name) for pace in paces) for name in names}
    return RankPace(rank, sum(pace.num_steps for pace in paces), **medians)


class Stragglers:
    """The judgement over a run; only rank 0, which has the run directory, judges."""

    def __init__(
        self, num_ranks: int, run: RunDir | None, stage_of: Callable[[int], int] | None = None
    ) -> None:
        """`stage_of` says which place in a pipeline a rank has, where there is one."""
        self._stage_of = stage_of
        self._run = run if num_ranks > 1 else None
        self._windows: deque[Sequence[RankPace]] = deque(maxlen=WINDOW)
        self._told: dict[int, float] = {}

    def after(self, step: int, ranks: Sequence[RankPace]) -> list[str]:
        """Take in the paces of an exchange, if there was one; returns lines for the terminal."""
        if self._run is None or not ranks or step <= _SKIPPED_STEPS:
            return []
        self._windows.append(ranks)
        if len(self._windows) < WINDOW:
            return []
        lines = []
        now = time.monotonic()
        for finding in find_stragglers(self._windows, self._stage_of):
            if now - self._told.get(finding.rank, -AGAIN_S) < AGAIN_S:
                continue
            self._told[finding.rank] = now
            if self._stage_of is not None and finding.part == "compute":
                finding = replace(finding, stage=self._stage_of(finding.rank))
            lines.append(str(finding))
            self._run.add_event(
                "straggler",
                step=step,
                rank=finding.rank if finding.rank >= 0 else None,
                part=finding.part,
                own_s=finding.own_s,
                others_s=finding.others_s,
                step_s=finding.step_s,
                excess=finding.excess,
                **({} if finding.stage is None else {"stage": finding.stage}),
            )
        return lines
