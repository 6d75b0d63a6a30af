"""One state of a user's own script in a climb: `python -m ridgeline.doctor.script_candidate SCRIPT ARGS`.

The script runs as it is; its settings come to `ridgeline.start` by RIDGELINE_TUNE. A step is over when its
optimizer's is. After as many as were asked for, the hook that is told so answers and waits for the next
line, so that the script stands still while other states are measured. The loss of a step is what the script
called backward on, or gave to its engine. Started by `states.py`, once for each rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from ridgeline.doctor.candidate import device_facts, nudge_weights
from ridgeline.doctor.interface import tell_missing
from ridgeline.doctor.model_look import Look, look_of
from ridgeline.doctor.script import Enough, models_seen, no_checkpoints, run_script
from ridgeline.doctor.seen import look_at_script
from ridgeline.errors import RunError, UsageError, tell_where
from ridgeline.launch.bind import bind_as_told
from ridgeline.launch.env import bind_mode, read_rank_env
from ridgeline.machine.describe import peak_memory_bytes
from ridgeline.train.engine import Engine
from ridgeline.train.job import Job, JobLoader


class Turns:
    """Counts the script's steps, and lets it go on for as many as each line asks for."""

    def __init__(self, script: Path, answers: TextIO) -> None:
        self._script, self._answers = script, answers
        self.num_steps = 0
        self._untimed = self._timed = self._all_timed = 0
        self._losses: list[Tensor] = []
        self._of_step: list[Tensor] = []
        self._begun = self._data_s = self._optimizer_s = self._update_begun = 0.0
        self._first: Optimizer | None = None
        self.device = torch.device("cpu")
        self.job: Job | None = None
        self.look = Look()
        self.batch = self.workers = 0
        self.bucket_mb = 0.0
        self.nudge = 0.0
        self.in_engine = False
        """Whether an engine has said what it computes gradients of, scaled or in parts as it will be."""

    def wait(self) -> bool:
        """For the next line; False when there is none any more."""
        line = sys.stdin.readline()
        if not line:
            return False
        asked = json.loads(line)
        self._untimed, self._timed = asked["untimed"], asked["timed"]
        self.nudge = asked["nudge"]
        self._all_timed = self._timed
        self._begin()
        return True

    def answer(self, value: dict[str, Any]) -> None:
        print(json.dumps(value), file=self._answers, flush=True)

    def _begin(self) -> None:
        self._data_s = self._optimizer_s = 0.0
        if self._first is not None and dist.is_initialized():
            dist.barrier()  # none is timed as it waits for one that was told later
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._begun = time.perf_counter()

    def before_update(self, *_: Any) -> None:
        self._update_begun = time.perf_counter()

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self._optimizer_s += time.perf_counter() - self._update_begun
        if self._first is None:
            self._first = optimizer
            self.device = next(p.device for g in optimizer.param_groups for p in g["params"])
        if optimizer is not self._first:  # a script with two has a step when the first of them has
            return
        self.num_steps += 1
        if self._of_step:
            self._losses.append(torch.stack(self._of_step).sum())
            self._of_step = []
        if self._untimed:
            self._untimed -= 1
            if not self._untimed and self._timed:
                self._begin()
        elif self._timed:
            self._timed -= 1
        if not self._untimed and not self._timed:
            self._report()
            if not self.wait():
                raise Enough

    def given(self, job: Job, model: nn.Module, bucket_mb: float) -> None:
        if self.job is None:
            self.job, self.look, self.bucket_mb = job, look_of(model), bucket_mb
            if self.nudge:
                nudge_weights(model, self.nudge)

    def lost(self, loss: Tensor) -> None:
        if loss.numel() == 1 and not self.in_engine:
            self._of_step.append(loss.detach().float().reshape(()))

    def waited(self, seconds: float) -> None:
        self._data_s += seconds

    def _report(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        spent = time.perf_counter() - self._begun
        if self.job is None:
            raise UsageError(tell_missing(self._script))
        steps = max(self._all_timed, 1)
        assert self._first is not None
        self.answer(
            {
                "step_s": spent / steps,
                "losses": [float(loss) for loss in self._losses],
                "parts": {
                    "data_s": self._data_s / steps,
                    "optimizer_s": self._optimizer_s / steps,
                },
                "peak_bytes": peak_memory_bytes(self.device),
                "device": self.device.type,
                **device_facts(self.device),
                "samples": self.batch or 1,
                "unit": "samples" if self.batch else "steps",
                "units_per_sample": 1,
                "time": time.time(),
                "seen": asdict(
                    look_at_script(
                        self.job, self.look, self.workers, self._first, bucket_mb=self.bucket_mb
                    )
                ),
            }
        )
        self._losses = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def watched(turns: Turns) -> Iterator[None]:
    """Have the job, loaders and backward tell what they are given."""
    iterator = dataloader._BaseDataLoaderIter
    before = (
        JobLoader.__init__,
        iterator.__next__,
        torch.autograd.backward,
        Engine.backward,
        Engine._through_stages,
    )

    def make(self: JobLoader, *args: Any, **options: Any) -> None:
        before[0](self, *args, **options)
        if not turns.batch:
            turns.batch, turns.workers = self._batch, self._loader.num_workers

    def next_batch(self: Any) -> Any:
        begun = time.perf_counter()
        try:
            return before[1](self)
        finally:
            turns.waited(time.perf_counter() - begun)

    def backward(tensors: Any, *args: Any, **options: Any) -> None:
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            turns.lost(tensor)
        before[2](tensors, *args, **options)

    def engine_backward(self: Engine, loss: Tensor) -> None:
        turns.lost(loss.detach() * (self._weight() / self._mesh.axis_size("cp")))
        turns.in_engine = True
        try:
            before[3](self, loss)
        finally:
            turns.in_engine = False

    def through_stages(self: Engine, batch: Any) -> Tensor:
        """The update is a part of it, so that the loss is noted where the stages have it."""
        staged, scale = self.arranged.staged, self._precision.scale() * self._mesh.axis_size("cp")
        assert staged is not None
        forward_backward = staged.forward_backward

        def noted(*args: Any, **options: Any) -> Tensor:
            turns.in_engine = True
            try:
                total = forward_backward(*args, **options)
            finally:
                turns.in_engine = False
            turns.lost(total / scale)
            return total

        staged.forward_backward = noted  # type: ignore[method-assign]
        try:
            return before[4](self, batch)
        finally:
            del staged.forward_backward

    JobLoader.__init__ = make  # type: ignore[method-assign,assignment]
    iterator.__next__ = next_batch  # type: ignore[method-assign]
    torch.autograd.backward = backward  # Tensor.backward calls it by this name
    Engine.backward = engine_backward  # type: ignore[method-assign]
    Engine._through_stages = through_stages  # type: ignore[method-assign]
    handles = [
        register_optimizer_step_pre_hook(turns.before_update),
        register_optimizer_step_post_hook(turns.stepped),
    ]
    try:
        with no_checkpoints(), models_seen(turns.given):
            yield
    finally:
        for handle in handles:
            handle.remove()
        JobLoader.__init__ = before[0]  # type: ignore[method-assign]
        iterator.__next__ = before[1]  # type: ignore[method-assign]
        torch.autograd.backward = before[2]
        Engine.backward = before[3]  # type: ignore[method-assign]
        Engine._through_stages = before[4]  # type: ignore[method-assign]


def main(argv: list[str]) -> None:
    # Answers go out on a copy of standard output; whatever the script prints goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    script = Path(argv[0])
    if bind_mode() is not None:  # one of several ranks
        bind_as_told(read_rank_env())
    turns = Turns(script, answers)
    if turns.wait():
        try:
            with watched(turns):
                run_script(script, argv[1:])
            turns.answer({"ended": turns.num_steps or "no"})
        except Enough:
            pass
        except BaseException as error:
            import traceback

            traceback.print_exc()
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            usage = isinstance(error, UsageError)
            if not isinstance(error, (UsageError, RunError)):
                first = f"{type(error).__name__}: {first}{tell_where(error)}"
            turns.answer({"failed": first, "usage": usage})
    sys.stdout.flush()
    os._exit(0)  # a loader's process may still wait for room


if __name__ == "__main__":
    main(sys.argv[1:])
