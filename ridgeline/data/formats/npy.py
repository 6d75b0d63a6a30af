"""A folder of .npy files a shard, which numpy opens and maps as they are.

Fields of fixed shape are one file each, the rest a flat file with offsets (see `columns.py`). Read by
offset, so that nothing is mapped and a file that was cut short is an error instead of a signal. A single
.npy file, an .npz archive and a folder of .npy files of one length are read as others wrote them.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ridgeline.data.formats.columns import (
    Column,
    ColumnShard,
    ColumnSplitter,
    Extent,
    MemoryColumn,
    RowKeys,
    check_columns,
    columns_of_extents,
    field_of_rows,
    refuse_names,
)
from ridgeline.data.formats.contract import Format, Sample, Schema, Shard, Table
from ridgeline.data.formats.members import read_header
from ridgeline.data.formats.zip import list_zip, stored_offset
from ridgeline.errors import UsageError

_SUFFIX = ".arrays"
_MOST_HEADER = 64 * 1024
# Headers are written again at the end with the number of rows; room for any.
_ROWS_DIGITS = 20
# A folder of more .npy files than this has one for each sample.
_MOST_FIELDS = 32


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """A .npy header whose length does not depend on the number of rows."""
    sides = "".join(f"{side}, " for side in shape)
    descr = np.lib.format.dtype_to_descr(dtype)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': ({sides}), }}"
    room = 10 + len(text) + _ROWS_DIGITS - len(str(shape[0])) + 1
    length = -(-room // 64) * 64
    padded = text.ljust(length - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + (length - 10).to_bytes(2, "little") + padded.encode("latin1")


class ArraysWriter:
    def __init__(self, path: Path, schema: Schema) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for old in path.glob("*.npy"):
            old.unlink()
        self._path = path
        self._splitter = ColumnSplitter(schema, self._put)
        self._files: dict[str, BinaryIO] = {}
        for part, (dtype, shape) in self._splitter.parts.items():
            file = open(path / f"{part}.npy", "wb", buffering=1 << 18)  # noqa: SIM115
            self._files[part] = file
            file.write(_header(dtype, (0, *shape)))

    def _put(self, part: str, data: bytes | memoryview) -> object:
        return self._files[part].write(data)

    def add(self, key: str, sample: Sample) -> None:
        self._splitter.add(key, sample)

    def finish(self) -> None:
        for part, file in self._files.items():
            file.seek(0)
            file.write(_header(self._splitter.parts[part][0], self._splitter.shape(part)))
            file.flush()
            os.fsync(file.fileno())
        for part, values in self._splitter.small().items():
            with open(self._path / f"{part}.npy", "wb") as out:
                np.lib.format.write_array(out, values, allow_pickle=False)
                out.flush()
                os.fsync(out.fileno())
        fd = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _extent(fd: int, start: int, path: str) -> tuple[Extent, bool]:
    """The array of a .npy file that begins at `start`, and whether its columns come first."""
    try:
        dtype, shape, fortran, length = read_header(os.pread(fd, _MOST_HEADER, start))
    except ValueError as error:
        raise UsageError(
            f"{path} is no whole .npy file ({error}); write or fetch it again"
        ) from error
    return Extent(fd, start + length, dtype, shape), fortran and len(shape) > 1


def _named_files(path: Path) -> dict[str, Path]:
    if path.is_dir():
        return {p.stem: p for p in sorted(path.glob("*.npy")) if not p.name.startswith(".")}
    return {"npy": path}


def _open_files(path: Path, fds: list[int]) -> tuple[dict[str, Extent], dict[str, np.ndarray]]:
    extents: dict[str, Extent] = {}
    mapped: dict[str, np.ndarray] = {}
    for name, file in _named_files(path).items():
        fds.append(os.open(file, os.O_RDONLY))
        extent, fortran = _extent(fds[-1], 0, str(file))
        if fortran:
            try:
                mapped[name] = np.load(file, mmap_mode="r", allow_pickle=False)
            except ValueError as error:
                raise UsageError(f"{file} is cut short ({error}); fetch it again") from error
        else:
            extents[name] = extent
    return extents, mapped


def _open_npz(path: Path, fds: list[int]) -> tuple[dict[str, Extent], dict[str, np.ndarray]]:
    extents: dict[str, Extent] = {}
    loaded: dict[str, np.ndarray] = {}
    infos = list_zip(path)
    fds.append(os.open(path, os.O_RDONLY))
    for info in infos:
        if not info.filename.endswith(".npy"):
            raise UsageError(f"{path} holds {info.filename!r}, which is no array")
        name = info.filename.removesuffix(".npy").replace("/", ".")
        if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 0x1:
            start = stored_offset(fds[0], info, path)
            extent, fortran = _extent(fds[0], start, f"{path}: {info.filename}")
            if not extent.shape:
                continue
            if not fortran:
                extents[name] = extent
                continue
        try:
            with np.load(path, allow_pickle=False) as archive:
                values = archive[info.filename.removesuffix(".npy")]
        except (ValueError, zipfile.BadZipFile, zlib.error, RuntimeError, EOFError) as error:
            raise UsageError(f"{path}: {info.filename} cannot be read: {error}") from error
        if values.ndim:
            loaded[name] = values
    return extents, loaded


def _open(path: Path, schema: Schema | None, table: Table | None) -> Shard:
    fds: list[int] = []
    try:
        return _open_arrays(path, schema, table, fds)
    except OSError as error:
        _close(fds)
        raise UsageError(f"cannot open {path}: {error.strerror}") from error
    except UsageError:
        _close(fds)
        raise


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _open_arrays(path: Path, schema: Schema | None, table: Table | None, fds: list[int]) -> Shard:
    read = _open_npz if path.is_file() and path.name.endswith(".npz") else _open_files
    extents, arrays = read(path, fds)
    found: Schema = {}
    columns: dict[str, Column] = {}
    lengths: set[int] = set()
    keys = None
    if extents or not arrays:
        found, columns, keys, num_rows = columns_of_extents(path, extents)
        lengths.add(num_rows)
    for name, values in arrays.items():
        found[name] = field_of_rows(values.dtype, values.shape, f"{path}: {name}")
        columns[name] = MemoryColumn(values)
        lengths.add(values.shape[0])
    if len(lengths) != 1:
        raise UsageError(f"{path}: arrays of samples have one length; these have {sorted(lengths)}")
    num_rows = lengths.pop()
    if schema is None or table is None:
        schema, table = found, Table(keys or RowKeys(path, num_rows))
    check_columns(path, schema, found, num_rows, table)
    return ColumnShard(path, schema, table, columns, fds)


def _finds(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.name.endswith((".npy", ".npz")) else []
    if not path.is_dir():
        return []
    if path.name.endswith(_SUFFIX) or _is_columns(path):
        return [path]
    return sorted(p for p in path.iterdir() if p.name.endswith(_SUFFIX) and p.is_dir())


def _is_columns(path: Path) -> bool:
    """Whether a folder of .npy files holds the fields of samples, and not a sample in each.

    Fields have one length and differ in type or shape; samples that lie in files of their own are
    alike.
    """
    entries = [p for p in path.iterdir() if not p.name.startswith(".")]
    if not 1 < len(entries) <= _MOST_FIELDS or any(p.suffix != ".npy" for p in entries):
        return False
    heads = set()
    for entry in entries:
        try:
            with open(entry, "rb") as file:
                dtype, shape, _, _ = read_header(file.read(_MOST_HEADER))
        except (OSError, ValueError):
            return False
        if not shape:
            return False
        heads.add((dtype, shape))
    return len({shape[0] for _, shape in heads}) == 1 and len(heads) > 1


NPY = Format(
    name="npy",
    suffix=_SUFFIX,
    about="a folder of .npy files a shard, one a field",
    write=ArraysWriter,
    open=_open,
    finds=_finds,
    refuses=refuse_names,
)
