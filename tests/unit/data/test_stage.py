"""Staging: one node, its ranks as real processes, and everything that can be in the way."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.data.stage import copy as copying
from ridgeline.data.stage import held as holding
from ridgeline.data.stage import plan as planning
from ridgeline.data.stage import run as running
from ridgeline.data.stage import users as using
from ridgeline.data.stage import where as placing
from ridgeline.data.stage.crc import combine
from ridgeline.data.stage.held import Held, base_folder, copies, remove_leftovers
from ridgeline.data.stage.meet import NodePlace
from ridgeline.data.stage.plan import Listing, list_source, plan_sendings, plan_workers
from ridgeline.data.stage.problem import StageProblem
from ridgeline.data.stage.run import Staged, stage
from ridgeline.data.stage.where import Mount, human_bytes, look, mount_of, read_mounts
from ridgeline.errors import RunError, UsageError
from ridgeline.launch.env import local_storage_variables

BLOCK = 64 * 1024
ALONE = NodePlace()


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        running, "list_source", lambda source, **more: list_source(source, BLOCK, **more)
    )
    monkeypatch.setattr(placing, "MARGIN_BYTES", 4096)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """One large file, some small ones, an empty one and an empty folder."""
    root = tmp_path / "shared" / "set"
    (root / "train" / "a").mkdir(parents=True)
    (root / "nothing").mkdir()
    (root / "large.bin").write_bytes(os.urandom(20 * BLOCK + 123))
    for number in range(12):
        (root / "train" / "a" / f"{number}.bin").write_bytes(os.urandom(1000 + number))
    (root / "empty").touch()
    return root


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def tree(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def in_processes(num: int, function: Callable[[int], Any]) -> list[Any]:
    """The function's result in each of n forked processes, which stay until all have one."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    done = context.Event()
    for number in range(num):
        ours, theirs = context.Pipe(duplex=False)

        def run(number: int = number, pipe: Any = theirs) -> None:
            pipe.send(function(number))
            done.wait(20)

        process = context.Process(target=run)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    results = [pipe.recv() if pipe.poll(20) else None for pipe in pipes]
    done.set()
    for process in processes:
        process.join(10)
    return results


def one_node(source: Path, disk: Path, ranks: int, job: str = "j", **more: Any) -> list[Staged]:
    def rank(number: int) -> Staged:
        place = NodePlace(0, 1, number, ranks, job)
        return stage(source, disk, place=place, **more)

    return in_processes(ranks, rank)


# Plans.


def test_crc_of_parts_is_that_of_the_whole() -> None:
    data = os.urandom(10_000)
    cuts = [0, 1, 1, 4096, 9_999, 10_000]
    parts = [data[a:b] for a, b in itertools.pairwise(cuts)]
    assert combine((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(data)


def test_work_is_divided_by_bytes_and_large_files_are_cut(source: Path) -> None:
    listing = list_source(source, BLOCK)
    blocks = list(range(listing.num_blocks))
    work = plan_workers(listing, blocks, 4)
    given = [block for runs in work for run in runs for block in range(run.first, run.stop)]
    assert sorted(given) == blocks
    loads = [sum(listing.bytes_of(range(r.first, r.stop)) for r in runs) for runs in work]
    assert max(loads) - min(loads) <= 2 * BLOCK
    large = next(i for i, file in enumerate(listing.files) if file.name == "large.bin")
    mine = set(listing.blocks_of(large))
    assert all(any(run.first in mine for run in runs) for runs in work)


def test_every_block_is_sent_once_by_a_node_that_has_it_or_reads_least(source: Path) -> None:
    listing = list_source(source, BLOCK)
    every = set(range(listing.num_blocks))
    has: list[set[int]] = [set(), {0, 1, 2}, set()]
    sent = plan_sendings(listing, [every, every - has[1], set()], has)
    assert sorted(block for one in sent for block in one.blocks) == sorted(every)
    assert all(one.size <= BLOCK for one in sent)
    assert all(one.node == 1 for one in sent if {0, 1, 2} & set(one.blocks))
    assert {one.node for one in sent} == {0, 1, 2}
    small = [one for one in sent if len(one.blocks) > 1]
    assert small, "small files travel together"
    assert not plan_sendings(listing, [set(), set()], [every, every])


def test_listing_survives_text_and_refuses_names_that_lead_out(source: Path) -> None:
    listing = list_source(source, BLOCK)
    again = Listing.from_json(listing.to_json())
    assert again == listing
    assert again.key == listing.key
    for name in ("../x", "/etc/x", ""):
        with pytest.raises(Exception, match="is no name"):
            Listing.from_json(listing.to_json().replace('"empty"', f'"{name}"'))


# The disk.


def test_candidates_come_with_reasons(tmp_path: Path) -> None:
    for name in ("lustre", "ssd", "memory"):
        (tmp_path / name).mkdir()
    mounts = [
        Mount("/", "ext4", "/dev/sda"),
        Mount(str(tmp_path / "lustre"), "lustre", "mds:/x"),
        Mount(str(tmp_path / "memory"), "tmpfs", "tmpfs"),
    ]
    found = [
        ("$SLURM_TMPDIR", tmp_path / "missing"),
        ("$TMPDIR", tmp_path / "lustre"),
        ("/nvme*", tmp_path / "ssd"),
        ("/dev/shm", tmp_path / "memory"),
    ]

    def verdicts(lacks: Callable[[Path, int], str], copy: str = "") -> list[tuple[bool, str]]:
        looked = look(found, mounts, lacks, lambda path: path.name == copy)
        return [(one.taken, one.reason) for one in looked]

    roomy = verdicts(lambda path, times: "")
    assert [taken for taken, _ in roomy] == [False, False, True, False]
    assert "not a folder" in roomy[0][1]
    assert "lustre" in roomy[1][1]
    # Memory is the last resort, and has to have room for twice the data.
    asked: list[tuple[str, int]] = []
    full = verdicts(lambda path, times: (asked.append((path.name, times)), "has no room")[1])
    assert not any(taken for taken, _ in full)
    assert asked == [("ssd", 1), ("memory", 2)]
    # A folder that holds the copy already is taken before one with room.
    assert verdicts(lambda path, times: "", "memory")[3] == (True, "holds a copy already")


def test_mounts_are_read_and_the_longest_decides(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 0:1 / / rw - ext4 /dev/sda rw\n"
        "23 22 0:2 / /a\\040b rw shared:1 - lustre x rw\n"
        "24 22 0:3 / /a rw - xfs /dev/nvme0n1p1 rw\n"
    )
    mounts = read_mounts(table)
    assert [mount.kind for mount in mounts] == ["ext4", "lustre", "xfs"]
    found = mount_of(Path("/a b/c"), mounts)
    assert found is not None
    assert found.kind == "lustre"
    named = placing.candidates(mounts)
    assert ("/dev/nvme0n1p1", Path("/a")) in named
    assert named[-1][0] == "/dev/shm"


def test_environment_is_asked_in_order() -> None:
    env = {"TMPDIR": "/t", "SLURM_TMPDIR": "/s", "PBS_JOBFS": "", "HOME": "/h"}
    assert local_storage_variables(env) == [("SLURM_TMPDIR", "/s"), ("TMPDIR", "/t")]


@pytest.mark.parametrize(
    ("size", "text"), [(12, "12 B"), (1500, "1.5 kB"), (999_999, "1.0 MB"), (4e11, "400 GB")]
)
def test_bytes_for_people(size: float, text: str) -> None:
    assert human_bytes(size) == text


# Copies.


def test_a_copy_is_the_same_and_goes_with_its_last_user(source: Path, disk: Path) -> None:
    os.utime(source / "nothing", ns=(10**18, 10**18))
    staged = stage(source, disk, place=ALONE)
    total = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    assert staged.is_local
    assert staged.path.name == source.name
    assert tree(staged.path) == tree(source)
    assert staged.read_bytes == staged.copied_bytes == staged.total_bytes == total
    assert (staged.path / "nothing").stat().st_mtime_ns == 10**18
    file = staged.path / "large.bin"
    assert file.stat().st_mtime_ns == (source / "large.bin").stat().st_mtime_ns
    assert file.stat().st_mode & 0o777 == 0o644 & ~_umask()
    assert "staged 1.3 MB to" in staged.describe()

    again = stage(source, disk, place=ALONE)
    assert again.path == staged.path
    assert again.read_bytes == 0
    assert "already" in again.describe()
    assert not again.release()
    assert tree(staged.path) == tree(source)
    assert staged.release()
    assert list(base_folder(disk).iterdir()) == []
    assert not staged.release()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_single_file_keeps_its_name(source: Path, disk: Path) -> None:
    staged = stage(source / "large.bin", disk, place=ALONE)
    assert staged.path.name == "large.bin"
    assert staged.path.read_bytes() == (source / "large.bin").read_bytes()


def test_ranks_of_a_node_read_each_byte_once(source: Path, disk: Path) -> None:
    ranks = one_node(source, disk, 3)
    assert len({staged.path for staged in ranks}) == 1
    assert tree(ranks[0].path) == tree(source)
    assert sum(staged.read_bytes for staged in ranks) == ranks[0].total_bytes
    assert all(staged.read_bytes > 0.2 * ranks[0].total_bytes for staged in ranks)
    assert not list(copies(base_folder(disk))[0].users()), "all of them have ended"


def test_two_jobs_at_once_copy_once(source: Path, disk: Path) -> None:
    def rank(number: int) -> Staged:
        place = NodePlace(0, 1, number % 2, 2, f"job {number // 2}")
        staged = stage(source, disk, place=place)
        assert tree(staged.path) == tree(source)
        return staged

    ranks = in_processes(4, rank)
    assert sum(staged.read_bytes for staged in ranks) == ranks[0].total_bytes
    assert len({staged.path for staged in ranks}) == 1


def test_killed_in_the_middle_it_goes_on_where_it_was(
    source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = copying.SharedReader.read

    def slow(self: copying.SharedReader, block: int) -> bytes:
        time.sleep(0.05)
        return plain(self, block)

    monkeypatch.setattr(copying.SharedReader, "read", slow)
    process = multiprocessing.get_context("fork").Process(
        target=stage, args=(source, disk), kwargs={"place": ALONE}
    )
    process.start()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = copies(base_folder(disk))
        if found and found[0].journal_bytes() > 5 * 11:
            break
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    monkeypatch.setattr(copying.SharedReader, "read", plain)
    there = copies(base_folder(disk))[0]
    done = len(there.journaled())
    assert 5 <= done < 21
    # One block that was written is damaged: it alone is read again.
    parts = sorted(path for path in (there.folder / "parts").iterdir())
    with parts[0].open("r+b") as file:
        file.write(b"\0\1\2\3")
    staged = stage(source, disk, place=ALONE)
    assert tree(staged.path) == tree(source)
    assert staged.read_bytes <= staged.total_bytes - (done - 2) * BLOCK
    assert staged.read_bytes >= BLOCK
    assert staged.verify() == []


def cut_off(source: Path, disk: Path, name: str) -> Held:
    """A copy that ended before it came to a file."""
    plain = copying.SharedReader.read

    def read(self: copying.SharedReader, block: int) -> bytes:
        file = self._listing.files[self._listing.locate(block)[0]]
        if file.name == name:
            raise StageProblem("cut off")
        return plain(self, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying.SharedReader, "read", read)
        assert stage(source, disk, place=ALONE).reason == "cut off"
    (held,) = copies(base_folder(disk))
    return held


def flip(file: Path, place: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        (value,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([value ^ 1]))


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer"])
def test_a_damaged_file_with_its_name_is_mended_when_the_copy_goes_on(
    source: Path, disk: Path, damage: str
) -> None:
    (source / "a.bin").write_bytes(os.urandom(3 * BLOCK + 5))
    held = cut_off(source, disk, "train/a/7.bin")
    root = held.root(held.listing())
    assert (root / "a.bin").read_bytes() == (source / "a.bin").read_bytes()
    assert not (root / "train" / "a" / "7.bin").exists()
    if damage == "flipped":
        flip(root / "a.bin", BLOCK + 7)
    elif damage == "shorter":
        os.truncate(root / "a.bin", BLOCK + 7)
    else:
        with (root / "a.bin").open("ab") as opened:
            opened.write(b"more")
    staged = stage(source, disk, place=ALONE)
    assert staged.is_local, staged.reason
    assert tree(staged.path) == tree(source)
    assert staged.read_bytes < 4 * BLOCK, "of that file, only what was damaged"
    assert staged.verify() == []


def test_files_whose_record_was_lost_are_copied_again(source: Path, disk: Path) -> None:
    staged = stage(source, disk, place=ALONE, keep=True)
    staged.release()
    (held,) = copies(base_folder(disk))
    (held.folder / "record.json").write_bytes(b"\0" * 100)
    flip(staged.path / "large.bin", BLOCK + 7)
    again = stage(source, disk, place=ALONE)
    assert again.read_bytes == again.total_bytes
    assert tree(again.path) == tree(source)
    assert again.verify() == []


@pytest.mark.parametrize("rubbish", [b"\0\0\0 7\n", b"3 zz\n", b"-3 0000beef\n", b"\xff \xfe\n"])
def test_what_is_no_line_of_a_journal_is_passed_over(
    source: Path, disk: Path, rubbish: bytes
) -> None:
    held = cut_off(source, disk, "train/a/7.bin")
    blocks = held.journaled()
    (journal, *_) = (held.folder / "journal").iterdir()
    journal.write_bytes(rubbish + journal.read_bytes() + rubbish + b"5 0a")
    assert held.journaled() == blocks
    staged = stage(source, disk, place=ALONE)
    assert tree(staged.path) == tree(source)
    assert staged.read_bytes < BLOCK


def test_bytes_are_checked_on_demand_and_sizes_always(source: Path, disk: Path) -> None:
    staged = stage(source, disk, place=ALONE, keep=True)
    file = staged.path / "large.bin"
    with file.open("r+b") as opened:
        opened.write(b"wrong")
    (problem,) = staged.verify()
    assert "large.bin" in problem
    assert stage(source, disk, place=ALONE).read_bytes == 0, "only sizes are looked at"
    with file.open("ab") as opened:
        opened.write(b"longer")
    in_use = stage(source, disk, place=ALONE)
    assert in_use.path == source, "a damaged copy that somebody reads is neither used nor removed"
    assert "damaged" in in_use.reason
    staged.release()
    staged.release()
    again = stage(source, disk, place=ALONE)
    assert again.read_bytes == again.total_bytes
    assert again.verify() == []


def test_after_a_reboot_every_byte_is_read(
    source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = stage(source, disk, place=ALONE, keep=True)
    with (staged.path / "large.bin").open("r+b") as opened:
        opened.write(b"wrong")
    staged.release()
    monkeypatch.setattr("ridgeline.data.stage.held.this_boot", lambda: "another")
    again = stage(source, disk, place=ALONE)
    assert again.read_bytes == again.total_bytes
    assert tree(again.path) == tree(source)


def test_after_a_reboot_users_from_before_keep_nothing(
    source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = stage(source, disk, place=ALONE)
    flip(staged.path / "large.bin", BLOCK + 7)
    (held,) = copies(base_folder(disk))
    assert len(held.users()) == 1
    host, _, namespace = using.this_world().split("/")
    monkeypatch.setattr("ridgeline.data.stage.held.this_boot", lambda: "another")
    monkeypatch.setattr(using, "this_world", lambda: f"{host}/another/{namespace}")
    assert held.users() == []
    again = stage(source, disk, place=ALONE)
    assert again.is_local, again.reason
    assert tree(again.path) == tree(source)
    assert len(held.users()) == 1


@pytest.mark.parametrize(
    ("world", "is_alive"),
    [
        ("here/now/pid:[1]", False),  # looked up, and not found
        ("here/before/pid:[1]", False),
        ("here/before/pid:[2]", False),
        ("here/now/pid:[2]", True),
        ("there/now/pid:[1]", True),
        ("there/before/pid:[1]", True),
        ("here/-/pid:[1]", True),
        ("here", True),
        ("", True),
    ],
)
def test_users_that_cannot_be_looked_up_are_alive_unless_the_host_was_restarted(
    monkeypatch: pytest.MonkeyPatch, world: str, is_alive: bool
) -> None:
    monkeypatch.setattr(using, "this_world", lambda: "here/now/pid:[1]")
    assert using.User(os.getpid(), 1.0, world).is_alive() == is_alive


def test_a_changed_source_is_copied_again(source: Path, disk: Path) -> None:
    before = stage(source, disk, place=ALONE)
    os.utime(source / "train" / "a" / "3.bin")
    after = stage(source, disk, place=ALONE)
    assert after.path != before.path
    assert after.read_bytes == after.total_bytes


# What is in the way.


def test_no_room_falls_back_with_a_reason(
    source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "free_bytes", lambda path: 1_000_000)
    staged = stage(source, disk, place=ALONE)
    assert staged.path == source
    assert staged.read_bytes == 0
    assert "has room for 1.0 MB and needs 1." in staged.reason
    assert "not staged" in staged.describe()
    with pytest.raises(RunError, match="has room for"):
        stage(source, disk, place=ALONE, required=True)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_fills_up_is_cleaned_and_left(
    source: Path, tiny_disk: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    # Another program takes the room after it was looked at.
    monkeypatch.setattr(placing, "free_bytes", lambda path: 10**9)
    for staged in one_node(source, tiny_disk, ranks):
        assert staged.path == source
        assert "no space left" in staged.reason
    assert list(base_folder(tiny_disk).iterdir()) == []


def test_leftovers_go_when_room_is_needed(
    source: Path, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(name: str) -> Path:
        (tmp_path / name).write_bytes(os.urandom(BLOCK))
        return tmp_path / name

    (dead,) = one_node(other("of-the-dead"), disk, 1)
    used = stage(other("used"), disk, place=ALONE)
    one_node(other("kept"), disk, 1, keep=True)
    monkeypatch.setattr(placing, "free_bytes", lambda path: 0 if dead.path.exists() else 10**9)
    assert stage(source, disk, place=ALONE).is_local
    left = {(held.record() or {})["path"].rpartition("/")[2] for held in copies(base_folder(disk))}
    assert left == {"used", "kept", "set"}
    used.release()
    assert len(remove_leftovers(base_folder(disk), kept=True)) == 1
    assert len(copies(base_folder(disk))) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_that_vanishes_is_named(
    source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    def listed(path: Path, **more: Any) -> Listing:
        listing = list_source(path, BLOCK, **more)
        (source / "train" / "a" / "7.bin").unlink()
        return listing

    monkeypatch.setattr(running, "list_source", listed)
    for staged in one_node(source, disk, ranks):
        assert staged.path == source
        assert "7.bin is gone" in staged.reason
    assert list(base_folder(disk).iterdir()) == []


def test_a_file_that_changes_is_named(
    source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = copying.SharedReader.read

    def read(self: copying.SharedReader, block: int) -> bytes:
        if block == 3:
            with (source / "large.bin").open("ab") as file:
                file.write(b"more")
        return plain(self, block)

    monkeypatch.setattr(copying.SharedReader, "read", read)
    staged = stage(source, disk, place=ALONE)
    assert "large.bin was changed while it was copied" in staged.reason


def test_links_inside_are_kept_and_links_out_are_refused(source: Path, disk: Path) -> None:
    (source / "link.bin").symlink_to("train/a/1.bin")
    (source / "train" / "b").symlink_to(source / "train" / "a")
    staged = stage(source, disk, place=ALONE)
    assert not (staged.path / "link.bin").is_symlink()
    assert (staged.path / "link.bin").read_bytes() == (source / "link.bin").read_bytes()
    inside = (staged.path / "train" / "b").resolve()
    assert inside == (staged.path / "train" / "a").resolve()
    staged.release()

    for target, word in (("/etc/passwd", "link out of"), ("nowhere", "is not there")):
        (source / "bad").symlink_to(target)
        staged = stage(source, disk, place=ALONE)
        assert staged.path == source
        assert word in staged.reason
        assert "set/bad" in staged.reason
        (source / "bad").unlink()
    os.mkfifo(source / "pipe")
    assert "pipe is neither" in stage(source, disk, place=ALONE).reason


def test_a_source_that_is_not_there_is_the_users_error(tmp_path: Path, disk: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        stage(tmp_path / "missing", disk, place=ALONE)


def test_a_rank_that_waits_in_vain_reads_the_source(source: Path, disk: Path) -> None:
    place = NodePlace(0, 1, 1, 2, "nobody leads")
    staged = stage(source, disk, place=place, limit_s=0.2)
    assert staged.path == source
    assert "no progress for 0.2 s" in staged.reason


@pytest.mark.parametrize("work", ["list", "check", "check a large file", "prepare"])
def test_ranks_are_patient_while_the_first_is_at_work(
    source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            time.sleep(0.5)
            return function(*args)

        return run

    if work == "list":
        monkeypatch.setattr(planning._Walk, "_take", slow(planning._Walk._take))
    elif work == "prepare":
        cut_off(source, disk, "train/a/7.bin")
        monkeypatch.setattr(Held, "_has", slow(Held._has))
    else:
        if work == "check a large file":
            source /= "large.bin"
            monkeypatch.setattr(holding, "_PIECE_BYTES", BLOCK)
        stage(source, disk, place=ALONE, keep=True).release()
        monkeypatch.setattr(holding, "this_boot", lambda: "another")
        monkeypatch.setattr(holding, "zlib", SimpleNamespace(crc32=slow(zlib.crc32)))
    for staged in one_node(source, disk, 2, limit_s=3.5):
        assert staged.is_local, staged.reason
        assert staged.seconds > 4.0


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_copy_does_without_a_rank_that_has_given_up(
    source: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    if is_whole:
        stage(source, disk, place=ALONE, keep=True).release()

    begun, has_left = multiprocessing.Event(), multiprocessing.Event()

    def listed(path: Path, **more: Any) -> Listing:
        begun.set()
        has_left.wait(20)
        return list_source(path, BLOCK)

    def rank(number: int) -> Staged:
        place = NodePlace(0, 1, number, 3, "one gives up")
        if number != 1:
            return stage(source, disk, place=place, limit_s=60.0)
        begun.wait(20)
        staged = stage(source, disk, place=place, limit_s=0.2)
        has_left.set()
        return staged

    monkeypatch.setattr(running, "list_source", listed)
    first, gone, other = in_processes(3, rank)
    assert (gone.path, gone.read_bytes) == (source, 0)
    assert first.is_local, first.reason
    assert other.path == first.path
    assert tree(first.path) == tree(source)
    assert first.read_bytes + other.read_bytes == (0 if is_whole else first.total_bytes)


def test_commands_stage_list_and_clean(
    source: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ridgeline.data.stage.command import clean_command, list_command, stage_command

    stage_command(source, str(disk))
    assert capsys.readouterr().out.startswith("staged 1.3 MB to ")
    stage_command(source, str(disk), verify=True)
    assert "already; 1.3 MB read again, as it was copied" in capsys.readouterr().out
    stage_command(source, str(disk), as_json=True, verify=True)
    said = json.loads(capsys.readouterr().out)
    assert said["read_bytes"] == 0
    assert said["problems"] == []
    list_command(str(disk), as_json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["whole"], row["keep"], row["source"]) == (True, True, str(source))
    list_command(str(disk))
    assert "kept" in capsys.readouterr().out
    clean_command(str(disk))
    assert "removed 0 copies" in capsys.readouterr().out
    (held,) = copies(base_folder(disk))
    held._write_users([])  # this process, which used it, has ended
    clean_command(str(disk), everything=True)
    assert "removed 1 copy, 1.3 MB" in capsys.readouterr().out
    assert not copies(base_folder(disk))
    with pytest.raises(RunError, match="cannot make the folder"):
        stage_command(source, str(disk / "a" / "b"))
