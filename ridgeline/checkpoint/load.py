"""Loading a checkpoint into whatever layout the run has now: exact values, only the bytes that are needed.

First the newest checkpoint that is whole is found: ranks share out the files and check every byte, and
one that is damaged is passed over with a word on what is wrong. Then each rank reads its own boxes.
Called by `train/resume.py` and by `ridgeline checkpoint`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.optim import Optimizer

from ridgeline.checkpoint.damage import find_damage
from ridgeline.checkpoint.files import DTYPES, Reader
from ridgeline.checkpoint.held import Held, State, hold_state, hold_weights, write_own
from ridgeline.checkpoint.manifest import (
    AVERAGE,
    MODEL,
    OPTIMIZER,
    RANK,
    REPLICA,
    Damaged,
    Manifest,
    check_sizes,
    chunks_by_file,
    list_checkpoints,
    read_manifest,
)
from ridgeline.checkpoint.storage import BoxReader
from ridgeline.errors import RunError, UsageError
from ridgeline.parallel.arranged import Arranged


@dataclass(frozen=True)
class Found:
    """A whole checkpoint, and what was passed over on the way to it."""

    path: Path
    manifest: Manifest
    damaged: tuple[str, ...] = ()
    """One sentence for each newer one that is not whole."""
    damaged_paths: tuple[Path, ...] = ()


def find_newest(
    directory: Path, rank: int, group: dist.ProcessGroup | None, check: bool = True
) -> Found | None:
    """The newest whole checkpoint, None where there is none; every rank calls it and gets the same."""
    world = 1 if group is None else dist.get_world_size(group)
    box = [[path.name for path in list_checkpoints(directory)]]
    if group is not None:
        dist.broadcast_object_list(box, group_src=0, group=group)
    damaged: list[str] = []
    paths: list[Path] = []
    for name in reversed(box[0]):
        path = directory / name
        problems = _problems(path, rank, world, check)
        if group is not None:
            everyone: list[list[str]] = [[] for _ in range(world)]
            dist.all_gather_object(everyone, problems, group=group)
            problems = list(dict.fromkeys(p for part in everyone for p in part))
        if not problems:
            return Found(path, read_manifest(path), tuple(damaged), tuple(paths))
        if not any(UNREADABLE in problem for problem in problems):
            paths.append(path)  # a file system that fails now says nothing of the bytes
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        damaged.append(f"checkpoint {name} is not whole: {problems[0]}{more}")
    if damaged:
        raise Damaged(
            f"no checkpoint in {directory} is whole: {'; '.join(damaged)}; start over with --fresh"
        )
    return None


UNREADABLE = "cannot be read"


def _problems(path: Path, rank: int, world: int, check: bool) -> list[str]:
    try:
        manifest = read_manifest(path)
    except Damaged as error:
        return [str(error)]
    problems = list(check_sizes(path, manifest)) if rank == 0 else []
    if check and not problems:
        for name, chunks in list(chunks_by_file(manifest).items())[rank::world]:
            problems += map(str, find_damage(path / name, manifest.files[name], chunks))
    return problems


class _Planner(DefaultLoadPlanner):  # type: ignore[misc]
    """Torch's planner, for values that are parts of tensors rather than tensors."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        held: Held = self.state_dict[index.fqn]
        return held.__get_tensor_shard__(index)


def load_state(path: Path, manifest: Manifest, state: State) -> None:
    """Fill what `state` holds from the checkpoint; no rank waits for another."""
    planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            reader = BoxReader(path, manifest)
            dcp.load(dict(state), storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointException as error:  # torch's, which is no Exception
            cause, _ = next(iter(error.failures.values()))
            raise RunError(f"{path} cannot be read: {type(cause).__name__}: {cause}") from cause


def load_training(
    path: Path, manifest: Manifest, arranged: Arranged, optimizer: Optimizer
) -> list[str]:
    """Weights, buffers, optimizer state and what is the rank's own; sentences for the user."""
    _make_state(optimizer)
    state = hold_state(arranged, optimizer)
    is_same = manifest.layout == str(arranged.layout)
    wanted, notes = _match(state, manifest, path, is_same, arranged, optimizer)
    load_state(path, manifest, wanted)
    for flat in arranged.flats:
        flat.after_step()  # the ranks of a shard group give each other what each has read
    notes += _begin_average(arranged, manifest)
    arranged.num_steps = manifest.step
    if is_same:
        write_own(arranged, _read_own(path, manifest, arranged.mesh.env.rank))
    return notes


def load_weights(path: Path, manifest: Manifest, arranged: Arranged) -> None:
    """Weights and buffers alone; the optimizer begins anew."""
    state = hold_weights(arranged)
    for name, held in state.items():
        _require(name, held, manifest, path)
    load_state(path, manifest, state)
    for flat in arranged.flats:
        flat.after_step()


def _make_state(optimizer: Optimizer) -> None:
    """Let the optimizer make its state, by a step that changes nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _match(
    state: State,
    manifest: Manifest,
    path: Path,
    is_same: bool,
    arranged: Arranged,
    optimizer: Optimizer,
) -> tuple[State, list[str]]:
    """What of `state` is to be read, under the names that the checkpoint has."""
    wanted: State = {}
    for name, held in state.items():
        if name.startswith(RANK):
            continue
        source = name
        if name.startswith(REPLICA) and not (is_same and name in manifest.tensors):
            source = name.split("/", 2)[
                2
            ]  # of replicas that are not there, the first stands for all
        if source not in manifest.tensors and source.startswith(OPTIMIZER):
            continue  # of a parameter that had no gradient yet: forgotten below
        if source.startswith(AVERAGE) and not manifest.has_average:
            continue  # it begins with the weights
        _require(source, held, manifest, path)
        wanted[source] = held
    _require_all(manifest, path, arranged, optimizer)
    _forget(optimizer, arranged, manifest)
    notes = []
    if not is_same:
        notes.append(f"the checkpoint is of layout {manifest.layout}, read into {arranged.layout}")
        if any(name.startswith(REPLICA) for name in manifest.tensors):
            notes.append("its replicas had stepped on their own; the first one's weights are taken")
    return wanted, notes


def _begin_average(arranged: Arranged, manifest: Manifest) -> list[str]:
    """Where a run keeps an average and its checkpoint has none, or the other way round."""
    has = manifest.has_average
    if arranged.average is None:
        return ["the checkpoint's moving average is left behind"] if has else []
    if has:
        return []
    arranged.average.restart()
    return ["the checkpoint has no moving average: it begins with the weights of now"]


def _require(name: str, held: Held, manifest: Manifest, path: Path) -> None:
    """The checkpoint has it, in its shape."""
    mine = name.removeprefix(MODEL).removeprefix(AVERAGE)
    if name not in manifest.tensors:
        raise UsageError(
            f"the model has {mine} and the checkpoint {path} has not; "
            "use the recipe it was made with, or start over with --fresh"
        )
    shape = manifest.tensors[name].shape
    if shape != held.shape:
        raise UsageError(
            f"{mine} has shape {list(held.shape)} and in the checkpoint "
            f"{path} {list(shape)}; use the recipe it was made with, or start over with --fresh"
        )


def _forget(optimizer: Optimizer, arranged: Arranged, manifest: Manifest) -> None:
    """Parameters that had no state when the checkpoint was made get none."""
    known = {name.split("/", 2)[2] for name in manifest.tensors if name.startswith(OPTIMIZER)}
    for trainable in arranged.trainables():
        if arranged.state_names.get(trainable.name, trainable.name) not in known:
            optimizer.state.pop(trainable.parameter, None)


def _require_all(manifest: Manifest, path: Path, arranged: Arranged, optimizer: Optimizer) -> None:
    """The checkpoint is of this model and of this optimizer, and of no more than these."""
    for name in manifest.tensors:
        mine = name.removeprefix(MODEL)
        if name.startswith(MODEL) and mine not in arranged.state_names:
            raise UsageError(
                f"the checkpoint {path} has {mine} and the model has not; use the recipe it was made "
                "with, or start over with --fresh"
            )
    if not any(t.parameter.numel() for t in arranged.trainables()):
        return  # a stage of frozen layers cannot tell
    has = {key for state in optimizer.state.values() for key in state}
    had = {name.split("/")[1] for name in manifest.tensors if name.startswith(OPTIMIZER)}
    if has != had and manifest.step:
        raise UsageError(
            f"the checkpoint {path} has {', '.join(sorted(had)) or 'nothing'} of an optimizer, and "
            f"{type(optimizer).__name__} keeps {', '.join(sorted(has)) or 'nothing'}; use the optimizer "
            "it was made with, or start over with --fresh"
        )


def _read_own(path: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    start = f"{RANK}{rank}/"
    names = [name for name in manifest.tensors if name.startswith(start)]
    return {name.removeprefix(start): read_tensor(Reader(path), manifest, name) for name in names}


def read_tensor(reader: Reader, manifest: Manifest, name: str) -> Tensor:
    """One whole tensor, put together from its boxes."""
    stored = manifest.tensors[name]
    values = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    for chunk in stored.chunks:
        target = values
        for dim, (low, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            target = target.narrow(dim, low, length)
        target.copy_(reader.read(chunk, stored.dtype))
    return values
