"""What a run keeps about samples: which ones each step used, one file a rank, for those who want it on
paper (`log.samples`), and which ones could not be read and were passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ridgeline.data.batch import Batch
from ridgeline.parallel.mesh import Mesh
from ridgeline.rundir import SAMPLES, RunDir
from ridgeline.train.setup import Training
from ridgeline.train.step import StepResult

SKIPPED = "skipped-sample"


def _writes(mesh: Mesh) -> bool:
    """Whether this is the first rank of a data-parallel replica; the others have the same samples."""
    others = [axis for axis in mesh.sizes if axis not in ("copies", "shard")]
    return all(mesh.axis_rank(axis) == 0 for axis in others)


class SampleLog:
    """Writes on the first rank of each data-parallel replica."""

    def __init__(self, training: Training, run: RunDir | None) -> None:
        wanted = training.config.log.samples and _writes(training.mesh)
        self._run = run if wanted else None
        self._name = f"{SAMPLES}/rank-{training.mesh.env.rank}.jsonl"
        if self._run is not None:
            self._run.file(SAMPLES).mkdir(exist_ok=True)

    def add(self, result: StepResult) -> None:
        if self._run is None:
            return
        samples = [index for part in result.samples for index in part.tolist()]
        line = {"step": result.step, "epoch": result.epoch, "samples": samples}
        self._run.append_line(self._name, line)


class SkippedSamples:
    """Samples that were passed over (`on_error: skip`): an event each, by the rank that met it. One that
    comes again in a later epoch is told once."""

    def __init__(self, training: Training, run: RunDir | None) -> None:
        self._run = run if _writes(training.mesh) else None
        self._rank = training.mesh.env.rank
        self._known: set[str] = set()

    def add(self, sentences: Iterable[str], step: int) -> list[str]:
        """Write down those that are new, and give them back as lines for the user."""
        new = [one for one in dict.fromkeys(sentences) if one not in self._known]
        self._known.update(new)
        if self._run is not None:
            for sentence in new:
                self._run.add_event(SKIPPED, rank=self._rank, step=step, sentence=sentence)
        return [f"skipped: {sentence}" for sentence in new]

    def noting(self, to_device: Callable[[Batch], Batch], step: int) -> Callable[[Batch], Batch]:
        """For batches that are no step's: those of an evaluation."""

        def noted(batch: Batch) -> Batch:
            self.add(batch.skipped, step)
            return to_device(batch)

        return noted

    def count(self) -> int:
        """Different samples over all ranks and starts of the run, as its events have them."""
        told = set(self._known)
        if self._run is not None:
            events = (event for event in self._run.events() if event.event == SKIPPED)
            told.update(str(event.details.get("sentence")) for event in events)
        return len(told)
