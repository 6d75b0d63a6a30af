"""What a data set consists of, and how the work of copying it is divided.

`list_source` walks the shared path once; the listing and its fingerprint say whether a copy is still
that of the source. Files are counted in blocks, so that several ranks can copy one large file and a
copy that was cut off goes on where it stopped. Called by `run.py`; everything but the walk is pure.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path, PurePosixPath

from ridgeline.data.stage.problem import StageProblem
from ridgeline.errors import UsageError

BLOCK_BYTES = 4 * 2**20
Beat = Callable[[], None]
"""Called again and again by what takes long, so that others see that it goes on."""
_RUNS_A_WORKER = 4
"""A large file is cut so that each worker gets about so many pieces, and the last end together."""


@dataclass(frozen=True)
class SourceFile:
    name: str
    """Relative to the root, with `/`."""
    size: int
    mtime_ns: int
    target: str = ""
    """For a link, the file inside the data set that it stands for."""


@dataclass(frozen=True)
class Listing:
    """Everything in a data set, sorted by name."""

    root: str
    """The real folder on the shared path; of a single file, the folder that it is in."""
    name: str
    """What the data set is called; its copy is called the same."""
    is_file: bool
    files: tuple[SourceFile, ...]
    folders: tuple[tuple[str, int], ...]
    """Name and time of change."""
    links: tuple[tuple[str, str], ...] = ()
    """Links to folders inside the data set, kept as links: name, and the folder's name."""
    block_bytes: int = BLOCK_BYTES

    @cached_property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @cached_property
    def key(self) -> str:
        """The fingerprint of source, names, sizes and times; a copy's folder is called so."""
        digest = hashlib.sha256()
        lines = [f"{self.root}\0{self.name}\0{self.is_file}"]
        lines += [f"f{file.name}\0{file.size}\0{file.mtime_ns}" for file in self.files]
        lines += [f"d{name}" for name, _ in self.folders]
        lines += [f"l{name}\0{target}" for name, target in self.links]
        for line in lines:
            digest.update(line.encode(errors="surrogateescape") + b"\0\n")
        return digest.hexdigest()[:32]

    @cached_property
    def first_blocks(self) -> list[int]:
        """Number of each file's first block, and at the end how many there are."""
        counts = (-(-file.size // self.block_bytes) for file in self.files)
        return list(accumulate(counts, initial=0))

    @property
    def num_blocks(self) -> int:
        return self.first_blocks[-1]

    def blocks_of(self, file: int) -> range:
        return range(self.first_blocks[file], self.first_blocks[file + 1])

    def locate(self, block: int) -> tuple[int, int, int]:
        """File, offset and size of a block."""
        file = bisect_right(self.first_blocks, block) - 1
        start = (block - self.first_blocks[file]) * self.block_bytes
        return file, start, min(self.block_bytes, self.files[file].size - start)

    def bytes_of(self, blocks: Iterable[int]) -> int:
        return sum(self.locate(block)[2] for block in blocks)

    def path_of(self, file: SourceFile) -> Path:
        """Where the bytes are on the shared path."""
        return Path(self.root) / (file.target or file.name)

    def to_json(self) -> str:
        values = [[f.name, f.size, f.mtime_ns, f.target] for f in self.files]
        head = {"root": self.root, "name": self.name, "is_file": self.is_file}
        rest = {"folders": self.folders, "links": self.links, "block_bytes": self.block_bytes}
        return json.dumps({**head, "files": values, **rest})

    @classmethod
    def from_json(cls, text: str) -> Listing:
        """What `to_json` wrote, here or on another node; names are checked again."""
        value = json.loads(text)
        names = [value["name"], *(row[0] for row in value["files"])]
        for name in [*names, *(name for name, _ in (*value["folders"], *value["links"]))]:
            _check_name(name)
        return cls(
            value["root"],
            value["name"],
            value["is_file"],
            tuple(SourceFile(*row) for row in value["files"]),
            tuple((name, time_ns) for name, time_ns in value["folders"]),
            tuple((name, target) for name, target in value["links"]),
            value["block_bytes"],
        )


def list_source(source: Path, block_bytes: int = BLOCK_BYTES, beat: Beat = lambda: None) -> Listing:
    """Everything under `source`, which may be a file; the path itself may be a link, as it was named."""
    real = Path(os.path.realpath(source))
    name = Path(os.path.abspath(source)).name or "root"
    try:
        mode = real.stat().st_mode
    except OSError as error:
        raise UsageError(f"cannot stage {source}: {(error.strerror or '').lower()}") from error
    if stat.S_ISREG(mode):
        found = real.stat()
        target = real.name if real.name != name else ""
        file = SourceFile(name, found.st_size, found.st_mtime_ns, target)
        return Listing(str(real.parent), name, True, (file,), (), (), block_bytes)
    if not stat.S_ISDIR(mode):
        raise UsageError(f"cannot stage {source}: it is neither a file nor a folder")
    walk = _Walk(real, beat)
    walk.enter("")
    return Listing(
        str(real),
        name,
        False,
        tuple(sorted(walk.files, key=lambda file: file.name)),
        tuple(sorted(walk.folders)),
        tuple(sorted(walk.links)),
        block_bytes,
    )


class _Walk:
    """Goes through a tree; links are looked at, never walked along."""

    def __init__(self, root: Path, beat: Beat) -> None:
        self.root, self.beat = root, beat
        self.files: list[SourceFile] = []
        self.folders: list[tuple[str, int]] = []
        self.links: list[tuple[str, str]] = []

    def enter(self, start: str) -> None:
        left = [start]
        while left:
            folder = left.pop()
            try:
                with os.scandir(self.root / folder) as entries:
                    for entry in entries:
                        name = f"{folder}/{entry.name}" if folder else entry.name
                        if self._take(entry, name):
                            left.append(name)
                        self.beat()
            except OSError as error:
                raise StageProblem(f"cannot list {self.root / folder}: {error.strerror}") from error

    def _take(self, entry: os.DirEntry[str], name: str) -> bool:
        """Whether the entry is a folder to be entered."""
        _check_name(name)
        if entry.is_symlink():
            self._take_link(name)
            return False
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            self.folders.append((name, found.st_mtime_ns))
            return True
        if not stat.S_ISREG(found.st_mode):
            raise StageProblem(f"{self.root / name} is neither a file nor a folder nor a link")
        self.files.append(SourceFile(name, found.st_size, found.st_mtime_ns))
        return False

    def _take_link(self, name: str) -> None:
        path = self.root / name
        real = Path(os.path.realpath(path))
        try:
            found = real.stat()
        except OSError as error:
            raise StageProblem(
                f"{path} is a link to {os.readlink(path)}, which is not there"
            ) from error
        if not real.is_relative_to(self.root):
            raise StageProblem(
                f"{path} is a link out of the data set, to {real}; put a copy there instead"
            )
        target = real.relative_to(self.root).as_posix()
        if stat.S_ISDIR(found.st_mode):
            self.links.append((name, target))
        elif stat.S_ISREG(found.st_mode):
            self.files.append(SourceFile(name, found.st_size, found.st_mtime_ns, target))
        else:
            raise StageProblem(f"{path} is a link to what is neither a file nor a folder")


def _check_name(name: str) -> None:
    """A name from a listing is joined to a folder of ours, and has to stay in there."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise StageProblem(f"{name!r} is no name for a file of a data set")


@dataclass(frozen=True)
class Run:
    """Blocks of one file in a row: first up to, not including, stop."""

    first: int
    stop: int


def plan_workers(listing: Listing, missing: Sequence[int], num_workers: int) -> list[list[Run]]:
    """Which worker copies which blocks: the largest pieces first, each to the one with least to do."""
    total = listing.bytes_of(missing)
    largest = max(1, -(-total // (num_workers * _RUNS_A_WORKER * listing.block_bytes)))
    runs = [
        Run(start, min(start + largest, run.stop))
        for run in _runs(listing, missing)
        for start in range(run.first, run.stop, largest)
    ]
    sized = [(listing.bytes_of(range(run.first, run.stop)), run) for run in runs]
    sized.sort(key=lambda pair: (-pair[0], pair[1].first))
    loads = [(0, worker) for worker in range(num_workers)]
    work: list[list[Run]] = [[] for _ in range(num_workers)]
    for size, run in sized:
        load, worker = heapq.heappop(loads)
        work[worker].append(run)
        heapq.heappush(loads, (load + size, worker))
    for mine in work:
        mine.sort(key=lambda run: run.first)
    return work


def _runs(listing: Listing, blocks: Sequence[int]) -> list[Run]:
    """Blocks in ascending order as runs that do not reach over the end of a file."""
    runs: list[Run] = []
    starts = set(listing.first_blocks)
    for block in blocks:
        if runs and runs[-1].stop == block and block not in starts:
            runs[-1] = Run(runs[-1].first, block + 1)
        else:
            runs.append(Run(block, block + 1))
    return runs


@dataclass(frozen=True)
class Sending:
    """Blocks that one node sends to all others in one message."""

    node: int
    blocks: tuple[int, ...]
    size: int


def plan_sendings(
    listing: Listing, wants: Sequence[set[int]], has: Sequence[set[int]]
) -> list[Sending]:
    """Each block that some node wants, sent by one: by one that has it, else whoever reads least.

    `wants` and `has` are by node. Nodes take turns, so that all of them read at the same time.
    """
    load = [0] * len(wants)
    queues: list[list[tuple[list[int], int]]] = [[] for _ in wants]
    for block in sorted(set().union(*wants)):
        size = listing.locate(block)[2]
        owners = [node for node, blocks in enumerate(has) if block in blocks]
        node = min(owners or range(len(wants)), key=lambda node: (load[node], node))
        load[node] += size
        queue = queues[node]
        if queue and queue[-1][1] + size <= listing.block_bytes:
            queue[-1] = (queue[-1][0], queue[-1][1] + size)
            queue[-1][0].append(block)
        else:
            queue.append(([block], size))
    turns = max((len(queue) for queue in queues), default=0)
    return [
        Sending(node, tuple(queue[turn][0]), queue[turn][1])
        for turn in range(turns)
        for node, queue in enumerate(queues)
        if turn < len(queue)
    ]
