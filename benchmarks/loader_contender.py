"""One loader of `loader.py`, in a process of its own: reads, counts, prints a line of JSON.

    python benchmarks/loader_contender.py images lmdb FOLDER --workers 2 --measure 8000

Needs no Ridgeline unless the contender is ours, so that it runs in the environment of a library that
cannot live beside the others. Every contender decodes with the same few lines of Pillow, collates to
batches of the same size and shuffles.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

SIDE = 128
ARRAY = (16, 256, 256)


def decode(data: bytes) -> torch.Tensor:
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def as_array(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.float32).reshape(ARRAY).copy())


def to_tensor(kind: str) -> Callable[[bytes], torch.Tensor]:
    return decode if kind == "images" else as_array


# Torch's DataLoader on a folder of files


class Folder(Dataset):
    def __init__(self, kind: str, root: Path) -> None:
        self.kind = kind
        self.files = sorted(str(path) for path in root.rglob("*.*"))
        names = sorted({os.path.dirname(file) for file in self.files})
        self.labels = {name: number for number, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file = self.files[index]
        label = self.labels[os.path.dirname(file)]
        if self.kind == "arrays":
            return torch.from_numpy(np.load(file)), label
        with open(file, "rb") as opened:
            return decode(opened.read()), label


# LMDB as one writes it by hand


class Lmdb(Dataset):
    def __init__(self, kind: str, root: Path) -> None:
        self.change = to_tensor(kind)
        self.path = str(root)
        self.env: Any = None
        with self._open().begin() as transaction:
            self.length = transaction.stat()["entries"]
        self.env = None

    def _open(self) -> Any:
        import lmdb

        return lmdb.open(self.path, readonly=True, lock=False, readahead=False, meminit=False)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.env is None:
            self.env = self._open()
        with self.env.begin(buffers=True) as transaction:
            value = bytes(transaction.get(struct.pack(">Q", index)))
        return self.change(value[8:]), struct.unpack("<q", value[:8])[0]


def torch_loader(dataset: Any, batch: int, workers: int) -> Iterator[Any]:
    return iter(DataLoader(dataset, batch_size=batch, shuffle=True, num_workers=workers))


def folder(kind: str, root: Path, batch: int, workers: int) -> Iterator[Any]:
    return torch_loader(Folder(kind, root), batch, workers)


def lmdb(kind: str, root: Path, batch: int, workers: int) -> Iterator[Any]:
    return torch_loader(Lmdb(kind, root), batch, workers)


def webdataset(kind: str, root: Path, batch: int, workers: int) -> Iterator[Any]:
    import webdataset as wds

    change = to_tensor(kind)
    shards = sorted(str(path) for path in root.glob("*.tar"))
    pipeline = (
        wds.WebDataset(shards, shardshuffle=len(shards), seed=0, empty_check=False)
        .shuffle(1000 if kind == "images" else 16)
        .to_tuple("jpg" if kind == "images" else "raw", "cls")
        .map_tuple(change, int)
        .batched(batch)
    )
    return iter(wds.WebLoader(pipeline, batch_size=None, num_workers=workers))


def litdata(kind: str, root: Path, batch: int, workers: int) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    change = to_tensor(kind)

    class Decoded(StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(index)
            return change(bytes(sample["data"])), sample["label"]

    dataset = Decoded(str(root), shuffle=True)
    return iter(StreamingDataLoader(dataset, batch_size=batch, num_workers=workers))


def streaming(kind: str, root: Path, batch: int, workers: int) -> Iterator[Any]:
    from streaming import StreamingDataset

    change = to_tensor(kind)

    class Decoded(StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(index)
            return change(sample["data"]), sample["label"]

    dataset = Decoded(local=str(root), shuffle=True, batch_size=batch)
    return iter(DataLoader(dataset, batch_size=batch, num_workers=workers))


def ridgeline(kind: str, root: Path, batch: int, workers: int, threads: int) -> Iterator[Any]:
    from ridgeline.data.build import build_sources
    from ridgeline.data.loader import Loader

    args: dict[str, Any] = {"path": str(root), "holdout": 0}
    if kind == "images":
        args.update(size=SIDE, pixels="bytes")
    source, _ = build_sources("packed", args, 0)
    loader = Loader(source, batch=batch, workers=workers, threads=max(1, threads))
    return loader.epoch(0)


def raw(kind: str, root: Path, batch: int, workers: int) -> Iterator[Any]:
    """No loader at all: the files from their first byte to their last, into three batches in turn."""
    memory = np.zeros((3, batch, *ARRAY), dtype=np.float32)
    turn = row = 0
    for path in sorted(root.rglob("input.npy")):
        fd = os.open(path, os.O_RDONLY)
        offset = 0
        while got := os.preadv(fd, [memory[turn, row].reshape(-1).view(np.uint8)], offset):
            offset += got
            row += 1
            if row == batch:
                yield [memory[turn]]
                turn, row = (turn + 1) % 3, 0
        os.close(fd)


OTHERS = {
    "folder": folder,
    "lmdb": lmdb,
    "webdataset": webdataset,
    "litdata": litdata,
    "streaming": streaming,
    "raw": raw,
}


def samples_of(batch: Any) -> int:
    inputs = batch.inputs if hasattr(batch, "inputs") else batch
    return len(inputs[0])


def drop_pages(root: Path) -> None:
    """Forget what the system has read of these files; those that are mapped stay."""
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("images", "arrays"))
    parser.add_argument("contender")
    parser.add_argument("root", type=Path)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--measure", type=int, default=8000, help="Samples that are timed.")
    parser.add_argument("--skip", type=int, default=0, help="Samples before the clock starts.")
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cold:
        drop_pages(options.root)
    args = (options.kind, options.root, options.batch, options.workers)
    if options.contender in OTHERS:
        batches = OTHERS[options.contender](*args)
    else:
        batches = ridgeline(*args, options.threads)
    done = samples_of(next(batches))
    while done < options.skip:
        done += samples_of(next(batches))
    start = time.perf_counter()
    counted = 0
    for batch in batches:
        counted += samples_of(batch)
        if counted >= options.measure:
            break
    seconds = time.perf_counter() - start
    print(json.dumps({"samples": counted, "seconds": seconds, "rate": counted / seconds}))
    sys.stdout.flush()
    os._exit(0)  # not timed, and some loaders take long to end


if __name__ == "__main__":
    main()
