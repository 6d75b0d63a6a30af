"""A whole run: the loop, with records, evaluation, progress and the final weights around it.

Called by `worker.py` on every rank of `ridgeline train`, and by `ridgeline.run_recipe` in a script.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.checkpoint.save import Outcome
from ridgeline.config import RunConfig, dump_config, find_recipe, load_config
from ridgeline.data.batch import Batch
from ridgeline.errors import UsageError, WouldRepeat
from ridgeline.launch.env import RankEnv, read_rank_env, recorded_environment
from ridgeline.layout import read_auto
from ridgeline.optim.update import Update
from ridgeline.parallel.fallbacks import Gathered, describe_gathered
from ridgeline.parallel.gather import full_state
from ridgeline.parallel.mesh import choose_device, close_mesh
from ridgeline.parallel.pipeline.balance import UnknownModule
from ridgeline.plan.auto import Place, choose_layout
from ridgeline.rundir import (
    BLOCKS,
    CONFIG,
    ENV,
    FACTS,
    LAYOUT,
    PLAN,
    WEIGHTS,
    EvalRecord,
    RunDir,
    StepRecord,
)
from ridgeline.train.alive import build_alive
from ridgeline.train.board import Board
from ridgeline.train.checkpoints import Checkpoints, has_checkpoints
from ridgeline.train.evaluate import evaluate
from ridgeline.train.guard import BadBatch, Guard
from ridgeline.train.loop import train_loop
from ridgeline.train.memory import is_out_of_memory, tell_budget, tell_no_start
from ridgeline.train.position import Position
from ridgeline.train.progress import build_progress
from ridgeline.train.record import Recorder
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
    training = _build(config, env, run)
    checkpoints = Checkpoints(training, run)
    training = replace(training, update=_after_release(checkpoints, training.update))
    guard = Guard(training, lambda: checkpoints.skipped)
    training = guard.training
    checkpoints.guard = guard
    alive = build_alive(training, run, requests or Requests(), checkpoints.is_late)
    main_run = run if training.mesh.is_main else None
    log = _Log(training, main_run)
    samples = SampleLog(training, run)
    skipped = SkippedSamples(training, run)
    recorder = Recorder(training)
    trace = StepTrace(training)
    last: StepRecord | None = None
    stopped = ""
    try:
        with alive.watch.during("load"):
            start = _go_on(checkpoints, log)
            if config.guard.on_bad == "rollback" and start.step == 0:
                log.saves(checkpoints.save(start, wait=True))  # there is something to go back to
        metrics = dict(checkpoints.metrics)
        reached = reaches(metrics, config.train.target, training.task) if metrics else False
        position = start
        steps = train_loop(training, start)
        while not reached and (result := next(steps, None)) is not None:
            position = result.position
            if result.step == start.step + 1:
                log.gathered(training.arranged.gathered())
                log.uncompiled(training.arranged.uncompiled())
            last = log.steps(recorder.add(result)) or last
            samples.add(result)
            for line in skipped.add(result.skipped, result.step):
                log.note(line)
            log.note(trace.after(result.step - start.step, main_run))
            beat, lines = alive.after(result)
            for line in lines:
                log.note(line)
            if bad := guard.take():
                log.bad_batch(result.step, bad, config.guard.on_bad)
                if config.guard.on_bad == "rollback" and checkpoints.add_skipped(bad):
                    log.saves(checkpoints.outcomes(wait=True))
                    last = log.steps(recorder.flush()) or last
                    steps.close()
                    with alive.watch.during("load"):
                        position = _go_on(checkpoints, log)
                    steps = train_loop(training, position)
                    continue
            if _evaluation_due(result, training) and training.eval_loader is not None:
                last = log.steps(recorder.flush()) or last
                checkpoints.release()  # an evaluation brings replicas together
                with alive.watch.during("evaluate"):
                    to_device = skipped.noting(training.to_device, result.step)
                    record = _evaluate(training, result, alive.watch.counting(to_device))
                log.evaluation(record)
                log.uncompiled(training.arranged.uncompiled())
                metrics = record.metrics
                log.note(checkpoints.evaluated(metrics))
                reached = reaches(metrics, config.train.target, training.task)
                training.clock.start()
            if checkpoints.is_due(result.step) or beat.save:
                with alive.watch.during(checkpoints.phase):
                    log.saves(checkpoints.save(position))
            log.saves(checkpoints.outcomes())
            stopped = beat.stop if result.step < training.num_steps else ""
            if stopped:
                break
        alive.close()
        last = log.steps(recorder.flush()) or last
        log.uncompiled(training.arranged.uncompiled())
        log.ranks(recorder)  # every rank has written what it skipped
        num_skipped = skipped.count()
        if num_skipped:
            log.note(
                f"{num_skipped} samples could not be read and were skipped; events.jsonl has them"
            )
        with alive.watch.during("save"):
            if config.checkpoint.at_end or stopped:
                log.saves(checkpoints.save(position, wait=True))
            log.saves(checkpoints.outcomes(wait=True))
            checkpoints.release()
            if config.log.weights and not stopped:
                # Replicas that stepped on their own come together.
                training.arranged.prepare_evaluation()
                weights = full_state(training.arranged)
                if main_run is not None:
                    log.note(_save_weights(weights, main_run))
            checkpoints.close()
        if not stopped:  # else it goes on from a checkpoint, and makes the records behind it again
            _finish_records(run, training.mesh.world_group, alive.watch)
    except Exception as error:
        log.steps(recorder.salvage())
        if is_out_of_memory(error):
            raise WouldRepeat(tell_budget(training, error)) from error
        raise
    finally:
        if run is not None:
            run.write_waiting()
        alive.end()
        log.close()
        training.close_loaders()
        training.staging.release()
    close_mesh(training.mesh)
    final_loss = last.loss if last else None
    if main_run is not None and stopped:
        main_run.add_event("stopped", signal=stopped, step=position.step)
    elif main_run is not None:
        main_run.add_event(
            "end",
            steps=position.step,
            loss=final_loss,
            metrics=metrics,
            reached_target=reached,
            skipped_samples=num_skipped,
        )
        _finish_records(main_run, None, alive.watch)
    return Summary(position.step, final_loss, metrics, reached, bool(stopped), num_skipped)


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


def _go_on(checkpoints: Checkpoints, log: _Log) -> Position:
    """Restore the newest whole checkpoint, if there is one, and say so."""
    found = checkpoints.find()
    if found is None:
        return Position()
    position, notes = checkpoints.restore(found)
    for line in (*found.damaged, *notes):
        log.note(line)
    log.note(f"going on from {found.path.name}")
    if position.step >= checkpoints.num_steps:
        log.note("the run is at its end; a larger train.epochs or train.steps makes it longer")
    log.event(
        "resume", step=position.step, checkpoint=found.path.name, passed_over=list(found.damaged)
    )
    return position


def _evaluation_due(result: StepResult, training: Training) -> bool:
    if result.step == training.num_steps:
        return True
    every = training.config.train.eval_every
    return result.step % every == 0 if every else result.ends_epoch


def _evaluate(
    training: Training, result: StepResult, to_device: Callable[[Batch], Batch]
) -> EvalRecord:
    assert training.eval_loader is not None
    return evaluate(
        training.arranged,
        training.task,
        training.eval_loader,
        training.precision,
        to_device,
        result.step,
        result.epoch,
    )


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


def _save_weights(weights: Mapping[str, object], run: RunDir) -> str:
    """Tied weights are one tensor under several names, which the format has no word for: copy.
    Returns what went wrong: a run that trained has not failed for want of room."""
    seen: set[int] = set()
    unique = {}
    for name, value in weights.items():
        if isinstance(value, Tensor):
            tensor = value.contiguous()
            unique[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
    aside = run.file(WEIGHTS + ".part")
    try:
        save_file(unique, aside)
        aside.chmod(run.path.stat().st_mode & 0o666)  # the library makes it the owner's alone
        aside.replace(run.file(WEIGHTS))
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        return f"the final weights could not be written ({error}); make room and run again"
    return ""


class _Log:
    """Where records go on rank 0: the run directory, TensorBoard, the terminal. Elsewhere nowhere."""

    def __init__(self, training: Training, run: RunDir | None) -> None:
        self._run = run
        self._is_waiting = False
        self._told: set[str] = set()
        mesh = training.mesh
        self._board = Board(run, training.config.log.tensorboard) if run is not None else None
        if run is not None:
            facts = {
                "model": training.model_facts.to_dict(),
                "machine": training.machine_facts.to_dict(),
            }
            with suppress(OSError):  # a full disk is no reason not to train
                run.write_text(LAYOUT, f"{mesh.layout}\n")
                run.write_json(FACTS, facts)
                run.write_json(ENV, recorded_environment())
                if training.arranged.block_costs is not None:
                    run.write_json(BLOCKS, training.arranged.block_costs)
            run.add_event("start", layout=str(mesh.layout), num_ranks=mesh.env.world_size)
            for details in training.staging.events:
                run.add_event("staged", **details)
        self._progress = build_progress(
            training.num_steps, training.model_facts, mesh.is_main and run is not None
        )
        for line in describe(training):
            self._progress.note(line)

    def note(self, text: str) -> None:
        if text:
            self._progress.note(text)

    def event(self, event: str, **details: object) -> None:
        if self._run is not None:
            self._run.add_event(event, **details)

    def bad_batch(self, step: int, bad: BadBatch, action: str) -> None:
        details = {"epoch": bad.epoch, "batch": bad.batch, "loss": bad.loss, "reason": bad.reason}
        self.event("bad-batch", step=step, action=action, **details)
        self.note(f"batch {bad.batch} of epoch {bad.epoch}: {bad.reason}; {action}")

    def saves(self, outcomes: list[Outcome]) -> None:
        """How checkpoints ended: an event each, and a word to the user when one could not be written."""
        for done in outcomes:
            if done.path is not None:
                self.event(
                    "checkpoint",
                    step=done.step,
                    bytes=done.num_bytes,
                    seconds=round(done.seconds, 3),
                    removed=list(done.removed),
                )
            else:
                self.event("checkpoint-failed", step=done.step, problem=done.problem)
                self.note(
                    f"no checkpoint at step {done.step}: {done.problem}; the run goes on, and the "
                    "last whole checkpoint stays"
                )

    def uncompiled(self, lines: list[str]) -> None:
        """Blocks of a split model that run as written, each reason once."""
        for line in lines:
            if line not in self._told:
                self._told.add(line)
                self.note(line)

    def gathered(self, found: list[Gathered]) -> None:
        if found:
            self.event("gathered", functions=[asdict(one) for one in found])
        for line in describe_gathered(found):
            self.note(line)

    def steps(self, records: list[StepRecord]) -> StepRecord | None:
        for record in records:
            if self._run is not None and self._board is not None:
                self._run.append(record)
                self._board.step(record)
            self._progress.step(record)
        if records and self._run is not None:
            self._tell_waiting(self._run.num_unwritten())
        return records[-1] if records else None

    def _tell_waiting(self, num_bytes: int) -> None:
        """Records that the disk does not take are kept; that it is so is said once."""
        if num_bytes and not self._is_waiting:
            self.note(
                f"the disk takes no records: {num_bytes} bytes wait; make room, they follow then"
            )
        self._is_waiting = bool(num_bytes)

    def evaluation(self, record: EvalRecord) -> None:
        if self._run is not None and self._board is not None:
            self._run.append(record)
            self._board.evaluation(record)
        self._progress.evaluation(record)

    def ranks(self, recorder: Recorder) -> None:
        """Every rank takes part; rank 0 keeps the result."""
        records = recorder.gather_ranks()
        if self._run is not None:
            for record in records:
                self._run.append(record)

    def close(self) -> None:
        self._progress.close()
        if self._board is not None:
            self._board.close()


def describe(training: Training) -> list[str]:
    """What a run is about to do, in a few lines."""
    model, machine, mesh = training.model_facts, training.machine_facts, training.mesh
    count = (
        f"{model.num_parameters / 1e6:.2f}M"
        if model.num_parameters >= 1e5
        else str(model.num_parameters)
    )
    peak = machine.peak_flops.get(training.precision.name)
    rate = f", peak {peak / 1e12:.3g} TFLOP/s ({machine.peak_source})" if peak else ""
    return [
        f"model {model.name}: {count} parameters, "
        f"{model.train_flops_per_sample / 1e9:.3g} GFLOP a sample ({model.flops_source})",
        f"layout {mesh.layout} on {mesh.env.world_size} x {machine.device_name}{rate}",
        *([f"axes, slowest links first: {mesh}"] if mesh.env.world_size > mesh.data_size else []),
        *training.notes,
        f"{training.num_steps} steps of {training.config.train.batch} samples",
    ]


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
    env = read_rank_env()
    config, plan = _choose(load_config(find_recipe(recipe), overrides).config, env)
    made: RunDir | None = None
    if run is not None:
        made = RunDir.at(Path(run))
    elif out is not None and env.rank == 0:
        made = RunDir.create(Path(out), config.name)
    if made is not None and env.rank == 0:
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
