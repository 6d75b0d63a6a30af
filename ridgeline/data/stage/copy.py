"""Blocks from the shared path to the node's disk.

Every read of the shared path goes through `SharedReader.read`, which counts. Every block is written to
the file's `.part`, and then, with its CRC32, to a journal, so that a copy that was cut off is gone on
with. Called by `run.py` on each rank that copies.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable

from ridgeline.data.stage.held import Held
from ridgeline.data.stage.plan import Listing, Run
from ridgeline.data.stage.problem import SourceChanged, StageProblem


class SharedReader:
    """Reads the data set where everybody does; keeps one file open at a time."""

    def __init__(self, listing: Listing) -> None:
        self.read_bytes = 0
        self._listing = listing
        self._file = -1
        self._descriptor = -1

    def read(self, block: int) -> bytes:
        """A block; one that is not what the listing says is an error that names the file."""
        file, start, size = self._listing.locate(block)
        if file != self._file:
            self._open(file)
        data = _read_all(self._descriptor, start, size)
        self.read_bytes += len(data)
        if len(data) != size:
            raise SourceChanged(f"{self._path(file)} became shorter while it was copied")
        if start + size == self._listing.files[file].size:
            self._check(file)
        return data

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._file = self._descriptor = -1

    def _open(self, file: int) -> None:
        self.close()
        try:
            self._descriptor = os.open(self._path(file), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise SourceChanged(f"{self._path(file)} is gone") from error
        except OSError as error:
            raise StageProblem(f"cannot read {self._path(file)}: {error.strerror}") from error
        self._file = file
        self._check(file)

    def _check(self, file: int) -> None:
        expected, found = self._listing.files[file], os.fstat(self._descriptor)
        if (found.st_size, found.st_mtime_ns) != (expected.size, expected.mtime_ns):
            raise SourceChanged(f"{self._path(file)} was changed while it was copied")

    def _path(self, file: int) -> str:
        return str(self._listing.path_of(self._listing.files[file]))


class BlockWriter:
    """Writes blocks into a copy; each is on record once it is written."""

    def __init__(self, held: Held, listing: Listing, worker: int) -> None:
        self.copied_bytes = 0
        self._held, self._listing = held, listing
        self._file = -1
        self._descriptor = -1
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._journal = os.open(held.journal_file(worker), flags, 0o644)

    def write(self, block: int, data: bytes | memoryview) -> None:
        file, start, _ = self._listing.locate(block)
        if file != self._file:
            self._close_file()
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._held.part(file), flags, 0o644)
            self._file = file
        view, done = memoryview(data), 0
        while done < len(view):
            done += os.pwrite(self._descriptor, view[done:], start + done)
        os.write(self._journal, f"{block} {zlib.crc32(data):08x}\n".encode())
        self.copied_bytes += len(view)

    def close(self) -> None:
        self._close_file()
        os.close(self._journal)

    def _close_file(self) -> None:
        """Disks over a network tell only now that they are full."""
        descriptor, self._descriptor, self._file = self._descriptor, -1, -1
        if descriptor >= 0:
            os.close(descriptor)


def copy_runs(
    listing: Listing,
    held: Held,
    runs: Iterable[Run],
    reader: SharedReader,
    writer: BlockWriter,
    after_block: Callable[[int], bool],
) -> None:
    """Copy what one worker was given; `after_block(num_bytes)` says whether to go on."""
    for run in runs:
        for block in range(run.first, run.stop):
            data = reader.read(block)
            writer.write(block, data)
            if not after_block(len(data)):
                return
        file = listing.locate(run.first)[0]
        if range(run.first, run.stop) == listing.blocks_of(file):
            held.finish_file(listing, file)


def _read_all(descriptor: int, start: int, size: int) -> bytes:
    """Less only where the file ends."""
    pieces = []
    while size:
        piece = os.pread(descriptor, size, start)
        if not piece:
            break
        pieces.append(piece)
        start, size = start + len(piece), size - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
