"""What keeps a run alive, in one object for the loop of `run.py`: the watchdog, the exchange of requests
between ranks, and the look-out for slow ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.rundir import LOGS, RunDir
from ridgeline.train.pulse import Beat, Pulse
from ridgeline.train.setup import Training
from ridgeline.train.signals import Requests
from ridgeline.train.step import StepResult
from ridgeline.train.stragglers import Stragglers
from ridgeline.train.watch import Watch


@dataclass(frozen=True)
class Alive:
    watch: Watch
    pulse: Pulse
    stragglers: Stragglers
    requests: Requests

    def after(self, result: StepResult) -> tuple[Beat, list[str]]:
        """What all ranks agree on after a step, and lines for the terminal (of rank 0)."""
        self.watch.after(result.step)
        self.requests.step = result.step
        beat = self.pulse.after(result)
        return beat, self.stragglers.after(result.step, beat.ranks)

    def close(self) -> None:
        """When the loop is over on every rank alike; not after an error."""
        self.pulse.close()

    def end(self) -> None:
        """Whatever happened."""
        self.requests.deaf = True
        self.watch.close()


def build_alive(
    training: Training, run: RunDir | None, requests: Requests, want_save: Callable[[], bool]
) -> Alive:
    """Every rank calls this at the same place. `want_save` says whether a checkpoint is due by the
    clock; rank 0's answer counts."""
    mesh = training.mesh
    piped = mesh.layout.pp > 1
    requests.want_save = want_save
    return Alive(
        Watch(training.config.watch, mesh.env, training.clock, run.file(LOGS) if run else None),
        Pulse(mesh, requests),
        Stragglers(
            mesh.env.world_size, run if mesh.is_main else None, mesh.stage_of if piped else None
        ),
        requests,
    )
