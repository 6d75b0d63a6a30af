"""What a format is: a shard is written sample by sample and read by number.

A sample is a dictionary of named fields, each either bytes as they were found (a JPEG, a line of
JSON) or a numpy array. The schema says which, so that a shard can be opened without looking at a
sample. Every format is one `Format` in `table.py`; `data/dataset.py` and `data/pack.py` use nothing
but what stands here.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ridgeline.errors import RunError, UsageError

Value = bytes | np.ndarray
Sample = dict[str, Value]

_PAGE_BYTES = 4096
_PAGE_WORDS = _PAGE_BYTES // 8
_LARGE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Field:
    """One named part of every sample."""

    kind: str
    """`bytes`, as they were found, or `array`."""
    dtype: str = ""
    """Numpy's name, for arrays."""
    shape: tuple[int | None, ...] = ()
    """For arrays; None where samples differ."""

    @property
    def is_fixed(self) -> bool:
        """Whether every sample's array has one and the same size."""
        return self.kind == "array" and None not in self.shape

    @property
    def num_bytes(self) -> int:
        """Of one sample's array, where it is fixed."""
        return int(np.prod([side or 0 for side in self.shape], dtype=np.int64)) * self.itemsize

    @property
    def itemsize(self) -> int:
        return np.dtype(self.dtype).itemsize

    def to_dict(self) -> dict[str, Any]:
        if self.kind == "bytes":
            return {"kind": "bytes"}
        return {"kind": "array", "dtype": self.dtype, "shape": list(self.shape)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Field:
        return Field(values["kind"], values.get("dtype", ""), tuple(values.get("shape", ())))


Schema = dict[str, Field]


class BadSample(RunError):
    """A sample that cannot be read as it was written; the message names shard, sample and place."""


@dataclass(frozen=True)
class Table:
    """Where the samples of a shard lie: what stands beside it in its `.idx` file."""

    keys: Sequence[str]
    checksums: np.ndarray | None = None
    """(samples, fields) uint32, of the contents whatever the format; None for a shard that others
    wrote."""
    offsets: np.ndarray | None = None
    """(samples, fields) uint64: where a field's bytes begin in the file; None where rows are found
    by their number."""
    sizes: np.ndarray | None = None
    """Likewise, how many bytes."""

    def __len__(self) -> int:
        return len(self.keys)


class Shard:
    """One file or folder of samples, open for reading. Not to be shared between processes."""

    path: Path
    schema: Schema
    table: Table
    reads_fields_apart = False
    """Whether `read_into` reads one field and leaves the others alone."""

    def __len__(self) -> int:
        return len(self.table)

    def read(self, row: int) -> Sample:
        """Sample `row`; raises BadSample where the file does not hold it whole."""
        raise NotImplementedError

    def read_into(self, name: str, rows: np.ndarray, out: np.ndarray) -> None:
        """The field `name`, an array of fixed shape, of several rows, stacked into `out`."""
        for place, row in enumerate(rows.tolist()):
            # Numbers alone: out[place] would be a copy.
            out[place, ...] = self.read(row)[name]

    def files(self) -> Iterator[str]:
        """The files that its samples lie in, in order."""
        if self.path.is_dir():
            yield from sorted(entry.path for entry in os.scandir(self.path) if entry.is_file())
        else:
            yield str(self.path)

    def place(self, row: int) -> str:
        """Where in the file a sample lies, for messages."""
        if self.table.offsets is None:
            return f"row {row}"
        return f"offset {int(self.table.offsets[row].min())}"

    def ahead(self, first: int, last: int) -> None:
        """Ask the system to have rows first..last-1 in memory soon; may do nothing."""

    def close(self) -> None:
        """Let go of files."""

    def damaged(self, row: int, why: str) -> BadSample:
        return BadSample(
            f"{self.path}: sample {row} ({self.table.keys[row]!r}, {self.place(row)}) {why}"
        )


class ShardWriter(Protocol):
    """One shard on its way to the disk; nothing is promised of it before `finish` returned."""

    def add(self, key: str, sample: Sample) -> None: ...

    def finish(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Bring everything to the disk; offsets and sizes for the table, where the format has such."""
        ...

    def close(self) -> None:
        """Let go of files, whether finished or not."""
        ...


@dataclass(frozen=True)
class Format:
    """A line of the table."""

    name: str
    suffix: str
    """Of a shard's name; empty for a folder."""
    about: str
    write: Callable[[Path, Schema], ShardWriter]
    open: Callable[[Path, Schema | None, Table | None], Shard]
    """Without a schema and a table the shard is looked through first, which takes a while once."""
    finds: Callable[[Path], list[Path]]
    """The shards that a path is or holds, in order; empty when it is nothing of this format."""
    refuses: Callable[[Schema], str] = lambda schema: ""
    """Why samples of this schema cannot be held; empty when they can."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A line of a table is sent to another process by its name.
        return _by_name, (self.name,)


def _by_name(name: str) -> Format:
    from ridgeline.data.formats.table import FORMATS

    return FORMATS[name]


def checksum(value: Value | memoryview, before: int = 0) -> int:
    """CRC-32 of small values; of large ones the CRC-32 of the 64-bit sums of their 4 KiB pages.

    Sums run at the speed of memory, where a CRC takes longer than the read it guards. A changed bit,
    word or page, a page in another's place and a missing end all show.
    """
    flat = np.ascontiguousarray(value).data if isinstance(value, np.ndarray) else memoryview(value)
    data = flat.cast("B") if flat.nbytes else memoryview(b"")
    if data.nbytes < _LARGE_BYTES:
        return zlib.crc32(data, before)
    num_pages = data.nbytes // _PAGE_BYTES
    words = np.frombuffer(data, dtype="<u8", count=num_pages * _PAGE_WORDS)
    sums = words.reshape(num_pages, _PAGE_WORDS).sum(axis=1, dtype=np.uint64)
    crc = zlib.crc32(sums.tobytes(), before)
    return zlib.crc32(data[num_pages * _PAGE_BYTES :], crc)


def field_checksum(value: Value, field: Field) -> int:
    """Of one field of a sample, the same in every format."""
    if isinstance(value, np.ndarray) and not field.is_fixed:
        return checksum(value, zlib.crc32(np.array(value.shape, dtype="<i8").tobytes()))
    return checksum(value)


def sample_checksums(sample: Sample, schema: Schema) -> list[int]:
    """A checksum for each field, in the schema's order."""
    return [field_checksum(sample[name], field) for name, field in schema.items()]


def type_name(dtype: np.dtype, field: str) -> str:
    """How a schema names the type of an array; text, records and objects have no place in one."""
    if dtype.kind not in "biufcmM":
        raise UsageError(
            f"the field {field!r} is an array of {dtype}; arrays hold numbers, keep anything else as bytes"
        )
    return dtype.newbyteorder("=").name


def schema_of(sample: Sample) -> Schema:
    """The schema that one sample alone suggests; `widen` makes room for others."""
    schema: Schema = {}
    for name, value in sample.items():
        if isinstance(value, np.ndarray):
            schema[name] = Field("array", type_name(value.dtype, name), value.shape)
        else:
            schema[name] = Field("bytes")
    return schema


def widen(schema: Schema, sample: Sample, what: str) -> Schema:
    """The schema that fits `sample` as well; an error where none does."""
    if set(sample) != set(schema):
        raise UsageError(
            f"{what} has the fields {', '.join(sorted(sample))} where the samples before it have "
            f"{', '.join(sorted(schema))}; every sample of a data set has the same fields"
        )
    wide = {}
    for name, known in schema.items():
        value = sample[name]
        one = schema_of({name: value})[name]
        if (one.kind, one.dtype, len(one.shape)) != (known.kind, known.dtype, len(known.shape)):
            raise UsageError(
                f"the field {name!r} of {what} is {_describe(one)} where the samples before it have "
                f"{_describe(known)}; a field has one type and number of dimensions"
            )
        pairs = zip(known.shape, one.shape, strict=True)
        shape = tuple(old if old == new else None for old, new in pairs)
        wide[name] = Field(known.kind, known.dtype, shape)
    return wide


def fits(schema: Schema, sample: Sample) -> bool:
    """Whether a sample is what the schema says, without making anything."""
    if sample.keys() != schema.keys():
        return False
    for name, field in schema.items():
        value = sample[name]
        if not isinstance(value, np.ndarray):
            if field.kind != "bytes":
                return False
            continue
        if field.kind != "array" or value.dtype.name != field.dtype:
            return False
        if len(value.shape) != len(field.shape):
            return False
        if any(
            want not in (None, side) for want, side in zip(field.shape, value.shape, strict=True)
        ):
            return False
    return True


def _describe(field: Field) -> str:
    if field.kind == "bytes":
        return "bytes"
    sides = ", ".join("any" if side is None else str(side) for side in field.shape)
    return f"{field.dtype} [{sides}]"


def describe_schema(schema: Schema) -> str:
    return ", ".join(f"{name}: {_describe(field)}" for name, field in schema.items())


def check_key(key: str, place: str) -> str:
    """A sample's key becomes a file's name: it must not lead out of the folder it is put in."""
    parts = key.split("/")
    if (
        not key
        or key.startswith("/")
        or "\\" in key
        or "\0" in key
        or ".." in parts
        or "." in parts
    ):
        raise UsageError(
            f"{place}: the name {key!r} leads out of its folder or is no name of a file; nothing "
            "was read from it"
        )
    return key


def find_by_suffix(*suffixes: str) -> Callable[[Path], list[Path]]:
    """Shards are the files with one of these endings: the path itself, or those it holds."""

    def finds(path: Path) -> list[Path]:
        if path.is_file():
            return [path] if path.name.endswith(suffixes) else []
        if not path.is_dir():
            return []
        return sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith(suffixes))

    return finds


def needs(extra: str, module: str, format_name: str) -> UsageError:
    """The error for a format whose library is not installed."""
    return UsageError(
        f"the format {format_name!r} needs {module}, which is not installed here; "
        f"pip install 'ridgeline[{extra}]'"
    )
