"""Packed data as a source: every sample once, in one order, whatever the ranks, workers or format."""

import json
import shutil
import sys
import threading
import zipfile
from itertools import chain
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from ridgeline.data.build import build_sources
from ridgeline.data.dali import DaliDecoder
from ridgeline.data.dataset import DATASET, open_dataset
from ridgeline.data.formats import folder, members, tfrecord
from ridgeline.data.formats.contract import schema_of
from ridgeline.data.formats.table import FORMATS
from ridgeline.data.loader import Loader
from ridgeline.data.order import Blocks
from ridgeline.data.pack import pack
from ridgeline.errors import RunError, UsageError

NUM = 53
BATCH = 8


class Made:
    """Samples whose input says which they are."""

    classes = ()
    origin = "made by a test"

    def __init__(self, num=NUM):
        self._num = num
        self.schema = schema_of(self.read(0))

    def __len__(self):
        return self._num

    def read(self, index):
        return {"x": np.full((3, 2), index, dtype=np.float32), "y": np.array(index % 5)}

    def key(self, index):
        return f"sample-{index:04d}"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """One data set in every format, in several shards."""
    root = tmp_path_factory.mktemp("stored")
    for name, form in FORMATS.items():
        packed = pack(Made(), root / name, form, shard_bytes=32 * 20)
        assert len(packed.dataset.entries) == 3
    return root


def build(path, **args):
    return build_sources("packed", {"path": str(path), "holdout": 0.02, "classes": 5, **args}, 0)[0]


def seen(batches):
    """The samples of some batches, as their inputs tell."""
    found = []
    for batch in batches:
        for inputs, count in zip(batch.inputs, batch.counts, strict=True):
            found.append(inputs[:count, 0, 0].long().tolist())
    return found


def global_batches(source, world, workers, start=0, loader=None, **options):
    """What all ranks see together, batch by batch; ranks of one `loader` share its processes."""
    ranks = []
    for rank in range(world):
        made = loader or Loader(source, batch=BATCH, workers=workers, **options)
        dealt = made.dealt_to(rank, world)
        dealt._processes = made._processes
        ranks.append(seen(dealt.epoch(1, start)))
        if loader is None:
            dealt.close()
    return [list(chain(*parts)) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_every_sample_once_in_one_order(name, workers, stored):
    source = build(stored / name)
    alone = global_batches(build(stored / "tar"), 1, 0)
    assert sorted(chain(*alone)) == sorted(source._members.tolist())
    # Starting processes takes longer than everything else: all ranks are served by the same.
    loader = Loader(source, batch=BATCH, workers=workers)
    list(loader.epoch(0))
    for world in (1, 2, 3, 4):
        assert global_batches(source, world, workers, loader=loader) == alone
    loader.close()


@pytest.mark.parametrize("name", ["tfrecord", "folder", "deflated"])
def test_samples_that_are_read_whole_are_read_once(name, stored, tmp_path, monkeypatch):
    """Not once for the input and again for the target."""
    path, num_fields = stored / name, 2
    if name == "deflated":
        path = tmp_path / "one.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted((stored / "folder").glob("*/*.npy")):
                archive.write(file, file.name)
    reads = []

    def counted(function):
        return lambda *args, **options: reads.append(args) or function(*args, **options)

    if name == "tfrecord":
        num_fields = 1
        monkeypatch.setattr(tfrecord, "pread", counted(tfrecord.pread))
    elif name == "folder":
        monkeypatch.setattr(folder, "open", counted(open), raising=False)
    else:
        monkeypatch.setattr(members.MemberShard, "_pread", counted(members.MemberShard._pread))
    dataset = open_dataset(path)
    batch = dataset.read_batch(np.array([7, 3, 40, 21]), ["x", "y"])
    assert len(reads) == 4 * num_fields
    assert batch["x"][:, 0, 0].tolist() == [7, 3, 40, 21]
    assert batch["y"].tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize("name", FORMATS)
def test_going_on_after_some_batches_and_with_other_ranks(name, stored):
    source = build(stored / name)
    whole = global_batches(source, 1, 0)
    for start in (1, 4, 6):
        for world in (1, 2, 3):
            assert global_batches(source, world, 0, start) == whole[start:]
    other = build(stored / ("hdf5" if name == "tar" else "tar"))
    assert global_batches(source, 2, 0)[:3] + global_batches(other, 3, 0, 3) == whole


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads, stored):
    source = build(stored / "tar")
    assert global_batches(source, 2, 0, threads=threads) == global_batches(source, 2, 0)


def test_blocks_keep_exactness(stored):
    source = build(stored / "tar")
    blocks = Blocks(block=4, window=16)
    whole = global_batches(source, 1, 0, blocks=blocks)
    assert sorted(chain(*whole)) == sorted(source._members.tolist())
    assert whole != global_batches(source, 1, 0)
    for world, start in ((2, 0), (3, 2), (4, 5)):
        assert global_batches(source, world, 0, start, blocks=blocks) == whole[start:]


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.fixture
def damaged(stored, tmp_path):
    """The tar data set with one bit of sample 9 changed."""
    path = tmp_path / "damaged"
    shutil.copytree(stored / "tar", path)
    dataset = open_dataset(path)
    shard, row = dataset.locate(9)
    place = dataset.shard(shard).table
    at = int(place.offsets[row, 0] + place.sizes[row, 0]) - 2
    flip(path / dataset.entries[shard].name, at)
    return path


def test_a_damaged_sample_is_named(damaged):
    source = build(damaged)
    with pytest.raises(RunError, match=r"shard-00000\.tar: sample 9 .*offset \d+.* is damaged"):
        source.fetch(np.arange(12), 0)
    assert torch.equal(
        build(damaged, check="never").fetch(np.arange(8), 0)[0][:, 0, 0], torch.arange(8.0)
    )


def test_a_damaged_sample_is_skipped_when_asked_for(damaged):
    source = build(damaged, on_error="skip")
    inputs, targets = source.fetch(np.arange(12), 0)
    assert inputs[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 11]
    assert targets.tolist() == [i % 5 for i in (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 11)]
    (sentence,) = source.take_skipped()
    assert "sample 9" in sentence
    assert not source.take_skipped()


@pytest.mark.parametrize("workers", [0, 1])
def test_skipped_samples_reach_the_loop(workers, damaged):
    loader = Loader(build(damaged, on_error="skip"), batch=BATCH, workers=workers)
    told = [sentence for batch in loader.epoch(0) for sentence in batch.skipped]
    loader.close()
    assert len(told) == 1
    assert "sample 9" in told[0]


def test_a_shard_that_was_cut_short(stored, tmp_path):
    path = tmp_path / "cut"
    shutil.copytree(stored / "tar", path)
    shard = path / "shard-00001.tar"
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(RunError, match=r"shard-00001\.tar: sample .* cut short"):
        build(path).fetch(np.arange(50), 0)


def test_a_shard_and_a_file_that_vanish(stored, tmp_path):
    path = tmp_path / "gone"
    shutil.copytree(stored / "tar", path)
    source = build(path)
    source.dataset.close()
    (path / "shard-00002.tar").unlink()
    with pytest.raises(RunError, match=r"shard-00002\.tar is gone"):
        source.fetch(np.arange(50), 0)
    folder = tmp_path / "folder"
    for number in range(30):
        (folder / "a").mkdir(parents=True, exist_ok=True)
        np.save(folder / "a" / f"{number:02d}.x.npy", np.zeros(3, dtype=np.float32))
    source = build_sources("packed", {"path": str(folder)}, 0)[0]
    (folder / "a" / "03.x.npy").unlink()
    with pytest.raises(RunError, match=r"sample 3 \('a/03', .*is gone"):
        source.fetch(np.arange(5), 0)


def test_images_come_as_from_their_folder(tmp_path):
    rng = np.random.default_rng(0)
    root = tmp_path / "images"
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for number in range(10):
            pixels = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    pack(open_dataset(root), tmp_path / "packed", FORMATS["tar"])
    args = {"size": 12, "holdout": 0.2, "augment": True}
    plain = build_sources("images", {"path": str(root), **args}, 3)
    packed = build_sources("packed", {"path": str(tmp_path / "packed"), **args}, 3)
    for one, other in zip(plain, packed, strict=True):
        assert len(one) == len(other)
        assert one.info == other.info
        fetched = (source.fetch(np.arange(len(one)), 2) for source in (one, other))
        assert all(map(torch.equal, *fetched))
    raw = build_sources(
        "packed", {"path": str(tmp_path / "packed"), "size": 30, "pixels": "bytes"}, 3
    )[0]
    assert raw.fetch(np.arange(2), 0)[0].dtype == torch.uint8


def test_train_and_eval_parts(tmp_path):
    pack(Made(20), tmp_path / "both" / "train", FORMATS["tar"])
    pack(Made(7), tmp_path / "both" / "val", FORMATS["npy"])
    train, held_out = build_sources("packed", {"path": str(tmp_path / "both"), "classes": 5}, 0)
    assert (len(train), len(held_out)) == (20, 7)
    assert train.info.task == "classify"


def test_tokens_predict_the_next(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(60, dtype=np.uint16).reshape(10, 6))
    train, _ = build_sources("packed", {"path": str(tmp_path / "tokens.npy")}, 0)
    inputs, targets = train.fetch(np.array([0]), 0)
    assert inputs.tolist() == [[0, 1, 2, 3, 4]]
    assert targets.tolist() == [[1, 2, 3, 4, 5]]
    assert (train.info.task, train.info.units_per_sample) == ("causal_lm", 5)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"path": "nowhere"}, "there is no nowhere"),
        ({}, "needs 'path'"),
        ({"input": "z"}, "input='z'"),
        ({"target": "z"}, "no field 'z'"),
        ({"check": "sometimes"}, "check='sometimes'"),
        ({"on_error": "panic"}, "on_error='panic'"),
    ],
)
def test_what_is_said_of_wrong_arguments(args, word, stored):
    args = args if "path" in args or not args else {"path": str(stored / "tar"), **args}
    with pytest.raises(UsageError, match=word):
        build_sources("packed", args, 0)


def test_a_table_that_is_not_its_own(stored, tmp_path):
    path = tmp_path / "other"
    shutil.copytree(stored / "tar", path)
    flip(path / "shard-00000.tar.idx", 200)
    with pytest.raises(RunError, match="not the table that was written"):
        build(path).fetch(np.arange(2), 0)
    (path / DATASET).write_text(json.dumps({"ridgeline_data": 1}))
    with pytest.raises(UsageError, match="pack the data set again"):
        open_dataset(path)


@pytest.fixture
def photos(tmp_path):
    """Smooth images of several sizes as JPEG, packed."""
    for number in range(6):
        x, y = np.meshgrid(np.linspace(0, 1, 40 + number), np.linspace(0, 1, 30))
        pixels = np.stack([255 * x, 255 * y, 255 * (x + y) / 2], axis=-1).astype(np.uint8)
        (tmp_path / "raw" / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "raw" / "a" / f"{number}.jpg", quality=95)
    pack(open_dataset(tmp_path / "raw"), tmp_path / "photos", FORMATS["tar"])
    return tmp_path / "photos"


def test_dali_decodes_nearly_as_pillow(photos):
    pytest.importorskip("nvidia.dali", reason="NVIDIA DALI is not installed here")
    args = {"path": str(photos), "size": 24, "pixels": "bytes", "holdout": 0}
    pillow, dali = (
        build_sources("packed", {**args, "decoder": name}, 0)[0].fetch(np.arange(6), 0)[0]
        for name in ("pillow", "dali")
    )
    assert pillow.shape == dali.shape == (6, 3, 24, 24)
    assert (pillow.float() - dali.float()).abs().mean() < 2.0


def test_dali_needs_no_type_of_the_images(photos, monkeypatch):
    """Without DALI: a module of its name, and a decoder that gives black images."""
    monkeypatch.setitem(sys.modules, "nvidia", ModuleType("nvidia"))
    monkeypatch.setitem(sys.modules, "nvidia.dali", ModuleType("nvidia.dali"))
    monkeypatch.setattr(
        DaliDecoder, "__call__", lambda self, images: np.zeros((len(images), 24, 24, 3), np.uint8)
    )
    args = {"path": str(photos), "size": 24, "pixels": "bytes", "holdout": 0, "decoder": "dali"}
    images, labels = build_sources("packed", args, 0)[0].fetch(np.arange(6), 0)
    assert images.shape == (6, 3, 24, 24)
    assert not images.any()
    assert labels.tolist() == [0] * 6


def test_dali_has_to_be_there(photos):
    try:
        import nvidia.dali  # noqa: F401
    except ImportError:
        with pytest.raises(UsageError, match="needs NVIDIA DALI"):
            build_sources("packed", {"path": str(photos), "decoder": "dali"}, 0)
    else:
        with pytest.raises(UsageError, match=r"data\.augment"):
            build_sources("packed", {"path": str(photos), "decoder": "dali", "augment": True}, 0)


def test_threads_keep_what_they_skipped_apart(damaged):
    source = build(damaged, on_error="skip")
    start, told = threading.Barrier(2), {}

    def read(first, last):
        start.wait()
        source.fetch(np.arange(first, last), 0)
        start.wait()
        told[first] = source.take_skipped()

    threads = [threading.Thread(target=read, args=pair) for pair in ((0, 12), (20, 30))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(told[0]), told[20]) == (1, [])


def test_a_first_sample_that_is_damaged(stored, tmp_path):
    path = tmp_path / "first"
    shutil.copytree(stored / "tar", path)
    table = open_dataset(path).shard(0).table
    flip(path / "shard-00000.tar", int(table.offsets[0, 1] + table.sizes[0, 1]) - 1)
    with pytest.raises(RunError, match=r"sample 0 .* is damaged"):
        build(path)
    source = build(path, on_error="skip")
    assert source.fetch(np.array([0]), 0)[0][0, 0, 0] == 1


def test_a_label_that_is_none_is_named(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(20):
        np.save(folder / f"{number:02d}.x.npy", np.zeros(3, dtype=np.float32))
        (folder / f"{number:02d}.cls").write_text("no" if number == 4 else str(number % 3))
    args = {"path": str(folder), "classes": 3}
    source, _ = build_sources("packed", args, 0)
    with pytest.raises(RunError, match=r"sample 4 \('04'.* has the label b'no'"):
        source.fetch(np.arange(6), 0)
    source, _ = build_sources("packed", {**args, "on_error": "skip"}, 0)
    assert source.fetch(np.arange(6), 0)[1].tolist() == [0, 1, 2, 0, 2, 2]


def test_once_is_once_also_for_some_of_the_fields(stored, monkeypatch):
    dataset = open_dataset(stored / "tar")
    dataset.read_batch(np.arange(6), ["x"])
    counted = []
    monkeypatch.setattr(
        "ridgeline.data.dataset.field_checksum", lambda *args: counted.append(args) or 0
    )
    dataset.read_batch(np.arange(6), ["x"])
    assert not counted
    with pytest.raises(RunError, match="has another checksum"):
        dataset.read_batch(np.arange(6), ["x", "y"])


def test_blocks_are_asked_for_around_what_is_held_out(stored, monkeypatch):
    source = build(stored / "tar", holdout=0.2)
    asked = []
    monkeypatch.setattr(source.dataset, "ahead", lambda first, last: asked.append((first, last)))
    list(Loader(source, batch=BATCH, blocks=Blocks(block=8, window=16), prefetch=0).epoch(0))
    wanted = {int(member) for first, last in asked for member in range(first, last)}
    assert wanted >= set(source._members.tolist())


def test_fields_that_are_no_numbers(tmp_path):
    for number in range(4):
        np.save(tmp_path / f"{number}.x.npy", np.zeros(3, dtype=np.float32))
        np.save(tmp_path / f"{number}.when.npy", np.array(["2020-01-01"], dtype="datetime64[s]"))
    for args in ({"input": "when", "target": "x"}, {"input": "x", "target": "when"}):
        with pytest.raises(UsageError, match=r"'when' .* holds datetime64.*, which no tensor can"):
            build_sources("packed", {"path": str(tmp_path), "holdout": 0.5, **args}, 0)
    np.save(tmp_path / "0.when.npy", np.array(["abc"]))
    with pytest.raises(UsageError, match=r"'when' is an array of <U3; arrays hold numbers"):
        open_dataset(tmp_path)


def test_large_arrays_are_asked_for_before_they_are_read(tmp_path, monkeypatch):
    np.save(tmp_path / "fields.npy", np.zeros((12, 4, 128, 128), dtype=np.float32))
    args = {"path": str(tmp_path / "fields.npy"), "holdout": 0, "target": "npy"}
    source = build_sources("packed", args, 0)[0]
    done = []
    monkeypatch.setattr(
        source.dataset, "ahead", lambda first, last: done.append(("asked", range(first, last)[0]))
    )
    fetch = source.fetch
    monkeypatch.setattr(
        source,
        "fetch",
        lambda indices, epoch: (
            done.extend(("read", i) for i in indices.tolist()) or fetch(indices, epoch)
        ),
    )
    list(Loader(source, batch=2).epoch(0))
    for number in range(12):
        assert done.index(("asked", number)) < done.index(("read", number))
    # The first two batches and the third are asked for before the first is read.
    assert [what for what, _ in done[:6]] == ["asked"] * 6
