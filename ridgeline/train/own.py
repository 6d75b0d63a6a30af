"""Checkpoints for a loop of the user's own: `saves = job.checkpoints(...)`, and `saves.step()` in it.

The state is the same as that of `ridgeline train`: weights, optimizer, generators, and the place in the
data, so every layout reads it, and `ridgeline checkpoint` except `reshard`, which builds the model from
a recipe. Sums over three ranks and more may differ in the last bit after going on, because torch lays
the buckets of its replication out anew after a first step. Called through `job.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from ridgeline.checkpoint.held import hold_state
from ridgeline.checkpoint.load import find_newest, load_training
from ridgeline.checkpoint.manifest import Manifest, clear_unfinished, put_aside
from ridgeline.checkpoint.retain import Keep
from ridgeline.checkpoint.save import Saver
from ridgeline.errors import OURS, UsageError
from ridgeline.launch.env import recorded_environment
from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.mesh import Mesh
from ridgeline.train.engine import Engine
from ridgeline.train.job import JobLoader


class OwnCheckpoints:
    """Made by `Job.checkpoints`; everything is restored by then."""

    def __init__(
        self,
        mesh: Mesh,
        arranged: Arranged,
        optimizer: Optimizer,
        loader: JobLoader,
        directory: Path,
        every: int,
        keep: int,
        also: Mapping[str, Any],
        engine: Engine | None = None,
    ) -> None:
        if every < 1:
            raise UsageError(f"job.checkpoints(every={every}): save every 1 step or more")
        self._mesh, self._arranged, self._optimizer = mesh, arranged, optimizer
        self._loader, self._every, self._also = loader, every, dict(also)
        self._engine = engine
        if engine is not None:
            self._also["engine"] = engine
            others = engine.settle

            def settle() -> None:
                others()
                self._saver.release()

            engine.settle = settle
        self._waits = False
        """Whether one fell due while the one before was still being written."""
        self.num_steps = 0
        """Steps done since the very beginning."""
        directory.mkdir(parents=True, exist_ok=True)
        group = mesh.side_group("save")
        world = mesh.world_group
        self._saver = Saver(directory, mesh.env.rank, group, world, Keep(keep), mesh.device)
        # The weights are about to change: what is being saved has to be copied by then.
        optimizer.register_step_pre_hook(lambda *_: self._saver.release())
        if mesh.is_main:
            clear_unfinished(directory)
        found = find_newest(directory, mesh.env.rank, group)
        if found is None:
            return
        for text in found.damaged if mesh.is_main else ():
            print(f"{OURS}{text}", file=sys.stderr)
        load_training(found.path, found.manifest, arranged, optimizer)
        self.num_steps = found.manifest.step
        self._restore(found.manifest.state, found.path)
        if mesh.is_main:
            for path in reversed(found.damaged_paths):
                put_aside(path)

    def _restore(self, state: dict[str, Any], path: Path) -> None:
        for name, now in self._loader.identity.items():
            if state["loader"].get(name) != now:
                raise UsageError(
                    f"the loader has {name}={now} and had {state['loader'].get(name)} in {path}, so "
                    "samples would come twice or never; use the same, or another directory"
                )
        self._loader.go_to(state["epoch"], state["batch"])
        for group, values in zip(self._optimizer.param_groups, state["groups"], strict=True):
            group.update(values)
        for name, value in self._also.items():
            if name in state["also"]:
                value.load_state_dict(state["also"][name])

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`, beginning with the one the run was in."""
        first = self._loader.position[0]
        yield from range(first, count)

    def step(self) -> None:
        """After `optimizer.step()` or `engine.step()`: counts updates, and saves when it is time, while the
        loop goes on."""
        if self._engine is not None and not self._engine.has_stepped:
            return
        self.num_steps += 1
        if self._waits or self.num_steps % self._every == 0:
            self.save()
        self._tell()

    def save(self, wait: bool = False) -> None:
        """Save now; with `wait`, until it is on disk."""
        average = self._arranged.average
        if average is not None and average.is_in_place:
            raise UsageError(
                "a checkpoint was to be saved within engine.averaged(), where the weights are their "
                "averages; leave it first"
            )
        if self._engine is not None:
            self._engine.take_loaded()
        epoch, batch = self._loader.position
        names = self._arranged.state_names
        state: dict[str, Any] = {
            "epoch": epoch,
            "batch": batch,
            "loader": self._loader.identity,
            "groups": [_plain(group) for group in self._optimizer.param_groups],
            "also": {name: value.state_dict() for name, value in self._also.items()},
            "tied": {name: first for name, first in names.items() if name != first},
        }
        manifest = Manifest(
            step=self.num_steps,
            layout=str(self._mesh.layout),
            num_ranks=self._mesh.env.world_size,
            time=time.time(),
            state=state,
            versions=dict(recorded_environment()["packages"]),  # type: ignore[call-overload]
        )
        held = hold_state(self._arranged, self._optimizer)
        self._waits = not self._saver.save(held, manifest, wait)
        self._tell()

    def close(self) -> None:
        """Wait for what is being written; call it at the end of the script."""
        self._saver.close()
        self._tell()

    def _tell(self) -> None:
        for done in self._saver.outcomes():
            if done.path is None and self._mesh.is_main:
                print(
                    f"{OURS}no checkpoint at step {done.step}: {done.problem}; the loop goes on",
                    file=sys.stderr,
                )


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group that a schedule may have changed: its rate and other numbers."""
    return {
        name: value
        for name, value in group.items()
        if name != "params" and isinstance(value, (int, float, bool))
    }
