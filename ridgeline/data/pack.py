"""Samples from anywhere into shards of one format: in parallel, resumable, checked at the end.

The shards are planned first (which samples go into which), so that processes write them
independently and a second start knows which are done: a shard counts when its table is there, and the
table is written last. `dataset.json` makes the whole a data set and comes after every sample has been
read back and compared with what was read from the source. Needs no torch, unless the
samples come from a recipe. Called by `ridgeline data pack` and `unpack`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from ridgeline.data.check import verify
from ridgeline.data.dataset import (
    DATASET,
    PLAN,
    TABLE_SUFFIX,
    UNPACKING,
    Dataset,
    ShardEntry,
    disk_bytes,
    open_dataset,
    read_table,
    sync_folder,
    write_table,
)
from ridgeline.data.formats.contract import (
    Field,
    Format,
    Sample,
    Schema,
    Table,
    fits,
    sample_checksums,
    schema_of,
    widen,
)
from ridgeline.data.formats.table import FORMATS
from ridgeline.data.order import epoch_order
from ridgeline.data.work import Tally, run_tasks
from ridgeline.errors import RunError, UsageError

_PROBED = 64
_ROOM_MARGIN = 1.05


class Samples(Protocol):
    """Where samples come from: a `Dataset`, or a source of a recipe."""

    schema: Schema
    classes: list[str]
    origin: str

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample: ...

    def key(self, index: int) -> str: ...


class Shuffled:
    """Samples in a random order. A folder lies sorted by class, and a shuffle by blocks mixes no further
    than its window: what is packed in random order needs no more."""

    def __init__(self, samples: Samples, seed: int) -> None:
        self._samples = samples
        self._order = epoch_order(len(samples), seed, 0)
        self.schema = samples.schema
        self.classes = samples.classes
        self.origin = f"{samples.origin}, shuffled with seed {seed}"

    def __len__(self) -> int:
        return len(self._order)

    def read(self, index: int) -> Sample:
        return self._samples.read(int(self._order[index]))

    def key(self, index: int) -> str:
        return self._samples.key(int(self._order[index]))

    def state_crc(self) -> int:
        return _state_crc(self._samples)


@dataclass(frozen=True)
class Packed:
    """How packing ended."""

    dataset: Dataset
    num_written: int
    """Samples written this time; the others were there from a start before."""
    seconds: float


@dataclass(frozen=True)
class _Job:
    """What all tasks share, sent to a process once."""

    samples: Samples
    form: Format
    schema: Schema


@dataclass(frozen=True)
class _Task:
    path: Path
    first: int
    last: int


Told = Callable[[str, int, int], None]
"""Called with what is being done, how many samples are done and how many there are."""


def pack(
    samples: Samples,
    target: Path,
    form: Format,
    *,
    shard_bytes: int = 256 * 2**20,
    varying: bool = False,
    processes: int = 1,
    tell: Told = lambda what, done, of: None,
) -> Packed:
    """Write all samples to `target`, or go on where a start before it ended. `varying`: arrays may have
    other shapes than those of the samples that are looked at first."""
    begin = time.monotonic()
    if (target / DATASET).exists():
        raise UsageError(f"{target} holds a data set already; choose another place or remove it")
    if not len(samples):
        raise UsageError(f"{samples.origin} holds no samples; there is nothing to pack")
    found = _look_ahead(samples, varying)
    if why := form.refuses(found.schema):
        raise UsageError(f"the format {form.name!r} cannot hold these samples: {why}")
    if not (target / PLAN).exists():
        _check_room(target, int(len(samples) * found.mean_bytes))
    _make_folder(target)
    with _alone_in(target), _writing(target):
        return _pack(samples, target, form, found, shard_bytes, processes, tell, begin)


def _pack(
    samples: Samples,
    target: Path,
    form: Format,
    found: _Found,
    shard_bytes: int,
    processes: int,
    tell: Told,
    begin: float,
) -> Packed:
    bounds = _plan(samples, target, form, found, shard_bytes)
    tasks = [
        _Task(target / f"shard-{number:05d}{form.suffix}", first, last)
        for number, (first, last) in enumerate(pairwise(bounds))
    ]
    _clear(target, tasks)
    waiting = [task for task in tasks if not _is_done(task)]
    num_left = sum(task.last - task.first for task in waiting)
    _check_room(target, int(num_left * found.mean_bytes))
    before = len(samples) - num_left
    job = _Job(samples, form, found.schema)
    told = lambda done: tell("packing", before + done, len(samples))  # noqa: E731
    run_tasks(_write_shard, job, waiting, processes, told)
    entries = [_entry(task) for task in tasks]
    dataset = Dataset(target, form, found.schema, entries, samples.classes, samples.origin)
    dataset.classes = dataset.classes or classes_of(dataset.iter_keys())
    bad = verify(dataset, processes, tell)
    if bad:
        lines = [line for damage in bad for line in damage.lines]
        raise RunError(
            f"what was written to {target} does not read back as it was: {lines[0]}"
            + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else "")
            + "; the disk or the memory of this machine is at fault, pack again elsewhere"
        )
    if len(dataset) != len(samples):
        raise RunError(f"{target} holds {len(dataset)} samples where there were {len(samples)}")
    dataset.write_manifest()
    (target / PLAN).unlink(missing_ok=True)
    return Packed(dataset, num_left, time.monotonic() - begin)


def was_packed(samples: Samples, target: Path, form: Format) -> bool:
    """Whether these samples are in `target` already, from a start before."""
    if not (target / DATASET).exists():
        return False
    there = open_dataset(target)
    return (there.origin, there.form, len(there)) == (samples.origin, form, len(samples))


def unpack(
    dataset: Dataset,
    target: Path,
    *,
    processes: int = 1,
    tell: Told = lambda what, done, of: None,
) -> int:
    """Every sample as files under `target`, which is what a folder was before it was packed."""
    folder = FORMATS["folder"]
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is not an empty folder; choose another place")
    _check_room(target, dataset.num_bytes)
    _make_folder(target)
    # Who opens the folder before all is there is told so.
    unpacking = target / UNPACKING
    tasks = []
    step = max(1, min(4096, -(-len(dataset) // max(1, 4 * processes))))
    for first in range(0, len(dataset), step):
        last = min(first + step, len(dataset))
        tasks.append(_Task(target, first, last))
    job = _Job(dataset, folder, dataset.schema)
    with _writing(target):
        unpacking.write_text(f"from {dataset.path}\n", encoding="utf-8")
        told = lambda done: tell("unpacking", done, len(dataset))  # noqa: E731
        run_tasks(_write_files, job, tasks, processes, told)
        unpacking.unlink()
    return len(dataset)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder {path} ({error.strerror}); choose another place"
        ) from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A disk that is full or gone, in words."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write {error.filename or path}: {error.strerror or error}"
        ) from error


@contextmanager
def _alone_in(target: Path) -> Iterator[None]:
    """Two that pack to one place would write each other's files. The lock goes with the process."""
    folder = os.open(target, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Not every network file system has locks.
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UsageError(
                    f"another process is packing to {target}; wait for it or choose another place"
                ) from error
        yield
    finally:
        os.close(folder)


@dataclass(frozen=True)
class _Found:
    """What some samples all over the data set tell of all."""

    schema: Schema
    mean_bytes: float
    """Of a sample."""
    crc: int
    """Of their keys and contents, and of the state of all files where samples come from such: whether a
    second start has the same samples."""


def _look_ahead(samples: Samples, varying: bool) -> _Found:
    picks = np.unique(np.linspace(0, len(samples) - 1, num=_PROBED).astype(np.int64)).tolist()
    schema = dict(samples.schema)
    num_bytes, crc = 0, _state_crc(samples)
    for index in picks:
        sample = samples.read(index)
        schema = widen(schema or schema_of(sample), sample, f"sample {index} of {samples.origin}")
        num_bytes += sum(
            value.nbytes if isinstance(value, np.ndarray) else len(value)
            for value in sample.values()
        )
        sums = sample_checksums(sample, schema_of(sample))
        crc = zlib.crc32(repr((samples.key(index), sums)).encode(), crc)
    if varying:
        schema = {
            name: Field(field.kind, field.dtype, (None,) * len(field.shape))
            for name, field in schema.items()
        }
    return _Found(schema, max(1.0, num_bytes / len(picks)), crc)


def _state_crc(samples: Samples) -> int:
    """Of all samples without reading them, where they can tell (`Dataset.state_crc`)."""
    tell: Callable[[], int] | None = getattr(samples, "state_crc", None)
    return 0 if tell is None else tell()


def _plan(
    samples: Samples,
    target: Path,
    form: Format,
    found: _Found,
    shard_bytes: int,
) -> list[int]:
    """First samples of the shards and the end; a plan that was begun is kept to."""
    per_shard = max(1, int(shard_bytes / found.mean_bytes))
    bounds = [*range(0, len(samples), per_shard), len(samples)]
    plan = {
        "origin": samples.origin,
        "format": form.name,
        "samples": len(samples),
        "fields": {name: field.to_dict() for name, field in found.schema.items()},
        "shard_bytes": shard_bytes,
        "crc": found.crc,
        "bounds": bounds,
    }
    file = target / PLAN
    if file.exists():
        try:
            begun = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"cannot read {file} ({error}); remove {target} and begin again"
            ) from error
        for key in ("origin", "format", "samples", "fields", "shard_bytes", "crc"):
            if begun.get(key) != plan[key]:
                raise UsageError(
                    f"{target} was begun with {key}={begun.get(key)!r:.80}, not {plan[key]!r:.80}"
                    + (" (the samples or their files have changed since)" if key == "crc" else "")
                    + "; choose another place or remove it"
                )
        return list(begun["bounds"])
    if any(target.iterdir()):
        raise UsageError(f"{target} is not empty and holds no data set; choose another place")
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(plan), encoding="utf-8")
    part.replace(file)
    return bounds


def _clear(target: Path, tasks: Sequence[_Task]) -> None:
    """What a start before left half done."""
    for path in target.glob("*.part"):
        _remove(path)
    for task in tasks:
        if task.path.exists() and not _is_done(task):
            _remove(task.path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def classes_of(keys: Iterable[str]) -> list[str]:
    """Names of the folders that samples lie in, where every sample lies in one."""
    folders: set[str] = set()
    for key in keys:
        folder, _, _ = key.rpartition("/")
        if not folder:
            return []
        folders.add(folder.rpartition("/")[2])
    return sorted(folders)


def _table_path(path: Path) -> Path:
    return path.with_name(path.name + TABLE_SUFFIX)


def _is_done(task: _Task) -> bool:
    if not (task.path.exists() and _table_path(task.path).is_file()):
        return False
    try:
        return len(read_table(_table_path(task.path))) == task.last - task.first
    except RunError:
        return False


def _entry(task: _Task) -> ShardEntry:
    crc = zlib.crc32(_table_path(task.path).read_bytes())
    return ShardEntry(task.path.name, task.last - task.first, disk_bytes(task.path), crc)


def _check_room(target: Path, num_bytes: int) -> None:
    there = next(path for path in (target, *target.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if num_bytes * _ROOM_MARGIN > free:
        raise UsageError(
            f"{target} has room for {free / 1e9:.2f} GB, and the samples take about "
            f"{num_bytes / 1e9:.2f} GB; choose another place or make room"
        )


def _read(job: _Job, task: _Task) -> Iterator[tuple[str, Sample]]:
    tally = Tally()
    for index in range(task.first, task.last):
        try:
            sample = job.samples.read(index)
        except OSError as error:
            raise RunError(
                f"sample {index} of {job.samples.origin} cannot be read: {error}"
            ) from error
        if not fits(job.schema, sample):
            widen(job.schema, sample, f"sample {index} of {job.samples.origin}")
            shapes = {
                name: list(value.shape)
                for name, value in sample.items()
                if isinstance(value, np.ndarray)
            }
            raise UsageError(
                f"sample {index} of {job.samples.origin} has arrays of shapes {shapes} where those "
                "looked at first had one; remove what was begun and pack again with --varying"
            )
        yield job.samples.key(index), sample
        tally.add()
    tally.tell()


def _write_shard(job: _Job, task: _Task) -> None:
    part = task.path.with_name(task.path.name + ".part")
    keys, checksums = [], []
    with _writing(part):
        writer = job.form.write(part, job.schema)
        try:
            for key, sample in _read(job, task):
                writer.add(key, sample)
                keys.append(key)
                checksums.append(sample_checksums(sample, job.schema))
            places = writer.finish()
        finally:
            writer.close()
        offsets, sizes = places if places is not None else (None, None)
        table = Table(keys, np.array(checksums, dtype=np.uint32), offsets, sizes)
        part.replace(task.path)
        write_table(_table_path(task.path), table)
        sync_folder(task.path.parent)


def _write_files(job: _Job, task: _Task) -> None:
    writer = job.form.write(task.path, job.schema)
    keys, checksums = [], []
    for key, sample in _read(job, task):
        writer.add(key, sample)
        keys.append(key)
        checksums.append(sample_checksums(sample, job.schema))
    writer.finish()
    written = job.form.open(task.path, job.schema, Table(keys, np.array(checksums)))
    for row, wanted in enumerate(checksums):
        if sample_checksums(written.read(row), job.schema) != wanted:
            raise written.damaged(row, "does not read back as it was written")
