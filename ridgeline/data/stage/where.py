"""The disk of this node: which folder a copy goes to, and why each of the others was not taken.

The file system decides, not the name: `$TMPDIR` is on the shared path of many machines. A folder that
holds the copy already is taken before one with room. Called by `run.py` and by the commands.
"""

from __future__ import annotations

import glob
import os
import pwd
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.data.stage.problem import StageProblem
from ridgeline.launch.env import local_storage_variables

AUTO = "auto"
MARGIN = 1.05
"""Files take whole blocks of the disk, and folders take room too."""
MARGIN_BYTES = 2**20
_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = ("tmpfs", "ramfs")
_LOCAL = (
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs"),
    *("overlay", *_IN_MEMORY),
)
_PATTERNS = ("/local*", "/scratch/local", "/lscratch", "/nvme*", "/mnt/nvme*")
_SYSTEM = ("/boot", "/etc", "/usr", "/home", "/var", "/proc", "/sys", "/dev", "/run", "/opt")


@dataclass(frozen=True)
class Mount:
    point: str
    kind: str
    """Type of the file system."""
    device: str


@dataclass(frozen=True)
class Candidate:
    """A folder that was looked at."""

    name: str
    """What it was found by: a variable or a pattern."""
    path: Path
    taken: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.path}): {self.reason}"


def read_mounts(table: Path = _MOUNTS) -> list[Mount]:
    """What is mounted where, in the order it was mounted; nothing where the system has no such table."""
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    mounts = []
    for line in lines:
        before, _, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if len(left) > 4 and len(right) > 1:
            mounts.append(Mount(_unescaped(left[4]), right[0], right[1]))
    return mounts


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The file system that a path is on: the longest mount point, of equal ones the last."""
    real = Path(os.path.realpath(path))
    best: Mount | None = None
    for mount in mounts:
        if real.is_relative_to(mount.point) and (
            best is None or len(mount.point) >= len(best.point)
        ):
            best = mount
    return best


def free_bytes(path: Path) -> int:
    """Room for somebody who is not root."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def needed_bytes(num_bytes: int, num_files: int) -> int:
    """What copies take on a disk, with a margin."""
    return int((num_bytes + num_files * 4096) * MARGIN) + MARGIN_BYTES if num_bytes else 0


def check_room(path: Path, num_bytes: int, num_files: int, times: int = 1) -> str:
    """Why it does not fit, or nothing."""
    room, need = free_bytes(path), times * needed_bytes(num_bytes, num_files)
    if room < need:
        twice = " (twice the data, as it is memory)" if times == 2 else ""
        return f"has room for {human_bytes(room)} and needs {human_bytes(need)}{twice}"
    found = os.statvfs(path)
    if found.f_files and found.f_favail < num_files:
        return f"has room for {found.f_favail} more files and needs {num_files}"
    return ""


def candidates(mounts: Sequence[Mount]) -> list[tuple[str, Path]]:
    """Folders that may be node-local, best first, with what each was found by."""
    found = [(f"${name}", Path(value)) for name, value in local_storage_variables()]
    for pattern in _PATTERNS:
        found += [(pattern, Path(path)) for path in sorted(glob.glob(pattern))]
    for mount in mounts:
        point = Path(mount.point)
        system = point == Path("/") or any(point.is_relative_to(folder) for folder in _SYSTEM)
        if mount.device.startswith("/dev/nvme") and not system:
            found.append((mount.device, point))
    found.append(("/dev/shm", Path("/dev/shm")))
    seen: set[Path] = set()
    return [one for one in found if one[1] not in seen and not seen.add(one[1])]  # type: ignore[func-returns-value]


def look(
    found: Sequence[tuple[str, Path]],
    mounts: Sequence[Mount],
    lacks: Callable[[Path, int], str],
    has_copy: Callable[[Path], bool],
) -> list[Candidate]:
    """Every candidate with its verdict; at most one is taken.

    `lacks(path, times)` says why the data do not fit into a folder, `times` over; `has_copy` whether
    they are there already.
    """
    judged: list[tuple[str, Path, str, int]] = []
    for name, given in found:
        path, reason = _usable(given)
        mount = mount_of(path, mounts)
        kind = mount.kind if mount is not None else "unknown"
        if not reason and kind not in _LOCAL:
            reason = f"is on {kind}, which is not known to be of this node alone"
        judged.append((name, path, reason, 2 if kind in _IN_MEMORY else 1))
    holder = next((path for _, path, reason, _ in judged if not reason and has_copy(path)), None)
    result: list[Candidate] = []
    taken = False
    for name, path, reason, times in judged:
        good = "holds a copy already" if path == holder else "node-local, writable, with room"
        if not reason and path != holder:
            reason = "not needed" if holder or taken else lacks(path, times)
        takes = not reason and not taken
        taken = taken or takes
        result.append(Candidate(name, path, takes, good if takes else reason or "not needed"))
    return result


def given_folder(where: Path) -> Path:
    """A folder that the user named; made if only its last part is missing."""
    try:
        where.mkdir(exist_ok=True)
    except OSError as error:
        raise StageProblem(f"cannot make the folder {where}: {error.strerror}") from error
    if not os.access(where, os.W_OK | os.X_OK):
        raise StageProblem(f"{where} is not writable")
    return where


def choose(
    where: str | Path,
    lacks: Callable[[Path, int], str],
    has_copy: Callable[[Path], bool],
) -> Candidate:
    """The folder to use, for `auto` or a path; the reasons of all others when there is none."""
    mounts = read_mounts()
    if str(where) != AUTO:
        path = given_folder(Path(where))
        mount = mount_of(path, mounts)
        local = mount is not None and mount.kind in _LOCAL
        kind = mount.kind if mount is not None else "unknown"
        reason = "" if has_copy(path) else lacks(path, 1)
        if reason:
            raise StageProblem(f"{path} {reason}")
        note = "" if local else f"; it is on {kind}, which may not be of this node alone"
        return Candidate("--to or data.stage", path, True, f"given{note}")
    looked = look(candidates(mounts), mounts, lacks, has_copy)
    for candidate in looked:
        if candidate.taken:
            return candidate
    raise StageProblem(
        "no folder of this node takes the data: "
        + "; ".join(map(str, looked))
        + "; name one instead of auto"
    )


def _usable(path: Path) -> tuple[Path, str]:
    """The folder, or the user's own inside it, and why neither can be written to."""
    if not path.is_absolute():
        return path, "is not an absolute path"
    if not path.is_dir():
        return path, "is not a folder"
    for folder in (path, path / user_name()):
        if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return folder, ""
    return path, "is not writable"


def user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may not know its user
        return str(os.getuid())


def _unescaped(text: str) -> str:
    """The table writes blanks in octal."""
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, letter)
    return text


def human_bytes(num_bytes: float) -> str:
    """Decimal units, as disks are sold.

    >>> human_bytes(1_234_567_890)
    '1.2 GB'
    """
    value, unit = float(num_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 999.5 or unit == "PB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"
