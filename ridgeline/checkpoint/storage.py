"""Where `torch.distributed.checkpoint` puts the boxes it has planned: one safetensors file a rank.

Torch plans who writes and who reads which box; its own file systems keep the index as a pickle, so the
two classes here keep it as JSON (`manifest.py`), with sizes and checksums, and make the whole appear by
one rename. Called by `save.py` and `load.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ridgeline.checkpoint.files import (
    DTYPES,
    Entry,
    Reader,
    dtype_name,
    sync_directory,
    write_file,
)
from ridgeline.checkpoint.manifest import (
    Chunk,
    Manifest,
    Stored,
    StoredFile,
    check_sizes,
    checkpoint_name,
    chunk_key,
    write_manifest,
)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_boxes(
    aside: Path, rank: int, items: list[WriteItem], value_of: Callable[[WriteItem], Tensor]
) -> tuple[StoredFile | None, list[WriteResult]]:
    """This rank's file of a checkpoint that is not there yet; None when it has nothing to write."""
    if not items:
        return None, []
    aside.mkdir(parents=True, exist_ok=True)
    entries = []
    for item in items:
        data = item.tensor_data
        assert data is not None
        chunk = Chunk(tuple(data.chunk.offsets), tuple(data.chunk.sizes), "", 0, 0, 0)
        entries.append(Entry(chunk_key(item.index.fqn, chunk, tuple(data.size)), value_of(item)))
    name = rank_file(rank)
    file, spans = write_file(aside / name, entries)
    sync_directory(aside)
    results = [
        WriteResult(item.index, stop - start, (name, start, stop, crc))
        for item, (start, stop, crc) in zip(items, spans, strict=True)
    ]
    return file, results


def commit(
    directory: Path,
    aside: Path,
    manifest: Manifest,
    metadata: Metadata,
    files: dict[str, StoredFile],
    results: list[WriteResult],
) -> Path:
    """All ranks have written: seal the checkpoint and let it appear. On one rank."""
    written = {(r.index.fqn, tuple(r.index.offset or ())): r.storage_data for r in results}
    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        chunks = []
        for chunk in stored.chunks:
            file, start, stop, crc = written[name, tuple(chunk.offsets)]
            chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), file, start, stop, crc))
        dtype = dtype_name(stored.properties.dtype, name)
        tensors[name] = Stored(dtype, tuple(stored.size), tuple(chunks))
    manifest = Manifest(**{**vars(manifest), "files": files, "tensors": tensors})
    aside.mkdir(parents=True, exist_ok=True)
    for problem in check_sizes(aside, manifest):
        raise OSError(f"{problem}; every rank has to write to the same file system")
    write_manifest(aside, manifest)
    sync_directory(aside)
    target = directory / checkpoint_name(manifest.step)
    old = directory / f".{target.name}.old"
    if target.exists():
        # One of this step that was damaged, or of an earlier try; it is put back if we die here.
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    os.rename(aside, target)
    sync_directory(directory)
    shutil.rmtree(old, ignore_errors=True)
    return target


class BoxReader(StorageReader):  # type: ignore[misc]
    """Reads from a checkpoint what a plan of torch's asks for, and no more."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        self._reader = Reader(path)
        self._chunks = {
            (name, chunk.offsets): (stored.dtype, chunk)
            for name, stored in manifest.tensors.items()
            for chunk in stored.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[stored.dtype]),
                    torch.Size(stored.shape),
                    [
                        ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                        for c in stored.chunks
                    ],
                )
                for name, stored in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        return

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            index: MetadataIndex = item.storage_index
            dtype, chunk = self._chunks[index.fqn, tuple(index.offset or ())]
            box = self._reader.read(chunk, dtype)
            for dim, (low, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                box = box.narrow(dim, low, length)
            target = planner.resolve_tensor(item)
            target.detach().copy_(box)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
