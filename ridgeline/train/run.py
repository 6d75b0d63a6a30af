"""A whole run: the loop, with records, evaluation, progress and the final weights around it.

Called by `worker.py` on every rank of `ridgeline train`, and by `ridgeline.run_recipe` in a script.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.config import RunConfig, dump_config, find_recipe, load_config, telling_places
from ridgeline.data.loader import Loader
from ridgeline.errors import UsageError, WouldRepeat
from ridgeline.launch.env import RankEnv, read_rank_env
from ridgeline.layout import read_auto
from ridgeline.optim.update import Update
from ridgeline.parallel.gather import full_state
from ridgeline.parallel.mesh import choose_device, close_mesh
from ridgeline.parallel.pipeline.balance import UnknownModule
from ridgeline.plan.auto import Place, choose_layout
from ridgeline.rundir import (
    BLOCKS,
    CONFIG,
    LIVE_WEIGHTS,
    METRICS,
    PLAN,
    WEIGHTS,
    RunDir,
    StepRecord,
)
from ridgeline.train.alive import build_alive
from ridgeline.train.checkpoints import Checkpoints, has_checkpoints
from ridgeline.train.checks import tell_past
from ridgeline.train.evaluate import evaluate
from ridgeline.train.guard import BadBatch, Guard
from ridgeline.train.log import RunLog
from ridgeline.train.loop import train_loop
from ridgeline.train.memory import is_out_of_memory, tell_budget, tell_no_start
from ridgeline.train.position import Position
from ridgeline.train.record import Recorder
from ridgeline.train.resources import ResourceLog
from ridgeline.train.samples import SampleLog, SkippedSamples
from ridgeline.train.setup import Training, build_training
from ridgeline.train.signals import Requests, listening
from ridgeline.train.step import StepResult
from ridgeline.train.tasks import Task
from ridgeline.train.trace import StepTrace
from ridgeline.train.traced import trace_recipe
from ridgeline.train.watch import Watch

ROOM_TRIES = 30
"""How often, a second apart, records that a full disk does not take are tried at the end of a run."""


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    num_steps: int
    final_loss: float | None
    metrics: dict[str, float]
    """Of the last evaluation."""
    reached_target: bool
    stopped: bool = False
    """Whether it was asked to stop before its end, and can go on."""
    num_skipped: int = 0
    """Samples that could not be read and were passed over; of all ranks on rank 0."""


def run_training(
    config: RunConfig,
    env: RankEnv,
    run: RunDir | None = None,
    requests: Requests | None = None,
) -> Summary:
    """Build, go on from the newest checkpoint of `run`, train, evaluate; every rank calls this, rank 0
    writes records to `run` and to the terminal. `requests` may end it after any step."""
    session = _Session(_build(config, env, run), run, requests or Requests())
    try:
        session.begin()
        session.train()
        session.save_all()
    except Exception as error:
        session.salvage()
        if is_out_of_memory(error):
            raise WouldRepeat(tell_budget(session.training, error)) from error
        raise
    finally:
        session.close()
    return session.end()


class _Session:
    """One run on one rank: what takes part in it, and how far it is."""

    def __init__(self, training: Training, run: RunDir | None, requests: Requests) -> None:
        self.config, self.run = training.config, run
        self.checkpoints = Checkpoints(training, run)
        training = replace(training, update=_after_release(self.checkpoints, training.update))
        self.guard = Guard(training, lambda: self.checkpoints.skipped)
        self.training = training = self.guard.training
        self.checkpoints.guard = self.guard
        self.alive = build_alive(training, run, requests, self.checkpoints.is_late)
        self.main_run = run if training.mesh.is_main else None
        self.log = RunLog(training, self.main_run)
        self.samples = SampleLog(training, run)
        self.skipped = SkippedSamples(training, run)
        self.recorder = Recorder(training)
        self.trace = StepTrace(training)
        self.resources = ResourceLog(training, run)
        self.start = self.position = Position()
        self.metrics: dict[str, float] = {}
        self.reached = False
        self.stopped = ""
        """The signal that ended it before its time."""
        self.paused = False
        """Whether it ended where `train.stop_after` says, to be gone on with."""
        self.num_skipped = 0
        self.last: StepRecord | None = None

    def begin(self) -> None:
        """Where the newest whole checkpoint left off."""
        with self.alive.watch.during("load"):
            self.start = self.position = self._go_on()
            if self.config.guard.on_bad == "rollback" and self.start.step == 0:
                # There is something to go back to.
                self.log.saves(self.checkpoints.save(self.start, wait=True))
        if self.checkpoints.metrics:
            self._judge(dict(self.checkpoints.metrics))

    def train(self) -> None:
        """Steps until the last, the target or a request to stop."""
        steps = train_loop(self.training, self.position)
        while not self.reached and (result := next(steps, None)) is not None:
            self.position = result.position
            self._note(result)
            beat, lines = self.alive.after(result)
            for line in lines:
                self.log.note(line)
            if (bad := self.guard.take()) and self._goes_back(bad, result.step):
                steps.close()
                with self.alive.watch.during("load"):
                    self.position = self._go_on()
                steps = train_loop(self.training, self.position)
                continue
            if self._evaluation_due(result) and self.training.eval_loader is not None:
                self._evaluate(result, self.training.eval_loader)
            if self.checkpoints.is_due(result.step) or beat.save:
                with self.alive.watch.during(self.checkpoints.phase):
                    self.log.saves(self.checkpoints.save(self.position))
            self.log.saves(self.checkpoints.outcomes())
            if beat.stop and result.step < self.training.num_steps:
                self.stopped = beat.stop
                break
        self.paused = (
            not (self.reached or self.stopped) and self.position.step < self.training.num_steps
        )
        self.alive.close()

    def save_all(self) -> None:
        """Records, the last checkpoint and the weights."""
        self._flush()
        self.log.uncompiled(self.training.arranged.uncompiled())
        self.log.ranks(self.recorder)  # every rank has written what it skipped
        self.num_skipped = self.skipped.count()
        if self.num_skipped:
            self.log.note(
                f"{self.num_skipped} samples could not be read and were skipped; events.jsonl has them"
            )
        with self.alive.watch.during("save"):
            if self.config.checkpoint.at_end or self.stopped or self.paused:
                self.log.saves(self.checkpoints.save(self.position, wait=True))
            self.log.saves(self.checkpoints.outcomes(wait=True))
            self.checkpoints.release()
            if self.config.log.weights and not (self.stopped or self.paused):
                self._save_weights()
            self.checkpoints.close()
        if (
            not self.stopped
        ):  # else it goes on from a checkpoint, and makes the records behind it again
            _finish_records(self.run, self.training.mesh.world_group, self.alive.watch)

    def salvage(self) -> None:
        """What was recorded before a failure."""
        self.log.steps(self.recorder.salvage())

    def close(self) -> None:
        """However it ended."""
        self.resources.close()
        if self.run is not None:
            self.run.write_waiting()
        self.alive.end()
        self.log.close()
        self.training.close_loaders()
        self.training.staging.release()

    def end(self) -> Summary:
        """After all went well: the ranks part, and rank 0 says how it ended."""
        close_mesh(self.training.mesh)
        loss = self.last.loss if self.last else None
        if self.main_run is not None and (self.stopped or self.paused):
            asked = (
                {"share": self.config.train.stop_after} if self.paused else {"signal": self.stopped}
            )
            self.main_run.add_event("stopped", **asked, step=self.position.step)
            if self.paused:
                _finish_records(self.main_run, None, self.alive.watch)
        elif self.main_run is not None:
            self.main_run.add_event(
                "end",
                steps=self.position.step,
                loss=loss,
                metrics=self.metrics,
                reached_target=self.reached,
                skipped_samples=self.num_skipped,
            )
            _finish_records(self.main_run, None, self.alive.watch)
        return Summary(
            self.position.step,
            loss,
            self.metrics,
            self.reached,
            bool(self.stopped),
            self.num_skipped,
        )

    def _note(self, result: StepResult) -> None:
        """A step's records, and what is said after the first."""
        if result.step == self.start.step + 1:
            self.log.gathered(self.training.arranged.gathered())
            self.log.uncompiled(self.training.arranged.uncompiled())
        self.last = self.log.steps(self.recorder.add(result)) or self.last
        self.samples.add(result)
        for line in self.skipped.add(result.skipped, result.step):
            self.log.note(line)
        self.log.note(self.training.late_note())
        self.log.note(self.trace.after(result.step - self.start.step, self.main_run))

    def _flush(self) -> None:
        self.last = self.log.steps(self.recorder.flush()) or self.last

    def _goes_back(self, bad: BadBatch, step: int) -> bool:
        """Tell of a bad batch; whether the run goes on from a checkpoint, without it."""
        action = self.config.guard.on_bad
        self.log.bad_batch(step, bad, action)
        if action != "rollback" or not self.checkpoints.add_skipped(bad):
            return False
        self.log.saves(self.checkpoints.outcomes(wait=True))
        self._flush()
        return True

    def _evaluation_due(self, result: StepResult) -> bool:
        if result.step == self.training.last_step:
            return True
        every = self.config.train.eval_every
        return result.step % every == 0 if every else result.ends_epoch

    def _evaluate(self, result: StepResult, loader: Loader) -> None:
        self._flush()
        self.checkpoints.release()  # an evaluation brings replicas together
        training = self.training
        with self.alive.watch.during("evaluate"), training.arranged.averaged():
            to_device = self.skipped.noting(training.to_device, result.step)
            record = evaluate(
                training.arranged,
                training.task,
                loader,
                training.precision,
                self.alive.watch.counting(to_device),
                result.step,
                result.epoch,
            )
        self.log.evaluation(record)
        self.log.uncompiled(training.arranged.uncompiled())
        self._judge(record.metrics)
        self.log.note(self.checkpoints.evaluated(record.metrics))
        training.clock.start()

    def _judge(self, metrics: dict[str, float]) -> None:
        self.metrics = metrics
        self.reached = reaches(metrics, self.config.train.target, self.training.task)

    def _save_weights(self) -> None:
        arranged = self.training.arranged
        # Replicas that stepped on their own come together.
        arranged.prepare_evaluation()
        if arranged.average is not None:
            self._write_weights(LIVE_WEIGHTS)
        with arranged.averaged():  # what evaluations were of
            self._write_weights(WEIGHTS)

    def _write_weights(self, name: str) -> None:
        weights = full_state(self.training.arranged)
        if self.main_run is not None:
            self.log.note(_write_weights(weights, self.main_run, name))

    def _go_on(self) -> Position:
        """Restore the newest whole checkpoint, if there is one, and say so."""
        found = self.checkpoints.find()
        if found is None:
            self.log.begin()
            if self.main_run is not None and self.main_run.file(METRICS).is_file():
                self.log.note("there is no checkpoint to go on from: the run starts over")
            return Position()
        position, notes = self.checkpoints.restore(found)
        self.log.begin()
        for line in (*found.damaged, *notes):
            self.log.note(line)
        self.log.note(f"going on from {found.path.name}")
        if position.step > self.checkpoints.num_steps:
            self.log.note(f"the run is already past step {self.checkpoints.num_steps}")
        if position.step >= self.checkpoints.num_steps:
            self.log.note(f"the run is at its end; {_tell_longer(self.config)}")
        self.log.event(
            "resume",
            step=position.step,
            checkpoint=found.path.name,
            passed_over=list(found.damaged),
        )
        return position


def _tell_longer(config: RunConfig) -> str:
    """How a run that is at its end is made longer: where both are set, whichever comes first ends it."""
    ends = {f"train.{n}": getattr(config.train, n) for n in ("epochs", "steps")}
    said = [f"{name}={value}" for name, value in ends.items() if value is not None]
    if len(said) == 2:
        return f"of {said[0]} and {said[1]} the first to come ends it: larger ones make it longer"
    return f"a larger {said[0].partition('=')[0] if said else 'train.epochs'} makes it longer"


def _build(config: RunConfig, env: RankEnv, run: RunDir | None) -> Training:
    costs = run.read_json(BLOCKS) if run is not None else None
    try:
        return build_training(config, env, has_checkpoints(run), costs)
    except UnknownModule as error:
        kept = BLOCKS if run is None else run.file(BLOCKS)  # rank 0's may have come to others
        raise UsageError(
            f"{kept} has a time of {error.path!r}, which the model does not call: it is of another model; "
            "delete that file, and the blocks are timed again"
        ) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise WouldRepeat(tell_no_start(config, env.rank, error)) from error
        raise


def _after_release(checkpoints: Checkpoints, update: Update) -> Update:
    """What is being saved is copied before the weights change."""

    def released() -> Tensor | None:
        checkpoints.release()
        return update()

    return released


def reaches(metrics: dict[str, float], target: dict[str, float], task: Task) -> bool:
    """Whether every target is met; a metric that should fall meets it from above."""
    if not target:
        return False
    return all(
        metrics[name] >= value if name in task.higher_is_better else metrics[name] <= value
        for name, value in target.items()
    )


def _finish_records(run: RunDir | None, group: dist.ProcessGroup | None, watch: Watch) -> None:
    """A run is not at its end while a full disk has not taken the records of each rank of `group`, which
    are gone with the process: wait for room, and where none comes say so, alike on every rank."""
    for number in range(ROOM_TRIES):
        with watch.during("save"):
            if number:
                _pause()
            waiting = torch.tensor(run.write_waiting() if run is not None else 0)
            if group is not None:
                dist.all_reduce(waiting, group=group)
        if not waiting:
            return
    raise WouldRepeat(
        f"the disk is full: it does not take the last {int(waiting)} bytes of this run's records; make "
        "room and run again, it goes on from its last checkpoint"
    )


def _pause() -> None:
    time.sleep(1.0)


def _write_weights(weights: Mapping[str, object], run: RunDir, name: str) -> str:
    """Tied weights are one tensor under several names, which the format has no word for: copy.
    Returns what went wrong: a run that trained has not failed for want of room."""
    seen: set[int] = set()
    unique = {}
    for key, value in weights.items():
        if isinstance(value, Tensor):
            tensor = value.contiguous()
            unique[key] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
    aside = run.file(name + ".part")
    try:
        save_file(unique, aside)
        aside.chmod(run.path.stat().st_mode & 0o666)  # the library makes it the owner's alone
        aside.replace(run.file(name))
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        return f"the final weights could not be written ({error}); make room and run again"
    return ""


def _choose(config: RunConfig, env: RankEnv) -> tuple[RunConfig, dict[str, Any] | None]:
    """The layout that `auto` stands for on the ranks that are there, and the plan."""
    if read_auto(config.layout) is None and not config.plan.machine:
        return config, None
    device = choose_device(config.device, env)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    cores = psutil.cpu_count() or 1  # of the host: ranks may be held to different numbers of them
    place = Place(env.world_size, env.local_world_size, cores, name)
    chosen = choose_layout(config, place, None, trace_recipe)
    if env.rank == 0:
        for line in chosen.lines:
            print(line, flush=True)
    return chosen.config, chosen.plan


def run_recipe(
    recipe: str, *overrides: str, out: str | None = None, run: str | None = None
) -> Summary:
    """Run a recipe in this process: `ridgeline.run_recipe("digits", "train.epochs=1")`.

    Under torchrun every process calls it and they train together; the layout's `dp` follows. With
    `out` a run directory is made there, of which `ridgeline report` makes the page; `run` is the
    directory itself, gone on with where it is there. SIGTERM and SIGUSR1 end it after a step, with
    `stopped` in what it returns. `layout: auto` is chosen by every rank for itself, alike.
    """
    with telling_places(find_recipe(recipe), overrides):
        return _run_recipe(recipe, overrides, out, run)


def _run_recipe(recipe: str, overrides: Sequence[str], out: str | None, run: str | None) -> Summary:
    env = read_rank_env()
    config, plan = _choose(load_config(find_recipe(recipe), overrides).config, env)
    made: RunDir | None = None
    if run is not None:
        made = RunDir.at(Path(run))
    elif out is not None and env.rank == 0:
        made = RunDir.create(Path(out), config.name)
    if made is not None and env.rank == 0 and not tell_past(config, made):
        made.write_text(CONFIG, dump_config(config))
        if plan is not None:
            made.write_json(PLAN, plan)
    try:
        with listening(Requests()) as requests:
            return run_training(config, env, made, requests)
    except Exception as error:
        if made is not None and env.rank == 0:
            made.add_event("failed", message=str(error))
        raise
