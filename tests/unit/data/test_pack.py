"""`ridgeline data`: folders to shards and back, ends in the middle, damage, and what is refused."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline import cli
from ridgeline.data import pack as packing
from ridgeline.data.build import build_sources
from ridgeline.data.check import verify
from ridgeline.data.dataset import DATASET, Dataset, open_dataset
from ridgeline.data.formats.contract import Format, Sample, schema_of
from ridgeline.data.formats.table import FORMATS
from ridgeline.data.pack import PLAN, Shuffled, pack, unpack
from ridgeline.errors import RunError, UsageError

NUM = 40
ROOT = Path(__file__).resolve().parents[3]
Command = Callable[..., "Outcome"]
Tree = dict[str, bytes]


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `ridgeline data ARGS` in this process, through its real entry point."""

    def run(*args: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["ridgeline", "data", *map(str, args)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


def make_folder(path: Path, num: int = NUM, size: int = 300) -> Path:
    """Two classes; keys with dots, blanks, percent signs and letters of other alphabets."""
    rng = np.random.default_rng(num)
    for number in range(num):
        where = path / ("cat", "dög%41")[number % 2]
        where.mkdir(parents=True, exist_ok=True)
        stem = f"{number:04d}" + ("", ".v2", " b%2Ec", "-日本")[number % 4]
        (where / f"{stem}.bin").write_bytes(rng.bytes(size))
        np.save(where / f"{stem}.mask.npy", rng.integers(0, 9, (2, 3)).astype(np.int16))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("from") / "folder")


def tree(root: Path) -> Tree:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


class Made:
    """Samples that do something when one of them is read."""

    classes: list[str] = []  # noqa: RUF012
    origin = "made by a test"

    def __init__(
        self, num: int = NUM, at: int = -1, do: Callable[[], None] = lambda: None, size: int = 64
    ) -> None:
        self._num, self._at, self._do, self._size = num, at, do, size
        self._reads = 0
        self.schema = schema_of(self._sample(0))

    def __len__(self) -> int:
        return self._num

    def _sample(self, index: int) -> Sample:
        rng = np.random.default_rng(index)
        raw = rng.bytes(40)
        return {"x": rng.integers(0, 255, self._size, dtype=np.uint8), "raw": raw}

    def read(self, index: int) -> Sample:
        self._reads += 1
        # The samples that are looked at first are read before.
        if index == self._at and self._reads > min(self._num, packing._PROBED):
            self._do()
        return self._sample(index)

    def key(self, index: int) -> str:
        return f"{index:04d}"


# There and back.


def test_a_folder_is_the_same_after_every_format(
    form: Format, folder: Path, tmp_path: Path, command: Command
) -> None:
    packed, back = tmp_path / "packed", tmp_path / "back"
    done = command("pack", folder, packed, "-f", form.name, "--shard-size", "4K", "-j", 1)
    assert done.code == 0, done.err
    assert f"{NUM} samples in 4 shards of format {form.name}" in done.out
    assert len(list(packed.glob(f"shard-*{form.suffix}.idx"))) == 4
    assert not [name for name in tree(packed) if ".part" in name or name == PLAN]
    done = command("unpack", packed, back, "-j", 1)
    assert (done.code, done.out) == (0, f"{back}: {NUM} samples\n")
    assert tree(back) == tree(folder)


def test_one_format_to_another_in_processes(folder: Path, tmp_path: Path, command: Command) -> None:
    assert command("pack", folder, tmp_path / "a", "-f", "tar", "--shard-size", "5K").code == 0
    args = ("-f", "npy", "--shard-size", "3K", "-j", 2)
    assert command("pack", tmp_path / "a", tmp_path / "b", *args).code == 0
    assert command("unpack", tmp_path / "b", tmp_path / "c", "-j", 2).code == 0
    assert tree(tmp_path / "c") == tree(folder)
    first = json.loads((tmp_path / "a" / DATASET).read_text())
    second = json.loads((tmp_path / "b" / DATASET).read_text())
    assert first["classes"] == second["classes"] == ["cat", "dög%41"]
    assert first["origin"] == second["origin"] == str(folder)


def test_shards_are_about_as_large_as_asked(tmp_path: Path) -> None:
    made = Made(size=1000)
    dataset = pack(made, tmp_path / "a", FORMATS["npy"], shard_bytes=7000).dataset
    assert [entry.num_samples for entry in dataset.entries] == [6] * 6 + [4]
    dataset = pack(made, tmp_path / "b", FORMATS["npy"], shard_bytes=1).dataset
    assert [entry.num_samples for entry in dataset.entries] == [1] * NUM


def test_files_that_look_like_ours_are_samples_too(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "folder" / "below"
    folder.mkdir(parents=True)
    for name in ("a.idx", "b.idx", "a.part", "b.part"):
        (folder / name).write_text(name)
    for name in ("c.idx", "c.part"):
        (folder.parent / name).write_text(name)
    assert command("pack", folder.parent, tmp_path / "packed", "-j", 1).code == 0
    assert command("unpack", tmp_path / "packed", tmp_path / "back", "-j", 1).code == 0
    assert tree(tmp_path / "back") == tree(folder.parent)


def test_our_archives_without_their_tables(folder: Path, tmp_path: Path, command: Command) -> None:
    assert command("pack", folder, tmp_path / "a", "--shard-size", "1M", "-j", 1).code == 0
    shard = tmp_path / "shard.tar"
    shutil.copy(tmp_path / "a" / "shard-00000.tar", shard)
    assert command("unpack", shard, tmp_path / "back", "-j", 1).code == 0
    assert tree(tmp_path / "back") == tree(folder)


def test_a_random_order(folder: Path, tmp_path: Path, command: Command) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        args = ("-f", "tar", "--shuffle", seed, "--shard-size", "4K", "-j", 1)
        assert command("pack", folder, tmp_path / name, *args).code == 0
    plain = list(open_dataset(folder).iter_keys())
    one, same, other = (list(open_dataset(tmp_path / name).iter_keys()) for name in "abc")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert one == same
    assert len({tuple(keys) for keys in (plain, one, other)}) == 3
    assert sorted(one) == sorted(other) == sorted(plain)
    # The classes of neighbours are mixed, where the folder has one after the other.
    assert one != sorted(one, key=lambda key: key.partition("/")[0])
    origin = json.loads((tmp_path / "a" / DATASET).read_text())["origin"]
    assert origin == f"{folder}, shuffled with seed 3"
    assert command("unpack", tmp_path / "a", tmp_path / "back", "-j", 1).code == 0
    assert tree(tmp_path / "back") == tree(folder)


def test_varying_shapes(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    # Files of one size whose shapes differ, where nobody looks first.
    for number in range(300):
        shape = (6, 4) if number == 150 else (4, 6)
        np.save(folder / f"{number:03d}.npy", np.full(shape, number, dtype=np.int32))
    refused = command("pack", folder, tmp_path / "packed", "-f", "zip", "-j", 1)
    assert refused.code == 2
    assert "sample 150 of" in refused.err
    assert "--varying" in refused.err
    other = command("pack", folder, tmp_path / "packed", "-f", "zip", "-j", 1, "--varying")
    assert (other.code, "was begun with fields=" in other.err) == (2, True)
    shutil.rmtree(tmp_path / "packed")
    assert command("pack", folder, tmp_path / "packed", "-f", "zip", "--varying").code == 0
    assert command("unpack", tmp_path / "packed", tmp_path / "back", "-j", 1).code == 0
    assert tree(tmp_path / "back") == tree(folder)


# Ends in the middle.


def stop() -> None:
    raise RunError("enough")


def test_going_on_gives_the_same_bytes(form: Format, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pack(Made(), whole, form, shard_bytes=600)
    with pytest.raises(RunError, match="enough"):
        pack(Made(at=33, do=stop), parts, form, shard_bytes=600)
    assert not (parts / DATASET).exists()
    with pytest.raises(UsageError, match="packing did not end"):
        open_dataset(parts)
    # A table that is no table, and a shard without one, are made again.
    first = sorted(parts.glob("*.idx"))
    first[0].write_bytes(b"half")
    first[1].unlink()
    kept = {path: path.stat().st_mtime_ns for path in parts.glob("shard-00002*")}
    tables = sorted(parts.glob("*.idx"))[1:]
    assert tables[0].with_suffix("") in kept
    num_kept = sum(len(packing.read_table(path)) for path in tables)
    again = pack(Made(), parts, form, shard_bytes=600)
    assert tree(parts) == tree(whole)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert again.num_written == NUM - num_kept


def test_the_bytes_do_not_depend_on_the_hour(form: Format, stored: Path, tmp_path: Path) -> None:
    first = stored / form.name
    time.sleep(max(0.0, (first / DATASET).stat().st_mtime + 1.1 - time.time()))
    pack(Made(size=200), tmp_path / "again", form, shard_bytes=2500)
    assert tree(tmp_path / "again") == tree(first)


def run_cli(*args: object, **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PACK_TEST": str(args)}
    return subprocess.Popen(
        [sys.executable, "-m", "ridgeline.cli", "data", *map(str, args)],
        env=env,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def processes_of(*args: object) -> list[int]:
    """Processes that a command started, itself or through others, and that are alive."""
    mark = f"PACK_TEST={args}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("from") / "many", 900, 50)


def test_a_killed_pack_goes_on_with_the_same_command(many: Path, tmp_path: Path) -> None:
    whole = pack(open_dataset(many), tmp_path / "whole", FORMATS["tar"], shard_bytes=1500)
    target = tmp_path / "killed"
    args = ("pack", many, target, "--shard-size", "1500", "-j", 2)
    with run_cli(*args) as started:
        wait_for(lambda: len(list(target.glob("*.idx"))) >= 3)
        started.send_signal(signal.SIGKILL)
    wait_for(lambda: not processes_of(*args))
    assert not (target / DATASET).exists()
    done = {
        path: (path.stat().st_ino, path.stat().st_mtime_ns)
        for table in target.glob("*.idx")
        for path in (table, table.with_suffix(""))
    }
    assert 6 <= len(done) < 2 * len(whole.dataset.entries)
    with run_cli(*args) as again:
        out, err = again.communicate()
    assert again.returncode == 0, err
    there = sum(len(packing.read_table(path)) for path in done if path.suffix == ".idx")
    assert f"900 samples ({there} were there already) in" in out
    assert {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in done} == done
    written, wanted = tree(target), tree(tmp_path / "whole")
    assert written == wanted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_processes(
    number: signal.Signals, many: Path, tmp_path: Path
) -> None:
    target = tmp_path / "interrupted"
    args = ("pack", many, target, "--shard-size", "1500", "-j", 2)
    with run_cli(*args) as started:
        wait_for(lambda: len(list(target.glob("*.idx"))) >= 1)
        assert len(processes_of(*args)) > 2
        started.send_signal(number)
        started.send_signal(number)  # as `timeout` does, which tells the group too
        _, err = started.communicate(timeout=100)
    assert started.returncode == 1
    assert f"interrupted; the same command goes on with what is in {target}" in err
    assert "Traceback" not in err
    wait_for(lambda: not processes_of(*args), 60)
    assert not (target / DATASET).exists()


TWICE = """
import signal, threading, time
from ridgeline.data import work as module

def work(common, task):
    time.sleep(0.3)

if __name__ == "__main__":
    shutdown = module.ProcessPoolExecutor.shutdown
    def interrupted(pool, **options):
        module.ProcessPoolExecutor.shutdown = shutdown
        raise KeyboardInterrupt  # the second one, before the pool has heard that it is to end
    module.ProcessPoolExecutor.shutdown = interrupted
    threading.Timer(1.5, signal.raise_signal, (signal.SIGINT,)).start()
    try:
        module.run_tasks(work, None, range(1000), 2, lambda done: None)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_a_second_interrupt_does_not_leave_the_processes_waiting(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TWICE)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=240
    )
    assert (ran.returncode, ran.stdout) == (0, "interrupted\n"), ran.stderr


def test_a_place_inside_the_source_is_refused(many: Path) -> None:
    with run_cli("pack", many, many / "packed") as started:
        _, err = started.communicate(timeout=240)
    assert started.returncode == 2
    assert f"lies inside {many}" in err
    assert not (many / "packed").exists()


WORK = """
import time
from ridgeline.data.work import Tally, run_tasks
from ridgeline.errors import RunError

def work(common, task):
    if task == 0:
        raise RunError("the first failed")
    tally = Tally()
    for _ in range(6000):
        time.sleep(0.01)
        tally.add()

if __name__ == "__main__":
    try:
        run_tasks(work, None, [1, 0], 2, lambda done: None)
    except RunError as error:
        print(error)
"""


def test_one_that_fails_stops_the_others(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WORK)
    begin = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    args = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(args, env=env, capture_output=True, text=True, timeout=275)
    assert (done.stdout, done.stderr) == ("the first failed\n", "")
    assert time.monotonic() - begin < 50


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("-f", "zip"), "format='tar', not 'zip'"),
        (("--shard-size", "5K"), "shard_bytes=4000, not 5000"),
        (("--shuffle", "1"), "shuffled with seed 1"),
        (("--varying",), "fields="),
    ],
)
def test_a_pack_begun_otherwise_is_refused(
    args: tuple[str, ...], said: str, folder: Path, tmp_path: Path, command: Command
) -> None:
    target = tmp_path / "packed"
    common = ("pack", folder, target, "-j", 1)
    assert command(*common, "--shard-size", "4K").code == 0
    (target / DATASET).unlink()
    plan = {"origin": str(folder), "format": "tar", "samples": NUM, "shard_bytes": 4000}
    dataset = open_dataset(folder)
    plan["fields"] = {name: field.to_dict() for name, field in dataset.schema.items()}
    (target / PLAN).write_text(json.dumps(plan))
    before = tree(target)
    refused = command(*common, *(args if "--shard-size" in args else (*args, "--shard-size", "4K")))
    assert refused.code == 2
    assert "was begun with" in refused.err
    assert said in refused.err
    assert tree(target) == before


def test_other_samples_of_the_same_number_are_refused(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "source")
    target = tmp_path / "packed"

    class Ends(Shuffled):
        def read(self, index: int) -> Sample:
            if index == NUM - 1 and list(target.glob("*.idx")):
                raise RunError("enough")
            return super().read(index)

    with pytest.raises(RunError, match="enough"):
        pack(Ends(open_dataset(source), 0), target, FORMATS["tar"], shard_bytes=2000)
    changed = next(path for path in source.rglob("*.bin"))
    changed.write_bytes(bytes(300))
    with pytest.raises(UsageError, match="was begun with crc="):
        pack(Shuffled(open_dataset(source), 0), target, FORMATS["tar"], shard_bytes=2000)


def test_two_at_once(tmp_path: Path) -> None:
    target = tmp_path / "packed"
    said = []

    def second() -> None:
        with pytest.raises(UsageError) as refused:
            pack(Made(), target, FORMATS["tar"], shard_bytes=600)
        said.append(str(refused.value))

    pack(Made(at=20, do=second), target, FORMATS["tar"], shard_bytes=600)
    assert said == [f"another process is packing to {target}; wait for it or choose another place"]
    assert not verify(open_dataset(target))


# Disks.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_too_little_room_is_told_before_anything_is_written(
    small_disk: Path, tmp_path: Path, command: Command
) -> None:
    source = make_folder(tmp_path / "source", 30, 100_000)
    refused = command("pack", source, small_disk / "a" / "b", "-j", 1)
    assert refused.code == 2
    assert "has room for 0.00 GB" in refused.err
    assert list(small_disk.iterdir()) == []
    assert command("pack", source, tmp_path / "packed", "-j", 1).code == 0
    refused = command("unpack", tmp_path / "packed", small_disk / "back", "-j", 1)
    assert (refused.code, "has room for" in refused.err) == (2, True)
    assert list(small_disk.iterdir()) == []


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def test_a_disk_that_fills_up_in_the_middle(form: Format, small_disk: Path, tmp_path: Path) -> None:
    target = small_disk / "packed"
    made = Made(at=25, do=lambda: fill(small_disk), size=20_000)
    with pytest.raises(RunError, match=r"No space left|cannot write"):
        pack(made, target, form, shard_bytes=200_000)
    assert not (target / DATASET).exists()
    with pytest.raises(UsageError, match="packing did not end"):
        open_dataset(target)
    (small_disk / "filler").unlink()
    again = pack(Made(size=20_000), target, form, shard_bytes=200_000)
    assert 0 < again.num_written < NUM
    pack(Made(size=20_000), tmp_path / "whole", form, shard_bytes=200_000)
    assert tree(target) == tree(tmp_path / "whole")


def test_a_disk_that_fills_up_while_unpacking(
    small_disk: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(Made(size=100_000), tmp_path / "packed", FORMATS["tar"])
    monkeypatch.setattr(packing, "_check_room", lambda target, num_bytes: None)
    full = command("unpack", tmp_path / "packed", small_disk / "back", "-j", 1)
    assert full.code == 1
    assert "No space left on device" in full.err
    refused = command("info", small_disk / "back")
    assert (refused.code, "unpacking did not end" in refused.err) == (2, True)


def test_places_that_cannot_be_written(folder: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("pack", "unpack"):
        refused = command(name, folder, tmp_path / "file" / "packed", "-j", 1)
        assert (refused.code, "cannot make the folder" in refused.err) == (2, True)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    for name in ("pack", "unpack"):
        refused = command(name, folder, tmp_path / "taken", "-j", 1)
        assert (refused.code, "choose another place" in refused.err) == (2, True)
    assert tree(tmp_path / "taken") == {"mine.txt": b"mine"}
    assert command("pack", folder, tmp_path / "packed", "-j", 1).code == 0
    refused = command("pack", folder, tmp_path / "packed", "-j", 1)
    assert (refused.code, "holds a data set already" in refused.err) == (2, True)


# Damage.


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stored")
    for name, form in FORMATS.items():
        pack(Made(size=200), root / name, form, shard_bytes=2500)
    return root


@pytest.fixture
def packed(form: Format, stored: Path, tmp_path: Path) -> Path:
    shutil.copytree(stored / form.name, tmp_path / "data")
    return tmp_path / "data"


def shard_of(packed: Path, number: int) -> Path:
    return packed / json.loads((packed / DATASET).read_text())["shards"][number]["name"]


def files_of(shard: Path) -> list[Path]:
    return [shard] if shard.is_file() else [path for path in shard.rglob("*") if path.is_file()]


def flip(shard: Path, data: object) -> None:
    """One bit of a field, wherever it is kept; LMDB has old pages with it, too."""
    assert isinstance(data, bytes)
    changed = bytearray(data)
    changed[len(data) // 2] ^= 16
    found = False
    for file in files_of(shard):
        whole = file.read_bytes()
        found |= data in whole
        file.write_bytes(whole.replace(data, changed))
    assert found, "the bytes are nowhere as they are"


def test_a_whole_data_set(packed: Path, command: Command) -> None:
    done = command("verify", packed, "-j", 1)
    assert done.code == 0
    assert done.out == f"{packed}: {NUM} samples, all read whole and as they were written\n"
    told = json.loads(command("verify", packed, "-j", 1, "--json").out)
    assert told == {"samples": NUM, "lost": 0, "damaged": []}


def test_a_changed_bit_is_found(packed: Path, command: Command) -> None:
    dataset = open_dataset(packed)
    shard, row = dataset.locate(17)
    raw = dataset.read(17)["raw"]
    del dataset
    flip(shard_of(packed, shard), raw)
    done = command("verify", packed, "-j", 1)
    assert done.code == 1
    assert f"{shard_of(packed, shard)}: sample {row} ('0017'" in done.out
    told = json.loads(command("verify", packed, "-j", 1, "--json").out)
    told, lost = told["damaged"], told["lost"]
    assert f"{lost} of 40 samples of {packed}, in 1 of its" in done.err
    assert lost == len(told) > 0
    assert any("'0017'" in line for line in told)
    # A page or a group of rows is damaged at once in some formats; other shards never are.
    assert all(str(shard_of(packed, shard)) in line for line in told)


@pytest.mark.parametrize("keep", [-1, 0.4])
def test_a_shard_cut_short_is_found(
    keep: float, form: Format, packed: Path, command: Command
) -> None:
    shard = shard_of(packed, 1)
    file = max(files_of(shard), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    os.truncate(file, size - 1 if keep == -1 else int(size * keep))
    # One of them in processes: starting those takes longer than the rest.
    done = command("verify", packed, "-j", 2 if form.name == "tar" else 1)
    assert done.code == 1
    assert str(shard) in done.out
    assert str(shard_of(packed, 0)) not in done.out
    # A shard of thousands would fill the terminal: two sentences on the shard, three on its samples.
    assert len(done.out.splitlines()) <= 6


def test_a_missing_shard_is_found(packed: Path, command: Command) -> None:
    shard = shard_of(packed, 2)
    shutil.rmtree(shard) if shard.is_dir() else shard.unlink()
    done = command("verify", packed, "-j", 1)
    assert done.code == 1
    assert f"{shard} is gone" in done.out
    table = shard_of(packed, 1).with_name(shard_of(packed, 1).name + ".idx")
    table.unlink()
    assert f"cannot read the table {table}" in command("verify", packed, "-j", 1).out


def test_a_wrong_count_is_found(packed: Path, command: Command) -> None:
    values = json.loads((packed / DATASET).read_text())
    values["shards"][0]["samples"] += 1
    (packed / DATASET).write_text(json.dumps(values))
    refused = command("verify", packed, "-j", 1)
    assert refused.code == 2
    assert "names 41 samples in its shards and 40 in all" in refused.err
    values["samples"] += 1
    (packed / DATASET).write_text(json.dumps(values))
    done = command("verify", packed, "-j", 1)
    assert done.code == 1
    assert f"{shard_of(packed, 0)} holds 10 samples, not 11" in done.out


# What is refused.


def archive(path: Path, name: str) -> None:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as out:
            out.writestr("a.txt", b"a")
            out.writestr(name, b"b")
        return
    with tarfile.open(path, "w") as out:
        for member in ("a.txt", name):
            info = tarfile.TarInfo(member)
            info.size = 1
            out.addfile(info, open("/dev/zero", "rb"))  # noqa: SIM115


@pytest.mark.parametrize("name", ["../x.txt", "a/../../x.txt", "/x.txt", "%2E%2E/../x.txt"])
@pytest.mark.parametrize("ending", ["tar", "zip"])
def test_names_that_lead_out(name: str, ending: str, tmp_path: Path, command: Command) -> None:
    path = tmp_path / f"bad.{ending}"
    archive(path, name)
    inside = tmp_path / "inside"
    for args in (("info", path), ("pack", path, inside / "a"), ("unpack", path, inside / "b")):
        refused = command(*args)
        assert refused.code == 2
        assert f"the name {name!r} leads out of its folder" in refused.err
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


def test_what_is_no_data(tmp_path: Path, command: Command) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.xyz").write_text("x")
    for source, said in (
        ("empty", "holds no samples"),
        ("gone", "there is no"),
        ("file.xyz", "in no format that is known"),
    ):
        for name in ("pack", "unpack"):
            refused = command(name, tmp_path / source, tmp_path / "out", "-j", 1)
            assert (refused.code, said in refused.err) == (2, True)
        refused = command("info", tmp_path / source)
        assert (refused.code, said in refused.err) == (2, True)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="holds no samples"):
        pack(Made(0), tmp_path / "out", FORMATS["tar"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--format", "tra"), "did you mean 'tar'"),
        (("--shard-size", "many"), "--shard-size 'many' is no size"),
        (("--shard-size", "0"), "less than a byte"),
        (("train.lr=1",), "'train.lr=1' is for recipe:NAME"),
    ],
)
def test_wrong_arguments(
    args: tuple[str, ...], said: str, folder: Path, tmp_path: Path, command: Command
) -> None:
    refused = command("pack", folder, tmp_path / "out", *args)
    assert (refused.code, said in refused.err) == (2, True), refused.err
    assert not (tmp_path / "out").exists()


# What is said.


def test_info(folder: Path, tmp_path: Path, command: Command) -> None:
    target = tmp_path / "packed"
    assert command("pack", folder, target, "--shard-size", "4K", "-j", 1).code == 0
    lines = dict(line.split(maxsplit=1) for line in command("info", target).out.splitlines())
    assert lines["format"] == "tar (archives as WebDataset reads them)"
    assert lines["samples"].startswith("40, ")
    assert lines["fields"] == "bin: bytes, mask: int16 [2, 3]"
    assert lines["packed"] == f"from  {folder}"
    told = json.loads(command("info", target, "--json").out)
    assert (told["samples"], told["checksums"], len(told["shards"])) == (NUM, True, 4)
    assert told["classes"] == ["cat", "dög%41"]
    plain = json.loads(command("info", folder, "--json").out)
    assert (plain["format"], plain["checksums"], plain["samples"]) == ("folder", False, NUM)


def test_formats_are_listed(command: Command) -> None:
    lines = command("formats").out.splitlines()
    assert [line.split()[0] for line in lines] == list(FORMATS)


def test_the_bar_is_for_a_terminal(folder: Path, tmp_path: Path) -> None:
    with run_cli("pack", folder, tmp_path / "a", "-j", 1) as quiet:
        _, err = quiet.communicate()
    assert (quiet.returncode, err) == (0, "")
    ours, theirs = pty.openpty()
    with run_cli("pack", folder, tmp_path / "b", "-j", 1, stderr=theirs) as shown:
        os.close(theirs)
        seen = b""
        try:
            while more := os.read(ours, 4096):
                seen += more
        except OSError:
            pass  # that is how the end of a terminal reads
        assert shown.stdout is not None
        shown.stdout.read()
    os.close(ours)
    assert shown.returncode == 0
    assert b"packing" in seen
    assert b"40/40" in seen
    assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l")


def test_staging(folder: Path, tmp_path: Path, command: Command) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with run_cli("stage", folder, "--to", disk, "--json") as started:
        staged = json.loads(started.communicate()[0])
    assert tree(Path(staged["path"])) == tree(folder)
    assert str(folder) in command("stage", "--list", "--to", disk).out
    (listed,) = json.loads(command("stage", "--list", "--to", disk, "--json").out)
    assert (listed["path"], listed["keep"]) == (staged["path"], True)
    refused = command("stage", "--list", "--clean")
    assert (refused.code, "stage takes one of" in refused.err) == (2, True)
    assert command("stage", "--clean", "--to", disk).code == 0
    assert Path(staged["path"]).exists()
    assert command("stage", "--clean", "--all", "--to", disk).code == 0
    assert not Path(staged["path"]).exists()


# Recipes.


@pytest.fixture
def digits() -> list[str]:
    return ["recipe:digits", "data.args={size: 8}"]


def test_both_parts_of_a_recipe(digits: list[str], tmp_path: Path, command: Command) -> None:
    target = tmp_path / "packed"
    common = ("pack", digits[0], target, digits[1], "-f", "npy", "--shard-size", "64K", "-j", 1)
    done = command(*common)
    assert done.code == 0, done.err
    assert [line.partition(":")[0] for line in done.out.splitlines()] == [
        str(target / "train"),
        str(target / "eval"),
    ]
    made = build_sources("digits", {"size": 8}, 0)
    packed = build_sources("packed", {"path": str(target), "classes": 10}, 0)
    for one, other in zip(made, packed, strict=True):
        assert len(one) == len(other)
        for a, b in zip(one.fetch(np.arange(9), 0), other.fetch(np.arange(9), 0), strict=True):
            assert np.array_equal(a.numpy(), b.numpy())
    both = command("info", target)
    assert both.code == 2
    assert f"give one of them: {target / 'eval'}, {target / 'train'}" in both.err
    # The first part was done when somebody ended the command.
    shutil.rmtree(target / "eval")
    before = tree(target / "train")
    again = command(*common)
    assert again.code == 0, again.err
    assert tree(target / "train") == before
    assert len(open_dataset(target / "eval")) == len(made[1])
    refused = command(*common)
    assert (refused.code, "holds a data set already" in refused.err) == (2, True)
    shutil.rmtree(target / "eval")
    refused = command(*common, "--shuffle", 1)
    assert (refused.code, "holds a data set already" in refused.err) == (2, True)


def test_a_source_that_cannot_be_read_is_not_the_disks_fault(tmp_path: Path) -> None:
    def gone() -> None:
        raise FileNotFoundError(2, "No such file", "photo.jpg")

    with pytest.raises(RunError, match=r"sample 20 of made by a test cannot be read: .*photo\.jpg"):
        pack(Made(at=20, do=gone), tmp_path / "a", FORMATS["tar"])


def test_unpacking_what_is_damaged(stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "data"
    shutil.copytree(stored / "tar", path)
    flip(shard_of(path, 0), open_dataset(path).read(3)["raw"])
    dataset: Dataset = open_dataset(path, check="always")
    with pytest.raises(RunError, match=r"sample 3 \('0003'"):
        unpack(dataset, tmp_path / "back")
    with pytest.raises(UsageError, match="unpacking did not end"):
        open_dataset(tmp_path / "back")
