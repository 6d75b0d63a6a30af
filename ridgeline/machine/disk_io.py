"""Reading and writing blocks with the page cache and without it, for `storage.py`.

The page cache is kept out with O_DIRECT where the file system has it; else its pages are dropped with
`posix_fadvise` before a read, which needs no rights either. Buffers are anonymous memory maps, because
O_DIRECT wants them aligned to pages and a `bytearray` is not.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

BLOCK_BYTES = 4 * 2**20
"""Of one sequential read or write: whole stripes of a parallel file system, and enough in flight for a
fast disk although O_DIRECT reads nothing ahead."""
ALIGN_BYTES = 4096

DIRECT, FADVISE, MEMORY = "O_DIRECT", "fadvise", "memory"

Advance = Callable[[float], None]
"""Told the share of a measurement that is done, 0 to 1."""

_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)

# What a file system without O_DIRECT, or with another alignment, answers.
_NOT_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def aligned_buffer(num_bytes: int, random: bool = False) -> mmap.mmap:
    """Memory for blocks; random bytes where it is written, so that compression cannot flatter."""
    # There before the clock runs: the first touch of each page would cost as much as a fast read.
    buffer = mmap.mmap(-1, num_bytes, flags=_ANONYMOUS)
    if random:
        buffer.write(os.urandom(num_bytes))
    return buffer


def how_uncached(folder: Path, kind: str) -> str:
    """How the page cache can be kept out there, found by trying. A file system in memory has nothing
    below its pages, though some kernels accept O_DIRECT for it."""
    if kind == "memory":
        return MEMORY
    if not hasattr(os, "O_DIRECT"):
        return FADVISE
    path = folder / "direct"
    buffer = aligned_buffer(ALIGN_BYTES)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.pwrite(descriptor, buffer, 0)
            os.preadv(descriptor, [buffer], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _NOT_DIRECT:
            return FADVISE
        raise
    finally:
        path.unlink(missing_ok=True)
    return DIRECT


def write_file(
    path: Path, size_bytes: int, direct: bool, budget_s: float, advance: Advance
) -> float:
    """Bytes a second of a new file with the fsync at its end; it is shorter where time ran out, and not
    there where writing failed."""
    buffer = aligned_buffer(BLOCK_BYTES, random=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    start, done = time.perf_counter(), 0
    descriptor = os.open(path, flags, 0o600)
    try:
        while done < size_bytes and (done == 0 or time.perf_counter() - start < budget_s):
            done += write_all(descriptor, buffer, done)
            advance(done / size_bytes)
        os.fsync(descriptor)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return done / (time.perf_counter() - start)


def write_all(descriptor: int, buffer: mmap.mmap, offset: int) -> int:
    """Every byte of the buffer: a write may take fewer, and the next then says why."""
    with memoryview(buffer) as view:
        done = 0
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], offset + done)
    return done


def drop_pages(path: Path) -> None:
    """Ask that a file's pages leave the cache; only those that are on the disk do, so they go there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def drop_all(paths: list[Path], num_threads: int, budget_s: float, advance: Advance) -> int:
    """`drop_pages` of as many as the time allows, from the first on, and how many those were; by several
    threads because each waits for the disk."""
    start, count = time.perf_counter(), 0
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for count, _ in enumerate(pool.map(drop_pages, paths), start=1):
                advance(count / len(paths))
                if time.perf_counter() - start > budget_s:
                    break
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return count


@dataclass(frozen=True)
class Reading:
    """How many blocks were read, and when by the clock that counts from nowhere."""

    num_blocks: int
    start_s: float
    end_s: float

    @property
    def blocks_per_s(self) -> float:
        return self.num_blocks / max(self.end_s - self.start_s, 1e-9)


def read_blocks(
    path: Path,
    offsets: Iterable[int],
    block_bytes: int,
    *,
    direct: bool,
    buffer: mmap.mmap | None = None,
    at_random: bool = False,
    budget_s: float = float("inf"),
    stop: Event | None = None,
    advance: Advance = lambda _: None,
    total: int = 1,
) -> Reading:
    """Read blocks in the order given, by one thread; fewer where time ran out."""
    buffer = buffer or aligned_buffer(block_bytes)
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    count, start = 0, time.perf_counter()
    try:
        if at_random and not direct:
            # Else the kernel reads on behind each block, and the next one is there by luck.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        start = time.perf_counter()
        for offset in offsets:
            if os.preadv(descriptor, [buffer], offset) != block_bytes:
                raise OSError(errno.EIO, f"the file is shorter than it was written, at {offset}")
            count += 1
            advance(count / total)
            if (stop is not None and stop.is_set()) or time.perf_counter() - start > budget_s:
                break
        end = time.perf_counter()
    finally:
        os.close(descriptor)
    return Reading(count, start, end)


def read_in_threads(path: Path, num_threads: int, direct: bool, budget_s: float) -> float:
    """Bytes a second of all threads together, each reading its own part of the file from start to end."""
    num_blocks = path.stat().st_size // BLOCK_BYTES
    bounds = [num_blocks * i // num_threads for i in range(num_threads + 1)]
    buffers = [aligned_buffer(BLOCK_BYTES) for _ in range(num_threads)]
    stop = Event()

    def part(index: int) -> Reading:
        offsets = range(bounds[index] * BLOCK_BYTES, bounds[index + 1] * BLOCK_BYTES, BLOCK_BYTES)
        return read_blocks(
            path,
            offsets,
            BLOCK_BYTES,
            direct=direct,
            buffer=buffers[index],
            budget_s=budget_s,
            stop=stop,
        )

    with ThreadPoolExecutor(num_threads) as pool:
        try:
            parts = list(pool.map(part, range(num_threads)))
        except BaseException:
            stop.set()
            raise
    whole = Reading(
        sum(part.num_blocks for part in parts),
        min(part.start_s for part in parts),
        max(part.end_s for part in parts),
    )
    return whole.blocks_per_s * BLOCK_BYTES
