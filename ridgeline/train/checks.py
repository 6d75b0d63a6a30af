"""What can be known to be wrong with a run before any process is started.

Apart from `setup.py`, which loads all of torch that a rank needs: the command that starts the ranks asks
this first, and imports nothing for it. Called by `cli.py`, `run.py`, `setup.py` and `verify/run.py`.
"""

from __future__ import annotations

from ridgeline.checkpoint.manifest import Manifest, list_checkpoints, read_manifest
from ridgeline.config import RunConfig, TrainConfig
from ridgeline.errors import RunError, UsageError, unknown_word
from ridgeline.layout import Layout
from ridgeline.rundir import CHECKPOINTS, RunDir
from ridgeline.shipped import METRICS, MODELS, NATURAL, SOURCES, TASKS


def check_batch(config: RunConfig, layout: Layout) -> None:
    """Every full batch is the same size on every rank; only the last of an epoch may be uneven."""
    parts = count_parts(layout)
    pieces = layout.dp * parts
    batch = config.train.batch
    if batch % pieces:
        below, above = batch // pieces * pieces, (batch // pieces + 1) * pieces
        nearest = f"{below} or {above}" if below else str(above)
        name = "accumulate" if layout.pp == 1 else "microbatches"
        raise UsageError(
            f"train.batch={batch} is not divisible by dp={layout.dp} x {name}={parts} = {pieces}; "
            f"the nearest that are: train.batch={nearest}"
        )


def count_parts(layout: Layout) -> int:
    """Microbatches that a rank's share of a global batch is cut into."""
    return layout.microbatches if layout.pp > 1 else layout.accumulate


def check_names(config: RunConfig) -> None:
    """Words that stand in no table, before any process is started; `module:name` is looked up there."""
    for word, known, kind, place in (
        (config.model.name, MODELS, "model", "model.name"),
        (config.data.source, SOURCES, "source", "data.source"),
        (config.train.task, {"auto", *TASKS}, "task", "train.task"),
    ):
        if ":" not in word and word not in known:
            raise unknown_word(kind, word, known, place)


def check_metric(config: RunConfig, metric: str, place: str) -> None:
    """A metric that no evaluation of the recipe gives, where its task is known without its data."""
    name = config.train.task
    if name == "auto":
        said = config.data.args.get("task")
        name = str(said or NATURAL.get(config.data.source, ""))
    known = METRICS.get(name)
    if known is not None and metric not in known:
        raise unknown_word("metric", metric, known, f"{place} (the task is {name})")
    if metric != "loss" and config.train.eval_samples == 0:
        raise UsageError(
            f"{place} {metric} is of evaluations, and train.eval_samples=0 has none; use {place} loss"
        )


def tell_past(config: RunConfig, run: RunDir) -> str:
    """A sentence where the run was trained further than it is now asked to be, else empty: to begin would
    train nothing, and leave records of a run that never was."""
    saved = list_checkpoints(run.file(CHECKPOINTS))
    if not saved:
        return ""
    try:
        newest = read_manifest(saved[-1])
    except RunError:
        return ""  # damaged: the ranks find one to go on from, and tell of it
    asked = _passed(config.train, newest)
    if not asked:
        return ""
    return (
        f"{run.path} is already past {asked}: its newest checkpoint is of step {newest.step}; nothing was "
        f"trained or changed (a larger value makes the run longer, and --fresh starts it over)"
    )


def _passed(train: TrainConfig, newest: Manifest) -> str:
    """The end that is asked for, where the checkpoint is behind it."""
    if train.steps is not None and newest.step > train.steps:
        return f"train.steps={train.steps}"
    done = (newest.state.get("epoch", 0), newest.state.get("batch", 0))
    if train.epochs is not None and done > (train.epochs, 0):
        return f"train.epochs={train.epochs}"
    return ""
