"""States ahead: those that may come next start beside the one whose turn it is.

A state takes longer to start (imports, building, compiling, the steps whose losses are compared) than to be
raced, and most of that is work of one core. So together with a remedy's state start those that come after
it: one for the case that it is kept, one for the case that it is dropped. Whichever way it goes, the next
one is there, and its race begins at once. Those for the other case are closed.

Nothing of this may show in a ladder but the time. Before anything is timed every state has finished its
start and waits. One that fails beside others is forgotten, and starts alone when its turn comes; the one
whose turn it is starts alone once more where the memory was not enough for all. Called by `climb.py`;
imports without torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import islice

from ridgeline.config import RunConfig
from ridgeline.doctor.choice import Foreseen
from ridgeline.doctor.states import Candidate, Effort
from ridgeline.errors import RunError

FULL = 0.95
"""Share of a device's memory that states may fill at the same time."""
MORE = 1.25
"""What a state needs while it starts, as a multiple of the kept state's peak: the allocator's rest, a
remedy that takes more, and what compiling and the search for kernels try."""
PROCESS_BYTES = 1.5e9
"""Of a device, for a process's context and its libraries."""
NO_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed", "(-9)")
"""What a state says, or its end, where memory was short; the last is the host's way."""
ENDS_S, AT_ONCE_S = 30.0, 0.5
"""How long a state may take to end by itself; after an interrupt."""


class _Early:
    """A state whose turn has not come."""

    def __init__(self, history: tuple[bool, ...], state: Candidate, effort: Effort) -> None:
        self.history, self.state, self._effort = history, state, effort
        self.failed = False
        # A daemon: an interrupt does not wait for it, but for the process that it listens to.
        self.thread = threading.Thread(target=self._check, daemon=True)

    def _check(self) -> None:
        try:
            self.state.check(self._effort)
        except Exception:  # for whatever reason: it will say so again in its own turn
            self.failed = True

    def close(self, wait_s: float) -> None:
        """One that still starts would not hear that it is to end."""
        if self.thread.is_alive():
            self.state.close(0.0)
            self.thread.join(wait_s)
        else:
            self.state.close(wait_s)


class Ahead:
    """The states of a climb that is at some state: `get` starts them, `note` says how a turn went."""

    def __init__(
        self,
        start: Callable[[RunConfig, str], Candidate],
        effort: Effort,
        left_s: Callable[[], float],
    ) -> None:
        self.start, self._effort, self._left_s = start, effort, left_s
        self._early: list[_Early] = []
        self._failed: list[RunConfig] = []
        """What failed beside others and has to start alone."""
        self._was_early, self._num_others = False, 0
        """Of the state whose turn it is: whether it started ahead, and how many others there are."""

    def get(
        self, config: RunConfig, name: str, foreseen: Iterable[Foreseen] = (), number: int = 0
    ) -> Candidate:
        """The state after its check: the one that was started for this case if it has just this
        configuration, or one that starts now beside the first `number` of `foreseen`."""
        self.settle()
        for early in self._early:
            if not early.history and early.state.config == config:
                self._early.remove(early)
                self._was_early, self._num_others = True, len(self._early)
                return early.state
        self.close()  # the step turned out otherwise, and with it what comes next
        self._was_early, self._num_others = False, 0
        state = self.start(config, name)
        try:
            if config not in self._failed:
                for one in islice(foreseen, number):
                    self._start_early(one, name)
            self._num_others = state.beside = len(self._early)
            for early in self._early:
                early.state.beside = self._num_others
                early.thread.start()
            state.check(self._effort)
        except BaseException as error:
            state.close(AT_ONCE_S if isinstance(error, KeyboardInterrupt) else ENDS_S)
            raise
        return state

    def _start_early(self, one: Foreseen, after: str) -> None:
        went = "-".join("kept" if kept else "dropped" for kept in one.history)
        try:
            state = self.start(one.config, f"{after}-{went}-{one.name.replace(' ', '-')}")
        except RunError:
            self._failed.append(one.config)
            return
        self._early.append(_Early(one.history, state, self._effort))

    def settle(self) -> None:
        """Until nothing computes any more: all have finished their start, or failed, or the time is over,
        after which none of them gets a turn."""
        for early in list(self._early):
            left_s = self._left_s()
            early.thread.join(min(max(left_s, 0.0), threading.TIMEOUT_MAX))
            if early.failed or early.thread.is_alive():
                if early.failed:
                    self._failed.append(early.state.config)
                self._early.remove(early)
                early.close(ENDS_S)

    def make_room(self, kept: Candidate, tried: Candidate) -> None:
        """Close those for whom there is no memory while these two are raced: some hold as much while they
        wait as at their peak."""
        capacity = kept.last.get("capacity_bytes", 0.0)
        while capacity and self._early:
            waiting = [early.state for early in self._early]
            resting = sum(_rest_bytes(state) for state in (kept, tried, *waiting))
            if resting + MORE * max(kept.peak_bytes, tried.peak_bytes) <= FULL * capacity:
                return
            self._early.pop().close(ENDS_S)

    @property
    def was_early(self) -> bool:
        """Whether the state whose turn it is started ahead, so that its start took no time of its own."""
        return self._was_early

    def note(self, kept: bool) -> None:
        """How the turn of the last state went; those for the other case are closed."""
        for early in list(self._early):
            if early.history[0] == kept:
                early.history = early.history[1:]
            else:
                self._early.remove(early)
                early.close(ENDS_S)

    def is_to_blame(self, error: RunError) -> bool:
        """Whether a state may have failed for having waited, or for want of what others beside it took."""
        text = str(error).lower()
        return self._was_early or (self._num_others > 0 and any(sign in text for sign in NO_MEMORY))

    def close(self, wait_s: float = ENDS_S) -> None:
        while self._early:
            self._early.pop().close(wait_s)


def num_beside(kept: Candidate, effort: Effort) -> int:
    """States that can start beside another while the kept one rests: as many as are asked for, less where
    the device has no room for all at their peaks."""
    capacity = kept.last.get("capacity_bytes", 0.0)
    if not capacity:
        return effort.num_ahead
    each = MORE * kept.peak_bytes + PROCESS_BYTES
    room = FULL * capacity - _rest_bytes(kept)
    return max(0, min(effort.num_ahead, int(room // each) - 1))


def _rest_bytes(state: Candidate) -> float:
    """What a state holds of the device while it waits."""
    held: float = state.last.get("rest_bytes", state.peak_bytes)
    return held + PROCESS_BYTES
