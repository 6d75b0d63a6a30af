"""The format on disk, and the geometry of who holds what: round trips and brute force."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from ridgeline.checkpoint.boxes import Box, memory_order, runs_of, stretch_boxes
from ridgeline.checkpoint.damage import find_damage
from ridgeline.checkpoint.files import DTYPES, Entry, Reader, write_file
from ridgeline.checkpoint.held import _stretch
from ridgeline.checkpoint.manifest import (
    ITEM_BYTES,
    MANIFEST,
    Chunk,
    Damaged,
    Manifest,
    Stored,
    checkpoint_name,
    clear_unfinished,
    list_checkpoints,
    read_manifest,
    write_manifest,
)
from ridgeline.checkpoint.retain import Keep, remove_old
from ridgeline.parallel.tensor.split import Split, cut_local


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits at all, NaNs included; of a bool only the two that it has."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    count = math.prod(shape) * dtype.itemsize
    return (
        torch.randint(256, (count,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)
    )


def bits(values: Tensor) -> Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)


def write_checkpoint(directory: Path, tensors: dict[str, Tensor], step: int = 3) -> Path:
    path = directory / checkpoint_name(step)
    path.mkdir(parents=True)
    name = "rank-00000.safetensors"
    file, spans = write_file(path / name, [Entry(key, value) for key, value in tensors.items()])
    stored = {}
    for (key, value), (start, stop, crc) in zip(tensors.items(), spans, strict=True):
        shape = tuple(value.shape)
        names = {dtype: word for word, dtype in DTYPES.items()}
        chunk = Chunk((0,) * len(shape), shape, name, start, stop, crc)
        stored[key] = Stored(names[value.dtype], shape, (chunk,))
    metrics = {"loss": float(step)}
    write_manifest(
        path,
        Manifest(step, "dp=1", 1, 12.5, {"batch": 1}, metrics, "a: é\n", {}, {name: file}, stored),
    )
    return path


# Files


def test_every_type_and_shape_comes_back(tmp_path: Path) -> None:
    shapes = [(), (0,), (3, 0, 2), (1,), (5,), (2, 3, 4)]
    tensors = {
        f"{name}{list(shape)}": random_tensor(dtype, shape, number)
        for number, (name, dtype) in enumerate(DTYPES.items())
        for shape in shapes
    }
    tensors["strided"] = torch.arange(12.0).view(3, 4).t()
    path = write_checkpoint(tmp_path, tensors)
    manifest = read_manifest(path)
    reader = Reader(path, check=True)
    for key, value in tensors.items():
        stored = manifest.tensors[key]
        found = reader.read(stored.chunks[0], stored.dtype)
        assert (found.dtype, found.shape) == (value.dtype, value.shape), key
        assert torch.equal(bits(found), bits(value)), key
        assert stored.num_bytes == value.numel() * ITEM_BYTES[stored.dtype]
    # Any reader of safetensors can open it, and a mapped tensor is aligned for its type.
    with safe_open(path / "rank-00000.safetensors", "pt") as opened:
        assert set(opened.keys()) == set(tensors)
        for key, value in tensors.items():
            assert torch.equal(bits(opened.get_tensor(key)), bits(value)), key
    for stored in manifest.tensors.values():
        assert stored.chunks[0].start % ITEM_BYTES[stored.dtype] == 0


def test_a_type_that_files_have_no_word_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"w is of type torch.complex64, which safetensors"):
        write_file(tmp_path / "x", [Entry("w", torch.zeros(2, dtype=torch.complex64))])


def test_the_manifest_comes_back(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"model/w": torch.ones(2, 3)})
    manifest = read_manifest(path)
    assert (manifest.step, manifest.layout, manifest.config) == (3, "dp=1", "a: é\n")
    assert manifest.state == {"batch": 1}
    assert manifest.tensors["model/w"].shape == (2, 3)
    assert manifest.num_bytes == (path / "rank-00000.safetensors").stat().st_size
    again = tmp_path / "again"
    again.mkdir()
    write_manifest(again, manifest)
    assert (again / MANIFEST).read_bytes() == (path / MANIFEST).read_bytes()
    assert json.loads((path / MANIFEST).read_text())["format"] == 1


def test_any_changed_or_missing_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"model/w": torch.ones(2)}) / MANIFEST
    data = path.read_bytes()
    generator = random.Random(0)
    changed = [
        data[:place] + bytes([data[place] ^ 1 << generator.randrange(8)]) + data[place + 1 :]
        for place in range(len(data))
    ]
    for text in (*changed, *(data[:place] for place in range(len(data))), data + b"\n", b""):
        path.write_bytes(text)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            read_manifest(path.parent)


def test_any_changed_byte_of_a_file_is_noticed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"model/a": torch.ones(3), "model/b": torch.ones(2).half()})
    manifest = read_manifest(path)
    name, file = next(iter(manifest.files.items()))
    chunks = [(key, stored.chunks[0]) for key, stored in manifest.tensors.items()]
    data = (path / name).read_bytes()
    assert not list(find_damage(path / name, file, chunks))
    for place in range(len(data)):
        (path / name).write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
        (problem,) = find_damage(path / name, file, chunks)
        expected = [key for key, chunk in chunks if chunk.start <= place < chunk.stop]
        assert list(problem.tensors) == (expected or ["model/a", "model/b"])
        assert name in str(problem)


def test_a_checked_read_of_damaged_bytes_raises(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"model/a": torch.ones(3)})
    chunk = read_manifest(path).tensors["model/a"].chunks[0]
    file = path / chunk.file
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged, match="rank-00000"):
        Reader(path, check=True).read(chunk, "F32")


# What is kept


def test_keep_newest_every_and_best(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50, 60):
        write_checkpoint(tmp_path, {}, step)
    # What an earlier removal left half done is in nobody's way.
    (tmp_path / ".step-00000020.gone" / "x").mkdir(parents=True)
    (tmp_path / "step-00000040" / MANIFEST).write_text("damaged")
    removed = remove_old(tmp_path, Keep(last=2, every=30, best="loss"))
    left = [path.name for path in list_checkpoints(tmp_path)]
    assert left == [checkpoint_name(step) for step in (10, 30, 50, 60)]
    assert removed == [checkpoint_name(step) for step in (20, 40)]
    assert not list(tmp_path.glob(".step-*"))
    remove_old(tmp_path, Keep(last=1, best="loss", higher_is_better=True))
    assert [path.name for path in list_checkpoints(tmp_path)] == [checkpoint_name(60)]


def test_what_a_killed_save_left_is_cleared_and_a_replaced_one_put_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, 1).rename(tmp_path / ".step-00000001.old")
    write_checkpoint(tmp_path, {}, 2)
    (tmp_path / ".step-00000002.old").mkdir()
    (tmp_path / ".step-00000003-7.part").mkdir()
    assert clear_unfinished(tmp_path) == [".step-00000002.old", ".step-00000003-7.part"]
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        checkpoint_name(1),
        checkpoint_name(2),
    ]


# Boxes


def narrow(values: Tensor, box: Box) -> Tensor:
    for dim, (low, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        values = values.narrow(dim, low, size)
    return values


def random_shape(generator: random.Random) -> tuple[int, ...]:
    return tuple(generator.randint(1, 4) for _ in range(generator.randint(0, 4)))


def test_a_stretch_is_its_boxes() -> None:
    generator = random.Random(1)
    for _ in range(400):
        shape = random_shape(generator)
        numel = math.prod(shape)
        start, stop = sorted(generator.choices(range(numel + 1), k=2))
        values = torch.arange(numel).view(shape)
        boxes = list(stretch_boxes(shape, start, stop))
        found = torch.cat([narrow(values, box).reshape(-1) for _, box in boxes] or [torch.empty(0)])
        assert found.tolist() == list(range(start, stop)), (shape, start, stop)
        places = [sum(box.numel for _, box in boxes[:i]) for i in range(len(boxes))]
        assert [place for place, _ in boxes] == places
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_stretch_of_memory_in_any_order_is_its_boxes() -> None:
    """Channels-last weights and transposes: dims in any order in memory, size 1 with any stride."""
    generator = random.Random(2)
    for _ in range(400):
        shape = random_shape(generator)
        order = generator.sample(range(len(shape)), len(shape))
        memory = torch.arange(math.prod(shape))
        values = memory.view([shape[dim] for dim in order]).permute(
            [order.index(dim) for dim in range(len(shape))]
        )
        stride = tuple(
            step if size > 1 else generator.choice([1, step, 7, 1000])
            for step, size in zip(values.stride(), shape, strict=True)
        )
        values = values.as_strided(shape, stride)
        assert sorted(memory_order(shape, stride)) == list(range(len(shape)))
        start, stop = sorted(generator.choices(range(memory.numel() + 1), k=2))
        seen = []
        for box, view in _stretch(shape, stride, start, stop):
            piece = view(memory[start:stop])
            assert torch.equal(piece, narrow(values, box)), (shape, stride, start, stop)
            seen += piece.reshape(-1).tolist()
        assert sorted(seen) == list(range(start, stop))


def test_a_cut_with_units_laid_out_anew_and_padded_is_its_runs() -> None:
    """Against the function that cuts weights for tensor parallelism."""
    generator = random.Random(3)
    for _ in range(300):
        units, size = generator.randint(1, 6), generator.randint(1, 3)
        shape = (2, units * size, 3)
        order = None
        if generator.random() < 0.8:
            places = [*range(units), *[-1] * generator.randint(0, 3)]
            if generator.random() < 0.7:
                generator.shuffle(places)
            order = tuple(places)
        split = Split(1, shape, units, order)
        full = torch.arange(1, math.prod(shape) + 1).view(shape)
        ranks = generator.randint(1, 5)
        low, covered = 0, []
        for rank in range(ranks):
            piece = cut_local(full, split, rank, ranks)
            # Any part of the piece, as a shard of it would be.
            begin, end = sorted(generator.choices(range(piece.shape[1] + 1), k=2))
            for is_all, first, last in ((True, 0, piece.shape[1]), (False, begin, end)):
                part = piece[:, first:last]
                runs = list(runs_of(low + first, last - first, shape[1], units, order))
                held = torch.zeros_like(part)
                for run in runs:
                    held[:, run.local : run.local + run.length] = full.narrow(
                        1, run.whole, run.length
                    )
                assert torch.equal(held, part)
                for a, b in itertools.pairwise(runs):  # none that could be one
                    assert (a.local + a.length, a.whole + a.length) != (b.local, b.whole)
                if is_all:
                    covered += [run.whole + i for run in runs for i in range(run.length)]
            low += piece.shape[1]
        assert sorted(covered) == list(range(shape[1]))
