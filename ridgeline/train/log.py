"""What a run tells: records to the run directory and TensorBoard, lines and a bar to the terminal.

On rank 0; elsewhere nothing is written. Called by `run.py`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict

from ridgeline.checkpoint.save import Outcome
from ridgeline.launch.env import recorded_environment
from ridgeline.parallel.fallbacks import Gathered, describe_gathered
from ridgeline.rundir import BLOCKS, ENV, FACTS, LAYOUT, EvalRecord, RunDir, StepRecord
from ridgeline.train.board import Board
from ridgeline.train.guard import BadBatch
from ridgeline.train.progress import build_progress
from ridgeline.train.record import Recorder
from ridgeline.train.setup import Training


class RunLog:
    """Where records go on rank 0: the run directory, TensorBoard, the terminal. Elsewhere nowhere."""

    def __init__(self, training: Training, run: RunDir | None) -> None:
        self._run = run
        self._is_waiting = False
        self._told: set[str] = set()
        mesh = training.mesh
        self._training, self._has_begun = training, False
        self._board = Board(run, training.config.log.tensorboard) if run is not None else None
        self._progress = build_progress(
            training.num_steps, training.model_facts, mesh.is_main and run is not None
        )
        for line in describe(training):
            self._progress.note(line)

    def begin(self) -> None:
        """What the run is, once it is known that it can go on from where it was: a run that is refused
        keeps the records of the one before."""
        run, training = self._run, self._training
        if run is None or self._has_begun:
            return
        self._has_begun = True
        layout = training.mesh.layout
        facts = {
            "model": training.model_facts.to_dict(),
            "machine": training.machine_facts.to_dict(),
        }
        with suppress(OSError):  # a full disk is no reason not to train
            run.write_text(LAYOUT, f"{layout}\n")
            run.write_json(FACTS, facts)
            run.write_json(ENV, recorded_environment())
            if training.arranged.block_costs is not None:
                run.write_json(BLOCKS, training.arranged.block_costs)
        run.add_event(
            "start",
            layout=str(layout),
            num_ranks=training.mesh.env.world_size,
            num_steps=training.num_steps,
        )
        for details in training.staging.events:
            run.add_event("staged", **details)

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
                self._board.add(record)
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
            self._board.add(record)
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
