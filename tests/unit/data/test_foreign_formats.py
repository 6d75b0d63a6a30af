"""Files that others wrote are read as they meant them, and theirs read ours; what would harm is refused."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ridgeline.data.formats.contract import (
    BadSample,
    Field,
    Sample,
    Schema,
    Shard,
    Table,
    schema_of,
)
from ridgeline.data.formats.crc32c import crc32c
from ridgeline.data.formats.table import FORMATS, detect
from ridgeline.data.formats.tfrecord import check_records, masked_crc
from ridgeline.errors import UsageError

RNG = np.random.default_rng(5)
IMAGES = RNG.standard_normal((9, 3, 4), dtype=np.float32)
LABELS = np.arange(9) * 3


def open_found(path: Path, name: str) -> Shard:
    form, shards = detect(path)
    assert form.name == name
    assert len(shards) == 1
    return form.open(shards[0], None, None)


def write_own(name: str, path: Path, samples: list[tuple[str, Sample]], schema: Schema) -> Table:
    writer = FORMATS[name].write(path, schema)
    for key, sample in samples:
        writer.add(key, sample)
    places = writer.finish()
    writer.close()
    return Table([key for key, _ in samples], None, *(places or (None, None)))


def assert_columns(shard: Shard, images: str, labels: str) -> None:
    assert len(shard) == 9
    for row in (8, 0, 4):
        sample = shard.read(row)
        assert sample[images].tobytes() == IMAGES[row].tobytes()
        assert sample[images].shape == (3, 4)
        assert sample[labels].shape == ()
        assert int(sample[labels]) == LABELS[row]
    rows = np.array([7, 7, 1, 2])
    out = np.zeros((4, 3, 4), dtype=np.float32)
    shard.read_into(images, rows, out)
    assert np.array_equal(out, IMAGES[rows])
    numbers = np.zeros(4, dtype=LABELS.dtype)
    shard.read_into(labels, rows, numbers)
    assert np.array_equal(numbers, LABELS[rows])


# tar and zip


def test_tar_of_webdataset(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    with wds.TarWriter(str(tmp_path / "a.tar")) as sink:
        for row in range(9):
            sink.write({"__key__": f"k{row}", "bin": b"x" * row, "image.npy": IMAGES[row]})
    shard = open_found(tmp_path / "a.tar", "tar")
    assert list(shard.table.keys) == [f"k{row}" for row in range(9)]
    assert shard.schema == {"bin": Field("bytes"), "image": Field("array", "float32", (3, 4))}
    assert shard.read(5)["image"].tobytes() == IMAGES[5].tobytes()
    assert shard.read(5)["bin"] == b"xxxxx"


def test_webdataset_reads_our_tar(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    samples: list[tuple[str, Sample]] = [
        (f"k{row}.x", {"bin": b"x" * row, "image": IMAGES[row]}) for row in range(9)
    ]
    write_own("tar", tmp_path / "a.tar", samples, schema_of(samples[0][1]))
    found = list(wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode())
    assert [sample["__key__"] for sample in found] == [f"k{row}%2Ex" for row in range(9)]
    for row, sample in enumerate(found):
        assert sample["bin"] == b"x" * row
        assert np.array_equal(sample["image.npy"], IMAGES[row])


def test_arrays_of_one_size_that_are_not_alike(tmp_path: Path) -> None:
    """Other orders of bytes and of memory are put right; another shape is an error, not other numbers."""
    arrays = [
        IMAGES[0],
        IMAGES[1].astype(">f4"),
        np.asfortranarray(IMAGES[2]),
        IMAGES[3].reshape(4, 3),
    ]
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for row, array in enumerate(arrays):
            out = io.BytesIO()
            np.save(out, array)
            info = tarfile.TarInfo(f"k{row}.x.npy")
            info.size = len(out.getvalue())
            archive.addfile(info, io.BytesIO(out.getvalue()))
    shard = open_found(tmp_path / "a.tar", "tar")
    batch = np.zeros((3, 3, 4), dtype=np.float32)
    shard.read_into("x", np.arange(3), batch)
    assert np.array_equal(batch, IMAGES[:3])
    with pytest.raises(BadSample, match="shape"):
        shard.read_into("x", np.array([3]), batch[:1])


@pytest.mark.parametrize("name", ["../x.bin", "/etc/x.bin", "a/../../x.bin"])
def test_names_that_climb_are_refused(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo(name)
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        packed.writestr(zipfile.ZipInfo(name), b"abc")
    for form in ("tar", "zip"):
        with pytest.raises(UsageError, match="leads out of its folder"):
            FORMATS[form].open(tmp_path / f"a.{form}", None, None)


def test_links_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        info = tarfile.TarInfo("k.bin")
        info.type = tarfile.SYMTYPE
        info.linkname = "/etc/passwd"
        archive.addfile(info)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
        link = zipfile.ZipInfo("k.bin")
        link.external_attr = 0o120777 << 16
        packed.writestr(link, "/etc/passwd")
    for form in ("tar", "zip"):
        with pytest.raises(UsageError, match="link"):
            FORMATS[form].open(tmp_path / f"a.{form}", None, None)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip_of_others(tmp_path: Path, method: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.mkdir("train")
        for row in range(9):
            archive.writestr(f"train/k{row}.txt", b"again and " * 40 * row)
            out = io.BytesIO()
            np.save(out, IMAGES[row])
            archive.writestr(f"train/k{row}.image.npy", out.getvalue())
    shard = open_found(tmp_path / "a.zip", "zip")
    assert shard.schema["image"] == Field("array", "float32", (3, 4))
    again = FORMATS["zip"].open(tmp_path / "a.zip", shard.schema, shard.table)
    for opened in (shard, again):
        assert list(opened.table.keys) == [f"train/k{row}" for row in range(9)]
        for row in (8, 0, 3):
            assert opened.read(row)["txt"] == b"again and " * 40 * row
            assert opened.read(row)["image"].tobytes() == IMAGES[row].tobytes()
        out_batch = np.zeros((2, 3, 4), dtype=np.float32)
        opened.read_into("image", np.array([8, 1]), out_batch)
        assert np.array_equal(out_batch, IMAGES[[8, 1]])


def test_a_damaged_deflated_member(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for row in range(3):
            archive.writestr(f"k{row}.txt", RNG.bytes(500) + b"a" * 500)
    shard = open_found(tmp_path / "a.zip", "zip")
    with open(tmp_path / "a.zip", "r+b") as file:
        file.seek(int(shard.table.offsets[1, 0]) & ((1 << 63) - 1))
        file.write(b"\xff" * 200)
    with pytest.raises(BadSample, match=r"a\.zip"):
        shard.read(1)
    assert len(shard.read(2)["txt"]) == 1000


def test_encrypted_zip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("k.txt", b"secret")
    data = bytearray(path.read_bytes())
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(UsageError, match="encrypted"):
        FORMATS["zip"].open(path, None, None)


def test_zipfile_reads_ours(tmp_path: Path) -> None:
    samples: list[tuple[str, Sample]] = [("a/b", {"bin": b"abc", "image": IMAGES[0]})]
    write_own("zip", tmp_path / "a.zip", samples, schema_of(samples[0][1]))
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.testzip() is None
        assert archive.read("a/b.bin") == b"abc"
        assert np.array_equal(np.load(io.BytesIO(archive.read("a/b.image.npy"))), IMAGES[0])


# npy


def test_one_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IMAGES)
    shard = open_found(tmp_path / "a.npy", "npy")
    assert shard.schema == {"npy": Field("array", "float32", (3, 4))}
    assert shard.table.keys[3] == "a/00000003"
    assert np.array_equal(shard.read(3)["npy"], IMAGES[3])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path: Path, save: object) -> None:
    words = np.array([f"w{row}" for row in range(9)])
    save(tmp_path / "a.npz", x=IMAGES, y=LABELS, words=words, version=np.array(3))  # type: ignore[operator]
    shard = open_found(tmp_path / "a.npz", "npy")
    assert set(shard.schema) == {"x", "y", "words"}
    assert shard.read(2)["words"] == b"w2"
    assert_columns(shard, "x", "y")


def test_folder_of_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES)
    np.save(tmp_path / "y.npy", LABELS)
    assert_columns(open_found(tmp_path, "npy"), "x", "y")


def test_folder_of_npy_samples_is_a_folder(tmp_path: Path) -> None:
    for row in range(3):
        np.save(tmp_path / f"s{row}.npy", IMAGES[row])
    assert detect(tmp_path)[0].name == "folder"


def test_other_memory_orders(tmp_path: Path) -> None:
    (tmp_path / "c.arrays").mkdir()
    np.save(tmp_path / "c.arrays" / "x.npy", np.asfortranarray(IMAGES))
    np.save(tmp_path / "c.arrays" / "y.npy", LABELS.astype(">i8"))
    assert_columns(open_found(tmp_path / "c.arrays", "npy"), "x", "y")


def test_lengths_that_differ_are_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=IMAGES, y=LABELS[:5])
    with pytest.raises(UsageError, match="x 9, y 5"):
        detect(tmp_path / "a.npz")[0].open(tmp_path / "a.npz", None, None)


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}, {}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", x=np.array([{}, {}], dtype=object))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(UsageError, match=name):
            FORMATS["npy"].open(tmp_path / name, None, None)


def test_numpy_maps_ours(tmp_path: Path) -> None:
    samples: list[tuple[str, Sample]] = [
        (f"k{row}", {"x": IMAGES[row], "b": b"z" * row}) for row in range(9)
    ]
    write_own("npy", tmp_path / "s.arrays", samples, schema_of(samples[0][1]))
    assert np.array_equal(np.load(tmp_path / "s.arrays" / "x.npy", mmap_mode="r"), IMAGES)
    assert np.load(tmp_path / "s.arrays" / "b.offsets.npy").tolist()[-1] == 36


# HDF5


@pytest.mark.parametrize(
    "options",
    [{}, {"chunks": True}, {"chunks": (4, 3, 4), "compression": "gzip"}, {"shuffle": True}],
)
def test_hdf5_of_others(tmp_path: Path, options: dict[str, object]) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        file.create_dataset("x", data=IMAGES, **options)
        file.create_dataset("meta/y", data=LABELS)
        file.create_dataset("big_endian", data=LABELS.astype(">i4"))
        file.create_dataset("names", data=[f"n{row}" for row in range(9)])
        ragged = file.create_dataset("ragged", (9,), dtype=h5py.vlen_dtype(np.int32))
        for row in range(9):
            ragged[row] = np.arange(row)
        file.create_dataset("mean", data=np.zeros(3))
        file["elsewhere"] = h5py.ExternalLink("/etc/passwd", "/x")
    shard = open_found(tmp_path / "a.h5", "hdf5")
    assert set(shard.schema) == {"x", "meta.y", "big_endian", "names", "ragged"}
    assert shard.read(4)["names"] == b"n4"
    assert shard.read(4)["ragged"].tolist() == [0, 1, 2, 3]
    assert shard.read(4)["big_endian"] == LABELS[4]
    assert_columns(shard, "x", "meta.y")


def test_h5py_reads_ours(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    samples: list[tuple[str, Sample]] = [
        (f"k{row}", {"x": IMAGES[row], "b": b"z" * row, "on": np.array(row > 4)})
        for row in range(9)
    ]
    write_own("hdf5", tmp_path / "s.h5", samples, schema_of(samples[0][1]))
    assert [p.name for p in tmp_path.iterdir()] == ["s.h5"]
    with h5py.File(tmp_path / "s.h5") as file:
        assert np.array_equal(file["x"][...], IMAGES)
        assert file["x"].chunks is None
        assert file["on"][...].tolist() == [False] * 5 + [True] * 4
        assert file["b.bytes"][...].tobytes() == b"z" * 36


def test_hdf5_without_a_common_length(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = IMAGES, LABELS[:4]
    with pytest.raises(UsageError, match="first dimension"):
        FORMATS["hdf5"].open(tmp_path / "a.h5", None, None)


# LMDB


@pytest.mark.parametrize("subdir", [True, False])
def test_lmdb_of_others(tmp_path: Path, subdir: bool) -> None:
    lmdb = pytest.importorskip("lmdb")
    env = lmdb.open(str(tmp_path / "a.lmdb"), subdir=subdir, lock=False)
    with env.begin(write=True) as transaction:
        for key in (b"b", b"a", b"\xff\x00", b"../up"):
            transaction.put(key, b"value of " + key)
    env.close()
    shard = open_found(tmp_path / "a.lmdb", "lmdb")
    assert list(shard.table.keys) == ["hex-2e2e2f7570", "a", "b", "hex-ff00"]
    assert [shard.read(row)["value"] for row in range(4)] == [
        b"value of ../up",
        b"value of a",
        b"value of b",
        b"value of \xff\x00",
    ]
    again = FORMATS["lmdb"].open(shard.path, shard.schema, shard.table)
    assert again.read(3)["value"] == b"value of \xff\x00"


def test_lmdb_grows_its_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lmdb")
    monkeypatch.setattr("ridgeline.data.formats.lmdb._FIRST_MAP_BYTES", 1 << 16)
    samples: list[tuple[str, Sample]] = [(f"k{n}", {"b": bytes([n]) * 30_000}) for n in range(30)]
    table = write_own("lmdb", tmp_path / "a.lmdb", samples, {"b": Field("bytes")})
    shard = FORMATS["lmdb"].open(tmp_path / "a.lmdb", {"b": Field("bytes")}, table)
    assert [shard.read(n)["b"] for n in range(30)] == [sample["b"] for _, sample in samples]


# TFRecord


def test_crc32c() -> None:
    assert crc32c(b"") == 0
    assert crc32c(b"123456789") == 0xE3069283
    # RFC 3720, B.4
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


@pytest.mark.parametrize("size", [127, 128, 255, 256, 257, 5685, 5686, 5889, 45_481, 99_999])
def test_crc32c_of_any_length(size: int) -> None:
    """Against the definition, a byte at a time."""
    data = np.random.default_rng(size).bytes(size)
    crc = 0xFFFFFFFF
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    assert crc32c(data) == crc ^ 0xFFFFFFFF
    assert crc32c(memoryview(data)) == crc ^ 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join(
        (length, struct.pack("<I", masked_crc(length)), data, struct.pack("<I", masked_crc(data)))
    )


def example(**features: tuple[int, bytes]) -> bytes:
    """An Example with lists as their wire format; short ones only."""

    def block(tag: int, data: bytes) -> bytes:
        return bytes((tag << 3 | 2, len(data))) + data

    entries = b"".join(
        block(1, block(1, name.encode()) + block(2, block(kind, data)))
        for name, (kind, data) in features.items()
    )
    return block(1, entries)


def test_tfrecord_of_others(tmp_path: Path) -> None:
    path = tmp_path / "train.tfrecord-00000-of-00001"
    records = []
    for row in range(3):
        floats = np.arange(row + 1, dtype="<f4").tobytes()
        packed = bytes((1 << 3 | 2, len(floats))) + floats
        # Numbers one by one, as old writers have them: field 1 of wire type 0.
        ints = b"\x08\x05\x08" + b"\xff" * 9 + b"\x01"
        image = b"\x0a\x03" + bytes([row]) * 3
        label = b"\x0a\x01" + bytes([row])
        records.append(example(image=(1, image), f=(2, packed), ints=(3, ints), label=(3, label)))
    path.write_bytes(b"".join(framed(record) for record in records))
    shard = open_found(path, "tfrecord")
    assert shard.schema == {
        "image": Field("bytes"),
        "f": Field("array", "float32", (None,)),
        "ints": Field("array", "int64", (2,)),
        "label": Field("array", "int64", ()),
    }
    sample = shard.read(2)
    assert sample["image"] == b"\x02\x02\x02"
    assert sample["f"].tolist() == [0.0, 1.0, 2.0]
    assert sample["ints"].tolist() == [5, -1]
    assert int(sample["label"]) == 2
    assert check_records(shard) == []


def test_tensorboard_reads_our_records(tmp_path: Path) -> None:
    iterator = pytest.importorskip(
        "tensorboard.compat.tensorflow_stub.pywrap_tensorflow"
    ).PyRecordReader_New
    samples: list[tuple[str, Sample]] = [
        ("k", {"b": RNG.bytes(9000), "x": IMAGES[0], "y": np.array(-4)})
    ]
    write_own("tfrecord", tmp_path / "a.tfrecord", samples, schema_of(samples[0][1]))
    reader = iterator(str(tmp_path / "a.tfrecord"))
    reader.GetNext()
    assert samples[0][1]["b"] in reader.record()


def test_a_damaged_record_is_found_by_its_own_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    samples: list[tuple[str, Sample]] = [(f"k{n}", {"b": bytes([n]) * 3000}) for n in range(4)]
    write_own("tfrecord", path, samples, {"b": Field("bytes")})
    shard = FORMATS["tfrecord"].open(path, None, None)
    with open(path, "r+b") as file:
        file.seek(int(shard.table.offsets[2, 0]) + 1000)
        file.write(b"\xee")
    with pytest.raises(BadSample, match=r"sample 2 \('k2'"):
        shard.read(2)
    assert shard.read(3)["b"] == samples[3][1]["b"]
    assert len(check_records(shard)) == 1
    with open(path, "r+b") as file:
        file.seek(int(shard.table.offsets[2, 0]) - 12)
        file.write(b"\x01")
    with pytest.raises(UsageError, match="checksum"):
        FORMATS["tfrecord"].open(path, None, None)


# Parquet and Arrow


def foreign_table(pa: object) -> object:
    return pa.table(  # type: ignore[attr-defined]
        {
            "label": LABELS,
            "score": np.arange(9, dtype=np.float32),
            "on": [row % 2 == 0 for row in range(9)],
            "tokens": [list(range(row)) for row in range(9)],
            "text": [f"t{row}" for row in range(9)],
            "raw": [b"r" * row for row in range(9)],
            "image": [{"bytes": b"i" * row, "path": None} for row in range(9)],
        }
    )


@pytest.mark.parametrize("name", ["parquet", "feather", "file", "stream"])
def test_tables_of_others(tmp_path: Path, name: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.feather
    import pyarrow.parquet

    table = foreign_table(pa)
    path = tmp_path / f"a.{name if name in ('parquet', 'feather') else 'arrow'}"
    if name == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=4)
    elif name == "feather":
        pyarrow.feather.write_feather(table, path, chunksize=4)
    else:
        make = pa.ipc.new_file if name == "file" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as out, make(out, table.schema) as sink:
            sink.write_table(table, max_chunksize=4)
    shard = open_found(path, "parquet" if name == "parquet" else "arrow")
    assert shard.schema["tokens"] == Field("array", "int64", (None,))
    assert shard.schema["on"] == Field("array", "bool", ())
    for row in (8, 0, 5):
        sample = shard.read(row)
        assert int(sample["label"]) == LABELS[row]
        assert sample["label"].shape == ()
        assert sample["score"].dtype == np.float32
        assert bool(sample["on"]) == (row % 2 == 0)
        assert sample["tokens"].tolist() == list(range(row))
        assert sample["text"] == f"t{row}".encode()
        assert sample["raw"] == b"r" * row
        assert sample["image"] == b"i" * row


def test_gaps_are_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"x": [1, None, 3]}), tmp_path / "a.parquet")
    shard = open_found(tmp_path / "a.parquet", "parquet")
    with pytest.raises(BadSample, match="gaps"):
        shard.read(0)


def test_pyarrow_reads_ours(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    samples: list[tuple[str, Sample]] = [
        (f"k{row}", {"v": IMAGES[row, 0], "b": b"z" * row, "n": LABELS[row : row + 1].reshape(())})
        for row in range(9)
    ]
    write_own("parquet", tmp_path / "s.parquet", samples, schema_of(samples[0][1]))
    table = pyarrow.parquet.read_table(tmp_path / "s.parquet")
    assert table["__key__"].to_pylist() == [f"k{row}" for row in range(9)]
    assert table["n"].to_pylist() == LABELS.tolist()
    assert np.array_equal(np.array(table["v"].to_pylist(), dtype=np.float32), IMAGES[:, 0])


def test_only_some_groups_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    module = "ridgeline.data.formats.parquet"
    monkeypatch.setattr(f"{module}._GROUP_BYTES", 1000)
    monkeypatch.setattr(f"{module}._CACHE_BYTES", 3000)
    samples: list[tuple[str, Sample]] = [(f"k{n}", {"b": os.urandom(600)}) for n in range(20)]
    table = write_own("parquet", tmp_path / "s.parquet", samples, {"b": Field("bytes")})
    shard = FORMATS["parquet"].open(tmp_path / "s.parquet", {"b": Field("bytes")}, table)
    for row in (*range(20), 3, 19, 0):
        assert shard.read(row)["b"] == samples[row][1]["b"]
    assert 1 <= len(shard._cache) <= 3  # type: ignore[attr-defined]


# Without a library


def test_knowing_the_formats_imports_no_library() -> None:
    code = (
        "import sys, ridgeline.data.formats.table;"
        "print([m for m in ('lmdb', 'h5py', 'pyarrow', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "module"),
    [("lmdb", "lmdb"), ("hdf5", "h5py"), ("parquet", "pyarrow"), ("arrow", "pyarrow")],
)
def test_a_missing_library_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / f"a{FORMATS[name].suffix}"
    path.write_bytes(b"x" * 9000)
    with pytest.raises(UsageError, match=rf"needs {module}.*ridgeline\[data\]"):
        FORMATS[name].open(path, None, None)
    with pytest.raises(UsageError, match=rf"needs {module}"):
        FORMATS[name].write(tmp_path / f"b{FORMATS[name].suffix}", {"b": Field("bytes")})
