"""A folder of files, as people have it: every file, or every few of one name, is a sample.

The worst way to keep many small samples on a shared file system, and the one most data sets come in.
Read to be packed, and written by `ridgeline data unpack`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ridgeline.data.formats.contract import (
    Format,
    Sample,
    Schema,
    Shard,
    Table,
    check_key,
)
from ridgeline.data.formats.members import (
    decode,
    encode,
    group_members,
    member_name,
    schema_from_members,
    split_at_last_dot,
)
from ridgeline.errors import UsageError

# What a data set of ours keeps beside its shards.
_TABLE = ".idx"
_OWN_FILES = ("dataset.json", "pack.json")


class FolderWriter:
    def __init__(self, path: Path, schema: Schema) -> None:
        self._path = path
        self._schema = schema
        self._sizes: list[list[int]] = []
        path.mkdir(parents=True, exist_ok=True)

    def add(self, key: str, sample: Sample) -> None:
        check_key(key, str(self._path))
        sizes = []
        for name, field in self._schema.items():
            file = self._path / member_name(key, name, field, guard_dots=False)
            file.parent.mkdir(parents=True, exist_ok=True)
            data = encode(sample[name])
            # Two fields of two samples can meet in one name, and so can letters on some disks.
            try:
                with open(file, "xb") as out:
                    out.write(data)
            except FileExistsError as error:
                raise UsageError(
                    f"sample {key!r} would write {file} a second time; start with an empty folder"
                ) from error
            sizes.append(len(data))
        self._sizes.append(sizes)

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        # One call for the lot: fsync of each of a million files would take longer than writing them.
        os.sync()
        sizes = np.array(self._sizes, dtype=np.uint64).reshape(-1, len(self._schema))
        return np.zeros_like(sizes), sizes

    def close(self) -> None:
        pass


class FolderShard(Shard):
    def __init__(self, path: Path, schema: Schema, table: Table, files: list[str] | None) -> None:
        self.path = path
        self.schema = schema
        self.table = table
        self._files = files
        self._fields = list(schema.items())

    def _file(self, row: int, column: int) -> str:
        if self._files is not None:
            return os.path.join(self.path, self._files[row * len(self._fields) + column])
        name, field = self._fields[column]
        return os.path.join(self.path, member_name(self.table.keys[row], name, field, False))

    def read(self, row: int) -> Sample:
        sample: Sample = {}
        for column, (name, field) in enumerate(self._fields):
            try:
                with open(self._file(row, column), "rb", buffering=0) as file:
                    data = file.readall()
                if self.table.sizes is not None and len(data) != self.table.sizes[row, column]:
                    size = int(self.table.sizes[row, column])
                    raise ValueError(f"has {len(data)} bytes, where {size} were listed")
                sample[name] = decode(data, field)
            except FileNotFoundError as error:
                raise self.damaged(row, "is gone: the file was there when it was listed") from error
            except OSError as error:
                raise self.damaged(row, f"cannot be read: {error.strerror}") from error
            except ValueError as error:
                raise self.damaged(row, f"cannot be read: its field {name!r} {error}") from error
        return sample

    def files(self) -> Iterator[str]:
        for row in range(len(self)):
            for column in range(len(self._fields)):
                yield self._file(row, column)

    def place(self, row: int) -> str:
        return os.path.basename(self._file(row, 0))


def _walk(path: Path) -> list[tuple[str, int, int]]:
    """Files below a folder in the order of their names, with their number and size."""
    found: list[tuple[str, int, int]] = []
    stack = [""]
    while stack:
        below = stack.pop()
        with os.scandir(path / below) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        own = set() if below else _own({entry.name for entry in ordered})
        folders = []
        for entry in ordered:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(name)
            elif entry.name not in own:
                found.append((name, 0, entry.stat().st_size))
        stack.extend(reversed(folders))
    found.sort()
    return [(name, number, size) for number, (name, _, size) in enumerate(found)]


def _own(names: set[str]) -> set[str]:
    """Files that are ours and no samples."""
    tables = {name for name in names if name.endswith(_TABLE) and name[: -len(_TABLE)] in names}
    return tables | names.intersection(_OWN_FILES)


def _scan(path: Path) -> tuple[Schema, Table, list[str]]:
    try:
        members = _walk(path)
    except OSError as error:
        raise UsageError(f"cannot look through {path}: {error.strerror}") from error
    keys, names, kinds, numbers, sizes = group_members(members, split_at_last_dot, str(path))
    files = [members[number][0] for number in numbers.reshape(-1).tolist()]
    first = {}
    for name, file in zip(names, files, strict=False):
        with open(path / file, "rb") as opened:
            first[name] = kinds[name], opened.read()
    return (
        schema_from_members(first, sizes, names, str(path)),
        Table(keys, None, None, sizes),
        files,
    )


def _open(path: Path, schema: Schema | None, table: Table | None) -> Shard:
    if schema is None or table is None:
        return FolderShard(path, *_scan(path))
    return FolderShard(path, schema, table, None)


FOLDER = Format(
    name="folder",
    suffix="",
    about="one file a field",
    write=FolderWriter,
    open=_open,
    finds=lambda path: [path] if path.is_dir() else [],
)
