"""`ridgeline data bench`: the step, then the loader with every number of workers, then every format.

One process stands for one rank. Formats are packed from some of the recipe's own samples into a
temporary directory and read through the source `packed`. Called by `cli_data.py`; what was found is
shown by `feeding_show.py`.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.config import RunConfig
from ridgeline.data.build import build_sources
from ridgeline.data.dataset import disk_bytes
from ridgeline.data.formats.table import FORMATS
from ridgeline.data.loader import Loader
from ridgeline.data.pack import Samples, Told, pack
from ridgeline.data.recipe import SourceSamples
from ridgeline.data.sources.packed import Packed, build_packed
from ridgeline.data.subset import SomeSamples
from ridgeline.errors import RunError, UsageError, unknown_word
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.machine.disk_io import drop_pages
from ridgeline.parallel.mesh import close_mesh
from ridgeline.train.checks import check_names
from ridgeline.train.feeding import (
    Demand,
    Parts,
    Supply,
    best_of,
    choose_enough,
    conclude,
    let_go,
    measure_demand,
    measure_parts,
    measure_supply,
)
from ridgeline.train.setup import Training, build_training

# What a single process can do of a layout; the rest is between ranks.
_OF_ONE_RANK = ("recompute", "offload", "precision", "compile", "graphs", "accumulate")
# Files that are looked at to see whether their pages have gone.
_NUM_LOOKED_AT = 32
_IMAGE_ARGS = ("size", "crop", "augment", "holdout")


@dataclass(frozen=True)
class Choice:
    """What is measured."""

    workers: tuple[int, ...]
    """0 is reading in threads."""
    cores: int
    formats: tuple[str, ...] = ()
    num_samples: int = 2000
    """That are packed for the formats."""
    seconds: float = 2.0
    """A measurement."""
    cold: bool = False
    where: Path | None = None
    """For the packed samples; None: where the system keeps temporary files."""


@dataclass(frozen=True)
class FormatRow:
    name: str
    num_samples: int
    disk_bytes: int
    supply: Supply
    parts: Parts


@dataclass
class Findings:
    """What was measured, and what follows."""

    recipe: str
    source: str
    device: str
    cores: int
    num_ranks: int
    demand: Demand
    parts: Parts
    supplies: list[Supply] = field(default_factory=list)
    formats: list[FormatRow] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Formats that were not measured, and why."""
    notes: list[str] = field(default_factory=list)
    verdict: str = ""

    @property
    def enough(self) -> Supply | None:
        return choose_enough(self.supplies, self.demand.samples_per_s)


def default_workers(cores: int) -> tuple[int, ...]:
    """0, and doubling up to twice the cores.

    >>> default_workers(3)
    (0, 1, 2, 4, 6)
    """
    return (0, *_doubling(2 * cores))


def _doubling(most: int) -> list[int]:
    return sorted({most, *(2**n for n in range(most.bit_length()))})


def check_formats(names: Sequence[str]) -> tuple[str, ...]:
    """`all`, or names of formats."""
    if list(names) == ["all"]:
        return tuple(FORMATS)
    for name in names:
        if name not in FORMATS:
            raise unknown_word("format", name, [*FORMATS, "all"], "--formats")
    return tuple(dict.fromkeys(names))


def one_rank(config: RunConfig) -> tuple[RunConfig, int]:
    """The configuration of one rank by itself, and how many there are."""
    layout = Layout.parse(config.layout, "layout")
    if layout.world_size != layout.dp:
        raise UsageError(
            f"layout {config.layout!r} splits the model over several ranks, and `ridgeline data bench` "
            "runs the step of one; leave tp, cp, pp and spatial out"
        )
    if config.train.batch % layout.dp:
        raise UsageError(
            f"train.batch={config.train.batch} is not divisible by dp={layout.dp} of the layout"
        )
    alone = Layout(**{name: getattr(layout, name) for name in _OF_ONE_RANK})
    train = replace(config.train, batch=config.train.batch // layout.dp)
    return replace(config, layout=str(alone), train=train), layout.dp


def bench(config: RunConfig, choice: Choice, tell: Told) -> Findings:
    """Measure everything that was chosen."""
    check_names(config)
    load = os.getloadavg()[0]
    alone, num_ranks = one_rank(config)
    # As the launcher shares the cores out.
    alone = replace(alone, threads=config.threads or max(1, choice.cores // num_ranks))
    training = build_training(alone, read_rank_env({}), resumes=True)
    try:
        cold = _Cold(_files_of(training)) if choice.cold else None
        tell("the step", 0, 2)
        demand = measure_demand(training, choice.seconds)
        tell("the step", 1, 2)
        parts = measure_parts(training, training.loader, choice.seconds, cold)
        tell("the step", 2, 2)
        facts = training.machine_facts
        found = Findings(
            recipe=config.name,
            source=config.data.source,
            device="cpu" if facts.device_kind == "cpu" else facts.device_name,
            cores=choice.cores,
            num_ranks=num_ranks,
            demand=demand,
            parts=parts,
        )
        _measure_workers(found, training.loader, choice, cold, tell)
        found.verdict = _verdict(found, training.loader)
        if cold is not None:
            found.notes += cold.notes("the recipe's data")
            found.notes += _say_short(training.loader, max(choice.workers))
        if choice.formats:
            _measure_formats(found, training, choice, tell)
        found.notes += _notes(found, training)
        if load > choice.cores / 2:
            found.notes.append(
                f"Others were at work here (load {load:.1f} on {choice.cores} cores): measure again on a "
                "machine of your own before you rely on this."
            )
        return found
    finally:
        training.close_loaders()
        training.staging.release()
        close_mesh(training.mesh)


def _made_on_device(loader: Loader) -> bool:
    return loader.device is not None and hasattr(loader.source, "device_fetch")


def _ways(loader: Loader, choice: Choice) -> Iterator[Loader]:
    """The loader in every way of reading that is to be measured."""
    if _made_on_device(loader):
        yield loader.varied(workers=0, threads=1)
        return
    # Without reading ahead, or where the source borrows the global generators, there are no threads.
    in_line = not loader.prefetch or getattr(loader.source, "uses_global_rng", False)
    for workers in choice.workers:
        if workers:
            yield loader.varied(workers=workers, threads=1)
        else:
            for threads in [1] if in_line else _doubling(choice.cores):
                yield loader.varied(workers=0, threads=threads)


def _measure_workers(
    found: Findings, loader: Loader, choice: Choice, cold: _Cold | None, tell: Told
) -> None:
    ways = list(_ways(loader, choice))
    for number, way in enumerate(ways):
        tell("the loader", number, len(ways))
        try:
            found.supplies.append(measure_supply(way, choice.seconds, cold))
        except (UsageError, RunError) as error:
            # Threads have figures, and a source that cannot be sent to processes is none the worse.
            if not (way.workers and found.supplies):
                raise
            found.notes.append(f"{way.workers} workers and more were not measured: {error}")
            break
    tell("the loader", len(ways), len(ways))


def _verdict(found: Findings, loader: Loader) -> str:
    if _made_on_device(loader):
        supply = found.supplies[0]
        return (
            f"source {found.source!r} makes its batches on the device, where workers have no part: it "
            f"gives {supply.samples_per_s:,.0f} samples/s and the step asks for "
            f"{found.demand.samples_per_s:,.0f} a rank"
        )
    return conclude(found.supplies, found.demand.samples_per_s, found.parts)


def _say_short(loader: Loader, workers: int) -> list[str]:
    """A cold epoch has new readers, and their first batches are no measure."""
    if len(loader) >= 4 * workers * max(1, loader.prefetch):
        return []
    return [
        f"--cold: an epoch has only {len(loader)} batches, of which many readers have some done before "
        "the first is asked for; figures of many workers are too high."
    ]


def _notes(found: Findings, training: Training) -> list[str]:
    notes = ["The figures are of the loader alone, with nothing else on the cores."]
    if training.mesh.device.type == "cpu":
        notes[0] = (
            "The figures are of the loader alone: without a GPU the step computes on the same cores, "
            "and both together are slower."
        )
    if found.num_ranks > 1:
        notes.append(
            f"One rank of {found.num_ranks} was measured, without its communication; ranks of one node "
            "share its cores, so each needs its own workers at the same time."
        )
    copy_s = found.parts.seconds["copy"]
    if copy_s * found.demand.samples_per_s > 1:
        notes.append(
            f"The copy to the device alone takes {1e6 * copy_s:.1f} µs a sample, longer than the step: "
            "keep samples in a narrower type."
        )
    return notes


def _measure_formats(found: Findings, training: Training, choice: Choice, tell: Told) -> None:
    """Each format with as many readers as are enough, or as were best."""
    like = found.enough or best_of(found.supplies)
    samples, args, note = _samples_of(training, choice.num_samples)
    found.notes += note
    try:
        with tempfile.TemporaryDirectory(prefix="ridgeline-bench-", dir=choice.where) as folder:
            for name in choice.formats:
                tell(f"format {name}", 0, 1)
                place = Path(folder) / name
                try:
                    row = _measure_format(name, samples, args, place, training, like, choice, found)
                    found.formats.append(row)
                except (UsageError, RunError) as error:
                    found.skipped[name] = str(error).replace(f"{folder}{os.sep}", "")
                tell(f"format {name}", 1, 1)
    except OSError as error:
        raise UsageError(
            f"cannot write samples to {choice.where or tempfile.gettempdir()} of --where "
            f"({error.strerror or error}); name a directory with room"
        ) from error


def _measure_format(
    name: str,
    samples: Samples,
    args: dict[str, Any],
    place: Path,
    training: Training,
    like: Supply,
    choice: Choice,
    found: Findings,
) -> FormatRow:
    dataset = pack(samples, place / "train", FORMATS[name]).dataset
    # The source wants a held-out half, which nobody reads here.
    (place / "eval").symlink_to("train", target_is_directory=True)
    seed = training.config.train.seed
    source, held_out = build_sources("packed", {**args, "path": str(place)}, seed)
    # Files that are open here cannot be taken out of memory.
    dataset.close()
    let_go(held_out)
    loader = training.loader.varied(source=source, workers=like.workers, threads=like.threads)
    cold = _Cold(_files_below(place / "train")) if choice.cold else None
    supply = measure_supply(loader, choice.seconds, cold)
    parts = measure_parts(training, loader, choice.seconds, cold)
    if cold is not None:
        found.notes += cold.notes(f"the format {name}")
    return FormatRow(name, len(dataset), disk_bytes(place / "train"), supply, parts)


def _samples_of(training: Training, most: int) -> tuple[Samples, dict[str, Any], list[str]]:
    """Some of the training samples, from all over the data set, the arguments to read them with when
    they are packed, and what there is to say: images as their files, other samples as arrays."""
    config, source = training.config.data, training.loader.source
    args = training.staging.args or dict(config.args)
    notes: list[str] = []
    raw: Packed | None = source if isinstance(source, Packed) else None
    if config.source == "images":
        args = {name: value for name, value in args.items() if name in ("path", *_IMAGE_ARGS)}
        try:
            raw, _ = build_packed(training.config.train.seed, **args)
        except UsageError as error:
            notes.append(f"The formats hold decoded images, since {error}.")
    if raw is not None:
        members = raw.members[_spread(len(raw), most)]
        samples: Samples = raw.dataset
    else:
        samples, args = SourceSamples(source, config.source), {}
        members = _spread(len(source), most)
    return SomeSamples(samples, members), args, notes


def _spread(length: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, length - 1, num=min(most, length)).astype(np.int64))


class _Cold:
    """Takes files out of memory, and remembers whether they went."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._num_looked_at = self._num_kept = 0
        self._errors: set[str] = set()

    def __call__(self) -> None:
        for file in self._files:
            try:
                drop_pages(file)
            except OSError as error:
                self._errors.add(error.strerror or str(error))
        step = max(1, len(self._files) // _NUM_LOOKED_AT)
        for file in self._files[::step]:
            with suppress(OSError):
                self._num_looked_at += 1
                self._num_kept += _is_in_memory(file)

    def notes(self, what: str) -> list[str]:
        if not self._files:
            return [f"--cold: data.args.path names no files of {what} that could be dropped."]
        if self._errors:
            return [f"--cold: {what} could not all be dropped from memory ({min(self._errors)})."]
        if self._num_kept:
            return [
                f"--cold: {self._num_kept} of {self._num_looked_at} files of {what} that were looked at "
                "stayed in memory all the same; their figures are of memory, not of the disk."
            ]
        return []


def _is_in_memory(file: Path) -> bool:
    """Whether a byte in the middle of the file is read without the disk."""
    size = file.stat().st_size
    if not size or not hasattr(os, "RWF_NOWAIT"):
        return False
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(1)], size // 2, os.RWF_NOWAIT)
        return True
    except OSError as error:
        # A file system that does not know the flag is one in memory, as far as is known.
        return error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK)
    finally:
        os.close(descriptor)


def _files_of(training: Training) -> list[Path]:
    """Files of the recipe's data, as far as its arguments name them."""
    args = training.staging.args or training.config.data.args
    given = args.get("path")
    paths = given if isinstance(given, list | tuple) else [given]
    return [
        file
        for path in paths
        if isinstance(path, str | os.PathLike)
        for file in _files_below(Path(path))
    ]


def _files_below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())
