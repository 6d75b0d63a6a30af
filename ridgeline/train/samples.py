"""Which samples each step used, one file a rank, for those who want it on paper (`log.samples`)."""

from __future__ import annotations

from ridgeline.rundir import SAMPLES, RunDir
from ridgeline.train.setup import Training
from ridgeline.train.step import StepResult


class SampleLog:
    """Writes on the first rank of each data-parallel replica; elsewhere the samples are the same."""

    def __init__(self, training: Training, run: RunDir | None) -> None:
        mesh = training.mesh
        others = [axis for axis in mesh.sizes if axis not in ("copies", "shard")]
        first = all(mesh.axis_rank(axis) == 0 for axis in others)
        self._run = run if run is not None and training.config.log.samples and first else None
        self._name = f"{SAMPLES}/rank-{mesh.env.rank}.jsonl"
        if self._run is not None:
            self._run.file(SAMPLES).mkdir(exist_ok=True)

    def add(self, result: StepResult) -> None:
        if self._run is None:
            return
        samples = [index for part in result.samples for index in part.tolist()]
        line = {"step": result.step, "epoch": result.epoch, "samples": samples}
        self._run.append_line(self._name, line)
