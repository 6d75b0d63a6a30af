"""The checkpoints of a run: when one is due, what goes into it, and where a run goes on from.

`checkpoint/` knows how state is written and read; this knows the run: its position in the data, the loss
scale, the metrics of the last evaluation, the policy of the configuration. Called by `run.py`.
"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ridgeline.checkpoint.files import sync_directory
from ridgeline.checkpoint.held import hold_state
from ridgeline.checkpoint.load import Found, find_newest, load_training
from ridgeline.checkpoint.manifest import Manifest, clear_unfinished, list_checkpoints, put_aside
from ridgeline.checkpoint.retain import Keep
from ridgeline.checkpoint.save import Outcome, Saver
from ridgeline.config import dump_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import recorded_environment
from ridgeline.parallel.ddp import Replicated
from ridgeline.rundir import CHECKPOINTS, RunDir
from ridgeline.train.guard import BadBatch, Guard
from ridgeline.train.position import Position
from ridgeline.train.setup import Training


class Checkpoints:
    """Every rank has one, and calls it alike; without a run directory it does nothing."""

    def __init__(self, training: Training, run: RunDir | None) -> None:
        self._training = training
        self._config = training.config.checkpoint
        self._metrics: dict[str, float] = {}
        self._last_saved = -1
        self.guard: Guard | None = None
        """Whose judgement goes on with the run; set by whoever made both."""
        self._waits = False
        """Whether one fell due while the one before was still being written."""
        self._last_time = time.monotonic()
        self.skipped: list[list[int]] = []
        """[epoch, batch] of batches that are left out for what they did to the loss."""
        self._always_skipped: list[list[int]] = []
        """Those found since the start, which an older checkpoint does not know of."""
        mesh = training.mesh
        path = _agreed_path(training, run)
        self._saver: Saver | None = None
        if path is None:
            return
        self._directory = path
        self._group = mesh.side_group("checkpoint")
        higher = self._config.keep_best in training.task.higher_is_better
        self._saver = Saver(
            path,
            mesh.env.rank,
            self._group,
            mesh.world_group,
            Keep(self._config.keep, self._config.keep_every, self._config.keep_best, higher),
            mesh.device,
            before=partial(_write_records, run, mesh.env.rank),
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last evaluation, also one before a restart."""
        return self._metrics

    # Going on

    def find(self) -> Found | None:
        """The newest whole checkpoint of this run; leftovers of a save that was cut off are removed."""
        if self._saver is None:
            return None
        if self._training.mesh.is_main:
            clear_unfinished(self._directory)
        rank = self._training.mesh.env.rank
        found = find_newest(self._directory, rank, self._group, self._config.check)
        if found is not None and self._training.mesh.is_main:
            for path in reversed(found.damaged_paths):
                put_aside(path)
        return found

    def restore(self, found: Found) -> tuple[Position, list[str]]:
        """Bring the run to where the checkpoint was made; sentences for the user."""
        position = read_position(found.manifest, self._training)
        _settle_buckets(self._training, position)
        training = self._training
        notes = load_training(found.path, found.manifest, training.arranged, training.optimizer)
        state = found.manifest.state
        scaler = training.precision.scaler
        if scaler is not None and state.get("scaler"):
            scaler.load_state_dict(state["scaler"])
        training.arranged.num_averaged = state.get("num_averaged", 0)
        self._metrics = dict(found.manifest.metrics)
        if self.guard is not None and state.get("guard"):
            self.guard.restore(state["guard"])
        known = [list(pair) for pair in state.get("skipped", [])]
        self.skipped = known + [pair for pair in self._always_skipped if pair not in known]
        self._last_saved = position.step
        self._last_time = time.monotonic()
        return position, [*notes, *_tell_rate(training, position.step, state)]

    def add_skipped(self, bad: BadBatch) -> bool:
        """Never learn from this batch again; whether that is news, and the run has to go back."""
        pair = [bad.epoch, bad.batch]
        if pair in self.skipped:
            return False
        self._always_skipped.append(pair)
        return True

    # Saving

    def is_due(self, step: int) -> bool:
        """By the count of steps, which all ranks know; one that had to wait is tried again soon."""
        every = self._config.every
        if self._waits and step % (max(1, every // 10) if every else 10) == 0:
            return True
        return bool(every) and step % every == 0

    def is_late(self) -> bool:
        """By the clock, which ranks have to agree on."""
        minutes = self._config.minutes
        return bool(minutes) and time.monotonic() - self._last_time > 60 * minutes

    @property
    def phase(self) -> str:
        """What the watchdog calls a save: one in the background is over at once, or something hangs."""
        return "begin a save" if self._config.background else "save"

    @property
    def num_steps(self) -> int:
        """Of the whole run."""
        return self._training.num_steps

    def evaluated(self, metrics: dict[str, float]) -> str:
        """Takes what an evaluation found; a sentence when it has no word on what is to be kept."""
        first, self._metrics = not self._metrics, dict(metrics)
        best = self._config.keep_best
        if not first or not best or best in metrics:
            return ""
        known = ", ".join(sorted(metrics))
        return (
            f"checkpoint.keep_best={best} is no metric of this run, so none is kept for it: {known}"
        )

    def save(self, position: Position, wait: bool = False) -> list[Outcome]:
        """Begin a save of the run at `position`; how those ended that have ended by now."""
        if self._saver is None or position.step == self._last_saved:
            return self.outcomes(wait)
        training = self._training
        state = hold_state(training.arranged, training.optimizer)
        began = self._saver.save(
            state, self._manifest(position), wait or not self._config.background
        )
        self._waits = not began
        if began:
            self._last_saved = position.step
        self._last_time = time.monotonic()
        return self.outcomes(wait)

    def outcomes(self, wait: bool = False) -> list[Outcome]:
        if self._saver is None:
            return []
        if wait:
            self._saver.join()
        done = self._saver.outcomes()
        if any(outcome.path is None and outcome.step == self._last_saved for outcome in done):
            self._last_saved = -1
        return done

    def close(self) -> None:
        """At the end of the run."""
        if self._saver is not None:
            self._saver.close()

    def release(self) -> None:
        """Before the weights change."""
        if self._saver is not None:
            self._saver.release()

    def _manifest(self, position: Position) -> Manifest:
        training = self._training
        scaler = training.precision.scaler
        state: dict[str, Any] = {
            "epoch": position.epoch,
            "batch": position.batch,
            "train_batch": training.config.train.batch,
            "seed": training.config.train.seed,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "num_averaged": training.arranged.num_averaged,
            "skipped": self.skipped,
            "guard": self.guard.state() if self.guard is not None else None,
            "num_samples": len(training.loader.source),
            "drop_last": training.config.data.drop_last,
            "rate": training.peak_lr * training.schedule(position.step),
            "num_steps": training.num_steps,
            "tied": {a: b for a, b in training.arranged.state_names.items() if a != b},
        }
        if self._config.keep_best:
            higher = self._config.keep_best in training.task.higher_is_better
            state["best"] = {"metric": self._config.keep_best, "higher": higher}
        return Manifest(
            step=position.step,
            layout=str(training.mesh.layout),
            num_ranks=training.mesh.env.world_size,
            time=time.time(),
            state=state,
            metrics=self._metrics,
            config=dump_config(training.config),
            versions=dict(recorded_environment()["packages"]),  # type: ignore[call-overload]
        )


def read_position(manifest: Manifest, training: Training) -> Position:
    """Where the checkpoint's run was, in the batches of this one."""
    state, batch = manifest.state, training.config.train.batch
    if state["seed"] != training.config.train.seed:
        raise UsageError(
            f"the checkpoint was made with train.seed={state['seed']} and the run has "
            f"{training.config.train.seed}, so samples would come twice or never; use the same seed, "
            "or start over with --fresh"
        )
    data = {"num_samples": len(training.loader.source), "drop_last": training.config.data.drop_last}
    for name, now in data.items():
        if state[name] != now:
            raise UsageError(
                f"the data has {name}={now} and had {state[name]} when the checkpoint was made, so "
                "samples would come twice or never; use the same data, or start over with --fresh"
            )
    done = state["batch"] * state["train_batch"]
    if done % batch:
        raise UsageError(
            f"the checkpoint is {done} samples into an epoch, which is no whole number of batches of "
            f"train.batch={batch}; go on with {state['train_batch']}, or with a divisor of {done}"
        )
    if done // batch >= len(training.loader):  # what is left of the epoch is dropped
        return Position(manifest.step, state["epoch"] + 1, 0)
    return Position(manifest.step, state["epoch"], done // batch)


def _tell_rate(training: Training, step: int, state: dict[str, Any]) -> list[str]:
    """A run of another length, or of other settings, has another learning rate from here on."""
    before, now = state.get("rate"), training.peak_lr * training.schedule(step)
    if before is None or math.isclose(before, now, rel_tol=1e-6):
        return []
    text = f"the learning rate goes on at {now:.4g}, where the checkpoint's run would have had {before:.4g}"
    if state["num_steps"] != training.num_steps:
        text += (
            f": it had {state['num_steps']} steps in all, and there are {training.num_steps} now"
        )
    return [text]


def has_checkpoints(run: RunDir | None) -> bool:
    """Whether a run will go on from one; known before anything is built."""
    return run is not None and bool(list_checkpoints(run.file(CHECKPOINTS)))


def _agreed_path(training: Training, run: RunDir | None) -> Path | None:
    """Rank 0's directory, on every rank; also where no save is planned: a run may be asked to stop."""
    path = run.file(CHECKPOINTS) if run is not None else None
    group = training.mesh.world_group
    if group is not None:
        box = [path]
        dist.broadcast_object_list(box, group_src=0, group=group)
        path = box[0]
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        sync_directory(path.parent)
    return path


def _write_records(run: RunDir | None, rank: int) -> str:
    """A run that goes on from a checkpoint does not make the records of the steps before it again, so
    none is there without them; a sentence when the disk has not taken them."""
    waiting = run.write_waiting() if run is not None else 0
    return f"rank {rank}: the disk does not take {waiting} bytes of records" if waiting else ""


def _settle_buckets(training: Training, position: Position) -> None:
    """Torch's replication lays its buckets out anew after the first step, and sums of several ranks
    depend on the last bit on where in a bucket a number lies. A run that goes on is past its first step,
    so one is run for that alone; what it leaves behind is overwritten by the checkpoint."""
    if not isinstance(training.arranged.objective, Replicated):
        return
    training.arranged.train()
    for batch in training.loader.epoch(position.epoch, position.batch):
        training.forward_backward(training.to_device(batch), training.clock)
        break
    training.optimizer.zero_grad(set_to_none=True)
