"""What a checkpoint is made of, as `manifest.json` says it. Imports without torch.

A checkpoint is a directory `step-N` with safetensors files, one a rank, and the manifest, which holds for
each tensor its shape and the boxes it was written in, for each box the bytes and their checksum, and the
state of the run that is no tensor. The directory appears by one rename when everything in it is on disk,
so what is called `step-N` was whole once; sizes and checksums say whether it still is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.errors import UsageError, WouldRepeat

MANIFEST = "manifest.json"
FORMAT = 1
MODEL, OPTIMIZER, RANK, REPLICA = "model/", "optim/", "rank/", "replica/"
"""How tensor names begin: weights and buffers, `optim/KEY/NAME`, what is one rank's own, and what
differs between replicas that step on their own."""
AVERAGE = "average/"
"""A moving average of a weight, where one is kept."""

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

_NAME = re.compile(r"step-(\d+)$")
_SEAL, _END = ', "crc32": ', "}\n"


class Damaged(WouldRepeat):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """First byte in the file; `stop` is past the last."""
    stop: int
    crc32: int


@dataclass(frozen=True)
class Stored:
    """A whole tensor as the checkpoint has it."""

    dtype: str
    """As safetensors calls it: F32, BF16 ..."""
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)


@dataclass(frozen=True)
class StoredFile:
    num_bytes: int
    header_bytes: int
    """Of the safetensors header with its length."""
    header_crc32: int


@dataclass(frozen=True)
class Manifest:
    step: int
    layout: str
    num_ranks: int
    time: float
    """Seconds since 1970."""
    state: dict[str, Any] = field(default_factory=dict)
    """The run's state that is no tensor: position in the data, loss scale ..."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the last evaluation before it."""
    config: str = ""
    """The configuration, as YAML."""
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    @property
    def has_average(self) -> bool:
        """Whether a moving average of the weights is kept (`optim.ema`)."""
        return any(name.startswith(AVERAGE) for name in self.tensors)


def chunk_key(name: str, chunk: Chunk, shape: tuple[int, ...]) -> str:
    """What a box is called in its safetensors file: the tensor's name, with the box where it is a part."""
    if chunk.sizes == shape:
        return name
    pairs = zip(chunk.offsets, chunk.sizes, strict=True)
    return f"{name}[{','.join(f'{low}:{low + size}' for low, size in pairs)}]"


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = []
    if directory.is_dir():
        for path in directory.iterdir():
            match = _NAME.match(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def clear_unfinished(directory: Path) -> list[str]:
    """Remove what a save that was killed has left behind; an old one that was being replaced and has no
    newer in its place is put back."""
    removed = []
    for path in sorted(directory.glob(".step-*")):
        if path.name.endswith(".old") and not (directory / path.name[1:-4]).exists():
            path.rename(directory / path.name[1:-4])
            continue
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path.name)
    return removed


def put_aside(path: Path) -> None:
    """Take a damaged checkpoint out of the line, so that it does not count as one that is kept."""
    name = path.with_name(f"{path.name}.damaged")
    number = 1
    while name.exists():
        number += 1
        name = path.with_name(f"{path.name}.damaged-{number}")
    path.rename(name)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write it and wait until it is on disk."""
    names = list(manifest.files)
    place = {name: index for index, name in enumerate(names)}
    body = {
        "format": FORMAT,
        "step": manifest.step,
        "layout": manifest.layout,
        "num_ranks": manifest.num_ranks,
        "time": manifest.time,
        "state": manifest.state,
        "metrics": manifest.metrics,
        "config": manifest.config,
        "versions": manifest.versions,
        "files": [
            [name, file.num_bytes, file.header_bytes, file.header_crc32]
            for name, file in manifest.files.items()
        ],
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "chunks": [
                    [place[c.file], c.offsets, c.sizes, c.start, c.stop, c.crc32]
                    for c in tensor.chunks
                ],
            }
            for name, tensor in manifest.tensors.items()
        },
    }
    text = json.dumps(body)[:-1]
    sealed = f"{text}{_SEAL}{zlib.crc32(text.encode())}{_END}".encode()
    with (directory / MANIFEST).open("wb") as file:
        file.write(sealed)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint; `Damaged` when it is not there or not what was written."""
    path = directory / MANIFEST
    try:
        text = path.read_bytes().decode()
        body, seal, crc = text.removesuffix(_END).rpartition(_SEAL)
        whole = text.endswith(_END) and bool(seal) and crc.isdigit()
        if not whole or zlib.crc32(body.encode()) != int(crc):
            raise Damaged(f"{path} is not what was written (its checksum does not fit)")
        value = json.loads(f"{body}}}")
    except (OSError, ValueError) as error:
        if not directory.is_dir():
            raise UsageError(f"no checkpoint at {directory}") from error
        raise Damaged(f"{path} cannot be read ({_reason(error)})") from error
    if value["format"] != FORMAT:
        raise UsageError(
            f"{directory} has format {value['format']} and this version reads {FORMAT}; "
            "use the version that wrote it"
        )
    names = [row[0] for row in value["files"]]
    tensors = {}
    for name, tensor in value["tensors"].items():
        chunks = tuple(
            Chunk(tuple(offsets), tuple(sizes), names[file], start, stop, crc)
            for file, offsets, sizes, start, stop, crc in tensor["chunks"]
        )
        tensors[name] = Stored(tensor["dtype"], tuple(tensor["shape"]), chunks)
    return Manifest(
        step=value["step"],
        layout=value["layout"],
        num_ranks=value["num_ranks"],
        time=value["time"],
        state=value["state"],
        metrics=value["metrics"],
        config=value["config"],
        versions=value["versions"],
        files={row[0]: StoredFile(*row[1:]) for row in value["files"]},
        tensors=tensors,
    )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def chunks_by_file(manifest: Manifest) -> dict[str, list[tuple[str, Chunk]]]:
    """For each file the boxes in it with their tensors' names, in the order of their bytes."""
    found: dict[str, list[tuple[str, Chunk]]] = {name: [] for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            found[chunk.file].append((name, chunk))
    for members in found.values():
        members.sort(key=lambda member: member[1].start)
    return found


def check_sizes(directory: Path, manifest: Manifest) -> Iterator[str]:
    """One sentence for each file that is missing or has not the size it had; reads no data."""
    for name, file in manifest.files.items():
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            yield f"{name} is missing ({_reason(error)})"
            continue
        if size != file.num_bytes:
            yield f"{name} has {size} bytes where {file.num_bytes} were written"
