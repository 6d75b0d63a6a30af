"""A data set on disk: shards of one format, what is in them, and any sample by its number.

`dataset.json` names the format, the fields and the shards in order; beside each shard lies its table
(`NAME.idx`: keys, checksums, places). Samples are numbered through all shards, so that their order
does not depend on the format or on the size of shards. Files that others wrote have neither and are
looked through when they are opened. Needs no torch. Written by `pack.py`, read by `sources/packed.py`
and by the commands of `ridgeline data`.
"""

from __future__ import annotations

import json
import os
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.data.formats.contract import (
    Field,
    Format,
    Sample,
    Schema,
    Shard,
    Table,
    Value,
    describe_schema,
    field_checksum,
)
from ridgeline.data.formats.table import FORMATS, detect
from ridgeline.data.spent import Spent
from ridgeline.errors import RunError, UsageError, unknown_word

DATASET = "dataset.json"
PLAN = "pack.json"
"""There while packing has not ended."""
UNPACKING = "unpacking.txt"
"""There while unpacking has not ended."""
TABLE_SUFFIX = ".idx"
_VERSION = 1
# Shards that stay open; files of more are closed when nobody reads them any longer.
_MAX_OPEN = 256
# Arrays of this size go from the file to their place in the batch without a stop.
_DIRECT_BYTES = 32 * 1024
CHECKS = ("once", "always", "never")


@dataclass(frozen=True)
class ShardEntry:
    """A line of `dataset.json`."""

    name: str
    num_samples: int
    num_bytes: int
    table_crc: int | None = None
    """CRC-32 of the table's file; None where there is none."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "samples": self.num_samples,
            "bytes": self.num_bytes,
            "table_crc": self.table_crc,
        }


class _Keys(Sequence[str]):
    """Keys as they lie in a table: one text and where each ends."""

    def __init__(self, text: bytes, ends: np.ndarray) -> None:
        self._text, self._ends = text, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        start = int(self._ends[row - 1]) if row > 0 else 0
        return self._text[start : int(self._ends[row])].decode()


def write_table(path: Path, table: Table) -> int:
    """Bring a table to the disk as `path`; returns the CRC-32 of the file."""
    encoded = [key.encode() for key in table.keys]
    arrays = {
        "key_text": np.frombuffer(b"".join(encoded), dtype=np.uint8),
        "key_ends": np.cumsum([len(key) for key in encoded], dtype=np.uint64),
    }
    for name in ("checksums", "offsets", "sizes"):
        value = getattr(table, name)
        if value is not None:
            arrays[name] = value
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    crc = zlib.crc32(part.read_bytes())
    part.replace(path)
    return crc


def read_table(path: Path, crc: int | None = None) -> Table:
    try:
        if crc is not None and zlib.crc32(path.read_bytes()) != crc:
            raise RunError(f"{path} is not the table that was written: it has another checksum")
        with np.load(path, allow_pickle=False) as stored:
            keys = _Keys(stored["key_text"].tobytes(), stored["key_ends"])
            rest = {
                name: stored[name] for name in ("checksums", "offsets", "sizes") if name in stored
            }
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise RunError(
            f"cannot read the table {path} ({error}); pack the data set again"
        ) from error
    return Table(keys, **rest)


class Dataset:
    """Samples by number. Open files belong to a process: a copy that was pickled opens its own."""

    def __init__(
        self,
        path: Path,
        form: Format,
        schema: Schema,
        entries: Sequence[ShardEntry],
        classes: Sequence[str] = (),
        origin: str = "",
        check: str = "once",
        scanned: dict[int, Table] | None = None,
    ) -> None:
        self.path = path
        self.form = form
        self.schema = schema
        self.entries = list(entries)
        self.classes = list(classes)
        """Names of the folders that samples of a labelled folder lay in, in order."""
        self.origin = origin
        self.check = check
        self.spent = Spent()
        # Tables of shards that others wrote, which lie nowhere else.
        self._scanned = scanned or {}
        counts = [entry.num_samples for entry in self.entries]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._forget()

    def _forget(self) -> None:
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._checked: dict[tuple[int, tuple[str, ...]], np.ndarray] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        hidden = ("_open", "_checked", "_lock", "_pid")
        return {name: value for name, value in self.__dict__.items() if name not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def has_checksums(self) -> bool:
        return not self._scanned

    def shard(self, number: int) -> Shard:
        """Shard `number`, opened by this process."""
        with self._lock:
            if self._pid != os.getpid():  # a fork; the parent's files are not ours to close
                self._open = OrderedDict()
                self._pid = os.getpid()
            shard = self._open.get(number)
            if shard is not None:
                self._open.move_to_end(number)
                return shard
        # Not under the lock: a slow file system would stop the threads that read other shards. Of two
        # that open the same, one is let go.
        with self.spent.during("open"):
            opened = self._open_shard(number)
        with self._lock:
            shard = self._open.setdefault(number, opened)
            while len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)
            return shard

    def _open_shard(self, number: int) -> Shard:
        entry = self.entries[number]
        path = self.path / entry.name if entry.name else self.path
        table = self._scanned.get(number)
        if table is None:
            table = read_table(path.with_name(path.name + TABLE_SUFFIX), entry.table_crc)
        if not path.exists():
            raise RunError(f"{path} is gone; {self.path / DATASET} names it as one of the shards")
        return self.form.open(path, self.schema, table)

    def locate(self, index: int) -> tuple[int, int]:
        """Shard and row of a sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self.path}")
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return number, index - int(self.starts[number])

    def key(self, index: int) -> str:
        number, row = self.locate(index)
        return str(self.shard(number).table.keys[row])

    def iter_keys(self) -> Iterator[str]:
        for number in range(len(self.entries)):
            yield from self.shard(number).table.keys

    def read(self, index: int) -> Sample:
        """One sample, checked."""
        number, row = self.locate(index)
        shard = self.shard(number)
        sample = shard.read(row)
        self._check(shard, number, row, sample, list(self.schema))
        return sample

    def read_batch(
        self,
        indices: np.ndarray,
        names: Sequence[str],
        out: Mapping[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray | list[Value]]:
        """Some fields of several samples, in this order; fields of fixed shape come stacked, in `out`
        where it has them.

        Samples are visited in the order they lie in, whatever order they are asked in.
        """
        fixed = {name for name in names if self.schema[name].is_fixed}
        batch: dict[str, Any] = {}
        for name in names:
            field = self.schema[name]
            if out is not None and name in out:
                batch[name] = out[name]
            elif name in fixed:
                batch[name] = np.empty((len(indices), *field.shape), dtype=field.dtype)
            else:
                batch[name] = [b""] * len(indices)
        order = np.argsort(indices, kind="stable")
        numbers = np.searchsorted(self.starts, indices[order], side="right") - 1
        bounds = np.flatnonzero(np.diff(numbers)) + 1
        for group in np.split(np.arange(len(order)), bounds):
            if not len(group):
                continue
            number = int(numbers[group[0]])
            places = order[group]
            rows = indices[places] - self.starts[number]
            shard = self.shard(number)
            if len(fixed) == len(names):
                if any(self.schema[name].num_bytes >= _DIRECT_BYTES for name in names):
                    # All at once, so that the disk has more to do than the read being waited for.
                    for row in rows.tolist():
                        shard.ahead(row, row + 1)
                if shard.reads_fields_apart:
                    self._read_fixed(shard, number, rows, places, names, batch)
                    continue
            for place, row in zip(places.tolist(), rows.tolist(), strict=True):
                sample = shard.read(row)
                self._check(shard, number, row, sample, names)
                for name in names:
                    batch[name][place] = sample[name]
        return batch

    def _read_fixed(
        self,
        shard: Shard,
        number: int,
        rows: np.ndarray,
        places: np.ndarray,
        names: Sequence[str],
        batch: dict[str, Any],
    ) -> None:
        for name in names:
            out = batch[name]
            if self.schema[name].num_bytes >= _DIRECT_BYTES:
                for place, row in zip(places.tolist(), rows, strict=True):
                    shard.read_into(name, np.array([row]), out[place : place + 1])
            else:
                together = np.empty((len(rows), *out.shape[1:]), dtype=out.dtype)
                shard.read_into(name, rows, together)
                out[places] = together
        if self._needs_check(shard):
            for place, row in zip(places.tolist(), rows.tolist(), strict=True):
                sample = {name: batch[name][place, ...] for name in names}
                self._check(shard, number, row, sample, names)

    def _needs_check(self, shard: Shard) -> bool:
        return self.check != "never" and shard.table.checksums is not None

    def _check(
        self, shard: Shard, number: int, row: int, sample: Sample, names: Sequence[str]
    ) -> None:
        checksums = shard.table.checksums
        if self.check == "never" or checksums is None:
            return
        which = number, tuple(names)
        done = self._checked.get(which)
        if done is None:
            done = self._checked.setdefault(which, np.zeros(len(shard), dtype=bool))
        if self.check == "once" and done[row]:
            return
        for column, (name, field) in enumerate(self.schema.items()):
            if name in names and field_checksum(sample[name], field) != int(checksums[row, column]):
                raise shard.damaged(row, f"is damaged: its field {name!r} has another checksum")
        done[row] = True

    def ahead(self, first: int, last: int) -> None:
        """Ask the system to have samples first..last-1 in memory soon."""
        while first < last:
            number, row = self.locate(first)
            end = min(last, int(self.starts[number + 1]))
            self.shard(number).ahead(row, row + end - first)
            first = end

    def state_crc(self) -> int:
        """CRC-32 of what tells these files from changed ones: the checksums of their tables, or names,
        sizes and times of change where others wrote them. Reads no sample."""
        crc = 0
        for number, entry in enumerate(self.entries):
            if number not in self._scanned:
                crc = zlib.crc32(repr(entry).encode(), crc)
                continue
            for file in self.shard(number).files():
                try:
                    found = os.stat(file)
                except OSError as error:
                    raise RunError(f"cannot look at {file}: {error.strerror}") from error
                crc = zlib.crc32(repr((file, found.st_size, found.st_mtime_ns)).encode(), crc)
        return crc

    def close(self) -> None:
        with self._lock:
            self._open.clear()

    def write_manifest(self) -> None:
        """Make the directory a data set: the last thing that is written."""
        values = {
            "ridgeline_data": _VERSION,
            "format": self.form.name,
            "samples": len(self),
            "fields": {name: field.to_dict() for name, field in self.schema.items()},
            "classes": self.classes,
            "origin": self.origin,
            "shards": [entry.to_dict() for entry in self.entries],
        }
        part = self.path / f"{DATASET}.part"
        with open(part, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path / DATASET)
        sync_folder(self.path)


def sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_dataset(path: Path, check: str = "once") -> Dataset:
    """A data set of ours, or files in one of the formats."""
    if check not in CHECKS:
        raise unknown_word("check", check, CHECKS, "data.args.check")
    manifest = path / DATASET
    if manifest.is_file():
        return _from_manifest(path, manifest, check)
    if (path / PLAN).is_file():
        raise UsageError(
            f"{path} is a data set whose packing did not end; the same `ridgeline data pack` goes on"
        )
    if (path / UNPACKING).is_file():
        raise UsageError(
            f"{path} is a folder whose unpacking did not end; remove it and unpack again"
        )
    form, shards = detect(path)
    parts = sorted(str(found.parent) for found in path.glob(f"*/{DATASET}"))
    if parts:
        raise UsageError(f"{path} holds data sets of its own; give one of them: {', '.join(parts)}")
    return _look_through(path, form, shards, check)


def _from_manifest(path: Path, manifest: Path, check: str) -> Dataset:
    try:
        values = json.loads(manifest.read_text(encoding="utf-8"))
        version = values["ridgeline_data"]
        schema = {name: Field.from_dict(field) for name, field in values["fields"].items()}
        entries = [
            ShardEntry(shard["name"], shard["samples"], shard["bytes"], shard["table_crc"])
            for shard in values["shards"]
        ]
        name, classes, origin = values["format"], values["classes"], values["origin"]
        num_samples = values["samples"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {manifest}: {error!r}; pack the data set again") from error
    if version > _VERSION:
        raise UsageError(f"{manifest} is of version {version}; this one reads up to {_VERSION}")
    if name not in FORMATS:
        raise unknown_word("format", name, FORMATS, str(manifest))
    counted = sum(entry.num_samples for entry in entries)
    if counted != num_samples or not counted:
        raise UsageError(
            f"{manifest} names {counted} samples in its shards and {num_samples} in all; pack the data "
            "set again"
        )
    return Dataset(path, FORMATS[name], schema, entries, classes, origin, check)


def _look_through(path: Path, form: Format, shards: list[Path], check: str) -> Dataset:
    entries, tables = [], {}
    schema: Schema | None = None
    for number, shard_path in enumerate(shards):
        shard = form.open(shard_path, None, None)
        schema = shard.schema if schema is None else _both(schema, shard, path)
        name = "" if shard_path == path else str(shard_path.relative_to(path))
        entries.append(ShardEntry(name, len(shard), disk_bytes(shard_path)))
        tables[number] = shard.table
        shard.close()
    assert schema is not None
    return Dataset(path, form, schema, entries, origin=str(path), check=check, scanned=tables)


def _both(schema: Schema, shard: Shard, path: Path) -> Schema:
    """The schema that fits two shards."""
    wide: Schema = {}
    for name, known in schema.items():
        other = shard.schema.get(name)
        same_kind = other is not None and (other.kind, other.dtype, len(other.shape)) == (
            known.kind,
            known.dtype,
            len(known.shape),
        )
        if other is None or not same_kind or len(shard.schema) != len(schema):
            raise UsageError(
                f"{shard.path} holds {describe_schema(shard.schema)} where the shards before it hold "
                f"{describe_schema(schema)}; the shards of {path} have to have the same fields"
            )
        pairs = zip(known.shape, other.shape, strict=True)
        shape = tuple(a if a == b else None for a, b in pairs)
        wide[name] = Field(known.kind, known.dtype, shape)
    return wide


def disk_bytes(path: Path) -> int:
    """Size of a file, or of the files of a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
