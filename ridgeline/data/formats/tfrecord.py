"""TFRecord files of `tf.train.Example`, as TensorFlow's own readers take them.

A record is a length, the length's checksum, the data and the data's checksum. Bytes are bytes lists; a
single int64 or float32 and vectors of them are the lists that TensorFlow has for them; any other array
is its raw bytes, with `NAME/dtype` and `NAME/shape` beside it. The feature `__key__` is the sample's
key. The table holds the record's place for every field, so a sample is one read.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from ridgeline.data.formats.columns import KEYS, RowKeys, pread
from ridgeline.data.formats.contract import (
    BadSample,
    Field,
    Format,
    Sample,
    Schema,
    Shard,
    Table,
    Value,
    check_key,
    widen,
)
from ridgeline.data.formats.crc32c import crc32c
from ridgeline.data.formats.example import Feature, decode_example, encode_example
from ridgeline.errors import UsageError

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec")
_LISTED = ("int64", "float32")


def masked_crc(data: bytes | memoryview) -> int:
    """The checksum as it stands in the file."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _is_listed(field: Field) -> bool:
    return field.dtype in _LISTED and len(field.shape) < 2


class TfrecordWriter:
    def __init__(self, path: Path, schema: Schema) -> None:
        self._schema = schema
        self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115
        self._offset = 0
        self._places: list[tuple[int, int]] = []

    def add(self, key: str, sample: Sample) -> None:
        features: dict[str, Feature] = {KEYS: key.encode()}
        for name, field in self._schema.items():
            value = sample[name]
            if not isinstance(value, np.ndarray):
                features[name] = value
            elif _is_listed(field):
                features[name] = value
                if value.size == 1 and value.ndim:
                    features[f"{name}/shape"] = np.array(value.shape, dtype=np.int64)
            else:
                dtype = np.dtype(field.dtype).newbyteorder("<")
                features[name] = np.asarray(value, dtype=dtype, order="C").tobytes()
                features[f"{name}/dtype"] = field.dtype.encode()
                features[f"{name}/shape"] = np.array(value.shape, dtype=np.int64)
        data = encode_example(features)
        length = len(data).to_bytes(8, "little")
        self._file.write(length + _CRC.pack(masked_crc(length)))
        self._file.write(data)
        self._file.write(_CRC.pack(masked_crc(data)))
        self._places.append((self._offset + _HEAD.size, len(data)))
        self._offset += _HEAD.size + len(data) + _CRC.size

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        self._file.flush()
        os.fsync(self._file.fileno())
        return _places_of(self._places, len(self._schema))

    def close(self) -> None:
        self._file.close()


def _places_of(places: list[tuple[int, int]], num_fields: int) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(places, dtype=np.uint64).reshape(-1, 2)
    offsets, sizes = (np.repeat(pairs[:, column, None], num_fields, axis=1) for column in (0, 1))
    return offsets, sizes


class TfrecordShard(Shard):
    """Records are held against their own checksums where there are none of ours."""

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
        self._offsets = table.offsets[:, 0]
        self._sizes = table.sizes[:, 0]
        self._wanted = set(schema)
        for name, field in schema.items():
            if field.kind == "array" and not field.is_fixed:
                self._wanted.add(f"{name}/shape")

    def record(self, row: int, check: bool) -> bytes:
        """A record's data and the 4 bytes of its checksum."""
        size = int(self._sizes[row])
        try:
            data = pread(self._fd, size + _CRC.size, int(self._offsets[row]))
        except OSError as error:
            raise self.damaged(row, f"cannot be read: {error.strerror}") from error
        if len(data) != size + _CRC.size:
            raise self.damaged(
                row, f"ends after {len(data)} of {size + _CRC.size} bytes: the file is cut short"
            )
        if check and masked_crc(memoryview(data)[:size]) != _CRC.unpack_from(data, size)[0]:
            raise self.damaged(row, "is not what its checksum was made of: the record is damaged")
        return data

    def read(self, row: int) -> Sample:
        record = self.record(row, self.table.checksums is None)
        try:
            features = decode_example(record, self._wanted, len(record) - _CRC.size)
            return {name: _value(name, field, features) for name, field in self.schema.items()}
        except ValueError as error:
            raise self.damaged(row, f"cannot be read: it {error}") from error

    def ahead(self, first: int, last: int) -> None:
        start = int(self._offsets[first])
        length = int(self._offsets[last - 1] + self._sizes[last - 1]) - start
        os.posix_fadvise(self._fd, start, length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def check_records(shard: Shard) -> list[BadSample]:
    """The records of a shard whose data is not what its checksum was made of."""
    assert isinstance(shard, TfrecordShard)
    found = []
    for row in range(len(shard)):
        try:
            shard.record(row, True)
        except BadSample as error:
            found.append(error)
    return found


def _value(name: str, field: Field, features: dict[str, bytes | np.ndarray | None]) -> Value:
    value = features.get(name)
    if value is None:
        if name not in features:
            raise ValueError(f"has no feature {name!r}")
        value = b"" if field.kind == "bytes" else np.zeros(0, dtype=np.dtype(field.dtype))
    if field.kind == "bytes":
        if isinstance(value, np.ndarray):
            raise ValueError(f"has numbers where {name!r} is bytes in other records")
        return value
    shape: tuple[int, ...]
    if field.is_fixed:
        shape = field.shape  # type: ignore[assignment]
    elif len(field.shape) == 1 and isinstance(value, np.ndarray):
        shape = value.shape
    else:
        sides = features.get(f"{name}/shape")
        if not isinstance(sides, np.ndarray):
            raise ValueError(f"has no feature {name + '/shape'!r}")
        shape = tuple(sides.tolist())
    if not isinstance(value, np.ndarray):
        value = np.frombuffer(value, dtype=np.dtype(field.dtype).newbyteorder("<"))
    return value.astype(np.dtype(field.dtype), copy=False).reshape(shape)


def _frames(path: Path) -> list[tuple[int, int]]:
    """Place and size of every record, by their lengths, each held against its checksum."""
    places: list[tuple[int, int]] = []
    with open(path, "rb", buffering=1 << 16) as file:
        end = os.fstat(file.fileno()).st_size
        offset = 0
        while offset < end:
            file.seek(offset)
            head = file.read(_HEAD.size)
            if len(head) == _HEAD.size:
                size, crc = _HEAD.unpack(head)
                if masked_crc(head[:8]) != crc:
                    raise UsageError(
                        f"{path} is no TFRecord file, or is damaged at offset {offset}: a length does "
                        "not fit its checksum; compressed ones have to be unpacked first"
                    )
            if len(head) != _HEAD.size or offset + _HEAD.size + size + _CRC.size > end:
                raise UsageError(
                    f"{path} is cut short within the record at offset {offset}; write or fetch it again"
                )
            places.append((offset + _HEAD.size, size))
            offset += _HEAD.size + size + _CRC.size
    if not places:
        raise UsageError(f"{path} holds no records")
    return places


def _shown(features: dict[str, bytes | np.ndarray | None]) -> Sample:
    """The arrays and bytes that features are, by themselves."""
    sample: Sample = {}
    for name, value in features.items():
        base, _, part = name.rpartition("/")
        if name == KEYS or value is None or (part in ("dtype", "shape") and base in features):
            continue
        sides = features.get(f"{name}/shape")
        named = features.get(f"{name}/dtype")
        if isinstance(value, np.ndarray):
            if isinstance(sides, np.ndarray):
                sample[name] = value.reshape(sides)
            else:
                sample[name] = value.reshape(()) if value.size == 1 else value
        elif isinstance(sides, np.ndarray) and isinstance(named, bytes):
            try:
                dtype = np.dtype(named.decode())
            except TypeError:
                sample[name] = value
                continue
            sample[name] = (
                np.frombuffer(value, dtype.newbyteorder("<")).astype(dtype).reshape(sides)
            )
        else:
            sample[name] = value
    return sample


def _join(schema: Schema | None, sample: Sample, place: str) -> Schema:
    """As `widen`, for lists that have one number in some records and several in others."""
    alone: Sample = {}
    for name, value in sample.items():
        known = schema.get(name) if schema else None
        if known and isinstance(value, np.ndarray) and len(known.shape) == 1 and not value.ndim:
            value = value.reshape(1)
        alone[name] = value
    if schema is None:
        return _schema(alone)
    wide = dict(schema)
    for name, value in alone.items():
        known = wide.get(name)
        if known and isinstance(value, np.ndarray) and value.ndim == 1 and known.shape == ():
            wide[name] = Field(known.kind, known.dtype, (1,))
    # A list without anything in it is not written at all.
    for name, field in wide.items():
        if name not in alone:
            if field.kind == "bytes":
                alone[name] = b""
            elif len(field.shape) < 2:
                alone[name] = np.zeros(0, dtype=np.dtype(field.dtype))
                wide[name] = Field(field.kind, field.dtype, (None,))
    return widen(wide, alone, place)


def _schema(sample: Sample) -> Schema:
    return {
        name: Field("array", value.dtype.name, value.shape)
        if isinstance(value, np.ndarray)
        else Field("bytes")
        for name, value in sample.items()
    }


def _scan(path: Path) -> tuple[Schema, Table]:
    try:
        places = _frames(path)
        fd = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"cannot open {path}: {error.strerror}") from error
    schema: Schema | None = None
    keys: list[str] = []
    try:
        for offset, size in places:
            place = f"the record at offset {offset} of {path}"
            try:
                features = decode_example(pread(fd, size, offset))
                schema = _join(schema, _shown(features), place)
            except (ValueError, OSError) as error:
                raise UsageError(
                    f"{place} is no tf.train.Example that can be read: {error}"
                ) from error
            key = features.get(KEYS)
            if isinstance(key, bytes):
                keys.append(check_key(key.decode("utf-8", "replace"), place))
    finally:
        os.close(fd)
    assert schema is not None
    if not schema:
        raise UsageError(f"{path}: its records hold no features")
    offsets, sizes = _places_of(places, len(schema))
    names = keys if len(keys) == len(places) else RowKeys(path, len(places))
    return schema, Table(names, None, offsets, sizes)


def _open(path: Path, schema: Schema | None, table: Table | None) -> Shard:
    if schema is None or table is None or table.offsets is None:
        schema, table = _scan(path)
    return TfrecordShard(path, schema, table)


def _is_shard(name: str) -> bool:
    # TensorFlow's tools put numbers behind the ending: train.tfrecord-00003-of-00128.
    return name.endswith(_SUFFIXES) or any(f"{suffix}-" in name for suffix in _SUFFIXES)


def _finds(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if _is_shard(path.name) else []
    if not path.is_dir():
        return []
    return sorted(p for p in path.iterdir() if _is_shard(p.name) and p.is_file())


def _refuses(schema: Schema) -> str:
    for name, field in schema.items():
        if name == KEYS or name.endswith(("/dtype", "/shape")):
            return f"the name {name!r} is one that the format itself uses"
        if field.kind == "array" and np.dtype(field.dtype).kind not in "biufc":
            return f"{name!r} is of {field.dtype}, which is no number"
    return ""


TFRECORD = Format(
    name="tfrecord",
    suffix=".tfrecord",
    about="records of tf.train.Example",
    write=TfrecordWriter,
    open=_open,
    finds=_finds,
    refuses=_refuses,
)
