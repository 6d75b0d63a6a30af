"""LMDB, one environment a shard: rows by number in a tree that the system maps and caches.

The key is the row's number in 8 bytes, the value a sample: a header of fixed length (sizes of bytes
fields, shapes of varying arrays, length of the sample's name) and then the fields one after another, so
that a sample is one look-up and every field is copied once. Environments that others wrote are read as
bytes under whatever keys they have.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.data.formats.columns import RowKeys
from ridgeline.data.formats.contract import (
    Field,
    Format,
    Sample,
    Schema,
    Shard,
    Table,
    check_key,
    needs,
)
from ridgeline.errors import RunError, UsageError

_DATA = "data.mdb"
# Comes before every row's key, which has 8 bytes, in the order of the tree.
_META = b"\0ridgeline"
_BATCH_BYTES = 16 * 1024 * 1024
_FIRST_MAP_BYTES = 64 * 1024 * 1024
_PAGE_BYTES = 4096
_FOREIGN_FIELD = "value"
_LARGE_BYTES = 1024 * 1024
"""Of values in the mean, from where on the system reads ahead: the library touches a value page by page,
and alone each of them would be a read. Of small values it would read mostly others."""


def _lmdb() -> Any:
    try:
        import lmdb  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise needs("data", "lmdb", "lmdb") from error
    return lmdb


def _header(schema: Schema) -> struct.Struct:
    numbers = 1
    for field in schema.values():
        if field.kind == "bytes":
            numbers += 1
        elif not field.is_fixed:
            numbers += len(field.shape)
    return struct.Struct(f"<{numbers}Q")


class LmdbWriter:
    def __init__(self, path: Path, schema: Schema) -> None:
        lmdb = _lmdb()
        path.mkdir(parents=True, exist_ok=True)
        (path / _DATA).unlink(missing_ok=True)
        self._path = path
        self._schema = schema
        self._header = _header(schema)
        self._map_bytes = _FIRST_MAP_BYTES
        self._env = lmdb.open(
            str(path), map_size=self._map_bytes, lock=False, sync=False, metasync=False
        )
        self._num_rows = 0
        self._batch: list[tuple[bytes, bytes]] = []
        self._batch_bytes = 0

    def add(self, key: str, sample: Sample) -> None:
        numbers: list[int] = []
        parts: list[Any] = []
        for name, field in self._schema.items():
            value = sample[name]
            if isinstance(value, np.ndarray):
                whole = np.asarray(value, dtype=np.dtype(field.dtype), order="C")
                if not field.is_fixed:
                    numbers.extend(whole.shape)
                parts.append(whole.tobytes())
            else:
                numbers.append(len(value))
                parts.append(value)
        name_bytes = key.encode()
        numbers.append(len(name_bytes))
        data = b"".join((self._header.pack(*numbers), *parts, name_bytes))
        self._batch.append((self._num_rows.to_bytes(8, "big"), data))
        self._batch_bytes += len(data)
        self._num_rows += 1
        if self._batch_bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        lmdb = _lmdb()
        while True:
            try:
                with self._env.begin(write=True) as transaction:
                    for key, data in self._batch:
                        transaction.put(key, data, append=key != _META)
                break
            except lmdb.MapFullError:
                self._map_bytes *= 2
                self._env.set_mapsize(self._map_bytes)
            except lmdb.Error as error:
                raise RunError(f"cannot write {self._path}: {error}") from error
        self._batch.clear()
        self._batch_bytes = 0

    def finish(self) -> None:
        self._flush()
        fields = {name: field.to_dict() for name, field in self._schema.items()}
        meta = {"fields": fields, "num_rows": self._num_rows}
        self._batch.append((_META, json.dumps(meta).encode()))
        self._flush()
        self._env.sync(True)
        self.close()
        for place in (self._path / _DATA, self._path):
            fd = os.open(place, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


class _Environment:
    """An open environment. LMDB takes each once a process, so readers of one shard share it.

    A child process may go on with its parent's: opened for reading and without locks, it is a mapped
    file and nothing else.
    """

    def __init__(self, env: Any) -> None:
        self.env = env


_open_environments: weakref.WeakValueDictionary[tuple[Any, ...], _Environment] = (
    weakref.WeakValueDictionary()
)
_opening = threading.Lock()


def _data_file(path: Path) -> Path:
    return path / _DATA if path.is_dir() else path


def _open_readonly(path: Path, readahead: bool) -> Any:
    return _lmdb().open(
        str(path),
        subdir=path.is_dir(),
        readonly=True,
        lock=False,
        readahead=readahead,
        create=False,
    )


def _open_environment(path: Path) -> _Environment:
    lmdb = _lmdb()
    data = _data_file(path)
    try:
        facts = data.stat()
    except OSError as error:
        raise UsageError(f"cannot open {data}: {error.strerror}") from error
    known = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
    with _opening:
        opened = _open_environments.get(known)
        if opened is not None:
            return opened
        try:
            # An empty file is one that LMDB would make into an environment.
            if facts.st_size < 2 * _PAGE_BYTES:
                raise lmdb.InvalidError("shorter than its first pages")
            env = _open_readonly(path, readahead=False)
            if facts.st_size >= _LARGE_BYTES * max(1, env.stat()["entries"]):
                env.close()
                env = _open_readonly(path, readahead=True)
        except lmdb.Error as error:
            raise UsageError(
                f"{path} is no whole LMDB environment ({error}); write or fetch it again"
            ) from error
        # Reading a page that is not there would end the process, not raise.
        size = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        if size > facts.st_size:
            env.close()
            raise UsageError(
                f"{path} is cut short: {facts.st_size} of {size} bytes are there; write or fetch it again"
            )
        opened = _Environment(env)
        _open_environments[known] = opened
        return opened


class LmdbShard(Shard):
    reads_fields_apart = True

    def __init__(self, path: Path, schema: Schema, table: Table, is_own: bool) -> None:
        self.path = path
        self.schema = schema
        self.table = table
        self._opened: _Environment | None = None
        self._header = _header(schema)
        self._is_own = is_own
        self._items = [
            (
                name,
                np.dtype(field.dtype) if field.kind == "array" else None,
                field.num_bytes if field.is_fixed else None,
                field.shape,
            )
            for name, field in schema.items()
        ]

    @contextlib.contextmanager
    def _value(self, row: int) -> Iterator[memoryview]:
        opened = self._opened
        if opened is None:
            opened = self._opened = _open_environment(self.path)
        key = row.to_bytes(8, "big") if self._is_own else _foreign_key(self.table.keys[row])
        lmdb = _lmdb()
        try:
            with opened.env.begin(buffers=True) as transaction:
                value = transaction.get(key)
                if value is None:
                    raise self.damaged(row, "is not there: the environment has no such key")
                yield value
        except lmdb.Error as error:
            raise self.damaged(row, f"cannot be read: {error}") from error

    def read(self, row: int) -> Sample:
        with self._value(row) as value:
            if not self._is_own:
                return {_FOREIGN_FIELD: bytes(value)}
            sample: Sample = {}
            for name, dtype, shape, start, end in self._places(row, value):
                if dtype is None:
                    sample[name] = bytes(value[start:end])
                else:
                    sample[name] = np.frombuffer(bytes(value[start:end]), dtype).reshape(shape)
            return sample

    def _places(
        self, row: int, value: memoryview
    ) -> Iterator[tuple[str, np.dtype | None, tuple[int, ...], int, int]]:
        """Type, shape and place of every field within a value."""
        size = len(value)
        start = self._header.size
        if size < start:
            raise self.damaged(row, f"has {size} bytes, fewer than its header")
        numbers = iter(self._header.unpack_from(value))
        for name, dtype, num_bytes, known in self._items:
            shape: tuple[int, ...] = ()
            if dtype is None:
                end = start + next(numbers)
            elif num_bytes is not None:
                shape = known  # type: ignore[assignment]
                end = start + num_bytes
            else:
                shape = tuple(next(numbers) for _ in known)
                end = start + math.prod(shape) * dtype.itemsize
            if end > size:
                raise self.damaged(row, f"ends within its field {name!r}: {size} bytes are there")
            yield name, dtype, shape, start, end
            start = end

    def read_into(self, name: str, rows: np.ndarray, out: np.ndarray) -> None:
        for place, row in enumerate(rows.tolist()):
            with self._value(row) as value:
                for found, dtype, shape, start, end in self._places(row, value):
                    if found == name:
                        assert dtype is not None
                        flat = np.frombuffer(value[start:end], dtype)
                        out[place, ...] = flat.reshape(shape)
                        break

    def close(self) -> None:
        # The environment closes with its last reader.
        self._opened = None


def _foreign_key(text: str) -> bytes:
    return bytes.fromhex(text[4:]) if text.startswith("hex-") else text.encode()


def _name_of(key: bytes, path: Path) -> str:
    """A key as text; one that is no name of a file is told in hexadecimal."""
    try:
        text = key.decode()
        if text.isprintable() and not text.startswith("hex-"):
            return check_key(text, str(path))
    except (UnicodeDecodeError, UsageError):
        pass
    return f"hex-{key.hex()}"


def _scan(path: Path) -> tuple[Schema, Table, bool]:
    lmdb = _lmdb()
    opened = _open_environment(path)
    try:
        with opened.env.begin() as transaction:
            meta = transaction.get(_META)
            if meta is None:
                keys = [_name_of(key, path) for key in transaction.cursor().iternext(values=False)]
                if not keys:
                    raise UsageError(f"{path} holds no samples")
                return {_FOREIGN_FIELD: Field("bytes")}, Table(keys), False
            values = json.loads(meta)
            schema = {name: Field.from_dict(field) for name, field in values["fields"].items()}
            return schema, Table(_own_keys(path, transaction, schema, values["num_rows"])), True
    except (lmdb.Error, ValueError, KeyError) as error:
        raise UsageError(f"{path} is damaged ({error}); write or fetch it again") from error


def _own_keys(path: Path, transaction: Any, schema: Schema, num_rows: int) -> list[str]:
    header = _header(schema)
    spare = RowKeys(path, num_rows)
    keys = []
    for row in range(num_rows):
        value = transaction.get(row.to_bytes(8, "big"))
        length = header.unpack_from(value)[-1] if value and len(value) >= header.size else 0
        keys.append(value[-length:].decode("utf-8", "replace") if length else spare[row])
    return keys


def _open(path: Path, schema: Schema | None, table: Table | None) -> Shard:
    if schema is None or table is None:
        return LmdbShard(path, *_scan(path))
    opened = _open_environment(path)
    with opened.env.begin() as transaction:
        is_own = transaction.get(_META) is not None
    return LmdbShard(path, schema, table, is_own)


def _finds(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.name.endswith((".lmdb", ".mdb")) else []
    if not path.is_dir():
        return []
    if (path / _DATA).is_file():
        return [path]
    inside = (p for p in path.iterdir() if p.name.endswith(".lmdb"))
    return sorted(p for p in inside if p.is_file() or (p / _DATA).is_file())


def _refuses(schema: Schema) -> str:
    for name, field in schema.items():
        if field.kind == "array" and np.dtype(field.dtype).hasobject:
            return f"{name!r} holds Python objects"
    return ""


LMDB = Format(
    name="lmdb",
    suffix=".lmdb",
    about="one LMDB environment a shard",
    write=LmdbWriter,
    open=_open,
    finds=_finds,
    refuses=_refuses,
)
