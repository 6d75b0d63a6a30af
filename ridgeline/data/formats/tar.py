"""Tar archives in the layout of WebDataset, with any sample reached in one read.

Written by hand a member at a time (a header of 512 bytes in the USTAR form, longer names in the way
of PAX), because the place of each member has to be known; read by offset. Archives that others wrote
are looked through once with the standard library.
"""

from __future__ import annotations

import os
import tarfile
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
    encode,
    group_members,
    member_name,
    schema_from_members,
    split_at_first_dot,
)
from ridgeline.errors import UsageError

_BLOCK = 512


class TarWriter:
    def __init__(self, path: Path, schema: Schema) -> None:
        self._schema = schema
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115
        self._offset = 0
        self._places: list[list[tuple[int, int]]] = []

    def add(self, key: str, sample: Sample) -> None:
        check_key(key, "tar")
        places = []
        for name, field in self._schema.items():
            data = encode(sample[name])
            info = tarfile.TarInfo(member_name(key, name, field))
            info.size = len(data)
            info.mode = 0o644
            self._put(info.tobuf(tarfile.PAX_FORMAT))
            places.append((self._offset, len(data)))
            self._put(data)
            self._put(b"\0" * (-len(data) % _BLOCK))
        self._places.append(places)

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._offset += len(data)

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        self._put(b"\0" * (2 * _BLOCK))
        self._file.flush()
        os.fsync(self._file.fileno())
        pairs = np.array(self._places, dtype=np.uint64).reshape(-1, len(self._schema), 2)
        return pairs[..., 0].copy(), pairs[..., 1].copy()

    def close(self) -> None:
        self._file.close()


def _scan(path: Path) -> tuple[Schema, Table]:
    members: list[tuple[str, int, int]] = []
    try:
        with tarfile.open(path, "r:") as archive:
            for info in archive:
                if info.isdir():
                    continue
                if not info.isfile():
                    raise UsageError(
                        f"{path}: the member {info.name!r} is a link or a device, not a file; "
                        "archives with such members are not read"
                    )
                check_key(info.name, str(path))
                last = info.name.rpartition("/")[2]
                if not last.startswith("."):
                    members.append((info.name, info.offset_data, info.size))
    except tarfile.TarError as error:
        raise UsageError(
            f"{path} is no whole tar archive ({error}); compressed ones have to be unpacked first"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot open {path}: {error.strerror}") from error
    keys, names, kinds, offsets, sizes = group_members(members, split_at_first_dot, str(path))
    first = {}
    with open(path, "rb") as file:
        for column, name in enumerate(names):
            file.seek(int(offsets[0, column]))
            first[name] = kinds[name], file.read(int(sizes[0, column]))
    return schema_from_members(first, sizes, names, str(path)), Table(keys, None, offsets, sizes)


def _open(path: Path, schema: Schema | None, table: Table | None) -> Shard:
    if schema is None or table is None or table.offsets is None:
        schema, table = _scan(path)
    return MemberShard(path, schema, table)


TAR = Format(
    name="tar",
    suffix=".tar",
    about="archives as WebDataset reads them",
    write=TarWriter,
    open=_open,
    finds=find_by_suffix(".tar"),
)
