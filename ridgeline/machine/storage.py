"""Measure the file system under a directory: large files, small files, synchronous and random access.

Which file system to put an environment, a data set or checkpoints on is usually learnt from other users'
complaints; a minute of measuring says it with figures. Everything is written inside a fresh temporary
directory and removed however the measuring ends. A measurement that fails for want of room is named and
the others are kept. Called by `cli_machine.py`; imports without torch, because login nodes have none.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import secrets
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ridgeline.errors import UsageError
from ridgeline.facts import StorageFacts
from ridgeline.machine import disk_io
from ridgeline.machine.disk_io import BLOCK_BYTES, Advance
from ridgeline.machine.mount import find_disk, find_mount
from ridgeline.machine.quota import find_quotas

RANDOM_READ_BYTES = 128 * 2**10
"""About one sample of a packed data set: a JPEG of ImageNet has 110 KB."""
SYNC_WRITE_BYTES = 512
"""The smallest unit a disk takes; each one costs a whole round trip."""
SMALL_FILE_BYTES = (4096, 10240)
"""Sources and compiled modules of a Python environment are mostly in this range."""
FILES_A_FOLDER = 200
"""Small files stand in several folders, as they do in an environment: one folder has one lock."""
DROP_THREADS = 16
"""That bring small files to the disk before they are read: waiting together, they wait once."""
ROOM_SHARE = 4
"""At most this part of the free room, and of the free inodes, is used: others write there too."""
LEAST_SIZE_BYTES = BLOCK_BYTES
"""A large file of less than one block measures nothing."""
LEAST_FILES = 50
"""Fewer small files say nothing about many."""

TELL_EVERY_S = 0.05

Tell = Callable[[str, float], None]
"""Told what is being measured, and the share of everything that is done, 0 to 1."""


@dataclass(frozen=True)
class Amounts:
    """How much of everything is measured."""

    size_bytes: int = 2**30
    num_files: int = 2000
    num_threads: int = 8
    num_small: int = 2000
    """Synchronous writes, and random reads, at most."""
    budget_s: float = 30.0
    """After this a measurement ends with what it has done, so that a slow disk does not take an hour."""


NORMAL = Amounts()
QUICK = Amounts(size_bytes=64 * 2**20, num_files=400, num_small=300, budget_s=0.7)

_T = TypeVar("_T")
Figures = dict[str, float]
"""Fields of `StorageFacts` that a measurement has found."""


def measure_storage(
    path: Path, amounts: Amounts = NORMAL, tell: Tell = lambda _what, _share: None
) -> StorageFacts:
    """Facts of the file system under the directory `path`, which is left as it was found."""
    began = time.time()
    with scratch_in(path) as folder:
        facts = dataclasses.replace(describe_storage(path), time=began)
        amounts, notes = fit_amounts(facts, amounts)
        bench = _Bench(folder, amounts, disk_io.how_uncached(folder, facts.kind))
        figures, problems = _measure_all(bench, path, tell)
    if folder.exists():
        problems = (*problems, f"{folder} could not be removed; remove it by hand")
    known: dict[str, object] = {**figures}
    return dataclasses.replace(
        facts,
        size_bytes=amounts.size_bytes,
        num_files=amounts.num_files,
        num_threads=amounts.num_threads,
        uncached_by=bench.uncached_by,
        measured_s=time.time() - began,
        notes=notes,
        problems=problems,
        **known,  # type: ignore[arg-type]
    )


def describe_storage(path: Path) -> StorageFacts:
    """What the system says of the file system under `path`, before anything is measured."""
    mount = find_mount(path)
    room = os.statvfs(path)
    device, rotational = find_disk(mount.device_number)
    return StorageFacts(
        path=str(path.resolve()),
        host=socket.gethostname(),
        time=time.time(),
        fs_type=mount.fs_type,
        kind=mount.kind,
        mount_point=mount.point,
        mount_source=mount.source,
        mount_options=mount.options,
        device=device,
        rotational=rotational,
        total_bytes=room.f_blocks * room.f_frsize,
        # What is kept back for root is nobody's room, root's neither.
        free_bytes=room.f_bavail * room.f_frsize,
        num_inodes=room.f_files or None,
        num_free_inodes=room.f_favail if room.f_files else None,
        quotas=find_quotas(mount),
    )


@contextmanager
def scratch_in(path: Path) -> Iterator[Path]:
    """A fresh directory under `path`, gone afterwards whatever happens."""
    if not path.exists():
        raise UsageError(f"{path} does not exist; give a directory that does")
    if not path.is_dir():
        raise UsageError(f"{path} is no directory; give the one it is in, {path.parent}")
    # Named before it is made: an interrupt between the two leaves nothing behind either.
    folder = path / f".ridgeline-storage-{secrets.token_hex(8)}"
    try:
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise _cannot_begin(path, error) from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _cannot_begin(path: Path, error: OSError) -> UsageError:
    if error.errno == errno.EROFS:
        return UsageError(f"{path} is on a file system mounted read-only; give one to write to")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UsageError(f"{path} may not be written to by you; give a directory of your own")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UsageError(f"{path} takes not even a directory more: {_full(error)}")
    return UsageError(f"cannot make a directory in {path} ({error.strerror}); give another")


def _full(error: OSError) -> str:
    if error.errno == errno.EDQUOT:
        return "the quota is used up; remove files there, or ask for more"
    return "no bytes or no inodes are left; remove files there"


def fit_amounts(facts: StorageFacts, asked: Amounts) -> tuple[Amounts, tuple[str, ...]]:
    """What of the amounts fits into a part of the room, and what was made less; a `UsageError` where
    too little fits to measure anything."""
    room = facts.room_bytes // ROOM_SHARE
    size = min(asked.size_bytes, room) // BLOCK_BYTES * BLOCK_BYTES
    if size < LEAST_SIZE_BYTES:
        raise UsageError(
            f"{facts.path} has {facts.room_bytes / 2**20:.1f} MiB left, and measuring uses at most one "
            f"part in {ROOM_SHARE} of that and at least {LEAST_SIZE_BYTES / 2**20:.0f} MiB; remove files "
            "there, or give another directory"
        )
    num_files = min(asked.num_files, room // max(SMALL_FILE_BYTES))
    if facts.room_files is not None:
        num_files = min(num_files, facts.room_files // ROOM_SHARE)
    if num_files < min(LEAST_FILES, asked.num_files):
        raise UsageError(
            f"{facts.path} has room for {facts.room_files} files more, and measuring uses at most one "
            f"part in {ROOM_SHARE} of that and at least {LEAST_FILES}; remove files there, or give "
            "another directory"
        )
    notes = []
    if size < asked.size_bytes // BLOCK_BYTES * BLOCK_BYTES:
        notes.append(
            f"the large file has {size / 2**20:.0f} MiB instead of {asked.size_bytes / 2**20:.0f}: "
            f"a part in {ROOM_SHARE} of the room that is left"
        )
    if num_files < asked.num_files:
        notes.append(
            f"{num_files} small files instead of {asked.num_files}: a part in {ROOM_SHARE} of what is "
            "left"
        )
    return dataclasses.replace(asked, size_bytes=size, num_files=num_files), tuple(notes)


@dataclass(frozen=True)
class _Bench:
    """Where the measurements write, how much, and how they keep the page cache out."""

    folder: Path
    amounts: Amounts
    uncached_by: str

    @property
    def large(self) -> Path:
        return self.folder / "large"

    @property
    def direct(self) -> bool:
        return self.uncached_by == disk_io.DIRECT

    def make_cold(self) -> None:
        """The large file is not in the page cache afterwards, where that can be brought about."""
        if self.uncached_by == disk_io.FADVISE:
            disk_io.drop_pages(self.large)


def _measure_all(bench: _Bench, path: Path, tell: Tell) -> tuple[Figures, tuple[str, ...]]:
    """Every measurement in turn; one that fails is a problem and not the end of the others."""
    figures: Figures = {}
    problems: list[str] = []
    for index, (what, measure, needs_large) in enumerate(MEASUREMENTS):
        if needs_large and not bench.large.exists():
            continue
        advance = _advance_of(index, what, tell)
        try:
            figures |= measure(bench, advance)
        except OSError as error:
            shutil.rmtree(bench.folder / "small", ignore_errors=True)
            problems.append(_problem(what, path, error))
    tell("done", 1.0)
    return figures, tuple(problems)


def _advance_of(index: int, what: str, tell: Tell) -> Advance:
    """Tells how far one measurement is, now and then: a bar drawn after each read would be measured."""
    last_s = float("-inf")

    def advance(share: float) -> None:
        nonlocal last_s
        now = time.perf_counter()
        if now - last_s >= TELL_EVERY_S:
            last_s = now
            tell(what, (index + min(share, 1.0)) / len(MEASUREMENTS))

    advance(0.0)
    return advance


def _problem(what: str, path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what} ran out of room in {path}: {_full(error)}"
    return f"{what} failed in {path} ({error.strerror or error}); look at the file system, or try again"


def _measure_small_files(bench: _Bench, advance: Advance) -> Figures:
    """Create, stat and read many small files, the last two in shuffled order."""
    root, count = bench.folder / "small", bench.amounts.num_files
    draw = random.Random(0)
    content = os.urandom(max(SMALL_FILE_BYTES))
    files = [
        (root / f"{i // FILES_A_FOLDER:03d}" / f"{i:06d}.bin", draw.randint(*SMALL_FILE_BYTES))
        for i in range(count)
    ]
    root.mkdir()
    for folder in {path.parent for path, _ in files}:
        folder.mkdir()

    def create(item: tuple[Path, int]) -> None:
        with open(item[0], "xb", buffering=0) as file:
            file.write(content[: item[1]])

    def read(path: Path) -> None:
        with open(path, "rb", buffering=0) as file:
            file.read()

    budget_s = bench.amounts.budget_s
    num_made, create_s = _each(files, create, budget_s, lambda share: advance(share * 0.3))
    paths = [path for path, _ in files[:num_made]]
    draw.shuffle(paths)
    num_asked, stat_s = _each(paths, os.stat, budget_s, lambda share: advance(0.3 + share * 0.1))
    if bench.uncached_by != disk_io.MEMORY:
        num_dropped = disk_io.drop_all(
            paths, DROP_THREADS, budget_s, lambda share: advance(0.4 + share * 0.4)
        )
        del paths[num_dropped:]
    num_read, read_s = _each(paths, read, budget_s, lambda share: advance(0.8 + share * 0.1))
    shutil.rmtree(root)
    return {
        "create_files_per_s": num_made / create_s,
        "stat_files_per_s": num_asked / stat_s,
        "read_files_per_s": num_read / read_s,
    }


def _each(
    items: list[_T], act: Callable[[_T], object], budget_s: float, advance: Advance
) -> tuple[int, float]:
    """How many were acted on within the time, and the seconds it took."""
    start = time.perf_counter()
    count = 0
    for count, item in enumerate(items, start=1):
        act(item)
        if count % 100 == 0:
            advance(count / len(items))
            if time.perf_counter() - start > budget_s:
                break
    return count, max(time.perf_counter() - start, 1e-9)


def _measure_sync_writes(bench: _Bench, advance: Advance) -> Figures:
    """Small writes one after another, each on the disk before the next begins."""
    path, data = bench.folder / "sync", os.urandom(SYNC_WRITE_BYTES)
    flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_DSYNC", os.O_SYNC)
    descriptor = os.open(path, flags, 0o600)
    times: list[float] = []
    try:
        start = time.perf_counter()
        while len(times) < bench.amounts.num_small:
            before = time.perf_counter()
            os.write(descriptor, data)
            times.append(time.perf_counter() - before)
            if time.perf_counter() - start > bench.amounts.budget_s:
                break
            advance(len(times) / bench.amounts.num_small)
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    times.sort()
    return {
        "sync_writes_per_s": len(times) / max(sum(times), 1e-9),
        "sync_write_median_s": statistics.median(times),
        "sync_write_p99_s": times[min(len(times) * 99 // 100, len(times) - 1)],
    }


def _measure_write(bench: _Bench, advance: Advance) -> Figures:
    rate = _write_large(bench, False, advance)
    return {"write_bytes_per_s": rate}


def _measure_uncached_write(bench: _Bench, advance: Advance) -> Figures:
    """A new file again: blocks that exist already are cheaper to write."""
    if not bench.direct:
        return {}
    bench.large.unlink()
    return {"uncached_write_bytes_per_s": _write_large(bench, True, advance)}


def _write_large(bench: _Bench, direct: bool, advance: Advance) -> float:
    amounts = bench.amounts
    return disk_io.write_file(bench.large, amounts.size_bytes, direct, amounts.budget_s, advance)


def _measure_read(bench: _Bench, advance: Advance) -> Figures:
    bench.make_cold()
    return {"read_bytes_per_s": _read_large(bench, bench.direct, advance)}


def _measure_threads_read(bench: _Bench, advance: Advance) -> Figures:
    bench.make_cold()
    amounts = bench.amounts
    rate = disk_io.read_in_threads(bench.large, amounts.num_threads, bench.direct, amounts.budget_s)
    return {"threads_read_bytes_per_s": rate}


def _measure_random_reads(bench: _Bench, advance: Advance) -> Figures:
    bench.make_cold()
    return {"random_reads_per_s": _read_random(bench, bench.direct, advance)}


def _measure_cached(bench: _Bench, advance: Advance) -> Figures:
    """Once to have it in the page cache, then what it is measured for."""
    _read_large(bench, False, lambda share: advance(share / 3))
    return {
        "cached_read_bytes_per_s": _read_large(bench, False, lambda s: advance((1 + s) / 3)),
        "cached_random_reads_per_s": _read_random(bench, False, lambda s: advance((2 + s) / 3)),
    }


def _read_large(bench: _Bench, direct: bool, advance: Advance) -> float:
    """Bytes a second of one thread from start to end."""
    offsets = range(0, bench.large.stat().st_size, BLOCK_BYTES)
    reading = disk_io.read_blocks(
        bench.large,
        offsets,
        BLOCK_BYTES,
        direct=direct,
        budget_s=bench.amounts.budget_s,
        advance=advance,
        total=len(offsets),
    )
    return reading.blocks_per_s * BLOCK_BYTES


def _read_random(bench: _Bench, direct: bool, advance: Advance) -> float:
    """Reads a second; no place is read twice, for the second time it could be a cache's."""
    offsets = list(range(0, bench.large.stat().st_size, RANDOM_READ_BYTES))
    random.Random(0).shuffle(offsets)
    del offsets[bench.amounts.num_small :]
    reading = disk_io.read_blocks(
        bench.large,
        offsets,
        RANDOM_READ_BYTES,
        direct=direct,
        at_random=True,
        budget_s=bench.amounts.budget_s,
        advance=advance,
        total=len(offsets),
    )
    return reading.blocks_per_s


MEASUREMENTS: tuple[tuple[str, Callable[[_Bench, Advance], Figures], bool], ...] = (
    # Small things first: what they need fits where the large file may not. True: needs that file.
    ("small files", _measure_small_files, False),
    ("synchronous writes", _measure_sync_writes, False),
    ("large write", _measure_write, False),
    ("large write without the page cache", _measure_uncached_write, True),
    ("large read", _measure_read, True),
    ("large read by threads", _measure_threads_read, True),
    ("random reads", _measure_random_reads, True),
    ("cached reads", _measure_cached, True),
)
