"""How ranks agree on what was asked of one of them, without anyone waiting.

Every now and then each rank starts a small exchange with all the others, on the host and on a group of
its own, and reads the result when the next is due, by when it has long arrived. So all ranks learn the
same thing at the same step: that one was told to stop, that a checkpoint is due, and how fast everyone
is. How often follows from the step times that were exchanged, so it too is the same everywhere.
Called by `alive.py` after every step.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ridgeline.parallel.mesh import Mesh
from ridgeline.train.clock import Pending
from ridgeline.train.signals import STOPPING, Requests
from ridgeline.train.step import StepResult

EVERY_S = 0.5
"""Time between exchanges. One costs about 0.6 ms of a core, so this is 0.1 % of the time."""
MOST_STEPS = 100
_KEPT_TIMES = 2 * MOST_STEPS
_PARTS: tuple[tuple[str, ...], ...] = (
    ("step_s",),
    ("data_s",),
    ("h2d_s", "forward_s", "backward_s", "optimizer_s"),
    ("comm_s",),
    ("bubble_s",),
)
"""What is exchanged of a step's times, in the order of `RankPace`."""


@dataclass(frozen=True)
class RankPace:
    """Means over the steps that a rank finished since the exchange before, in seconds a step."""

    rank: int
    num_steps: int
    step_s: float
    data_s: float
    compute_s: float
    comm_s: float
    """Communication that nothing hides, with the waiting for slower ranks."""
    bubble_s: float = 0.0
    """Waiting for other stages of a pipeline."""

    @property
    def own_s(self) -> float:
        """What this rank needs when nobody makes it wait."""
        return max(0.0, self.step_s - self.comm_s - self.bubble_s)


@dataclass(frozen=True)
class Beat:
    """What all ranks know after this step; the same on each."""

    stop: str = ""
    """The signal that asked for an end after this step."""
    save: bool = False
    ranks: tuple[RankPace, ...] = ()
    """Empty between two exchanges, and where there is one rank."""


_QUIET = Beat()


class Pulse:
    """Every rank makes one at the same place, and calls `after` after every step."""

    def __init__(self, mesh: Mesh, requests: Requests) -> None:
        self._requests, self._rank, self._size = requests, mesh.env.rank, mesh.env.world_size
        self._group = mesh.side_group("pulse")
        self._times: deque[Pending] = deque(maxlen=_KEPT_TIMES)
        self._every, self._due = 1, 1
        self._step = self._sent_step = 0
        self._sent_at = time.monotonic()
        self._work: dist.Work | None = None
        self._rows: list[torch.Tensor] = []

    def after(self, result: StepResult) -> Beat:
        if self._group is None:  # nobody to agree with
            return Beat(self._requests.stop, self._requests.want_save())
        self._times.append(result.times)
        self._step += 1
        if self._step < self._due:
            return _QUIET
        beat = self._read()
        if not beat.stop:
            self._send()
        self._due = self._step + self._every
        return beat

    def close(self) -> None:
        """Take in the last exchange, which every rank has started: an abandoned one can hang a peer."""
        self._read()

    def _send(self) -> None:
        row = self._row()
        self._sent_at, self._sent_step = time.monotonic(), self._step
        self._rows = [torch.empty_like(row) for _ in range(self._size)]
        self._work = dist.all_gather(self._rows, row, group=self._group, async_op=True)

    def _row(self) -> torch.Tensor:
        """stop, save, host seconds a step; then steps finished and the means of their parts."""
        elapsed = time.monotonic() - self._sent_at
        pace = elapsed / max(1, self._step - self._sent_step)
        names = [number.name for number in STOPPING]
        stop = names.index(self._requests.stop) + 1 if self._requests.stop else 0
        head = [stop, float(self._requests.want_save()), pace]
        return torch.tensor(head + self._mean_times(), dtype=torch.float64)

    def _mean_times(self) -> list[float]:
        read = []
        while self._times and self._times[0].is_finished():
            read.append(self._times.popleft().read())
        count = max(1, len(read))
        sums = [sum(times.get(name, 0.0) for times in read for name in names) for names in _PARTS]
        return [len(read), *(total / count for total in sums)]

    def _read(self) -> Beat:
        if self._work is None:
            return _QUIET
        self._work.wait()
        self._work = None
        values = [row.tolist() for row in self._rows]
        slowest = max(value[2] for value in values)
        wanted = int(EVERY_S / slowest) if slowest > 0 else MOST_STEPS
        # Not more than twice as rarely as before: one exchange may have seen unusually quick steps.
        self._every = max(1, min(wanted, 2 * self._every, MOST_STEPS))
        stop = max(int(value[0]) for value in values)
        return Beat(
            stop=STOPPING[stop - 1].name if stop else "",
            save=values[0][1] > 0,
            ranks=tuple(
                RankPace(rank, int(value[3]), *value[4:])
                for rank, value in enumerate(values)
                if value[3] > 0
            ),
        )
