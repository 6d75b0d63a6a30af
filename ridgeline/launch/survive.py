"""A run that is kept alive: ranks started again after a failure, with fewer of them where a device keeps
failing and with all of them later, and stopped in order when a scheduler asks.

Each attempt is one call of a starter (`start.py`), so that new ranks meet with a new store. While it
runs, this file owns SIGTERM and SIGUSR1 of the launcher. Called by `ridgeline train`.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ridgeline.config import RunConfig
from ridgeline.errors import Requeue, RunError, UsageError, say
from ridgeline.launch.env import Limits, visible_devices
from ridgeline.launch.failures import RankError, clear_accounts
from ridgeline.launch.fit import fit_layout
from ridgeline.launch.ranks import known_ranks
from ridgeline.launch.restart import Failed, bad_slot, count_restarts, why_elsewhere, why_give_up
from ridgeline.launch.start import Starter
from ridgeline.layout import Layout
from ridgeline.rundir import CHECKPOINTS, LOGS, RunDir

_SAME_S = 1.0
"""Signals to the launcher itself within this time of each other are one request; what it forwards may
reach ranks later, see `train/signals.py`."""
_LOOK_S = 0.1


class _Desk:
    """Where requests to stop arrive, and from where they go to the ranks."""

    def __init__(self, log_dir: Path, starter: Starter, limits: Limits) -> None:
        self.signal = ""
        """What the launcher itself was sent."""
        self.at_once = False
        """Whether it was sent a second one."""
        self.planned = ""
        """Why this launcher wants its ranks to stop, when nobody asked."""
        self._log_dir, self._starter, self._limits = log_dir, starter, limits
        self._since = 0.0
        self._told: set[tuple[str, int]] = set()

    @property
    def asked(self) -> bool:
        return bool(self.signal or self.planned)

    @contextmanager
    def open(self) -> Iterator[None]:
        before = {n: signal.signal(n, self._hear) for n in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def attempt(self, regrow_s: float) -> Iterator[None]:
        """While ranks run: pass requests on to each that can hear them, and make one when it is time
        for more ranks."""
        self._told, self.planned = set(), ""
        ended = threading.Event()
        deadline = time.monotonic() + regrow_s if regrow_s else None

        def forward() -> None:
            while not ended.wait(_LOOK_S):
                if deadline is not None and time.monotonic() > deadline and not self.planned:
                    self.planned = "regrow"
                if self._time_is_up() and not self.signal:
                    self.signal, self._since = "SIGUSR1", time.monotonic()
                if self.signal or self.planned:
                    self._tell()

        thread = threading.Thread(target=forward, name="ridgeline-forward", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _time_is_up(self) -> bool:
        """Where the scheduler sends no warning before the time limit, the clock does."""
        ends_at, warn_s = self._limits.ends_at, self._limits.warn_s
        return ends_at is not None and time.time() > ends_at - warn_s

    def _tell(self) -> None:
        # A rank that has not introduced itself yet would die of the signal; it is told later.
        new = [p for p in known_ranks(self._log_dir) if (p.host, p.pid) not in self._told]
        self._told |= {(process.host, process.pid) for process in new}
        self._starter.send(new, self.signal or "SIGUSR1")

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since > _SAME_S and not self.at_once:
            self.at_once = True
            # Not here: a handler may run while the hub's lock is held.
            threading.Thread(target=self._starter.kill, daemon=True).start()


def run_job(config: RunConfig, run: RunDir, starter: Starter, limits: Limits) -> None:
    """Train in `run` until it is done; raises `Requeue` when it was asked to stop before."""
    job = _Job(config, run, starter, limits)
    with closing(starter), job.desk.open():
        while not job.attempt():
            pass


class _Job:
    def __init__(self, config: RunConfig, run: RunDir, starter: Starter, limits: Limits) -> None:
        self._config, self._run, self._starter = config, run, starter
        num_ranks = starter.num_ranks
        self._layout = Layout.parse_for(config.layout, num_ranks, "layout")
        self._now = self._layout
        self._good = list(range(num_ranks))
        """Devices that ranks may be on, the first of them first."""
        self._log_dir = run.file(LOGS)
        self._history: list[Failed] = []
        self._attempt = 0
        self._limits = limits
        self.desk = _Desk(self._log_dir, starter, limits)

    def attempt(self) -> bool:
        """Run the ranks once; True when the run is over."""
        if self.desk.signal:  # before the first step of this attempt
            self._run.add_event("stopped", signal=self.desk.signal, step=None)
            raise self._requeue()
        self._attempt += 1
        clear_accounts(self._log_dir)
        began = time.time()
        full = self._now == self._layout
        regrow_s = 0.0 if full else 60 * self._config.restart.regrow_minutes
        try:
            with self.desk.attempt(regrow_s):
                self._starter.run(
                    self._command(),
                    self._now.world_size,
                    self._log_dir,
                    self._config.threads,
                    self._variables(),
                )
        except UsageError as error:
            if self._attempt == 1:
                raise
            raise RunError(f"{error} (after a restart)") from None
        except RankError as error:
            if self.desk.at_once:
                self._run.add_event("stopped", signal=self.desk.signal, at_once=True)
                raise self._requeue() from None
            self._after_failure(error, began)
            return False
        if self._run.status() == "finished" or not self.desk.asked:
            return True
        # Whether or not the disk took the event: they were asked to stop, and the run is not at its end.
        if self.desk.planned and not self.desk.signal:
            self._grow()
            return False
        raise self._requeue()

    def _command(self) -> list[str]:
        command = ["-m", "ridgeline.train.worker", str(self._run.path.resolve())]
        return command if self._now == self._layout else [*command, f"layout={_stated(self._now)}"]

    def _variables(self) -> dict[str, str]:
        """Where devices are left out, the ranks see the others only."""
        if self._config.device == "cpu" or len(self._good) == self._layout.world_size:
            return {}
        devices = visible_devices(self._layout.world_size)
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot] for slot in self._good)}

    def _requeue(self) -> Requeue:
        return Requeue(
            f"stopped by {self.desk.signal or 'a signal to its ranks'}; what was saved is in "
            f"{self._run.path}, and `ridgeline train {self._run.path}` goes on from there",
            self.desk.signal,
        )

    def _after_failure(self, error: RankError, began: float) -> None:
        """Decide what is next; raises the error when nothing is."""
        slot = self._good[error.failure.rank]  # ranks take the good ones in order
        failed = Failed(
            rank=error.failure.rank,
            slot=slot,
            step=error.step if error.step is not None else self._last_step(began),
            checkpoint=newest_checkpoint(self._run),
            lost=self._starter.here and self._config.device != "cpu" and not _answers(slot),
            node_gone=str(error) if error.failure.node_gone else "",
        )
        if error.failure.would_repeat:
            raise RunError(str(error)) from None
        self._history.append(failed)
        fewer = self._without(bad_slot(self._history))
        reason = why_give_up(self._history, self._config.restart.times)
        # On other devices, what failed twice in one place has a chance again.
        if reason is not None and (fewer is None or not reason):
            if self._limits.requeue and (
                gone := why_elsewhere(self._history, self._times_queued())
            ):
                self._run.add_event("stopped", cause=gone, step=None)
                raise Requeue(f"{gone}; the job is to go on with other nodes") from None
            raise RunError(f"{error}\n  given up: {reason}" if reason else str(error)) from None
        cause = str(error).splitlines()[0].partition("; logs of every rank")[0]
        details: dict[str, Any] = {
            "cause": error.failure.message,
            "rank": failed.rank,
            "attempt": self._attempt,
        }
        where = f"checkpoint {failed.checkpoint}" if failed.checkpoint else "the start"
        line = f"restart {count_restarts(self._history)}: {cause}; going on from {where}"
        if fewer is not None:
            self._good.remove(slot)
            self._now = fewer
            details |= {"without_slot": slot, "layout": str(fewer)}
            line += f" without device {slot}, as {fewer}"
            self._history.clear()
        self._run.add_event("restart", **details)
        say(line)

    def _without(self, slot: int | None) -> Layout | None:
        """The layout to go on with on the other devices, where that is allowed and works."""
        least = self._config.restart.min_ranks
        if slot is None or least is None or not self._starter.here:
            return None
        fitted = fit_layout(self._layout, self._config.train.batch, len(self._good) - 1)
        return fitted if fitted is not None and fitted.world_size >= least else None

    def _grow(self) -> None:
        """All ranks again, from what the fewer have just saved."""
        self._now, self._good = self._layout, list(range(self._layout.world_size))
        self._run.add_event("restart", cause="regrow", rank=None, layout=str(self._layout))
        say(f"regrow: going on with {self._layout.world_size} ranks again")

    def _times_queued(self) -> int:
        """How often in a row, with no step in between, a node that was gone sent this run back into the
        queue; of earlier starts of the job, so read from its record."""
        stepped = max((record.time for record in self._run.steps()), default=0.0)
        events = self._run.events()
        return sum(
            e.event == "stopped" and "cause" in e.details and e.time > stepped for e in events
        )

    def _last_step(self, began: float) -> int | None:
        """The last step on record of this attempt, when no rank lived to tell."""
        steps = [record.step for record in self._run.steps() if record.time >= began]
        return steps[-1] if steps else None


def _stated(layout: Layout) -> str:
    """With `dp` written out also where it is 1: the ranks must not fill it in."""
    text = str(layout)
    return text if text.startswith("dp=") else f"dp={layout.dp},{text}"


def newest_checkpoint(run: RunDir) -> str:
    """The name of the newest checkpoint, or empty; those half written or damaged have other names."""
    paths = run.file(CHECKPOINTS).glob("step-*")
    return max((path.name for path in paths if not path.suffix), default="")


def _answers(slot: int) -> bool:
    """Whether a GPU still answers; True where there is nothing to ask."""
    try:
        device = visible_devices(slot + 1)[slot]
        command = ["nvidia-smi", "-i", device, "-L"]
        done = subprocess.run(command, capture_output=True, timeout=20)
    except OSError:
        return True
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
