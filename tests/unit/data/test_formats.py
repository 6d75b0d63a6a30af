"""Every format keeps samples bit for bit, and says which file is broken. A new line in FORMATS is
tested by itself."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import mmap
import multiprocessing
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from ridgeline.data.formats.contract import (
    BadSample,
    Format,
    Sample,
    Schema,
    Shard,
    Table,
    sample_checksums,
    schema_of,
    widen,
)
from ridgeline.data.formats.table import FORMATS, detect
from ridgeline.errors import UsageError

NUM_SAMPLES = 23
LIBRARIES = {"lmdb": "lmdb", "hdf5": "h5py", "parquet": "pyarrow", "arrow": "pyarrow"}


@pytest.fixture(params=list(FORMATS))
def form(request: pytest.FixtureRequest) -> Format:
    pytest.importorskip(LIBRARIES.get(request.param, "numpy"))
    return FORMATS[request.param]


def make_samples() -> list[tuple[str, Sample]]:
    rng = np.random.default_rng(3)
    samples: list[tuple[str, Sample]] = []
    for number in range(NUM_SAMPLES):
        sample: Sample = {
            "raw": rng.bytes(int(rng.integers(1, 3000)) if number % 5 else 0),
            "grid": rng.standard_normal((3, 4), dtype=np.float32),
            "label": np.array(number * 7 - 3, dtype=np.int64),
            "weight": np.array(rng.standard_normal(), dtype=np.float32),
            "box": rng.standard_normal((number % 4, 2)),
            "tokens": rng.integers(-9, 9, number % 6 + 1).astype(np.int32),
            "bits": rng.integers(0, 2, 5).astype(bool),
            "half": rng.standard_normal((2, 2)).astype(np.float16),
            "pixel": rng.integers(0, 255, (2, 3, 1)).astype(np.uint8),
            "embed": rng.standard_normal(6).astype(np.float32),
        }
        samples.append((f"part{number % 2}/s{number:03d}.v1", sample))
    return samples


SAMPLES = make_samples()


def schema_for(samples: list[tuple[str, Sample]]) -> Schema:
    schema = schema_of(samples[0][1])
    for key, sample in samples:
        schema = widen(schema, sample, key)
    return schema


def write(
    form: Format, folder: Path, samples: list[tuple[str, Sample]]
) -> tuple[Path, Schema, Table]:
    schema = schema_for(samples)
    assert form.refuses(schema) == ""
    path = folder / f"shard-00000{form.suffix}"
    writer = form.write(path, schema)
    for key, sample in samples:
        writer.add(key, sample)
    places = writer.finish()
    writer.close()
    sums = np.array([sample_checksums(sample, schema) for _, sample in samples], dtype=np.uint32)
    return path, schema, Table([key for key, _ in samples], sums, *(places or (None, None)))


@pytest.fixture
def written(form: Format, tmp_path: Path) -> tuple[Path, Schema, Table]:
    return write(form, tmp_path, SAMPLES)


def assert_same(found: Sample, wanted: Sample) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        other = found[name]
        if isinstance(value, bytes):
            assert isinstance(other, bytes), name
            assert other == value, name
        else:
            assert isinstance(other, np.ndarray), name
            assert (other.dtype, other.shape) == (value.dtype, value.shape), name
            assert other.tobytes() == value.tobytes(), name


def files_of(path: Path) -> list[Path]:
    """The files of a shard, the largest first."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return sorted(files, key=lambda file: -file.stat().st_size)


def read_all(shard: Shard) -> list[Sample]:
    return [shard.read(row) for row in range(len(shard))]


def test_samples_come_back_in_any_order(form: Format, written: tuple[Path, Schema, Table]) -> None:
    path, schema, table = written
    shard = form.open(path, schema, table)
    assert len(shard) == NUM_SAMPLES
    for row in np.random.default_rng(0).permutation(NUM_SAMPLES).tolist():
        sample = shard.read(row)
        assert_same(sample, SAMPLES[row][1])
        assert list(sample) == list(schema)
        assert sample_checksums(sample, schema) == table.checksums[row].tolist()
        assert shard.place(row)
    shard.ahead(0, NUM_SAMPLES)
    shard.close()


def in_memory(files: list[Path]) -> int:
    """Bytes of the files that the system has in memory, by its own account."""
    mincore, total = ctypes.CDLL(None).mincore, 0
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            view = np.frombuffer(mapped, np.uint8)
            pages = (ctypes.c_ubyte * -(-view.size // mmap.PAGESIZE))()
            mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.size), pages)
            total += sum(page & 1 for page in pages) * mmap.PAGESIZE
            del view
    return total


def forget(files: list[Path]) -> None:
    for path in files:
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


MAPPED = {"arrow", "folder", "hdf5", "lmdb"}
"""Read as they come: a folder's files are opened by name, the others are left to the library."""
LARGE = 5 << 20


def write_large(name: str, folder: Path) -> tuple[Shard, list[Path], list[tuple[str, Sample]]]:
    """A shard of large samples, its files and what is in it; nothing of it is in memory."""
    pytest.importorskip(LIBRARIES.get(name, "numpy"))
    rng = np.random.default_rng(0)
    samples: list[tuple[str, Sample]] = [
        (f"s{n}", {"field": rng.integers(0, 255, LARGE).astype(np.uint8)}) for n in range(8)
    ]
    path, schema, table = write(FORMATS[name], folder, samples)
    files = files_of(path)
    forget(files)
    shard = FORMATS[name].open(path, schema, table)
    if in_memory(files) > LARGE:
        pytest.skip("the file system here keeps everything in memory")
    return shard, files, samples


def test_a_large_value_of_lmdb_is_not_read_page_by_page(tmp_path: Path) -> None:
    shard, _, samples = write_large("lmdb", tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    assert_same(shard.read(5), samples[5][1])
    num_waits = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
    assert num_waits < LARGE / mmap.PAGESIZE / 4


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in MAPPED])
def test_what_is_asked_for_is_read_before_it_is_wanted(name: str, tmp_path: Path) -> None:
    shard, files, samples = write_large(name, tmp_path)
    one, before = LARGE, in_memory(files)
    shard.ahead(5, 6)
    until = time.monotonic() + 100
    while in_memory(files) < before + one and time.monotonic() < until:
        time.sleep(0.02)
    # All of one, and not of the others.
    assert before + one <= in_memory(files) < before + 3 * one
    assert_same(shard.read(5), samples[5][1])
    shard.close()


def test_asking_for_what_is_gone_is_no_error(
    form: Format, written: tuple[Path, Schema, Table]
) -> None:
    """Who reads it says so."""
    path, schema, table = written
    shard = form.open(path, schema, table)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    shard.ahead(0, NUM_SAMPLES)
    shard.close()


def test_a_shard_explains_itself(form: Format, written: tuple[Path, Schema, Table]) -> None:
    path, schema, _ = written
    assert detect(path)[0] is form
    if form.name != "folder":
        assert detect(path.parent) == (form, [path])
    shard = form.open(path, None, None)
    assert set(shard.schema) == set(schema)
    rows = {key: row for row, key in enumerate(shard.table.keys)}
    for key, sample in SAMPLES:
        found = shard.read(rows[key])
        assert_same(found, sample)
        assert sample_checksums(found, schema) == sample_checksums(sample, schema)
    # What was found can be kept and used in place of looking again.
    again = form.open(path, shard.schema, shard.table)
    assert_same(again.read(5), shard.read(5))


@pytest.mark.parametrize("rows", [[3, 1, 1, 20], [4, 5, 6], [], [0, 1, 9, 10, 2]])
def test_arrays_come_straight_into_a_batch(
    form: Format, written: tuple[Path, Schema, Table], rows: list[int]
) -> None:
    path, schema, table = written
    shard = form.open(path, schema, table)
    for name, field in schema.items():
        if not field.is_fixed:
            continue
        out = np.zeros((len(rows), *field.shape), dtype=field.dtype)
        shard.read_into(name, np.array(rows, dtype=np.int64), out)
        wanted = np.zeros_like(out)
        for place, row in enumerate(rows):
            wanted[place] = SAMPLES[row][1][name]
        assert out.tobytes() == wanted.tobytes(), name


def test_a_shard_cut_short_is_named(form: Format, written: tuple[Path, Schema, Table]) -> None:
    path, schema, table = written
    largest = files_of(path)[0]
    for keep in (0.9, 0.5, 0.1, 0.0):
        os.truncate(largest, int(largest.stat().st_size * keep))
        # A directory at the end is missed by nobody who has the table.
        if form.name != "zip" or keep < 0.9:
            with pytest.raises((BadSample, UsageError), match=path.name):
                read_all(form.open(path, schema, table))
        if form.name != "folder":
            with pytest.raises((BadSample, UsageError), match=path.name):
                read_all(form.open(path, None, None))


def test_a_changed_byte_is_found(form: Format, written: tuple[Path, Schema, Table]) -> None:
    path, schema, table = written
    wanted = SAMPLES[8][1]["raw"]
    assert isinstance(wanted, bytes)
    for file in files_of(path):
        data = bytearray(file.read_bytes())
        if (at := data.find(wanted)) >= 0:
            data[at + len(wanted) // 2] ^= 4
            file.write_bytes(data)
            break
    else:
        pytest.fail("the sample's bytes are nowhere as they are")
    try:
        found = form.open(path, schema, table).read(8)
    except (BadSample, UsageError):
        return
    assert sample_checksums(found, schema) != table.checksums[8].tolist()


def test_damage_anywhere_is_told_in_words(
    form: Format, written: tuple[Path, Schema, Table]
) -> None:
    """Whatever is changed, reading gives a sample or one of two errors."""
    if form.name == "lmdb":
        pytest.skip("LMDB follows the page numbers it finds: a wrong one ends the process")
    path, schema, table = written
    rng = np.random.default_rng(4)
    files = files_of(path)[:3]
    whole = [file.read_bytes() for file in files]
    for number in range(12):
        file, data = files[number % len(files)], bytearray(whole[number % len(files)])
        for at in rng.integers(0, len(data), 1 + number * 3).tolist():
            data[at] ^= int(rng.integers(1, 256))
        file.unlink()
        file.write_bytes(data)
        for known in ((schema, table), (None, None)):
            try:
                shard = form.open(path, *known)
            except UsageError:
                continue
            for row in range(len(shard)):
                with contextlib.suppress(BadSample):
                    shard.read(row)


def test_nothing_else_is_taken_for_it(form: Format, tmp_path: Path) -> None:
    path = tmp_path / f"other{form.suffix}"
    with pytest.raises(UsageError, match="other"):
        form.open(path, None, None)
    if form.suffix:
        path.write_bytes(b"this is something else altogether" * 40)
        with pytest.raises(UsageError, match="other"):
            form.open(path, None, None)


def _sums(args: tuple[str, Path, Schema, Table]) -> list[int]:
    name, path, schema, table = args
    shard = FORMATS[name].open(path, schema, table)
    return [sample_checksums(sample, schema) for sample in read_all(shard)]


def test_another_process_reads_it(form: Format, written: tuple[Path, Schema, Table]) -> None:
    path, schema, table = written
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        sums = pool.apply(_sums, ((form.name, path, schema, table),))
    assert sums == table.checksums.tolist()


def test_a_forked_process_reads_what_its_parent_opened(
    form: Format, written: tuple[Path, Schema, Table]
) -> None:
    path, schema, table = written
    shard = form.open(path, schema, table)
    shard.read(0)
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # a child that hangs ends, and is seen
        status = 1
        try:
            sums = [sample_checksums(sample, schema) for sample in read_all(shard)]
            status = 0 if sums == table.checksums.tolist() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert_same(shard.read(1), SAMPLES[1][1])


def test_threads_read_at_once(form: Format, written: tuple[Path, Schema, Table]) -> None:
    path, schema, table = written
    shard = form.open(path, schema, table)
    rows = np.random.default_rng(1).integers(0, NUM_SAMPLES, 200).tolist()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for row, sample in zip(rows, pool.map(shard.read, rows), strict=True):
            assert sample_checksums(sample, schema) == table.checksums[row].tolist()


def test_two_readers_of_one_shard(form: Format, written: tuple[Path, Schema, Table]) -> None:
    path, schema, table = written
    one, two = form.open(path, schema, table), form.open(path, schema, table)
    assert_same(one.read(2), two.read(2))
    one.close()
    assert_same(two.read(3), SAMPLES[3][1])
    two.close()


def test_a_shard_is_written_over_what_a_stopped_writer_left(form: Format, tmp_path: Path) -> None:
    schema = schema_for(SAMPLES)
    path = tmp_path / f"shard-00000{form.suffix}"
    writer = form.write(path, schema)
    writer.add(*SAMPLES[4])
    writer.close()
    if form.name == "folder":
        shutil.rmtree(path)
    _, schema, table = write(form, tmp_path, SAMPLES[:3])
    shard = form.open(path, schema, table)
    for row in range(3):
        assert_same(shard.read(row), SAMPLES[row][1])


def test_large_values(form: Format, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    samples: list[tuple[str, Sample]] = [
        (
            f"k{number}",
            {"x": rng.standard_normal((3, 50, 70), dtype=np.float32), "b": rng.bytes(90_000)},
        )
        for number in range(40)
    ]
    path, schema, table = write(form, tmp_path, samples)
    shard = form.open(path, schema, table)
    for row in (39, 0, 17, 38):
        assert_same(shard.read(row), samples[row][1])
    out = np.zeros((3, 3, 50, 70), dtype=np.float32)
    shard.read_into("x", np.array([39, 2, 20]), out)
    for target, row in zip(out, (39, 2, 20), strict=True):
        assert target.tobytes() == samples[row][1]["x"].tobytes()


def test_bytes_alone(form: Format, tmp_path: Path) -> None:
    samples: list[tuple[str, Sample]] = [(f"k{n}", {"txt": b"x" * n}) for n in range(4)]
    path, schema, table = write(form, tmp_path, samples)
    assert [shard["txt"] for shard in read_all(form.open(path, schema, table))] == [
        b"x" * n for n in range(4)
    ]
