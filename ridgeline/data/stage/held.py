"""One copy on the node's disk: its files, its lock, its users, and the record that says it is whole.

    BASE/ridgeline-stage-UID/KEY.lock
    BASE/ridgeline-stage-UID/KEY/data/NAME...   the copy itself
                                 parts/         files that are not whole yet
                                 journal/       blocks that were written, with their CRC32
                                 listing.json users.json keep record.json

The lock is the kernel's, so it ends with the process that holds it. The record is written last. Called
by `run.py`, and by the commands that list and clean.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ridgeline.data.stage.crc import combine
from ridgeline.data.stage.plan import Beat, Listing
from ridgeline.data.stage.problem import StageProblem
from ridgeline.data.stage.users import User, alive, this_boot
from ridgeline.launch.ranks import write_aside

_RECORD, _LISTING, _USERS, _KEEP = "record.json", "listing.json", "users.json", "keep"
_GONE = ".gone"
_PIECE_BYTES = 4 * 2**20
_JOURNAL_LINE = re.compile(rb"^([0-9]{1,18}) ([0-9a-f]{8})\n", re.MULTILINE)


def base_folder(where: Path) -> Path:
    """Where this user's copies are on a disk."""
    return where / f"ridgeline-stage-{os.getuid()}"


def make_private(folder: Path) -> Path:
    """A folder of nobody else, also where everybody may make folders."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StageProblem(f"{folder} is there already and belongs to somebody else")
    return folder


class Held:
    """The copy with one fingerprint under one base folder."""

    def __init__(self, base: Path, key: str) -> None:
        self.base, self.key = base, key
        self.folder = base / key

    # Files.

    def root(self, listing: Listing) -> Path:
        """What stands for `listing.root`."""
        return self.folder / "data" if listing.is_file else self.folder / "data" / listing.name

    def path(self, listing: Listing) -> Path:
        """What stands for the source."""
        return self.folder / "data" / listing.name

    def part(self, file: int) -> Path:
        return self.folder / "parts" / f"{file:08d}.part"

    def journal_file(self, worker: int) -> Path:
        return self.folder / "journal" / f"{worker}-{os.getpid()}-{time.time_ns()}"

    def finish_file(self, listing: Listing, file: int) -> None:
        """A file with all its blocks gets its time and its name."""
        one, part = listing.files[file], self.part(file)
        if part.stat().st_size != one.size:
            raise StageProblem(f"{part} has {part.stat().st_size} bytes instead of {one.size}")
        os.utime(part, ns=(one.mtime_ns, one.mtime_ns))
        part.replace(self.root(listing) / one.name)

    # The lock.

    @contextmanager
    def locked(self, wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Nobody else changes the copy meanwhile; `wait` is called until it is free."""
        descriptor = self._take_lock(wait or (lambda: time.sleep(0.02)))
        assert descriptor is not None
        try:
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def locked_if_free(self) -> Iterator[bool]:
        """Whether nobody else held it; if so, it is held meanwhile."""
        descriptor = self._take_lock(None)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    @property
    def _lock_file(self) -> Path:
        return self.base / f"{self.key}.lock"

    def _take_lock(self, wait: Callable[[], None] | None) -> int | None:
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._lock_file, flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_lock(descriptor):
                    return descriptor
                os.close(descriptor)  # it was removed by the one who had it; there is a new one
            except BlockingIOError:
                os.close(descriptor)
                if wait is None:
                    return None
                wait()
            except OSError as error:
                os.close(descriptor)
                raise StageProblem(f"cannot lock {self._lock_file}: {error.strerror}") from error

    def _is_lock(self, descriptor: int) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self._lock_file))
        return False

    # Whole or not. Everything from here on is called under the lock.

    def record(self) -> dict[str, Any] | None:
        with suppress(OSError, ValueError):
            value = json.loads((self.folder / _RECORD).read_text(encoding="utf-8"))
            return value if isinstance(value, dict) else None
        return None

    def check(
        self, listing: Listing, every_byte: bool = False, beat: Beat = lambda: None
    ) -> list[str]:
        """What is wrong with a copy that has a record: sizes, and on demand the CRC32 of each file."""
        record, problems = self.record(), []
        if record is None or record.get("key") != listing.key:
            return ["it has no record"]
        for file, crc in zip(listing.files, record["crcs"], strict=True):
            path = self.root(listing) / file.name
            beat()
            try:
                size = path.lstat().st_size
            except OSError:
                problems.append(f"{path} is gone")
                continue
            if size != file.size:
                problems.append(f"{path} has {size} bytes instead of {file.size}")
            elif every_byte and _crc_of(path, beat) != crc:
                problems.append(f"{path} does not have the CRC32 that was copied")
        return problems

    def was_of_this_boot(self) -> bool:
        return (self.record() or {}).get("boot") == this_boot()

    def prepare(self, listing: Listing, beat: Beat = lambda: None) -> dict[int, int]:
        """Make or go on with a copy that is not whole. The blocks that are there, read again, with
        their CRC32."""
        for folder in ("parts", "journal", "data"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        self.root(listing).mkdir(exist_ok=True)
        for name, _ in listing.folders:
            (self.root(listing) / name).mkdir(parents=True, exist_ok=True)
        write_aside(self.folder / _LISTING, listing.to_json())
        journals = list((self.folder / "journal").iterdir())
        there = {}
        for block, crc in self.journaled().items():
            if block < listing.num_blocks and self._has(listing, block, crc):
                there[block] = crc
            beat()
        self._take_names_back(listing, there, beat)
        text = "".join(f"{block} {crc:08x}\n" for block, crc in there.items())
        self.journal_file(0).write_text(text)
        for journal in journals:
            journal.unlink()
        return there

    def journaled(self) -> dict[int, int]:
        """Blocks and CRC32 of all journals; a line that was cut off or damaged is passed over."""
        found: dict[int, int] = {}
        for path in sorted((self.folder / "journal").iterdir()):
            for block, crc in _JOURNAL_LINE.findall(path.read_bytes()):
                found[int(block)] = int(crc, 16)
        return found

    def _take_names_back(self, listing: Listing, there: dict[int, int], beat: Beat) -> None:
        """A file that has its name and yet is not whole becomes a part again; it would be passed over."""
        for number, file in enumerate(listing.files):
            whole, part = self.root(listing) / file.name, self.part(number)
            with suppress(FileNotFoundError):
                size = whole.stat().st_size
                if size != file.size or any(b not in there for b in listing.blocks_of(number)):
                    whole.replace(part)
            with suppress(FileNotFoundError):
                if part.stat().st_size > file.size:
                    os.truncate(part, file.size)
            beat()

    def journal_bytes(self) -> int:
        """Grows with every block, whoever copies it."""
        with suppress(OSError):
            return sum(path.stat().st_size for path in (self.folder / "journal").iterdir())
        return 0

    def _has(self, listing: Listing, block: int, crc: int) -> bool:
        with suppress(OSError):
            return zlib.crc32(self.read(listing, block)) == crc
        return False

    def read(self, listing: Listing, block: int) -> bytes:
        """A block of the copy itself."""
        file, start, size = listing.locate(block)
        whole = self.root(listing) / listing.files[file].name
        with (whole if whole.exists() else self.part(file)).open("rb", buffering=0) as opened:
            opened.seek(start)
            return opened.read(size) or b""

    def finish(self, listing: Listing) -> None:
        """Names for all files, sizes checked, and the record last."""
        crcs, blocks = [], self.journaled()
        root = self.root(listing)
        for number, file in enumerate(listing.files):
            if not file.size:
                self.part(number).touch()
            if not (root / file.name).exists():
                self.finish_file(listing, number)
            sizes = [listing.locate(block)[2] for block in listing.blocks_of(number)]
            try:
                parts = [blocks[block] for block in listing.blocks_of(number)]
            except KeyError:
                raise StageProblem(f"{file.name} was not copied as a whole") from None
            crcs.append(combine(zip(parts, sizes, strict=True)))
        for name, target in listing.links:
            link = root / name
            if not link.is_symlink():
                link.symlink_to(os.path.relpath(root / target, link.parent))
        for name, time_ns in reversed(listing.folders):
            os.utime(root / name, ns=(time_ns, time_ns))
        record = {
            "key": listing.key,
            "source": str(Path(listing.root) / listing.name) if listing.is_file else listing.root,
            "path": str(self.path(listing)),
            "num_bytes": listing.total_bytes,
            "num_files": len(listing.files),
            "time": time.time(),
            "boot": this_boot(),
            "crcs": crcs,
        }
        write_aside(self.folder / _RECORD, json.dumps(record))
        problems = self.check(listing)
        if problems:
            (self.folder / _RECORD).unlink()
            raise StageProblem(problems[0])
        shutil.rmtree(self.folder / "parts")
        shutil.rmtree(self.folder / "journal")

    # Users.

    def disk_bytes(self) -> int:
        """What it takes on the disk; files with holes take less than they are long. Also while somebody
        else is at work in it, and files come and go."""
        total = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                with suppress(OSError):
                    total += os.lstat(os.path.join(folder, name)).st_blocks * 512
        return total

    def listing(self) -> Listing:
        return Listing.from_json((self.folder / _LISTING).read_text(encoding="utf-8"))

    def users(self) -> list[User]:
        """Those alive."""
        with suppress(OSError, ValueError, TypeError):
            values = json.loads((self.folder / _USERS).read_text(encoding="utf-8"))
            return alive(User(**value) for value in values)
        return []

    def add_users(self, users: Iterable[User], keep: bool) -> None:
        if keep:
            (self.folder / _KEEP).touch()
        self._write_users([*self.users(), *users])

    def leave(self, user: User) -> bool:
        """One user less; the last one takes the copy away, unless it is to be kept. Whether it did."""
        if not self.folder.is_dir():
            return False
        left = self.users()
        if user in left:
            left.remove(user)
        self._write_users(left)
        if left or self.is_kept():
            return False
        self.remove()
        return True

    def is_kept(self) -> bool:
        return (self.folder / _KEEP).exists()

    def remove(self) -> None:
        """All of it; what cannot be removed at once is no longer found under its name."""
        aside = self.base / f"{self.key}{_GONE}-{os.getpid()}-{time.time_ns()}"
        with suppress(FileNotFoundError):
            self.folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        self._lock_file.unlink(missing_ok=True)

    def clear(self) -> None:
        """Begin again under the same lock."""
        shutil.rmtree(self.folder)

    def _write_users(self, users: Iterable[User]) -> None:
        write_aside(self.folder / _USERS, json.dumps([asdict(user) for user in users]))


def copies(base: Path) -> list[Held]:
    """Every copy under a base folder, whole or not."""
    if not base.is_dir():
        return []
    folders = [path for path in base.iterdir() if path.is_dir() and "." not in path.name]
    return [Held(base, path.name) for path in sorted(folders)]


def remove_leftovers(base: Path, but: str = "", kept: bool = False) -> list[str]:
    """Take away copies that nobody uses, except that of the key `but` and those to be kept (or, with
    `kept`, also these); what a killed process was in the middle of removing goes too. Their keys."""
    removed = []
    for held in copies(base):
        if held.key == but:
            continue
        with held.locked_if_free() as free:
            if free and not held.users() and (kept or not held.is_kept()):
                held.remove()
                removed.append(held.key)
    for path in base.glob(f"*{_GONE}-*"):
        shutil.rmtree(path, ignore_errors=True)
    return removed


def _crc_of(path: Path, beat: Beat) -> int:
    crc = 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(_PIECE_BYTES):
            crc = zlib.crc32(data, crc)
            beat()
    return crc
