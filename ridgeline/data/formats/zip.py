"""Zip archives of members as they are, with any sample reached in one read.

The names inside are those of the tar format. Written uncompressed, because samples mostly are
compressed already and because a stored member can be read by its offset. Archives that others wrote
may hold deflated members: their places are marked in the table, and they are unpacked as they are read.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from ridgeline.data.formats.contract import (
    Format,
    Sample,
    Schema,
    Shard,
    Table,
    check_key,
    find_by_suffix,
)
from ridgeline.data.formats.members import (
    MemberShard,
    decode,
    encode,
    group_members,
    member_name,
    schema_from_members,
    split_at_first_dot,
)
from ridgeline.errors import UsageError

_LOCAL_HEADER = struct.Struct("<4s22xHH")
# Set in the offset of a member that is deflated; no file is as long as that.
_DEFLATED = 1 << 63
_LINK = 0o120000


class ZipWriter:
    def __init__(self, path: Path, schema: Schema) -> None:
        self._schema = schema
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115
        self._archive = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)
        self._places: list[list[tuple[int, int]]] = []
        self._finished = False

    def add(self, key: str, sample: Sample) -> None:
        check_key(key, "zip")
        places = []
        for name, field in self._schema.items():
            data = encode(sample[name])
            info = zipfile.ZipInfo(member_name(key, name, field))
            info.external_attr = 0o644 << 16
            self._archive.writestr(info, data)
            # Nothing follows a stored member's data in a file that can seek.
            places.append((self._file.tell() - len(data), len(data)))
        self._places.append(places)

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        self._finished = True
        self._archive.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        pairs = np.array(self._places, dtype=np.uint64).reshape(-1, len(self._schema), 2)
        return pairs[..., 0].copy(), pairs[..., 1].copy()

    def close(self) -> None:
        if not self._finished:
            # Without a directory, so that nobody takes it for a whole archive.
            self._archive.fp = None
        self._file.close()


class DeflatedShard(MemberShard):
    """An archive some of whose members have to be unpacked."""

    reads_fields_apart = False

    def __init__(self, path: Path, schema: Schema, table: Table) -> None:
        assert table.offsets is not None
        mark = np.uint64(_DEFLATED)
        self._deflated = (table.offsets & mark) != 0
        self._places = table.offsets & ~mark
        super().__init__(
            path, schema, Table(table.keys, table.checksums, self._places, table.sizes)
        )
        # With the marks, for whoever keeps it.
        self.table = table

    def place(self, row: int) -> str:
        return f"offset {int(self._places[row].min())}"

    def read(self, row: int) -> Sample:
        assert self.table.sizes is not None
        sample: Sample = {}
        for column, (name, field) in enumerate(self._fields):
            offset, size = self._places[row, column], self.table.sizes[row, column]
            data = self._pread(row, int(size), int(offset))
            try:
                if self._deflated[row, column]:
                    data = _inflate(data)
                sample[name] = decode(data, field)
            except (ValueError, zlib.error) as error:
                raise self.damaged(row, f"cannot be read: its field {name!r} {error}") from error
        return sample

    def read_into(self, name: str, rows: np.ndarray, out: np.ndarray) -> None:
        Shard.read_into(self, name, rows, out)


def _inflate(data: bytes) -> bytes:
    unpack = zlib.decompressobj(-zlib.MAX_WBITS)
    whole = unpack.decompress(data) + unpack.flush()
    if not unpack.eof:
        raise ValueError("ends within its compressed data")
    return whole


def _checked(info: zipfile.ZipInfo, path: Path) -> None:
    if info.flag_bits & 0x1:
        raise UsageError(
            f"{path}: the member {info.filename!r} is encrypted; unpack the archive with its password "
            "and give the folder instead"
        )
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UsageError(
            f"{path}: the member {info.filename!r} is compressed by method {info.compress_type}; "
            "stored and deflated members are read: unpack the archive and give the folder instead"
        )
    if (info.external_attr >> 16) & 0o170000 == _LINK:
        raise UsageError(
            f"{path}: the member {info.filename!r} is a link, not a file; archives with such members "
            "are not read"
        )
    check_key(info.filename, str(path))


def stored_offset(fd: int, info: zipfile.ZipInfo, path: Path) -> int:
    """Where a member's data begins: its own header's length is not that of the directory's entry."""
    header = os.pread(fd, _LOCAL_HEADER.size, info.header_offset)
    if len(header) == _LOCAL_HEADER.size:
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        if magic == b"PK\x03\x04":
            start = info.header_offset + _LOCAL_HEADER.size
            return start + int(name_bytes) + int(extra_bytes)
    raise UsageError(
        f"{path} is damaged: there is no member {info.filename!r} at offset {info.header_offset}; "
        "fetch or write the archive again"
    )


def list_zip(path: Path) -> list[zipfile.ZipInfo]:
    """The directory of an archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    except (
        zipfile.BadZipFile,
        EOFError,
        struct.error,
        ValueError,
        NotImplementedError,
    ) as error:
        raise UsageError(
            f"{path} is no whole zip archive ({error}); fetch or write it again"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot open {path}: {error.strerror}") from error


def _scan(path: Path) -> tuple[Schema, Table]:
    members: list[tuple[str, int, int]] = []
    unpacked: dict[int, int] = {}
    infos = list_zip(path)
    with open(path, "rb") as file:
        for info in infos:
            if info.is_dir():
                continue
            _checked(info, path)
            if info.filename.rpartition("/")[2].startswith("."):
                continue
            offset = stored_offset(file.fileno(), info, path)
            if info.compress_type == zipfile.ZIP_DEFLATED:
                offset |= _DEFLATED
            members.append((info.filename, offset, info.compress_size))
            unpacked[offset] = info.file_size
        keys, names, kinds, offsets, sizes = group_members(members, split_at_first_dot, str(path))
        deflated = (offsets & np.uint64(_DEFLATED)) != 0
        first = {}
        for column, name in enumerate(names):
            size, offset = int(sizes[0, column]), int(offsets[0, column])
            data = os.pread(file.fileno(), size, offset & (_DEFLATED - 1))
            if deflated[0, column]:
                try:
                    data = _inflate(data)
                except (ValueError, zlib.error) as error:
                    raise UsageError(f"{path}: sample {keys[0]!r} is damaged: {error}") from error
            first[name] = kinds[name], data
    # Compressed sizes say nothing about shapes.
    shaped = sizes
    if deflated.any():
        whole = [unpacked[offset] for offset in offsets.reshape(-1).tolist()]
        shaped = np.array(whole, dtype=np.uint64).reshape(offsets.shape)
    return schema_from_members(first, shaped, names, str(path)), Table(keys, None, offsets, sizes)


def _open(path: Path, schema: Schema | None, table: Table | None) -> Shard:
    if schema is None or table is None or table.offsets is None:
        schema, table = _scan(path)
    assert table.offsets is not None
    if len(table) and int(table.offsets.max()) & _DEFLATED:
        return DeflatedShard(path, schema, table)
    return MemberShard(path, schema, table)


ZIP = Format(
    name="zip",
    suffix=".zip",
    about="archives that every system opens",
    write=ZipWriter,
    open=_open,
    finds=find_by_suffix(".zip"),
)
