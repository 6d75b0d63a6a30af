"""Storage: what is read of mounts and quotas, what is measured, what is said of it, what is left behind."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ridgeline import cli
from ridgeline.cli_machine import parse_size
from ridgeline.errors import UsageError
from ridgeline.facts import QuotaFacts, StorageFacts, facts_from_dict
from ridgeline.machine import disk_io, storage
from ridgeline.machine.mount import find_disk, find_mount, kind_of, mount_of, parse_mountinfo
from ridgeline.machine.quota import find_quotas, parse_lfs_quota, parse_quota
from ridgeline.machine.record import add_storage
from ridgeline.machine.storage import Amounts, describe_storage, fit_amounts, measure_storage
from ridgeline.machine.verdict import GOOD, POOR, UNKNOWN, judge

ROOT = Path(__file__).resolve().parents[2]
MIB, GIB = 2**20, 2**30
TINY = Amounts(size_bytes=8 * MIB, num_files=20, num_threads=2, num_small=5, budget_s=2.0)
FIGURES = [f.name for f in dataclasses.fields(StorageFacts) if "_per_s" in f.name]


def invented(**values: object) -> StorageFacts:
    """A file system that is good for everything but what `values` say."""
    facts = StorageFacts(
        path="/scratch",
        host="node1",
        time=1000.0,
        fs_type="lustre",
        kind="network",
        mount_point="/scratch",
        mount_source="10.0.0.1@o2ib:/scratch",
        mount_options=("rw", "flock"),
        device="",
        rotational=None,
        total_bytes=100 * GIB,
        free_bytes=80 * GIB,
        num_inodes=1_000_000,
        num_free_inodes=900_000,
        quotas=(QuotaFacts("user", 5 * GIB, 50 * GIB, 1000, 200_000, "lfs quota -u"),),
        write_bytes_per_s=1e9,
        read_bytes_per_s=1e9,
        threads_read_bytes_per_s=4e9,
        create_files_per_s=2000.0,
        stat_files_per_s=50_000.0,
        read_files_per_s=5000.0,
        random_reads_per_s=2000.0,
        notes=("one",),
        problems=("two",),
    )
    return dataclasses.replace(facts, **values)  # type: ignore[arg-type]


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts file systems in memory, where that is permitted."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        path = tmp_path / f"mount{len(mounted)}"
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True
        )
        if done.returncode:
            pytest.skip("mounting is not permitted here")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


# ---- mounts

MOUNTINFO = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
40 27 0:40 / /home rw,nosuid shared:21 master:3 - nfs4 10.1.1.1:/Home rw,vers=4.2,hard,proto=tcp
41 27 0:41 / /mnt/lustre rw - lustre 10.0.0.1@o2ib:10.0.0.2@o2ib:/scratch rw,flock,lazystatfs
42 41 0:42 / /mnt/lustre/my\040data rw - fuse.sshfs me@far:/data rw,user_id=1000
43 27 0:43 / /tmp rw - ext4 /dev/sdb1 rw
44 27 0:44 / /tmp rw,nodev - tmpfs tmpfs rw,size=1024k
no mount at all
"""


@pytest.mark.parametrize(
    ("path", "fs_type", "kind", "source"),
    [
        ("/etc", "ext4", "local", "/dev/nvme0n1p2"),
        ("/home/me/env", "nfs4", "network", "10.1.1.1:/Home"),
        ("/homes", "ext4", "local", "/dev/nvme0n1p2"),
        ("/mnt/lustre/a", "lustre", "network", "10.0.0.1@o2ib:10.0.0.2@o2ib:/scratch"),
        ("/mnt/lustre/my data/x", "fuse.sshfs", "network", "me@far:/data"),
        ("/tmp/x", "tmpfs", "memory", "tmpfs"),
    ],
)
def test_a_path_is_on_the_mount_above_it(path: str, fs_type: str, kind: str, source: str) -> None:
    mount = mount_of(Path(path), parse_mountinfo(MOUNTINFO))
    assert (mount.fs_type, mount.kind, mount.source) == (fs_type, kind, source)


def test_mount_options_are_of_the_mount_and_of_the_file_system() -> None:
    mounts = {mount.point: mount for mount in parse_mountinfo(MOUNTINFO)}
    assert len(mounts) == 6
    assert mounts["/home"].options == ("rw", "nosuid", "vers=4.2", "hard", "proto=tcp")
    assert mounts["/"].device_number == "259:2"


@pytest.mark.parametrize("fs_type", ["lustre", "nfs", "gpfs", "beegfs", "ceph", "wekafs", "cifs"])
def test_network_file_systems(fs_type: str) -> None:
    assert kind_of(fs_type) == "network"


@pytest.mark.parametrize("fs_type", ["overlay", "fuse.own", "", "new"])
def test_what_is_not_known_is_not_guessed(fs_type: str) -> None:
    assert kind_of(fs_type) == "unknown"


def test_a_partition_has_the_disk_above_it(tmp_path: Path) -> None:
    partition = tmp_path / "devices" / "nvme0n1" / "nvme0n1p2"
    partition.mkdir(parents=True)
    queue = partition.parent / "queue"
    queue.mkdir()
    links = tmp_path / "dev" / "block"
    links.mkdir(parents=True)
    (links / "259:2").symlink_to(partition)
    for text, rotates in (("0\n", False), ("1\n", True)):
        (queue / "rotational").write_text(text)
        assert find_disk("259:2", tmp_path) == ("nvme0n1", rotates)
    assert find_disk("0:41", tmp_path) == ("", None)
    assert find_disk("8:1", tmp_path) == ("", None)


def test_this_mount_is_found(tmp_path: Path) -> None:
    mount = find_mount(tmp_path)
    assert tmp_path.resolve().is_relative_to(mount.point)
    assert mount.fs_type not in ("", "unknown")


# ---- quotas

QUOTA = """Disk quotas for user me (uid 1001):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
      /dev/sda5  109452* 102400  122880   6days   12345   20000   25000
10.117.49.201:/Home_FT2
                 8157184  10245120 10485760           48959  102400  103424
server:/pool    1048576       0       0               7       0       0
"""
QUOTA_HUMAN = """Disk quotas for user me (uid 6215):
     Filesystem   space   quota   limit   grace   files   quota   limit   grace
    /nfs_global    479G   5120G   7168G            352k   5000k  10000k
"""
QUOTA_RAW_GRACE = """Disk quotas for user me (uid 1001):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
      /dev/sda5     100     200     300       0      10      20      30       0
"""
LFS = """Disk quotas for usr me (uid 1001):
      Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
        /lustre7 982177580       0 1000000000       - 443208       0 500000       -
uid 1001 is using default file quota setting
"""
LFS_LONG = """Disk quotas for grp ours (gid 2001):
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
/mnt/lustre/scratch/nlsas
                [13212057*] 3145728 3670016 6d23h56m44s   86665  200000  240000       -
Some errors happened when getting quota info. Some devices may be not working or deactivated. \
The data in "[]" is inaccurate.
"""


def test_quota_rows_are_found_by_file_system() -> None:
    kib = 1024
    assert parse_quota(QUOTA, "/dev/sda5") == (
        *(109452 * kib, 102400 * kib, 122880 * kib),
        *(12345, 20000, 25000),
    )
    assert parse_quota(QUOTA, "10.117.49.201:/Home_FT2") == (
        *(8157184 * kib, 10245120 * kib, 10485760 * kib),
        *(48959, 102400, 103424),
    )
    assert parse_quota(QUOTA, "/dev/sda") is None
    assert parse_quota("Disk quotas for user me (uid 1000): none\n", "/dev/sda5") is None
    assert parse_quota("", "/dev/sda5") is None


def test_quota_with_units_and_with_raw_grace_times() -> None:
    assert parse_quota(QUOTA_HUMAN, "/nfs_global") == (
        *(479 * GIB, 5120 * GIB, 7168 * GIB),
        *(352_000, 5_000_000, 10_000_000),
    )
    expected = (100 * 1024, 200 * 1024, 300 * 1024, 10, 20, 30)
    assert parse_quota(QUOTA_RAW_GRACE, "/dev/sda5") == expected


def test_lfs_quota() -> None:
    assert parse_lfs_quota(LFS) == (982177580 * 1024, 0, 1000000000 * 1024, 443208, 0, 500000)
    assert parse_lfs_quota(LFS_LONG) == (
        *(13212057 * 1024, 3145728 * 1024, 3670016 * 1024),
        *(86665, 200000, 240000),
    )
    assert parse_lfs_quota("lfs quota: '/home/me' not on a mounted Lustre filesystem\n") is None


def test_quotas_of_lustre_are_asked_for_user_and_group() -> None:
    asked: list[list[str]] = []

    def run(command: list[str]) -> str:
        asked.append(command)
        return LFS if "-u" in command else LFS_LONG

    lustre = mount_of(Path("/mnt/lustre/a"), parse_mountinfo(MOUNTINFO))
    user, group = find_quotas(lustre, run)
    assert all(command[:2] == ["lfs", "quota"] for command in asked)
    assert all(command[-1] == "/mnt/lustre" for command in asked)
    assert (user.owner, user.limit_bytes, user.num_files_left) == (
        *("user", 1000000000 * 1024),
        500000 - 443208,
    )
    # Over its soft limit already: nothing is left of it.
    assert (group.owner, group.free_bytes) == ("group", 0)


def test_no_limit_is_no_quota() -> None:
    mount = dataclasses.replace(parse_mountinfo(MOUNTINFO)[1], source="server:/pool")
    assert find_quotas(mount, lambda _: QUOTA) == ()
    (quota,) = find_quotas(dataclasses.replace(mount, source="/dev/sda5"), lambda _: QUOTA)
    assert quota.source == "quota"


# ---- facts


def test_facts_come_back_from_json() -> None:
    facts = invented()
    text = json.dumps({**facts.to_dict(), "of_a_newer_version": 1})
    assert facts_from_dict(StorageFacts, json.loads(text)) == facts


def test_room_is_what_file_system_and_quota_both_leave() -> None:
    assert invented().room_bytes == 45 * GIB
    assert invented(quotas=()).room_bytes == 80 * GIB
    assert invented(free_bytes=GIB).room_bytes == GIB
    assert invented().room_files == 199_000
    assert invented(quotas=(), num_free_inodes=None).room_files is None


# ---- how much is measured


def test_amounts_fit_into_a_quarter_of_the_room() -> None:
    asked = Amounts(size_bytes=GIB, num_files=2000)
    assert fit_amounts(invented(), asked) == (asked, ())
    fitted, notes = fit_amounts(invented(free_bytes=100 * MIB, num_free_inodes=1000), asked)
    assert fitted.size_bytes == 24 * MIB
    assert fitted.num_files == 250
    assert "24 MiB instead of 1024" in notes[0]
    assert "250 small files instead of 2000" in notes[1]


def test_no_room_is_refused() -> None:
    with pytest.raises(UsageError, match=r"/scratch has 8.0 MiB left.*at least 4 MiB; remove"):
        fit_amounts(invented(free_bytes=8 * MIB), Amounts())
    with pytest.raises(UsageError, match=r"/scratch has room for 40 files more.*remove"):
        fit_amounts(invented(num_free_inodes=40), Amounts())
    full = QuotaFacts("user", 50 * GIB, 50 * GIB, 0, None, "quota")
    with pytest.raises(UsageError, match=r"0.0 MiB left"):
        fit_amounts(invented(quotas=(full,)), Amounts())


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64M", 64 * MIB), ("1.5 GiB", 3 * GIB // 2), ("2gb", 2 * GIB)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--size") == size


@pytest.mark.parametrize("text", ["", "much", "-1G", "0", "1 GiB more", "GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match=r"in --size is no size; write it as 512MiB"):
        parse_size(text, "--size")


# ---- measuring


def test_everything_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    said: list[tuple[str, float]] = []
    facts = measure_storage(tmp_path, TINY, lambda what, share: said.append((what, share)))
    assert facts.problems == ()
    if facts.uncached_by != disk_io.DIRECT:
        pytest.skip("the file system of the tests has no O_DIRECT")
    assert all(getattr(facts, name) > 0 for name in FIGURES)
    assert 0 < facts.sync_write_median_s <= facts.sync_write_p99_s
    assert (facts.size_bytes, facts.num_files, facts.num_threads) == (8 * MIB, 20, 2)
    assert list(tmp_path.iterdir()) == []
    shares = [share for _, share in said]
    assert shares == sorted(shares)
    assert said[-1] == ("done", 1.0)
    assert {what for what, _ in said} >= {what for what, _, _ in storage.MEASUREMENTS}


def test_a_bar_is_not_drawn_after_each_read() -> None:
    told: list[float] = []
    advance = storage._advance_of(0, "random reads", lambda _, share: told.append(share))
    for count in range(1000):
        advance(count / 1000)
    assert 1 <= len(told) < 100


def test_the_files_are_as_large_and_as_many_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, object] = {}

    def drop_all(paths: list[Path], *_: object) -> int:
        seen["sizes"] = [path.stat().st_size for path in paths]
        seen["folders"] = len({path.parent for path in paths})
        return len(paths)

    real = disk_io.read_in_threads

    def read(path: Path, num_threads: int, *rest: object) -> float:
        seen["large"], seen["threads"] = path.stat().st_size, num_threads
        return real(path, num_threads, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_io, "drop_all", drop_all)
    monkeypatch.setattr(disk_io, "read_in_threads", read)
    monkeypatch.setattr(storage, "FILES_A_FOLDER", 7)
    measure_storage(tmp_path, TINY)
    sizes = seen["sizes"]
    assert isinstance(sizes, list)
    assert len(sizes) == 20
    assert all(4096 <= size <= 10240 for size in sizes)
    assert len(set(sizes)) > 10
    assert (seen["folders"], seen["large"], seen["threads"]) == (3, 8 * MIB, 2)


def test_without_o_direct_pages_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, dropped = os.open, []

    def no_direct(path: object, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", no_direct)
    monkeypatch.setattr(
        disk_io, "drop_pages", lambda path, real=disk_io.drop_pages: dropped.append(real(path))
    )
    facts = measure_storage(tmp_path, TINY)
    assert facts.uncached_by == "fadvise"
    assert facts.problems == ()
    assert facts.uncached_write_bytes_per_s is None
    assert all(getattr(facts, name) > 0 for name in FIGURES if name != "uncached_write_bytes_per_s")
    # Every small file, and the large one before each of three reads.
    assert len(dropped) == TINY.num_files + 3


def test_files_that_there_was_no_time_to_drop_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{i}" for i in range(50)]
    for path in paths:
        path.write_text("x")
    monkeypatch.setattr(disk_io, "drop_pages", lambda path: time.sleep(0.01))
    assert disk_io.drop_all(paths, 1, 10.0, lambda _: None) == 50
    assert 1 <= disk_io.drop_all(paths, 1, 0.05, lambda _: None) < 25


def test_memory_is_said_to_be_memory(tmpfs: Callable[..., Path]) -> None:
    path = tmpfs("size=64m")
    facts = measure_storage(path, TINY)
    assert (facts.fs_type, facts.kind, facts.uncached_by) == ("tmpfs", "memory", "memory")
    assert facts.mount_point == str(path)
    assert facts.total_bytes == 64 * MIB
    assert facts.uncached_write_bytes_per_s is None
    assert facts.read_bytes_per_s
    assert list(path.iterdir()) == []


def test_the_cache_is_what_makes_the_difference(tmp_path: Path) -> None:
    """Reads that shall not come from the cache go past it, those that shall do not."""
    flags: list[bool] = []
    real = disk_io.read_blocks

    def watch(*args: object, direct: bool, **rest: object) -> disk_io.Reading:
        flags.append(direct)
        return real(*args, direct=direct, **rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_io, "read_blocks", watch)
        facts = measure_storage(tmp_path, TINY)
    if facts.uncached_by != disk_io.DIRECT:
        pytest.skip("the file system of the tests has no O_DIRECT")
    # One reader, two threads, random; then to fill the cache, from it, and at random from it.
    assert flags == [True] * 4 + [False] * 3


def test_a_file_system_that_fills_up_keeps_the_other_figures(
    tmpfs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmpfs("size=8m")
    monkeypatch.setattr(storage, "fit_amounts", lambda facts, asked: (asked, ()))
    facts = measure_storage(path, dataclasses.replace(TINY, size_bytes=64 * MIB))
    (problem,) = facts.problems
    assert problem.startswith(f"large write ran out of room in {path}: no bytes or no inodes")
    assert facts.create_files_per_s
    assert facts.sync_writes_per_s
    assert facts.write_bytes_per_s is facts.read_bytes_per_s is facts.random_reads_per_s is None
    unknown = [verdict.use for verdict in judge(facts) if verdict.rating == UNKNOWN]
    assert unknown == ["packed data", "checkpoints"]
    assert list(path.iterdir()) == []


def test_inodes_that_run_out_keep_the_large_figures(
    tmpfs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmpfs("size=64m,nr_inodes=20")
    monkeypatch.setattr(storage, "fit_amounts", lambda facts, asked: (asked, ()))
    facts = measure_storage(path, TINY)
    (problem,) = facts.problems
    assert problem.startswith("small files ran out of room")
    assert facts.create_files_per_s is None
    assert facts.write_bytes_per_s
    assert facts.random_reads_per_s


def test_a_quota_that_is_used_up_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def over(*_: object) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(disk_io, "write_all", over)
    facts = measure_storage(tmp_path, TINY)
    assert facts.problems == (
        f"large write ran out of room in {tmp_path}: the quota is used up; remove files there, or ask "
        "for more",
    )
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")

    def fail(what: str, share: float) -> None:
        if what == "large read":
            assert len(list(tmp_path.iterdir())) == 2
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        measure_storage(tmp_path, TINY, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EACCES, "may not be written to by you; give a directory of your own"),
        (errno.EROFS, "is on a file system mounted read-only; give one to write to"),
        (errno.EDQUOT, "takes not even a directory more: the quota is used up"),
        (errno.EIO, r"cannot make a directory in .* \(Input/output error\); give another"),
    ],
)
def test_a_directory_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def mkdir(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(UsageError, match=said):
        measure_storage(tmp_path, TINY)


# ---- verdicts


def rating(use: str, **values: object) -> tuple[str, str]:
    found = {verdict.use: verdict for verdict in judge(invented(**values))}
    assert list(found) == ["environments", "packed data", "small files", "checkpoints"]
    return found[use].rating, found[use].reason


@pytest.mark.parametrize(
    ("use", "values", "said"),
    [
        ("environments", {"read_files_per_s": 500.0}, "1,000 files at 500/s"),
        ("environments", {"stat_files_per_s": 3000.0}, "4,000 names at 3,000/s"),
        ("environments", {"num_free_inodes": 39_999}, "39,999 files may be made"),
        (
            "packed data",
            {"read_bytes_per_s": 1e8, "threads_read_bytes_per_s": 2e8},
            "191 MiB/s in sequence (at least 500)",
        ),
        ("packed data", {"random_reads_per_s": 120.0}, "960 at best for 8 workers"),
        ("small files", {"read_files_per_s": 400.0}, "3,200 at best for 8 workers"),
        ("small files", {"create_files_per_s": 100.0}, "a million in 167 min"),
        ("checkpoints", {"write_bytes_per_s": 2e8}, "16 GB in 80 s (at most 60)"),
        ("checkpoints", {"kind": "memory"}, "gone when the node or the job ends"),
        ("checkpoints", {"free_bytes": int(15e9)}, "15.0 GB may be written"),
    ],
)
def test_what_is_poor_says_why_in_figures(use: str, values: dict[str, object], said: str) -> None:
    assert rating(use)[0] == GOOD
    found, reason = rating(use, **values)
    assert found == POOR
    assert said in reason


def test_many_readers_can_make_up_for_a_slow_one() -> None:
    assert rating("packed data", read_bytes_per_s=1e8)[0] == GOOD
    assert rating("packed data", threads_read_bytes_per_s=1e8)[0] == GOOD


def test_what_was_not_measured_is_not_judged() -> None:
    nothing = invented(**dict.fromkeys(FIGURES))
    assert {verdict.rating for verdict in judge(nothing)} == {UNKNOWN}


# ---- machine.json


def test_machine_json_keeps_what_others_have_put_there(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"host": "node1", "peak_flops": {"bf16": 1e12}}))
    add_storage(path, [invented(), invented(path="/home")])
    add_storage(path, [invented(write_bytes_per_s=5.0), invented(host="node2")])
    found = json.loads(path.read_text())
    assert found["peak_flops"] == {"bf16": 1e12}
    rows = [facts_from_dict(StorageFacts, row) for row in found["storage"]]
    assert [(row.host, row.path) for row in rows] == [
        *[("node1", "/home"), ("node1", "/scratch")],
        ("node2", "/scratch"),
    ]
    assert rows[1].write_bytes_per_s == 5.0
    assert [p.name for p in tmp_path.iterdir()] == ["machine.json"]


def test_machine_json_is_whole_or_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"a": 1}')

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        add_storage(path, [invented()])
    assert path.read_text() == '{"a": 1}'
    assert [p.name for p in tmp_path.iterdir()] == ["machine.json"]


# ---- the command


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs `ridgeline machine storage ARGS` in this process through its real entry point."""

    # The options that are given have to win over these.
    quick = dataclasses.replace(TINY, size_bytes=16 * MIB, num_files=30, num_threads=3)
    monkeypatch.setattr(storage, "QUICK", quick)

    def run(*args: object) -> tuple[int, str, str]:
        words = ["--size", "8M", "--files", "20", "--threads", "2", "--quick"]
        monkeypatch.setattr(
            sys, "argv", ["ridgeline", "machine", "storage", *words, *map(str, args)]
        )
        code = 0
        before = signal.getsignal(signal.SIGINT)
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            signal.signal(signal.SIGINT, before)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_command_prints_a_table_and_verdicts(command, tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.mkdir()
    code, out, err = command(path, "--out", tmp_path / "machine.json")
    assert (code, err) == (0, "")
    for words in ("write and fsync", "random 128 KiB, cached", "median / 99th", "MiB/s", str(path)):
        assert words in out
    for use in ("environments", "packed data", "small files", "checkpoints"):
        assert any(
            line.split("  ")[1:2] == [use] and ("good" in line or "poor" in line)
            for line in out.splitlines()
        )
    assert f"added to {tmp_path / 'machine.json'}" in out
    (row,) = json.loads((tmp_path / "machine.json").read_text())["storage"]
    assert (row["path"], row["size_bytes"], row["num_files"]) == (str(path), 8 * MIB, 20)
    assert row["num_threads"] == 2


def test_command_speaks_json(command, tmp_path: Path) -> None:
    code, out, _ = command(tmp_path, "--json")
    assert code == 0
    (row,) = json.loads(out)
    assert facts_from_dict(StorageFacts, row).write_bytes_per_s > 0
    assert row["verdicts"][0]["use"] == "environments"


def test_command_refuses_in_one_sentence(command, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    lists = tmp_path / "list.json"
    lists.write_text("[]")
    for args, said in (
        ((tmp_path / "none",), "none does not exist; give a directory that does"),
        ((file,), "file is no directory; give the one it is in"),
        ((tmp_path, "--size", "much"), "'much' in --size is no size"),
        ((tmp_path, "--size", "1K"), "'1K' in --size measures nothing; give 4MiB or more"),
        ((tmp_path, "--out", broken), "broken.json of --out holds no JSON"),
        ((tmp_path, "--out", lists), "list.json of --out holds JSON of another kind"),
        ((tmp_path, "--out", tmp_path / "no" / "m.json"), "which does not exist; make it first"),
        ((tmp_path, "--out", tmp_path), "of --out is a directory; name a file"),
    ):
        code, out, err = command(*args)
        assert (code, out) == (2, "")
        assert said in err
        assert err.count("\n") == 1
    assert broken.read_text() == "{"


def test_command_refuses_a_disk_without_room(command, tmpfs: Callable[..., Path]) -> None:
    code, _, err = command(tmpfs("size=8m"))
    assert code == 2
    assert "has 8.0 MiB left" in err
    code, _, err = command(tmpfs("size=64m,ro"))
    assert code == 2
    assert "mounted read-only" in err


def test_command_keeps_the_figures_before_a_wrong_path(command, tmp_path: Path) -> None:
    kept = tmp_path / "machine.json"
    code, out, err = command(tmp_path, tmp_path / "none", "--out", kept)
    assert code == 2
    assert "write and fsync" in out
    assert "does not exist" in err
    assert len(json.loads(kept.read_text())["storage"]) == 1


def test_command_fails_after_showing_what_there_is(command, tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_io, "write_all", full)
    code, out, err = command(tmp_path)
    assert code == 1
    assert "NOT MEASURED: large write ran out of room" in out
    assert "checkpoints   not measured" in out
    assert err.startswith("ridgeline: large write ran out of room")


# Without torch, as on a login node; the large write never ends by itself.
ENDLESS = """
import sys
sys.modules["torch"] = None
from ridgeline.machine import disk_io
real = disk_io.write_all
def again(descriptor, buffer, offset):
    print("writing", flush=True)
    real(descriptor, buffer, 0)
    return 0
disk_io.write_all = again
sys.argv = ["ridgeline", "machine", "storage", "--quick", "--files", "10", sys.argv[1]]
from ridgeline.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(number)
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 1
    assert f"interrupted while {tmp_path} was measured" in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_quick_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys\nsys.modules['torch'] = None\nfrom ridgeline.cli import main\nmain()"
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, "machine", "storage", "--quick", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - began < 40
    assert "64.0 MiB" in done.stdout


def test_room_and_inodes_are_those_of_df(tmp_path: Path) -> None:
    def df(column: str) -> int:
        done = subprocess.run(
            ["df", f"--output={column}", "-B1", str(tmp_path)], capture_output=True
        )
        return int(done.stdout.split()[-1])

    facts = describe_storage(tmp_path)
    assert facts.total_bytes == df("size")
    assert facts.free_bytes == pytest.approx(df("avail"), rel=0.05)
    assert facts.num_inodes == df("itotal")
