"""Parquet and Arrow files, one a shard, with the columns that pandas and Hugging Face datasets expect.

Bytes are binary columns, single numbers plain ones, vectors lists; arrays of more dimensions or of many
numbers are their raw bytes, with type and shape in the file's metadata, and those of varying shape have
a column `NAME.shape` beside them. A row is read with the group of rows it lies in: the last few groups
stay in memory. Arrow files (`.arrow`, `.feather`) are mapped and cost no memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ridgeline.data.formats.columns import KEYS, RowKeys
from ridgeline.data.formats.contract import (
    Field,
    Format,
    Sample,
    Schema,
    Shard,
    Table,
    Value,
    find_by_suffix,
    needs,
)
from ridgeline.errors import UsageError

_MARK = b"ridgeline"
_SHAPE = ".shape"
_GROUP_BYTES = 4 * 1024 * 1024
_CACHE_BYTES = 64 * 1024 * 1024
# Longer vectors are raw bytes: reading a list costs time for every number.
_MOST_LISTED = 4096


def _pyarrow(name: str) -> Any:
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise needs("data", "pyarrow", name) from error
    return pyarrow


def _is_vector(field: Field) -> bool:
    """Whether a field is a list of numbers to everybody."""
    if len(field.shape) != 1 or np.dtype(field.dtype).kind not in "iuf":
        return False
    return field.shape[0] is None or 0 < field.shape[0] <= _MOST_LISTED


def _is_number(field: Field) -> bool:
    return field.kind == "array" and field.shape == () and np.dtype(field.dtype).kind in "iuf"


def _arrow_schema(pa: Any, schema: Schema) -> Any:
    columns = [pa.field(KEYS, pa.string())]
    for name, field in schema.items():
        if field.kind == "bytes":
            columns.append(pa.field(name, pa.binary()))
            continue
        kind = np.dtype(field.dtype)
        if _is_number(field):
            columns.append(pa.field(name, pa.from_numpy_dtype(kind)))
        elif _is_vector(field):
            size = -1 if field.shape[0] is None else field.shape[0]
            columns.append(pa.field(name, pa.list_(pa.from_numpy_dtype(kind), size)))
        elif field.is_fixed:
            columns.append(pa.field(name, pa.binary(field.num_bytes or -1)))
        else:
            columns.append(pa.field(name, pa.binary()))
            columns.append(pa.field(name + _SHAPE, pa.list_(pa.int64(), len(field.shape))))
    fields = json.dumps({name: field.to_dict() for name, field in schema.items()})
    return pa.schema(columns, metadata={_MARK: fields.encode()})


class _Sink(Protocol):
    def write_batch(self, batch: Any) -> None: ...

    def close(self) -> None: ...


class ArrowWriter:
    """Samples are gathered to groups, and groups written as they are full."""

    def __init__(
        self, path: Path, schema: Schema, sink: Callable[[Any, Any], _Sink], name: str
    ) -> None:
        self._pa = _pyarrow(name)
        self._schema = schema
        self._arrow_schema = _arrow_schema(self._pa, schema)
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115
        self._sink: _Sink | None = sink(self._file, self._arrow_schema)
        self._rows: list[tuple[str, Sample]] = []
        self._num_bytes = 0

    def add(self, key: str, sample: Sample) -> None:
        self._rows.append((key, sample))
        for value in sample.values():
            self._num_bytes += value.nbytes if isinstance(value, np.ndarray) else len(value)
        if self._num_bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        arrays = [self._pa.array([key for key, _ in self._rows], self._pa.string())]
        for name, field in self._schema.items():
            values = [sample[name] for _, sample in self._rows]
            arrays.extend(_to_arrow(self._pa, field, values))
        assert self._sink is not None
        self._sink.write_batch(self._pa.RecordBatch.from_arrays(arrays, schema=self._arrow_schema))
        self._rows.clear()
        self._num_bytes = 0

    def finish(self) -> None:
        self._flush()
        assert self._sink is not None
        self._sink.close()
        self._sink = None
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        # The file first: a sink that closes would write an end to what has none.
        self._file.close()
        if self._sink is not None:
            with contextlib.suppress(ValueError, OSError):
                self._sink.close()
            self._sink = None


def _to_arrow(pa: Any, field: Field, values: list[Any]) -> list[Any]:
    if field.kind == "bytes":
        return [pa.array(values, pa.binary())]
    dtype = np.dtype(field.dtype)
    arrays = [np.asarray(value, dtype=dtype, order="C") for value in values]
    if _is_number(field):
        return [pa.array(np.stack(arrays))]
    if _is_vector(field):
        flat = pa.array(np.concatenate(arrays))
        if field.is_fixed:
            return [pa.FixedSizeListArray.from_arrays(flat, field.shape[0])]
        offsets = np.cumsum([0, *(len(one) for one in arrays)], dtype=np.int32)
        return [pa.ListArray.from_arrays(pa.array(offsets), flat)]
    if field.is_fixed:
        kind = pa.binary(field.num_bytes or -1)
        return [pa.array([one.tobytes() for one in arrays], kind)]
    shapes = np.array([one.shape for one in arrays], dtype=np.int64).reshape(-1)
    listed = pa.FixedSizeListArray.from_arrays(pa.array(shapes), len(field.shape))
    return [pa.array([one.tobytes() for one in arrays], pa.binary()), listed]


# A column of a group, ready to be read by row: the rows' arrays, or a function of the row.
_Rows = np.ndarray | Callable[[int], Value]


def _rows_of_binary(pa: Any, column: Any) -> Callable[[int], bytes]:
    wide = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
    _, places, data = column.buffers()
    kind = np.int64 if wide else np.int32
    offsets = np.frombuffer(places, kind)[column.offset : column.offset + len(column) + 1]
    view = memoryview(data) if data is not None else memoryview(b"")

    def row_of(row: int) -> bytes:
        return bytes(view[offsets[row] : offsets[row + 1]])

    return row_of


def _numbers(column: Any) -> np.ndarray:
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _rows_of(pa: Any, column: Any, field: Field, shapes: Any) -> _Rows:
    """The rows of one column of a group; `column` is one array without gaps."""
    kinds = pa.types
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kinds.is_struct(column.type):
        column = column.field("bytes")
    dtype = np.dtype(field.dtype) if field.kind == "array" else None
    if kinds.is_fixed_size_binary(column.type):
        size = column.type.byte_width
        data = memoryview(column.buffers()[1])[column.offset * size :][: len(column) * size]
        if dtype is None:
            return lambda row: bytes(data[row * size : row * size + size])
        return np.frombuffer(data, dtype).reshape(len(column), *_sides(field))
    if kinds.is_fixed_size_list(column.type):
        return _numbers(column.flatten()).reshape(len(column), *_sides(field))
    if kinds.is_list(column.type) or kinds.is_large_list(column.type):
        offsets, flat = _numbers(column.offsets), _numbers(column.values)
        return lambda row: flat[offsets[row] : offsets[row + 1]].astype(dtype, copy=True)
    if dtype is not None and not _is_binary(pa, column.type):
        return _numbers(column).astype(dtype, copy=False)
    row_of = _rows_of_binary(pa, column)
    if dtype is None:
        return row_of
    if field.is_fixed:
        return lambda row: np.frombuffer(row_of(row), dtype).reshape(_sides(field))
    sides = _numbers(shapes.flatten()).reshape(len(column), -1)
    return lambda row: np.frombuffer(row_of(row), dtype).reshape(sides[row])


def _sides(field: Field) -> tuple[int, ...]:
    return tuple(side or 0 for side in field.shape)


def _is_binary(pa: Any, kind: Any) -> bool:
    kinds = pa.types
    return bool(
        kinds.is_binary(kind)
        or kinds.is_string(kind)
        or kinds.is_large_binary(kind)
        or kinds.is_large_string(kind)
    )


class _Groups(Protocol):
    """A file of groups of rows."""

    schema: Any
    lengths: list[int]

    def load(self, number: int, names: list[str]) -> tuple[Any, int]:
        """The columns of a group as one batch, and what they cost in memory."""
        ...

    def ask(self, number: int) -> None:
        """Have the system read a group that is wanted soon."""
        ...


class _ParquetGroups:
    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self._fd = os.open(path, os.O_RDONLY)
        self._file = pq.ParquetFile(path, memory_map=False, pre_buffer=False)
        self.schema = self._file.schema_arrow
        meta = self._file.metadata
        self.lengths = [meta.row_group(number).num_rows for number in range(meta.num_row_groups)]

    def load(self, number: int, names: list[str]) -> tuple[Any, int]:
        table = self._file.read_row_group(number, columns=names, use_threads=False)
        return table.combine_chunks(), table.nbytes

    def ask(self, number: int) -> None:
        group = self._file.metadata.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
            starts = [column.data_page_offset]
            if column.has_dictionary_page and column.dictionary_page_offset is not None:
                starts.append(column.dictionary_page_offset)
            length = column.total_compressed_size
            os.posix_fadvise(self._fd, min(starts), length, os.POSIX_FADV_WILLNEED)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


class _ArrowGroups:
    def __init__(self, path: Path) -> None:
        self._pa = pa = _pyarrow("arrow")
        import pyarrow.ipc as ipc  # type: ignore[import-not-found, import-untyped, unused-ignore]

        mapped = pa.memory_map(str(path))
        try:
            self._reader = ipc.open_file(mapped)
            self.schema = self._reader.schema
            count = self._reader.num_record_batches
            self._batches = None
            self.lengths = [self._reader.get_batch(number).num_rows for number in range(count)]
        except pa.ArrowInvalid:
            # Without an index at the end: what Hugging Face datasets keeps in its cache.
            mapped.seek(0)
            stream = ipc.open_stream(mapped)
            self.schema = stream.schema
            self._batches = list(stream)
            self.lengths = [batch.num_rows for batch in self._batches]

    def load(self, number: int, names: list[str]) -> tuple[Any, int]:
        if self._batches:
            return self._batches[number].select(names), 0
        # A batch that is not compressed stays in the mapped file; nbytes would count it all the same.
        before = self._pa.total_allocated_bytes()
        batch = self._reader.get_batch(number)
        return batch.select(names), max(0, self._pa.total_allocated_bytes() - before)

    def ask(self, number: int) -> None:
        """Nothing: a mapped file is read ahead by the system."""


class GroupShard(Shard):
    """Rows of a file that is read a group at a time."""

    reads_fields_apart = True

    def __init__(
        self, path: Path, schema: Schema, table: Table, groups: Callable[[Path], _Groups], name: str
    ) -> None:
        self.path = path
        self.schema = schema
        self.table = table
        self._pa = _pyarrow(name)
        self._make = groups
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._groups: _Groups | None = groups(path)
        self._ends = np.cumsum(self._groups.lengths)
        self._cache: OrderedDict[int, tuple[dict[str, _Rows], int]] = OrderedDict()
        self._cached_bytes = 0
        self._names = [
            column for column in self._groups.schema.names if column.removesuffix(_SHAPE) in schema
        ]

    def _group(self, number: int, row: int) -> dict[str, _Rows]:
        if self._pid != os.getpid():
            # Whoever held it is not in this process.
            self._lock, self._groups, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            known = self._cache.get(number)
            if known is not None:
                self._cache.move_to_end(number)
                return known[0]
            try:
                if self._groups is None:
                    self._groups = self._make(self.path)
                batch, size = self._groups.load(number, self._names)
                rows = self._columns(batch)
            except (self._pa.ArrowException, OSError, ValueError) as error:
                raise self.damaged(row, f"cannot be read: {_first_line(error)}") from error
            self._cache[number] = rows, size
            self._cached_bytes += size
            while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1][1]
            return rows

    def _columns(self, batch: Any) -> dict[str, _Rows]:
        whole: dict[str, Any] = {}
        for name in batch.schema.names:
            column = batch.column(name)
            if isinstance(column, self._pa.ChunkedArray):
                # combine_chunks leaves several chunks only where offsets of 32 bits are too small.
                column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            # Lengths and offsets of a mapped file are whatever stands in it.
            column.validate()
            if column.null_count:
                raise ValueError(f"the column {name!r} has gaps (null); fill or drop them first")
            whole[name] = column
        return {
            name: _rows_of(self._pa, whole[name], field, whole.get(name + _SHAPE))
            for name, field in self.schema.items()
        }

    def _locate(self, row: int) -> tuple[dict[str, _Rows], int]:
        number = int(np.searchsorted(self._ends, row, side="right"))
        if number >= len(self._ends):
            raise IndexError(row)
        return self._group(number, row), row - (int(self._ends[number - 1]) if number else 0)

    def read(self, row: int) -> Sample:
        columns, place = self._locate(row)
        sample: Sample = {}
        for name in self.schema:
            rows = columns[name]
            try:
                # A copy: the group is not to stay because of one row of it.
                value = np.array(rows[place]) if isinstance(rows, np.ndarray) else rows(place)
            except ValueError as error:
                raise self.damaged(row, f"cannot be read: its field {name!r}: {error}") from error
            sample[name] = value
        return sample

    def read_into(self, name: str, rows: np.ndarray, out: np.ndarray) -> None:
        for place, row in enumerate(rows.tolist()):
            columns, inside = self._locate(row)
            values = columns[name]
            out[place, ...] = values[inside] if isinstance(values, np.ndarray) else values(inside)

    def ahead(self, first: int, last: int) -> None:
        from_group, to_group = np.searchsorted(self._ends, (first, last - 1), side="right").tolist()
        groups = self._groups if self._pid == os.getpid() else None
        for number in range(from_group, to_group + 1):
            if groups is not None and number not in self._cache:
                groups.ask(number)

    def place(self, row: int) -> str:
        number = int(np.searchsorted(self._ends, row, side="right"))
        return f"row {row}, in group {number} of rows"

    def close(self) -> None:
        self._cache.clear()
        self._cached_bytes = 0
        self._groups = None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _foreign_field(pa: Any, name: str, kind: Any, path: Path) -> Field:
    """What a column is, where nobody said; lists are taken to vary."""
    kinds = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if kinds.is_dictionary(kind):
        kind = kind.value_type
    if kinds.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if _is_binary(pa, kind) or kinds.is_fixed_size_binary(kind):
        return Field("bytes")
    shape: tuple[int | None, ...] = ()
    if kinds.is_fixed_size_list(kind):
        shape, kind = (kind.list_size,), kind.value_type
    elif kinds.is_list(kind) or kinds.is_large_list(kind):
        shape, kind = (None,), kind.value_type
    if kinds.is_integer(kind) or kinds.is_floating(kind) or kinds.is_boolean(kind):
        return Field("array", np.dtype(kind.to_pandas_dtype()).name, shape)
    raise UsageError(
        f"{path}: the column {name!r} is of {kind}; numbers, lists of numbers, text, binary and images "
        "are read: drop the column, or make it one of these"
    )


def _found_schema(pa: Any, arrow_schema: Any, path: Path) -> Schema:
    marked = (arrow_schema.metadata or {}).get(_MARK)
    if marked is not None:
        return {name: Field.from_dict(field) for name, field in json.loads(marked).items()}
    schema = {
        column.name: _foreign_field(pa, column.name, column.type, path)
        for column in arrow_schema
        if column.name != KEYS
    }
    if not schema:
        raise UsageError(f"{path} has no columns")
    return schema


def _keys(groups: _Groups, path: Path) -> list[str] | RowKeys:
    num_rows = sum(groups.lengths)
    if KEYS not in groups.schema.names:
        return RowKeys(path, num_rows)
    keys: list[str] = []
    for number in range(len(groups.lengths)):
        keys.extend(groups.load(number, [KEYS])[0].column(KEYS).to_pylist())
    return keys


def _open_groups(
    path: Path,
    schema: Schema | None,
    table: Table | None,
    make: Callable[[Path], _Groups],
    name: str,
) -> Shard:
    pa = _pyarrow(name)
    try:
        groups = make(path)
        found = _found_schema(pa, groups.schema, path)
        if not sum(groups.lengths):
            raise UsageError(f"{path} holds no rows")
        if schema is None or table is None:
            schema, table = found, Table(_keys(groups, path))
        if sum(groups.lengths) != len(table) or not set(schema) <= set(found):
            raise UsageError(
                f"{path} holds {sum(groups.lengths)} rows of {', '.join(found)}, where its table lists "
                f"{len(table)} of {', '.join(schema)}; one of the two is from another time: write the "
                "shard again"
            )
        return GroupShard(path, schema, table, make, name)
    except OSError as error:
        raise UsageError(f"cannot open {path}: {_first_line(error)}") from error
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise UsageError(
            f"{path} is no whole {name} file ({_first_line(error)}); write or fetch it again"
        ) from error


def _parquet_sink(file: Any, schema: Any) -> _Sink:
    import pyarrow.parquet as pq

    # Samples are compressed already or are numbers that hardly get smaller.
    sink: _Sink = pq.ParquetWriter(
        file, schema, compression="none", use_dictionary=False, write_statistics=False
    )
    return sink


def _arrow_sink(file: Any, schema: Any) -> _Sink:
    import pyarrow.ipc as ipc

    sink: _Sink = ipc.new_file(file, schema)
    return sink


def _refuses(schema: Schema) -> str:
    for name, field in schema.items():
        if name == KEYS or name.endswith(_SHAPE):
            return f"the name {name!r} is one that the format itself uses"
        if field.kind == "array" and np.dtype(field.dtype).kind not in "biufcmM":
            return f"{name!r} is of {field.dtype}, which is no number"
        if field.is_fixed and field.num_bytes >= 1 << 31:
            return f"a sample's {name!r} has 2 GiB or more, which no column holds"
    return ""


PARQUET = Format(
    name="parquet",
    suffix=".parquet",
    about="columns in groups of rows, for pandas and Hugging Face datasets",
    write=lambda path, schema: ArrowWriter(path, schema, _parquet_sink, "parquet"),
    open=lambda path, schema, table: _open_groups(path, schema, table, _ParquetGroups, "parquet"),
    finds=find_by_suffix(".parquet", ".pq"),
    refuses=_refuses,
)

ARROW = Format(
    name="arrow",
    suffix=".arrow",
    about="Arrow files, mapped; also Feather",
    write=lambda path, schema: ArrowWriter(path, schema, _arrow_sink, "arrow"),
    open=lambda path, schema, table: _open_groups(path, schema, table, _ArrowGroups, "arrow"),
    finds=find_by_suffix(".arrow", ".feather"),
    refuses=_refuses,
)
