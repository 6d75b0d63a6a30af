"""Which file system a path is on: its type and options, whether it is local, the disk under it.

The kernel tells all of it in /proc/self/mountinfo and /sys, without rights and without a command. Called
by `storage.py` before anything is measured; imports without torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

# Types as the kernel spells them. What is in neither set is `unknown`, which is said, not guessed.
LOCAL_TYPES = frozenset(
    {
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "jfs",
        "vfat",
        "exfat",
        "ntfs3",
        "bcachefs",
    }
)
MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
NETWORK_TYPES = frozenset(
    {
        "lustre",
        "nfs",
        "nfs4",
        "gpfs",
        "beegfs",
        "fhgfs",
        "ceph",
        "wekafs",
        "panfs",
        "pvfs2",
        "orangefs",
    }
    | {
        "cifs",
        "smb3",
        "glusterfs",
        "afs",
        "9p",
        "virtiofs",
        "daos",
        "vast",
        "quobyte",
        "gfs2",
        "ocfs2",
    }
)
# A file system in user space says only who serves it: `fuse.sshfs`. These go over a network.
NETWORK_FUSE = frozenset(
    {
        "sshfs",
        "ceph",
        "ceph-fuse",
        "glusterfs",
        "s3fs",
        "goofys",
        "gcsfuse",
        "juicefs",
        "daos",
        "dfuse",
    }
    | {"mountpoint-s3", "rclone", "quobyte", "blobfuse2"}
)


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    device_number: str
    """`major:minor`; major 0 is no disk."""
    point: str
    options: tuple[str, ...]
    """Those of the mount and those of the file system, each once."""
    fs_type: str
    source: str

    @property
    def kind(self) -> str:
        return kind_of(self.fs_type)


NO_MOUNT = Mount("", "", (), "unknown", "")


def kind_of(fs_type: str) -> str:
    """`local`, `network`, `memory`, or `unknown`.

    >>> kind_of("ext4"), kind_of("lustre"), kind_of("fuse.sshfs"), kind_of("tmpfs"), kind_of("overlay")
    ('local', 'network', 'network', 'memory', 'unknown')
    """
    if fs_type in MEMORY_TYPES:
        return "memory"
    if fs_type in LOCAL_TYPES:
        return "local"
    if fs_type in NETWORK_TYPES or fs_type.removeprefix("fuse.") in NETWORK_FUSE:
        return "network"
    return "unknown"


def parse_mountinfo(text: str) -> list[Mount]:
    """Every mount of the text, in its order; lines that are no mounts are passed over.

    The format is proc(5)'s: `id parent major:minor root point options [tags] - type source options`.
    """
    mounts = []
    for line in text.splitlines():
        before, found, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if not found or len(left) < 6 or len(right) < 2:
            continue
        options = [*left[5].split(","), *(right[2].split(",") if len(right) > 2 else ())]
        mounts.append(
            Mount(
                device_number=left[2],
                point=_unescaped(left[4]),
                options=tuple(dict.fromkeys(option for option in options if option)),
                fs_type=right[0],
                source=_unescaped(right[1]),
            )
        )
    return mounts


def _unescaped(text: str) -> str:
    """Spaces, tabs, line ends and backslashes stand as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def mount_of(path: Path, mounts: list[Mount]) -> Mount:
    """The mount that a resolved path is on: the longest point above it, and of several on the same
    point the last, which hides the others."""
    best = NO_MOUNT
    for mount in mounts:
        if path.is_relative_to(mount.point) and len(mount.point) >= len(best.point):
            best = mount
    return best


def find_mount(path: Path) -> Mount:
    """The mount under `path` now; where the kernel does not say, one of type `unknown`."""
    try:
        # Names are bytes to the kernel; what is no UTF-8 is carried along as `os` does it.
        text = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
    except OSError:
        return NO_MOUNT
    return mount_of(path.resolve(), parse_mountinfo(text))


def find_disk(device_number: str, sys: Path = Path("/sys")) -> tuple[str, bool | None]:
    """The disk's name and whether it rotates; ("", None) where no disk is under it.

    A partition has no queue of its own: its disk is the folder above.
    """
    if not device_number or device_number.startswith("0:"):
        return "", None
    try:
        folder = (sys / "dev" / "block" / device_number).resolve(strict=True)
        disk = folder if (folder / "queue").is_dir() else folder.parent
        text = (disk / "queue" / "rotational").read_text().strip()
    except OSError:
        return "", None
    return disk.name, text == "1"
