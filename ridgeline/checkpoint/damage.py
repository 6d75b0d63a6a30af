"""Whether a checkpoint is still what was written: every byte against its checksum. Imports without torch.

Called before a run goes on from a checkpoint (`load.py`), by `ridgeline checkpoint verify`, and after a
checkpoint was resharded.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.checkpoint.manifest import Chunk, Manifest, StoredFile, chunks_by_file

_BLOCK = 8 * 2**20
_MOST_THREADS = 16
_MOST_NAMES = 3

Advance = Callable[[int], object]
"""Told of bytes as they are done, for a progress bar."""


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it was written."""

    text: str
    """A sentence that names file and tensor."""
    file: str
    tensors: tuple[str, ...] = ()
    """Those that cannot be trusted any more."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class _Span:
    name: str
    """A tensor's, or empty for the header."""
    start: int
    stop: int
    crc32: int


def find_problems(
    directory: Path, manifest: Manifest, advance: Advance = lambda _: None
) -> list[Problem]:
    """All that is wrong with the files of a checkpoint; several threads read, so that a slow disk is
    asked for more than one thing at a time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(min(_MOST_THREADS, 2 * (cores or 1))) as pool:
        return [
            problem
            for name, chunks in chunks_by_file(manifest).items()
            for problem in find_damage(
                directory / name, manifest.files[name], chunks, pool.map, advance
            )
        ]


def find_damage(
    path: Path,
    file: StoredFile,
    chunks: Sequence[tuple[str, Chunk]],
    each: Callable[..., Iterable[Any]] = map,
    advance: Advance = lambda _: None,
) -> Iterator[Problem]:
    """What is wrong with one file, whose boxes are given in the order of bytes."""
    names = tuple(dict.fromkeys(name for name, _ in chunks))
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        text = "is missing" if isinstance(error, FileNotFoundError) else "cannot be opened"
        yield Problem(
            f"{path.name} {text} ({error.strerror}), and with it {_listed(names)}", path.name, names
        )
        return
    try:
        size = os.fstat(descriptor).st_size
        if size != file.num_bytes:
            lost = tuple(dict.fromkeys(name for name, chunk in chunks if chunk.stop > size))
            gone = f", so {_listed(lost)} is cut off" if lost else ""
            yield Problem(
                f"{path.name} has {size} bytes where {file.num_bytes} were written{gone}",
                path.name,
                lost,
            )
        spans = [_Span("", 0, file.header_bytes, file.header_crc32)]
        spans += [_Span(name, c.start, c.stop, c.crc32) for name, c in chunks]
        there = [span for span in spans if span.stop <= size]
        found = each(lambda span: _read_checksum(descriptor, span, advance), there)
        for span, crc in zip(there, found, strict=True):
            if crc != span.crc32:
                yield _describe(path.name, span, crc, names)
    finally:
        os.close(descriptor)


def _read_checksum(descriptor: int, span: _Span, advance: Advance) -> int | str:
    """The checksum of what is there now, or why it cannot be read."""
    crc, at = 0, span.start
    while at < span.stop:
        try:
            block = os.pread(descriptor, min(_BLOCK, span.stop - at), at)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        if not block:
            return "cannot be read (it ended while it was read)"
        crc, at = zlib.crc32(block, crc), at + len(block)
        advance(len(block))
    return crc


def _describe(file: str, span: _Span, found: int | str, names: tuple[str, ...]) -> Problem:
    what = f"bytes {span.start} to {span.stop}"
    if isinstance(found, int):
        why = f"is damaged ({what}, checksum {found:08x} where {span.crc32:08x} was written)"
    else:
        why = f"({what}) {found}"
    if span.name:
        return Problem(f"{file}: {span.name} {why}", file, (span.name,))
    return Problem(f"{file}: the header, which says where {_listed(names)} is, {why}", file, names)


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
