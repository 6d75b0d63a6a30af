"""Samples as columns: what a folder of .npy files and HDF5 have in common.

A field of fixed arrays is one array (N, ...). Bytes are one flat array `NAME.bytes` with N + 1
`NAME.offsets`; arrays of varying shape are `NAME.values` with offsets counted in elements and
`NAME.shapes` (N, dims). The keys are such bytes too, called `__key__`. Wherever the place of an array
in its file is known, rows are read from there without a library in between.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, overload

import numpy as np

from ridgeline.data.formats.contract import Field, Sample, Schema, Shard, Table, Value
from ridgeline.data.formats.members import read_exactly
from ridgeline.errors import UsageError

KEYS = "__key__"
_PARTS = (".bytes", ".values", ".offsets", ".shapes")


class RowKeys(Sequence[str]):
    """Keys for files that have none: the file's name and the row's number, made when asked for."""

    def __init__(self, path: Path, num_rows: int) -> None:
        self._stem = path.name.split(".")[0].replace("\\", "_") or "rows"
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[str]: ...
    def __getitem__(self, row: int | slice) -> str | Sequence[str]:
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(self._num_rows))]
        if not -self._num_rows <= row < self._num_rows:
            raise IndexError(row)
        return f"{self._stem}/{row % self._num_rows:08d}"


def refuse_names(schema: Schema) -> str:
    """Why the names of a schema cannot be those of columns."""
    for name in schema:
        if "/" in name or "\0" in name or name in ("", ".", "..", KEYS):
            return f"{name!r} is no name of a column"
        if name.endswith(_PARTS):
            return f"the name {name!r} ends as parts of columns do ({', '.join(_PARTS)})"
    return ""


@dataclass(frozen=True)
class Extent:
    """An array that lies as it is in a file, rows one after another."""

    fd: int
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    def load(self, path: Path) -> np.ndarray:
        """The whole array; for offsets and shapes."""
        size = self.row_bytes * self.shape[0]
        data = pread(self.fd, size, self.offset)
        if len(data) != size:
            raise UsageError(
                f"{path} is cut short: {len(data)} of {size} bytes of an array at offset {self.offset} "
                "are there; write or fetch the shard again"
            )
        return np.frombuffer(data, self.dtype).reshape(self.shape)


def pread(fd: int, size: int, offset: int) -> bytes:
    """`size` bytes, or fewer at the end of the file; one call hands out 2 GiB at most."""
    data = os.pread(fd, size, offset)
    while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
        data += more
    return data


class Column(Protocol):
    def get(self, shard: Shard, row: int) -> Value: ...

    def into(self, shard: Shard, rows: np.ndarray, out: np.ndarray) -> None: ...


def _read(shard: Shard, row: int, fd: int, size: int, offset: int) -> bytes:
    try:
        data = os.pread(fd, size, offset)
        if len(data) != size:
            data = pread(fd, size, offset)
    except OSError as error:
        raise shard.damaged(row, f"cannot be read: {error.strerror}") from error
    if len(data) != size:
        raise shard.damaged(row, f"ends after {len(data)} of {size} bytes: the file is cut short")
    return data


class FixedColumn:
    """Arrays of one shape, by offset."""

    def __init__(self, extent: Extent) -> None:
        self._fd = extent.fd
        self._offset = extent.offset
        self._dtype = extent.dtype
        self._native = extent.dtype.newbyteorder("=")
        self._is_native = extent.dtype.isnative
        self._shape = extent.shape[1:]
        self._bytes = extent.row_bytes

    def get(self, shard: Shard, row: int) -> Value:
        size = self._bytes
        data = _read(shard, row, self._fd, size, self._offset + row * size)
        value = np.frombuffer(data, self._dtype).reshape(self._shape)
        return value if self._is_native else value.astype(self._native)

    def into(self, shard: Shard, rows: np.ndarray, out: np.ndarray) -> None:
        if not (self._is_native and out.dtype == self._native and out.flags.c_contiguous):
            return each_into(self, shard, rows, out)
        size = self._bytes
        if not size:
            return None
        # Rows that follow each other come with one read.
        cuts = np.flatnonzero(np.diff(rows) != 1) + 1
        starts = [0, *cuts.tolist(), len(rows)]
        for first, last in itertools.pairwise(starts):
            if last > first:
                row = int(rows[first])
                read_exactly(shard, row, self._fd, out[first:last], self._offset + row * size)
        return None

    def ahead(self, first: int, last: int) -> None:
        size = self._bytes
        start = self._offset + first * size
        os.posix_fadvise(self._fd, start, (last - first) * size, os.POSIX_FADV_WILLNEED)


class FlatColumn:
    """Bytes, or arrays of varying shape, one after another in one flat array."""

    def __init__(
        self, flat: Extent, load: Callable[[], tuple[np.ndarray, np.ndarray | None]], is_bytes: bool
    ) -> None:
        self._flat = flat
        self._load = load
        self._is_bytes = is_bytes
        self._offsets: np.ndarray | None = None
        self._shapes: np.ndarray | None = None

    def get(self, shard: Shard, row: int) -> Value:
        if self._offsets is None:
            offsets, self._shapes = self._load()
            self._offsets = offsets
        itemsize = self._flat.dtype.itemsize
        start, end = self._offsets[row : row + 2].tolist()
        if not 0 <= start <= end <= self._flat.shape[0]:
            raise shard.damaged(row, f"is said to lie at {start} to {end}, which is no place in it")
        size = (end - start) * itemsize
        data = _read(shard, row, self._flat.fd, size, self._flat.offset + start * itemsize)
        if self._is_bytes:
            return data
        assert self._shapes is not None
        shape = self._shapes[row].tolist()
        try:
            value = np.frombuffer(data, self._flat.dtype).reshape(shape)
        except ValueError as error:
            raise shard.damaged(row, f"has {end - start} numbers for the shape {shape}") from error
        return value.astype(self._flat.dtype.newbyteorder("="), copy=False)

    def into(self, shard: Shard, rows: np.ndarray, out: np.ndarray) -> None:
        each_into(self, shard, rows, out)

    def ahead(self, first: int, last: int) -> None:
        if self._offsets is not None:
            itemsize = self._flat.dtype.itemsize
            start, end = (int(self._offsets[row]) * itemsize for row in (first, last))
            place = self._flat.offset + start
            os.posix_fadvise(self._flat.fd, place, end - start, os.POSIX_FADV_WILLNEED)


class MemoryColumn:
    """An array that is in memory, or mapped there; text becomes bytes."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self._native = values.dtype.newbyteorder("=")

    def get(self, shard: Shard, row: int) -> Value:
        value = self._values[row]
        if self._native.kind == "S":
            return bytes(value)
        if self._native.kind == "U":
            return str(value).encode()
        return np.array(value, dtype=self._native, order="C")

    def into(self, shard: Shard, rows: np.ndarray, out: np.ndarray) -> None:
        out[...] = self._values[rows]


def each_into(column: Column, shard: Shard, rows: np.ndarray, out: np.ndarray) -> None:
    for place, row in enumerate(rows.tolist()):
        out[place, ...] = column.get(shard, row)


def field_of_rows(dtype: np.dtype, shape: tuple[int, ...], place: str) -> Field:
    """The field that the rows of an array are."""
    if dtype.kind in "SU":
        if len(shape) != 1:
            raise UsageError(f"{place} is an array of text of {len(shape)} dimensions; 1 is read")
        return Field("bytes")
    if dtype.kind not in "biufcmM":
        raise UsageError(f"{place} is an array of {dtype}, which is no number; such are not read")
    return Field("array", dtype.newbyteorder("=").name, tuple(shape[1:]))


class ColumnShard(Shard):
    """Samples put together from columns."""

    reads_fields_apart = True

    def __init__(
        self,
        path: Path,
        schema: Schema,
        table: Table,
        columns: Mapping[str, Column],
        fds: Sequence[int] = (),
    ) -> None:
        self._fds = list(fds)
        self.path = path
        self.schema = schema
        self.table = table
        self._columns = columns
        self._items = [(name, columns[name]) for name in schema]

    def read(self, row: int) -> Sample:
        if row >= len(self.table):
            raise IndexError(row)
        return {name: column.get(self, row) for name, column in self._items}

    def read_into(self, name: str, rows: np.ndarray, out: np.ndarray) -> None:
        self._columns[name].into(self, rows, out)

    def ahead(self, first: int, last: int) -> None:
        for _, column in self._items:
            if isinstance(column, FixedColumn | FlatColumn):
                column.ahead(first, last)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def __del__(self) -> None:
        if hasattr(self, "_fds"):
            self.close()


def columns_of_extents(
    path: Path, extents: Mapping[str, Extent]
) -> tuple[Schema, dict[str, Column], Sequence[str] | None, int]:
    """Fields, columns, keys where there are some, and number of rows of arrays named as above.

    Raises UsageError where the arrays are not of one length.
    """
    schema: Schema = {}
    columns: dict[str, Column] = {}
    lengths: dict[str, int] = {}
    for part, extent in sorted(extents.items()):
        name, dot, kind = part.rpartition(".")
        if not dot or f"{name}.offsets" not in extents:
            if not extent.shape:
                raise UsageError(f"{path}: {part} is a single number, not an array of rows")
            if extent.dtype.kind in "SU":
                columns[part] = MemoryColumn(extent.load(path))
            else:
                columns[part] = FixedColumn(extent)
            schema[part] = field_of_rows(extent.dtype, extent.shape, f"{path}: {part}")
            lengths[part] = extent.shape[0]
        elif kind in ("bytes", "values"):
            offsets = extents[f"{name}.offsets"]
            shapes = extents.get(f"{name}.shapes")
            if kind == "values" and shapes is None:
                raise UsageError(f"{path} has no {name}.shapes beside {part}; write it again")
            columns[name] = FlatColumn(extent, _loader(path, offsets, shapes), kind == "bytes")
            lengths[name] = offsets.shape[0] - 1
            if shapes is None:
                schema[name] = Field("bytes")
            else:
                dtype = extent.dtype.newbyteorder("=").name
                schema[name] = Field("array", dtype, (None,) * shapes.shape[1])
    if not lengths:
        raise UsageError(f"{path} holds no arrays")
    if len(set(lengths.values())) != 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UsageError(f"{path}: arrays of samples have one length; these differ: {listed}")
    num_rows = next(iter(lengths.values()))
    keys = None
    if schema.pop(KEYS, None):
        column = columns.pop(KEYS)
        keys = read_keys(path, extents, column)
    return schema, columns, keys, num_rows


def _loader(
    path: Path, offsets: Extent, shapes: Extent | None
) -> Callable[[], tuple[np.ndarray, np.ndarray | None]]:
    return lambda: (offsets.load(path), shapes.load(path) if shapes else None)


def read_keys(path: Path, extents: Mapping[str, Extent], column: Column) -> list[str]:
    text = extents[f"{KEYS}.bytes"].load(path).tobytes()
    offsets = extents[f"{KEYS}.offsets"].load(path).tolist()
    pairs = itertools.pairwise(offsets)
    return [text[start:end].decode("utf-8", "replace") for start, end in pairs]


def check_columns(path: Path, schema: Schema, found: Schema, num_rows: int, table: Table) -> None:
    """That a shard is what its data set says."""
    if num_rows != len(table):
        raise UsageError(
            f"{path} holds {num_rows} samples, where its table lists {len(table)}; one of the two is "
            "from another time: write the shard again"
        )
    for name, field in schema.items():
        known = found.get(name)
        if known is None or (known.kind, known.dtype) != (field.kind, field.dtype):
            raise UsageError(
                f"{path} holds no field {name!r} as the data set describes it; write the shard again"
            )


class Put(Protocol):
    def __call__(self, part: str, data: bytes | memoryview) -> object: ...


class ColumnSplitter:
    """Takes samples apart into the pieces of their columns, and keeps offsets and shapes."""

    def __init__(self, schema: Schema, put: Put) -> None:
        self._schema = schema
        self._put = put
        self.num_rows = 0
        self.parts: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        self._offsets: dict[str, array[int]] = {}
        self._shapes: dict[str, array[int]] = {}
        for name, field in {**schema, KEYS: Field("bytes")}.items():
            if field.is_fixed:
                shape = tuple(side or 0 for side in field.shape)
                self.parts[name] = (np.dtype(field.dtype), shape)
                continue
            self._offsets[name] = array("q", [0])
            if field.kind == "array":
                self._shapes[name] = array("q")
                self.parts[f"{name}.values"] = (np.dtype(field.dtype), ())
            else:
                self.parts[f"{name}.bytes"] = (np.dtype(np.uint8), ())

    def add(self, key: str, sample: Sample) -> None:
        for name, field in self._schema.items():
            value = sample[name]
            if isinstance(value, np.ndarray):
                whole = np.asarray(value, dtype=np.dtype(field.dtype), order="C")
                flat = whole.reshape(-1).view(np.uint8).data if whole.size else b""
                if field.is_fixed:
                    self._put(name, flat)
                else:
                    self._put(f"{name}.values", flat)
                    self._offsets[name].append(self._offsets[name][-1] + whole.size)
                    self._shapes[name].extend(whole.shape)
            else:
                self._put(f"{name}.bytes", value)
                self._offsets[name].append(self._offsets[name][-1] + len(value))
        text = key.encode()
        self._put(f"{KEYS}.bytes", text)
        self._offsets[KEYS].append(self._offsets[KEYS][-1] + len(text))
        self.num_rows += 1

    def shape(self, part: str) -> tuple[int, ...]:
        """Of the whole array of a part, now that all samples came."""
        name, _, kind = part.rpartition(".")
        if kind in ("bytes", "values") and name in self._offsets:
            return (self._offsets[name][-1],)
        return (self.num_rows, *self.parts[part][1])

    def small(self) -> dict[str, np.ndarray]:
        """Offsets and shapes."""
        arrays = {f"{n}.offsets": np.array(o, dtype=np.int64) for n, o in self._offsets.items()}
        for name, sides in self._shapes.items():
            num_dims = len(self._schema[name].shape)
            arrays[f"{name}.shapes"] = np.array(sides, np.int64).reshape(self.num_rows, num_dims)
        return arrays
