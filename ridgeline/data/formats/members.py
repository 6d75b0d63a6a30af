"""Samples as named files: what tar, zip and a folder have in common.

A sample of key K with a bytes field `jpg` and an array field `mask` is the two files `K.jpg` and
`K.mask.npy`, side by side: the layout of WebDataset, which its readers open as it is. Dots in a key's
last part are written as %2E there, because WebDataset cuts names at the first dot.
"""

from __future__ import annotations

import ast
import io
import math
import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from ridgeline.data.formats.contract import (
    Field,
    Sample,
    Schema,
    Shard,
    Table,
    Value,
    check_key,
    type_name,
)
from ridgeline.errors import UsageError

_ARRAY = ".npy"
_NPY_MAGIC = b"\x93NUMPY"
# A file without an ending is a sample with this one field.
NO_ENDING = "_"


def member_name(key: str, name: str, field: Field, guard_dots: bool = True) -> str:
    """The file that a field is kept in."""
    if guard_dots:
        folder, slash, last = key.rpartition("/")
        key = f"{folder}{slash}{last.replace('%', '%25').replace('.', '%2E')}"
    if name == NO_ENDING:
        return key
    if field.kind == "bytes" or name == "npy":
        return f"{key}.{name}"
    return f"{key}.{name}{_ARRAY}"


def split_at_first_dot(member: str) -> tuple[str, str, str]:
    """Key, field and kind of a member, as WebDataset reads names."""
    folder, slash, last = member.rpartition("/")
    stem, _, ending = last.partition(".")
    return f"{folder}{slash}{unquote(stem)}", *_field_of(ending)


def split_at_last_dot(member: str) -> tuple[str, str, str]:
    """Likewise for files that people named: `photo.v2.jpg` is the sample `photo.v2`."""
    folder, slash, last = member.rpartition("/")
    stem, dot, ending = last.rpartition(".")
    if not dot:
        return member, NO_ENDING, "bytes"
    if ending == "npy" and "." in stem:
        stem, _, name = stem.rpartition(".")
        return f"{folder}{slash}{stem}", name, "array"
    return f"{folder}{slash}{stem}", *_field_of(ending)


def _field_of(ending: str) -> tuple[str, str]:
    if ending == "npy":
        return "npy", "array"
    if ending.endswith(_ARRAY):
        return ending.removesuffix(_ARRAY), "array"
    return ending or NO_ENDING, "bytes"


def encode(value: Value) -> bytes:
    """A field as the bytes of its file."""
    if not isinstance(value, np.ndarray):
        return bytes(value)
    if value.dtype.hasobject:
        raise UsageError(f"an array of {value.dtype} holds Python objects, which no file can keep")
    out = io.BytesIO()
    # Not ascontiguousarray, which makes a number into an array of one.
    np.lib.format.write_array(out, np.asarray(value, order="C"), allow_pickle=False)
    return out.getvalue()


_headers: dict[bytes, tuple[np.dtype, tuple[int, ...], bool]] = {}


def decode(data: bytes | memoryview, field: Field) -> Value:
    """A field from the bytes of its file; raises ValueError where they are not what they should be."""
    if field.kind == "bytes":
        return bytes(data)
    dtype, shape, fortran, start = read_header(data)
    count = math.prod(shape)
    if len(data) - start != count * dtype.itemsize:
        raise ValueError(
            f"holds {len(data) - start} bytes of array data, not {count * dtype.itemsize}"
        )
    flat = np.frombuffer(data, dtype=dtype, count=count, offset=start)
    array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def read_header(data: bytes | memoryview) -> tuple[np.dtype, tuple[int, ...], bool, int]:
    """Type, shape, memory order and length of the header of a .npy file.

    A data set's headers are nearly all the same, and numpy's own way to read one costs more than the
    array behind it: what was read once is kept by its text.
    """
    head = bytes(data[:12])
    if head[:6] != _NPY_MAGIC:
        raise ValueError("is no .npy array")
    wide = head[6] >= 2
    start = 12 if wide else 10
    length = int.from_bytes(head[8:start], "little")
    text = bytes(data[start : start + length])
    if len(text) != length:
        raise ValueError("ends within the header of its array")
    known = _headers.get(text)
    if known is None:
        known = _parse_header(text.decode("latin1" if head[6] < 3 else "utf-8"))
        if len(_headers) < 1024:
            _headers[text] = known
    return *known, start + length


def _parse_header(text: str) -> tuple[np.dtype, tuple[int, ...], bool]:
    try:
        values = ast.literal_eval(text)
        dtype = np.dtype(values["descr"])
        shape = tuple(values["shape"])
        fortran = bool(values["fortran_order"])
    except (SyntaxError, ValueError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise ValueError("has a damaged header of its array") from error
    if not all(isinstance(side, int) and side >= 0 for side in shape):
        raise ValueError(f"has an array of shape {shape}")
    if dtype.hasobject:
        raise ValueError("is an array of Python objects, which are not read")
    return dtype, shape, fortran


def schema_from_members(
    first: dict[str, tuple[str, bytes]], sizes: np.ndarray, names: list[str], place: str
) -> Schema:
    """The schema of files that others wrote: types of the first sample; an array's shape is taken to be
    the same everywhere where all files of that field have one size."""
    schema: Schema = {}
    for column, name in enumerate(names):
        kind, data = first[name]
        if kind == "bytes":
            schema[name] = Field("bytes")
            continue
        try:
            dtype, shape, _, _ = read_header(data)
        except ValueError as error:
            raise UsageError(f"{place}: the first sample's field {name!r} {error}") from error
        try:
            known = type_name(dtype, name)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from error
        same = len(np.unique(sizes[:, column])) == 1
        schema[name] = Field("array", known, tuple(shape) if same else (None,) * len(shape))
    return schema


def group_members(
    members: Iterable[tuple[str, int, int]], split: object, place: str
) -> tuple[list[str], list[str], dict[str, str], np.ndarray, np.ndarray]:
    """Files (name, offset, size) to samples: keys, field names, their kinds, offsets and sizes.

    Samples keep the order in which their first file came.
    """
    rows: dict[str, dict[str, tuple[int, int]]] = {}
    kinds: dict[str, str] = {}
    for member, offset, size in members:
        key, name, kind = split(member)  # type: ignore[operator]
        check_key(key, place)
        kinds.setdefault(name, kind)
        rows.setdefault(key, {})[name] = (offset, size)
    if not rows:
        raise UsageError(f"{place} holds no samples")
    names = sorted(kinds)
    for key, row in rows.items():
        if len(row) != len(names):
            missing = sorted(set(names) - set(row))
            raise UsageError(
                f"{place}: sample {key!r} has no {', '.join(missing)}, which other samples have; every "
                "sample of a data set has the same fields"
            )
    pairs = np.array([[row[name] for name in names] for row in rows.values()], dtype=np.uint64)
    return list(rows), names, kinds, pairs[..., 0].copy(), pairs[..., 1].copy()


class MemberShard(Shard):
    """Samples whose fields lie somewhere in one file as they are, each the bytes of a small file."""

    reads_fields_apart = True

    def __init__(self, path: Path, schema: Schema, table: Table) -> None:
        assert table.offsets is not None
        assert table.sizes is not None
        self.path = path
        self.schema = schema
        self.table = table
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"cannot open {path}: {error.strerror}") from error
        self._fields = list(schema.items())
        # Headers of arrays that can be read as they are, by field.
        self._plain: dict[str, set[bytes]] = {name: set() for name in schema}
        ends = table.offsets + table.sizes
        self._starts = table.offsets.min(axis=1).astype(np.int64)
        self._lengths = ends.max(axis=1).astype(np.int64) - self._starts
        # Fields that lie together come with one read.
        self._together = self._lengths - table.sizes.sum(axis=1).astype(np.int64) < 65536

    def read(self, row: int) -> Sample:
        assert self.table.offsets is not None
        assert self.table.sizes is not None
        offsets, sizes = self.table.offsets[row].tolist(), self.table.sizes[row].tolist()
        sample: Sample = {}
        start = int(self._starts[row])
        together = bool(self._together[row])
        whole = self._pread(row, int(self._lengths[row]), start) if together else b""
        for (name, field), offset, size in zip(self._fields, offsets, sizes, strict=True):
            if together:
                data: bytes | memoryview = memoryview(whole)[offset - start : offset - start + size]
            else:
                data = self._pread(row, size, offset)
            try:
                sample[name] = decode(data, field)
            except ValueError as error:
                raise self.damaged(row, f"cannot be read: its field {name!r} {error}") from error
        return sample

    def _pread(self, row: int, size: int, offset: int) -> bytes:
        try:
            data = os.pread(self._fd, size, offset)
            while len(data) < size and (
                more := os.pread(self._fd, size - len(data), offset + len(data))
            ):
                data += more
        except OSError as error:
            raise self.damaged(row, f"cannot be read: {error.strerror}") from error
        if len(data) != size:
            raise self.damaged(
                row, f"ends after {len(data)} of {size} bytes: the file is cut short"
            )
        return data

    def read_into(self, name: str, rows: np.ndarray, out: np.ndarray) -> None:
        """Straight from the file into the batch: no bytes in between."""
        assert self.table.offsets is not None
        assert self.table.sizes is not None
        column = list(self.schema).index(name)
        field = self.schema[name]
        num_bytes = field.num_bytes
        plain = self._plain[name]
        offsets = self.table.offsets[rows, column].tolist()
        sizes = self.table.sizes[rows, column].tolist()
        for place, row in enumerate(rows.tolist()):
            # The array's data is the end of its file.
            header_bytes = sizes[place] - num_bytes
            head = self._pread(row, max(header_bytes, 0), offsets[place])
            if head in plain or _is_plain(head, field, plain):
                start = offsets[place] + header_bytes
                read_exactly(self, row, self._fd, out[place, ...], start)
                continue
            value = self.read(row)[name]
            if not isinstance(value, np.ndarray) or value.shape != field.shape:
                raise self.damaged(row, f"has a {name!r} that is not of the shape {field.shape}")
            out[place, ...] = value

    def ahead(self, first: int, last: int) -> None:
        start = int(self._starts[first])
        length = int(self._starts[last - 1] + self._lengths[last - 1]) - start
        if length > 0:
            os.posix_fadvise(self._fd, start, length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def _is_plain(head: bytes, field: Field, known: set[bytes]) -> bool:
    """Whether the data behind a header is what numpy would have in memory for this field."""
    try:
        dtype, shape, fortran, length = read_header(head)
    except ValueError:
        return False
    same = (dtype.name, shape, length) == (field.dtype, field.shape, len(head))
    if not (same and dtype.isnative) or (fortran and len(shape) > 1):
        return False
    if len(known) < 1024:
        known.add(head)
    return True


def read_exactly(shard: Shard, row: int, fd: int, target: np.ndarray, offset: int) -> None:
    """Fill `target`, which is contiguous, from a place in a file."""
    view = target.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise shard.damaged(row, f"cannot be read: {error.strerror}") from error
        if not got:
            raise shard.damaged(
                row, f"ends after {done} of {len(view)} bytes: the file is cut short"
            )
        done += got
