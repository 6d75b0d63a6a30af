"""Scalars for TensorBoard, where it is installed. Called by `log.py`; `report/track.py` sends the same."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ridgeline.errors import UsageError
from ridgeline.rundir import SPLIT, TENSORBOARD, EvalRecord, RunDir, StepRecord


def scalars_of(record: StepRecord | EvalRecord) -> dict[str, float]:
    """What there is of it, by the names under which it is drawn."""
    if isinstance(record, EvalRecord):
        return {f"eval/{name}": value for name, value in record.metrics.items()}
    scalars = {
        "train/loss": record.loss,
        "train/lr": record.lr,
        "train/grad_norm": record.grad_norm,
        "speed/samples_per_s": record.samples_per_s,
        "speed/mfu": record.mfu,
        **{f"time/{part}": getattr(record, part) for part in ("step_s", *SPLIT)},
    }
    return {name: value for name, value in scalars.items() if value is not None}


class Board:
    """Writes nothing at all when TensorBoard is off or not there."""

    def __init__(self, run: RunDir, choice: str) -> None:
        self._writer: Any = None
        if choice == "no":
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except Exception as error:  # a broken installation is no reason not to train
            if choice == "yes":
                raise UsageError(
                    f"log.tensorboard=yes but TensorBoard cannot be imported ({error}); "
                    "pip install 'ridgeline[report]' or set log.tensorboard=no"
                ) from error
            return
        self._writer = SummaryWriter(str(run.file(TENSORBOARD)))

    def add(self, record: StepRecord | EvalRecord) -> None:
        if self._writer is None:
            return
        for name, value in scalars_of(record).items():
            with suppress(OSError):  # a full disk is no reason not to train
                self._writer.add_scalar(name, value, record.step, walltime=record.time)

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
