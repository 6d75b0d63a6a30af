"""Tensors on disk: safetensors files written in one pass with checksums, and read a box at a time.

The library's own writer takes all tensors at once, syncs nothing and knows no checksum, so files are
written by hand; the format is safetensors', and any reader of it can open them. While one block goes to
the operating system, the checksum of it is taken in another thread and the blocks before it are on their
way to the disk. Called by `storage.py`, `export.py` and `compare.py`.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ridgeline.checkpoint.manifest import ITEM_BYTES, Chunk, Damaged, StoredFile
from ridgeline.errors import UsageError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_Bytes = npt.NDArray[np.uint8]

_BLOCK = 8 * 2**20
_FLUSH = 64 * 2**20
"""Bytes after which the disk is set to work; left to itself the system would wait for the end."""


def dtype_name(dtype: torch.dtype, what: str) -> str:
    if dtype not in _NAMES:
        raise UsageError(f"{what} is of type {dtype}, which safetensors has no word for")
    return _NAMES[dtype]


@dataclass(frozen=True)
class Entry:
    """One tensor for a file: its key there and its values, on the host."""

    key: str
    values: Tensor


def as_bytes(values: Tensor) -> memoryview:
    """The bytes of a host tensor, not copied where it is contiguous."""
    flat = values.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def encode_header(
    rows: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """How a safetensors file begins: of each tensor key, type and shape, in the order of their bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for key, dtype, shape in rows:
        stop = place + math.prod(shape) * ITEM_BYTES[dtype]
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, stop]}
        place = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(
    path: Path, entries: Sequence[Entry]
) -> tuple[StoredFile, list[tuple[int, int, int]]]:
    """Write the entries and wait until they are on disk; for each entry first byte, last and checksum."""
    # The widest types first, so that every tensor is aligned for whoever maps the file.
    order = sorted(range(len(entries)), key=lambda i: -entries[i].values.element_size())
    rows = [(entries[index].key, entries[index].values) for index in order]
    head = encode_header(
        [(key, dtype_name(values.dtype, key), tuple(values.shape)) for key, values in rows]
    )
    spans: dict[int, tuple[int, int, int]] = {}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with ThreadPoolExecutor(1) as sums, ThreadPoolExecutor(1) as disk:
        try:
            _write_all(descriptor, memoryview(head))
            at, unflushed = len(head), 0
            flushes: list[Future[None]] = []
            pending: list[tuple[int, int, int, Future[int]]] = []
            for index in order:
                data = as_bytes(entries[index].values)
                crc = sums.submit(_checksum, data)
                for begin in range(0, len(data), _BLOCK):
                    block = data[begin : begin + _BLOCK]
                    _write_all(descriptor, block)
                    unflushed += len(block)
                    if unflushed >= _FLUSH:
                        flushes.append(disk.submit(os.fdatasync, descriptor))
                        unflushed = 0
                pending.append((index, at, at + len(data), crc))
                at += len(data)
            for index, start, stop, crc in pending:
                spans[index] = (start, stop, crc.result())
            for flush in flushes:
                flush.result()
            os.fsync(descriptor)
        finally:
            disk.shutdown(wait=True)
            os.close(descriptor)
    stored = StoredFile(at, len(head), zlib.crc32(head))
    return stored, [spans[index] for index in range(len(entries))]


def _checksum(data: memoryview) -> int:
    crc = 0
    for begin in range(0, len(data), _BLOCK):
        crc = zlib.crc32(data[begin : begin + _BLOCK], crc)
    return crc


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def sync_directory(path: Path) -> None:
    """Names in a directory are on disk only once the directory is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Reader:
    """Boxes of the files of one checkpoint, mapped, so that only what is asked for is read.

    With `check` boxes are read whole and held against their checksums, for readers that go through a
    checkpoint from end to end before anyone has looked whether it is sound.
    """

    def __init__(self, directory: Path, check: bool = False) -> None:
        self._directory, self._check = directory, check
        self._files: dict[str, _Bytes] = {}

    def read(self, chunk: Chunk, dtype: str) -> Tensor:
        """The whole box; a view of the mapped file, to be copied from."""
        if chunk.stop == chunk.start:
            return torch.empty(chunk.sizes, dtype=DTYPES[dtype])
        span = self._checked(chunk) if self._check else self._mapped(chunk)
        return torch.from_numpy(span).view(DTYPES[dtype]).view(chunk.sizes)

    def _mapped(self, chunk: Chunk) -> _Bytes:
        if chunk.file not in self._files:
            # Copy on write: torch wants memory that it may write to, and nobody does.
            self._files[chunk.file] = np.memmap(self._directory / chunk.file, np.uint8, mode="c")
        return self._files[chunk.file][chunk.start : chunk.stop]

    def _checked(self, chunk: Chunk) -> _Bytes:
        path = self._directory / chunk.file
        span = np.fromfile(path, np.uint8, chunk.stop - chunk.start, offset=chunk.start)
        if _checksum(span.data) != chunk.crc32:
            raise Damaged(
                f"{path}: bytes {chunk.start} to {chunk.stop} are not what was written; "
                "`ridgeline checkpoint verify` names what is damaged"
            )
        return span
