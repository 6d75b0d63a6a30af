"""`tf.train.Example` to bytes and back, without TensorFlow or protobuf.

An Example is one map from names to lists of bytes, of float32 or of int64. Written here are the few
kinds of fields of the wire format that it needs; `tfrecord.py` says what of a sample goes where.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import numpy as np

# What a feature holds: bytes as they are, or an array of float32 or int64.
Feature = bytes | memoryview | np.ndarray

_BYTES, _FLOATS, _INTS = 1, 2, 3


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _block(tag: int, *parts: bytes | memoryview) -> bytes:
    """Field number `tag`, of a length and that many bytes."""
    size = sum(len(part) for part in parts)
    return b"".join((bytes((tag << 3 | 2,)), _varint(size), *parts))


def encode_ints(numbers: Iterable[int]) -> bytes:
    return b"".join(_varint(number & 0xFFFFFFFFFFFFFFFF) for number in numbers)


def encode_example(features: Mapping[str, Feature]) -> bytes:
    """Features in the order given."""
    entries = []
    for name, value in features.items():
        if not isinstance(value, np.ndarray):
            feature = _block(_BYTES, _block(1, value))
        elif value.dtype.kind == "f":
            feature = _block(_FLOATS, _block(1, value.astype("<f4", copy=False).tobytes()))
        else:
            feature = _block(_INTS, _block(1, encode_ints(value.reshape(-1).tolist())))
        entries.append(_block(1, _block(1, name.encode()), _block(2, feature)))
    return _block(1, *entries)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    number, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at + 1
        shift += 7
        if shift > 63:
            raise ValueError("holds a number of more than 64 bits")


def _fields(data: bytes, at: int, end: int) -> list[tuple[int, int, int]]:
    """Number of every field of the message at..end, and where its content begins and ends."""
    found = []
    while at < end:
        tag = data[at]
        at += 1
        if tag > 0x7F:
            tag, at = _read_varint(data, at - 1)
        wire = tag & 7
        if wire == 2:
            stop, at = _read_varint(data, at)
            stop += at
        elif wire == 0:
            stop = _read_varint(data, at)[1]
        elif wire in (1, 5):
            stop = at + (8 if wire == 1 else 4)
        else:
            raise ValueError(f"holds a field of wire type {wire}, which Examples have not")
        if stop > end:
            raise ValueError("ends within a feature")
        found.append((tag >> 3, at, stop))
        at = stop
    return found


def decode_ints(data: bytes) -> np.ndarray:
    """Packed varints: the bytes without the high bit end a number each."""
    if len(data) < 64:
        numbers, at = [], 0
        while at < len(data):
            number, at = _read_varint(data, at)
            numbers.append(number & 0xFFFFFFFFFFFFFFFF)
        return np.array(numbers, dtype=np.uint64).view(np.int64)
    flat = np.frombuffer(data, dtype=np.uint8)
    ends = np.flatnonzero(flat < 0x80)
    if not len(ends) or ends[-1] != len(flat) - 1:
        raise ValueError("ends within a number")
    starts = np.concatenate(([0], ends[:-1] + 1))
    if int((ends - starts).max()) > 9:
        raise ValueError("holds a number of more than 64 bits")
    places = np.arange(len(flat)) - np.repeat(starts, ends - starts + 1)
    bits = (flat & 0x7F).astype(np.uint64) << (places * 7).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts).view(np.int64)


def _list(kind: int, data: bytes, at: int, end: int) -> bytes | np.ndarray:
    items = [(start, stop) for number, start, stop in _fields(data, at, end) if number == 1]
    if kind == _BYTES:
        if len(items) > 1:
            raise ValueError(f"is a list of {len(items)} byte strings, of which one is read")
        return data[items[0][0] : items[0][1]] if items else b""
    if kind == _FLOATS and len(items) == 1:
        start, stop = items[0]
        if (stop - start) % 4:
            raise ValueError("ends within a number")
        return np.frombuffer(data, dtype="<f4", count=(stop - start) // 4, offset=start)
    joined = b"".join([data[start:stop] for start, stop in items])
    if kind == _INTS:
        return decode_ints(joined)
    if len(joined) % 4:
        raise ValueError("ends within a number")
    return np.frombuffer(joined, dtype="<f4")


def decode_example(
    data: bytes, wanted: Container[str] | None = None, size: int | None = None
) -> dict[str, bytes | np.ndarray | None]:
    """Features by name, those wanted, of the first `size` bytes; None for one that holds no list.

    Raises ValueError for what is no Example.
    """
    features: dict[str, bytes | np.ndarray | None] = {}
    try:
        for number, start, stop in _fields(data, 0, len(data) if size is None else size):
            if number != 1:
                continue
            for _, at, end in _fields(data, start, stop):
                name, content = "", (0, 0)
                for part, first, last in _fields(data, at, end):
                    if part == 1:
                        name = data[first:last].decode()
                    elif part == 2:
                        content = first, last
                if wanted is not None and name not in wanted:
                    continue
                features[name] = _feature(name, data, *content)
    except (IndexError, UnicodeDecodeError) as error:
        raise ValueError("is no whole tf.train.Example") from error
    return features


def _feature(name: str, data: bytes, at: int, end: int) -> bytes | np.ndarray | None:
    for kind, start, stop in _fields(data, at, end):
        if kind in (_BYTES, _FLOATS, _INTS):
            try:
                return _list(kind, data, start, stop)
            except ValueError as error:
                raise ValueError(f"in feature {name!r} {error}") from error
    return None
