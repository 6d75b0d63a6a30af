"""HDF5, one file a shard, with the rows of every field at known places.

Written with contiguous data sets (see `columns.py` for their names): then a row's bytes lie at an
offset that HDF5 tells, and reading takes no library, no lock and no copy. Files that others wrote are
read the same way where their data sets are contiguous, and through h5py where they are in chunks,
compressed, or text.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from ridgeline.data.formats.columns import (
    Column,
    ColumnShard,
    ColumnSplitter,
    Extent,
    RowKeys,
    check_columns,
    columns_of_extents,
    each_into,
    field_of_rows,
    refuse_names,
)
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

_MARK = "ridgeline"
_CHUNK_CACHE_BYTES = 32 * 1024 * 1024
_COPY_BYTES = 8 * 1024 * 1024
# The library is not safe with threads; h5py has a lock of its own, ours covers several calls.
_lock = threading.RLock()


def _h5py() -> Any:
    try:
        import h5py  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise needs("data", "h5py", "hdf5") from error
    return h5py


class Hdf5Writer:
    """The number of samples is known at the end only, and a contiguous data set has a length: fields
    wait in unnamed files beside the shard and are copied to their places by `finish`."""

    def __init__(self, path: Path, schema: Schema) -> None:
        _h5py()
        self._path = path
        self._splitter = ColumnSplitter(schema, self._put)
        self._spools: dict[str, IO[bytes]] = {}
        for part in self._splitter.parts:
            self._spools[part] = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115

    def _put(self, part: str, data: bytes | memoryview) -> object:
        return self._spools[part].write(data)

    def add(self, key: str, sample: Sample) -> None:
        self._splitter.add(key, sample)

    def finish(self) -> None:
        h5py = _h5py()
        places: dict[str, int] = {}
        with _lock, _create_file(h5py, self._path) as file:
            file.attrs[_MARK] = 1
            for part, values in self._splitter.small().items():
                _create(h5py, file, part, values.dtype, values.shape)[...] = values
            for part, (dtype, _) in self._splitter.parts.items():
                dataset = _create(h5py, file, part, dtype, self._splitter.shape(part))
                if dataset.size:
                    places[part] = dataset.id.get_offset()
        with open(self._path, "r+b") as out:
            for part, offset in places.items():
                self._spools[part].seek(0)
                out.seek(offset)
                shutil.copyfileobj(self._spools[part], out, _COPY_BYTES)
            out.flush()
            os.fsync(out.fileno())

    def close(self) -> None:
        for spool in self._spools.values():
            spool.close()


def _create_file(h5py: Any, path: Path) -> Any:
    """The same samples are to be the same bytes, and the library writes down when it made a thing."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_libver_bounds(h5py.h5f.LIBVER_V110, h5py.h5f.LIBVER_LATEST)
    access.set_file_locking(False, False)
    settings = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    settings.set_obj_track_times(False)
    opened = h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_TRUNC, fcpl=settings, fapl=access)
    return h5py.File(opened)


def _create(h5py: Any, file: Any, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> Any:
    """A contiguous data set whose place is given out now and never filled."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(h5py.h5d.CONTIGUOUS)
    settings.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    settings.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    settings.set_obj_track_times(False)
    kind = h5py.h5t.py_create(dtype, logical=True)
    space = h5py.h5s.create_simple(shape)
    return h5py.Dataset(h5py.h5d.create(file.id, name.encode(), kind, space, dcpl=settings))


class _Handle:
    """A file open through h5py, once in every process that reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pid = -1
        self._file: Any = None
        self._datasets: dict[str, Any] = {}

    def dataset(self, name: str) -> Any:
        if self._pid != os.getpid():
            self._file = _open_file(self._path)
            self._datasets = {}
            self._pid = os.getpid()
        if name not in self._datasets:
            self._datasets[name] = self._file[name]
        return self._datasets[name]


class LibraryColumn:
    """Rows that only HDF5 itself can read."""

    def __init__(self, handle: _Handle, name: str, field: Field) -> None:
        self._handle = handle
        self._name = name
        self._field = field

    def get(self, shard: Shard, row: int) -> Value:
        with self._reading(shard, row):
            value = self._handle.dataset(self._name)[row]
        if self._field.kind == "bytes":
            return value.encode() if isinstance(value, str) else bytes(value)
        return np.asarray(value, dtype=np.dtype(self._field.dtype))

    def into(self, shard: Shard, rows: np.ndarray, out: np.ndarray) -> None:
        if not self._field.is_fixed:
            return each_into(self, shard, rows, out)
        # h5py wants rows in rising order and each once.
        unique, inverse = np.unique(rows, return_inverse=True)
        first, last = int(unique[0]), int(unique[-1])
        with self._reading(shard, first):
            dataset = self._handle.dataset(self._name)
            if last - first + 1 == len(unique):
                values = dataset[first : last + 1]
            else:
                values = dataset[unique]
        out[...] = values[inverse]
        return None

    @contextlib.contextmanager
    def _reading(self, shard: Shard, row: int) -> Iterator[None]:
        try:
            with _lock:
                yield
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise shard.damaged(row, f"cannot be read: {self._name!r}: {error}") from error


def _open_file(path: Path) -> Any:
    h5py = _h5py()
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    with _lock:
        try:
            # Locks are not to be had on many shared file systems, and nobody writes to a shard.
            return h5py.File(path, "r", locking=False, rdcc_nbytes=_CHUNK_CACHE_BYTES)
        except (OSError, RuntimeError) as error:
            raise UsageError(
                f"{path} is no whole HDF5 file ({error}); write or fetch it again"
            ) from error


def _all_datasets(h5py: Any, file: Any) -> dict[str, Any]:
    """Every data set in the file itself; links to other files are not followed."""
    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item

    file.visititems(visit)
    return found


def _extent(dataset: Any, fd: int) -> Extent | None:
    """Where a data set lies, if it lies in one piece as numpy would have it."""
    is_plain = dataset.dtype.kind in "biuf" and dataset.chunks is None
    if (
        not is_plain
        or dataset.is_virtual
        or dataset.external
        or dataset.id.get_create_plist().get_nfilters()
    ):
        return None
    offset = dataset.id.get_offset()
    if offset is None and dataset.size:
        return None
    if dataset.id.get_type().get_size() != dataset.dtype.itemsize:
        return None
    return Extent(fd, offset or 0, dataset.dtype, dataset.shape)


def _library_field(h5py: Any, dataset: Any, place: str) -> Field | None:
    if dataset.dtype.kind == "S" or h5py.check_string_dtype(dataset.dtype) is not None:
        return Field("bytes") if dataset.ndim == 1 else None
    inner = h5py.check_vlen_dtype(dataset.dtype)
    if inner is not None:
        return Field("array", np.dtype(inner).name, (None,)) if dataset.ndim == 1 else None
    if dataset.dtype.kind not in "biufc":
        return None
    return field_of_rows(dataset.dtype, dataset.shape, place)


def _open_foreign(
    h5py: Any, path: Path, datasets: dict[str, Any], fd: int
) -> tuple[Schema, dict[str, Column], int]:
    rows = {name: item for name, item in datasets.items() if item.shape and item.shape[0]}
    counts = Counter(item.shape[0] for item in rows.values()).most_common(2)
    listed = ", ".join(f"{name} {item.shape}" for name, item in datasets.items()) or "none"
    if not counts:
        raise UsageError(f"{path} holds no rows; its data sets: {listed}")
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        raise UsageError(
            f"{path}: the fields of samples are the data sets that share their first dimension, and "
            f"here none is shared by most: {listed}"
        )
    num_rows = counts[0][0]
    schema: Schema = {}
    columns: dict[str, Column] = {}
    handle = _Handle(path)
    for name, item in rows.items():
        if item.shape[0] != num_rows:
            continue
        label = name.replace("/", ".")
        extent = _extent(item, fd)
        if extent is not None:
            found, made, _, _ = columns_of_extents(path, {label: extent})
            schema.update(found)
            columns.update(made)
            continue
        field = _library_field(h5py, item, f"{path}: {name}")
        if field is None:
            raise UsageError(
                f"{path}: the data set {name!r} of {item.dtype} {item.shape} is neither numbers nor "
                "a list of texts; such are not read"
            )
        schema[label] = field
        columns[label] = LibraryColumn(handle, name, field)
    return schema, columns, num_rows


def _open(path: Path, schema: Schema | None, table: Table | None) -> Shard:
    h5py = _h5py()
    with _lock, _open_file(path) as file:
        fd = os.open(path, os.O_RDONLY)
        try:
            datasets = _all_datasets(h5py, file)
            keys = None
            if _MARK in file.attrs:
                extents = {name: _extent(item, fd) for name, item in datasets.items()}
                known = {name: extent for name, extent in extents.items() if extent is not None}
                found, columns, keys, num_rows = columns_of_extents(path, known)
            else:
                found, columns, num_rows = _open_foreign(h5py, path, datasets, fd)
            if schema is None or table is None:
                schema, table = found, Table(keys or RowKeys(path, num_rows))
            check_columns(path, schema, found, num_rows, table)
        except (OSError, RuntimeError, KeyError) as error:
            os.close(fd)
            raise UsageError(f"{path} is damaged ({error}); write or fetch it again") from error
        except UsageError:
            os.close(fd)
            raise
    return ColumnShard(path, schema, table, columns, [fd])


def _refuses(schema: Schema) -> str:
    for name, field in schema.items():
        if field.kind == "array" and np.dtype(field.dtype).kind not in "biuf":
            return f"{name!r} is of {field.dtype}; HDF5 shards hold integers, floats and booleans"
    return refuse_names(schema)


HDF5 = Format(
    name="hdf5",
    suffix=".h5",
    about="one HDF5 file a shard, a data set a field",
    write=Hdf5Writer,
    open=_open,
    finds=find_by_suffix(".h5", ".hdf5", ".he5"),
    refuses=_refuses,
)
