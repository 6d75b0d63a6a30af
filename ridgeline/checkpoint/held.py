"""What this rank holds of a run's state: for every tensor of the whole, the boxes that are here.

A `Held` is such a tensor as `torch.distributed.checkpoint` plans with; its parts are views of the live
memory, read in a save and written in a load. The names, shapes and values of whole tensors are those that
one device would have, whatever the layout, which is why a checkpoint moves between layouts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from ridgeline.checkpoint.boxes import Box, memory_order, runs_of, stretch_boxes, whole
from ridgeline.checkpoint.manifest import AVERAGE, MODEL, OPTIMIZER, RANK, REPLICA
from ridgeline.errors import RunError, UsageError
from ridgeline.parallel.arranged import Arranged
from ridgeline.parallel.flat import Piece
from ridgeline.parallel.fsdp import free_gathered
from ridgeline.parallel.pipeline.stage import stale_buffers
from ridgeline.parallel.tensor.split import Split, chunk_sizes

Part = tuple[Box, Callable[[Tensor], Tensor]]
"""A box of the whole tensor, and how to get at it in the rank's piece (or in anything shaped like it)."""


@dataclass(frozen=True)
class Held:
    """One tensor of the whole and this rank's parts of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    views: tuple[Tensor, ...]
    """Live memory, one view a box."""
    is_offered: bool = True
    """Whether this rank may be the one that writes it; copies that could differ are only rank 0's."""
    steady: bool = False
    """Whether only the optimizer's step changes it, so that it can be copied while the next batch runs."""

    def size(self) -> torch.Size:
        """The whole tensor's; torch compares it with the checkpoint's."""
        return torch.Size(self.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        if not self.is_offered:
            return []
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(box), properties=properties, size=torch.Size(self.shape)
                ),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offsets = tuple(index.offset or ())
        for box, view in zip(self.boxes, self.views, strict=True):
            if box.offsets == offsets:
                return view
        raise RunError(f"{index.fqn} has no box at {offsets} on this rank")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


State = dict[str, Held]


def hold_state(arranged: Arranged, optimizer: Optimizer) -> State:
    """Weights and their averages, buffers, optimizer state and what is this rank's own, of a run."""
    parameters = _hold_parameters(arranged)
    state = _hold_weights(arranged, parameters)
    for trainable in arranged.trainables():
        held = parameters[id(trainable.parameter)]
        if arranged.average is not None:
            name = AVERAGE + held.name
            state[name] = held.of(arranged.average.of(trainable.parameter), name)
        for key, value in optimizer.state.get(trainable.parameter, {}).items():
            if isinstance(value, Tensor):
                name = f"{OPTIMIZER}{key}/{held.name}"
                state[name] = held.of(value, name)
            elif value is not None:
                raise UsageError(
                    f"{type(optimizer).__name__} keeps {key}={value!r} for {held.name}, which is no "
                    "tensor and would be lost in a checkpoint; keep it as torch.tensor(...)"
                )
    if arranged.local_sync:
        state = _apart(state, arranged)
    return state | _hold_own(arranged)


def hold_weights(arranged: Arranged) -> State:
    """Weights and buffers alone."""
    return _hold_weights(arranged, _hold_parameters(arranged))


def _hold_weights(arranged: Arranged, parameters: dict[int, _Parameter]) -> State:
    found = {MODEL + held.name: held.of(held.values, held.name) for held in parameters.values()}
    return found | _hold_buffers(arranged)


@dataclass(frozen=True)
class _Parameter:
    """The geometry of one parameter on this rank, shared by its values and its optimizer state."""

    name: str
    """As the whole model first calls it."""
    values: Tensor
    """What the optimizer updates."""
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    is_offered: bool

    def of(self, value: Tensor, name: str) -> Held:
        """The parameter itself, or something that goes with it, by the same boxes."""
        value = _real(_local(value.detach()))
        mine = _real(_local(self.values))
        if value.shape == mine.shape:
            boxes = tuple(box for box, _ in self.parts)
            views = tuple(view(value) for _, view in self.parts)
            return Held(self.shape, value.dtype, boxes, views, self.is_offered, steady=True)
        if value.dim() == 0:
            return Held((), value.dtype, (whole(()),), (value,), self.is_offered, steady=True)
        if len(self.parts) == 1 and self.parts[0][0].sizes == self.shape:
            shape = tuple(value.shape)
            return Held(shape, value.dtype, (whole(shape),), (value,), self.is_offered, steady=True)
        raise RunError(
            f"{name} has shape {tuple(value.shape)} where this rank's part of the parameter has "
            f"{tuple(mine.shape)}; state of another shape cannot be saved in layout pieces"
        )


def _hold_parameters(arranged: Arranged) -> dict[int, _Parameter]:
    """Every parameter of this rank, by the identity of what the optimizer (or the model) has."""
    found: dict[int, _Parameter] = {}
    for part in arranged.parts:
        if arranged.is_fully_sharded:
            free_gathered(part)
        flats = [flat for flat in arranged.flats if flat.module is part]
        flat_names = {name for flat in flats for name in flat.names}
        every = bool(flats) and not arranged.is_fully_sharded
        for name, parameter in part.named_parameters():
            if parameter.requires_grad and (every or name in flat_names):
                continue
            split = _split_of(arranged, name)
            found[id(parameter)] = _Parameter(
                name=arranged.state_names.get(name, name),
                values=parameter.detach() if not isinstance(parameter, DTensor) else parameter,
                shape=_of_all_experts(arranged, name, _whole_shape(parameter, split)),
                parts=tuple(
                    _of_expert(arranged, name, p)
                    for p in _cut(_local_box(parameter), split, arranged)
                ),
                is_offered=_is_offered(arranged, name),
            )
        for piece in (piece for flat in flats for piece in flat.pieces):
            split = _split_of(arranged, piece.name)
            shape, stride = _piece_shape(piece)
            local = tuple(_stretch(shape, stride, piece.start, piece.stop))
            found[id(piece.parameter)] = _Parameter(
                name=arranged.state_names.get(piece.name, piece.name),
                values=piece.parameter,
                shape=_of_all_experts(
                    arranged, piece.name, split.global_shape if split is not None else shape
                ),
                parts=tuple(
                    _of_expert(arranged, piece.name, p)
                    for part_ in local
                    for p in _cut(part_, split, arranged)
                ),
                # Ranks of a tensor group may have cut the same parameter into other stretches.
                is_offered=_is_offered(arranged, piece.name)
                and (split is not None or arranged.mesh.axis_rank("tp") == 0),
            )
    return found


def _is_offered(arranged: Arranged, name: str) -> bool:
    """A weight that two stages share is written by the first."""
    staged = arranged.staged
    return staged is None or name not in staged.counted_elsewhere


def _of_all_experts(arranged: Arranged, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with the experts of all ranks, where the parameter is a stack of some."""
    stack = arranged.experts.stacks.get(name) if arranged.experts is not None else None
    return (stack.num, *shape[1:]) if stack is not None else shape


def _of_expert(arranged: Arranged, name: str, part: Part) -> Part:
    """A box of a rank's experts as one of all of them."""
    stack = arranged.experts.stacks.get(name) if arranged.experts is not None else None
    if stack is None:
        return part
    box, get = part
    return Box(_with(box.offsets, 0, stack.start + box.offsets[0]), box.sizes), get


def _split_of(arranged: Arranged, name: str) -> Split | None:
    return arranged.view.splits.get(name) if arranged.view is not None else None


def _whole_shape(parameter: Tensor, split: Split | None) -> tuple[int, ...]:
    if split is not None:
        return split.global_shape
    return tuple(parameter.shape) + ((2,) if parameter.is_complex() else ())


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _real(value: Tensor) -> Tensor:
    """Files have no complex numbers: pairs of real ones, along one dim more."""
    return torch.view_as_real(value) if value.is_complex() else value


def _local_box(parameter: Tensor) -> Part:
    """The box of (this tensor-parallel rank's piece of) a parameter that is in this rank's memory."""
    if isinstance(parameter, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        return Box(tuple(offsets), tuple(sizes)), _same
    shape = tuple(parameter.shape) + ((2,) if parameter.is_complex() else ())
    return whole(shape), _same


def _same(value: Tensor) -> Tensor:
    return value


def _piece_shape(piece: Piece) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides in real numbers; a stretch of a complex parameter counts those."""
    shape, stride = tuple(piece.original_shape), tuple(piece.original_stride)
    if piece.is_complex:
        return (*shape, 2), (*(2 * step for step in stride), 1)
    return shape, stride


def _stretch(
    shape: tuple[int, ...], stride: tuple[int, ...], start: int, stop: int
) -> Iterator[Part]:
    """A flat piece of memory as boxes of its parameter."""
    order = memory_order(shape, stride)
    back = tuple(order.index(dim) for dim in range(len(shape)))
    for place, box in stretch_boxes([shape[dim] for dim in order], start, stop):
        mine = Box(tuple(box.offsets[i] for i in back), tuple(box.sizes[i] for i in back))

        def view(flat: Tensor, place: int = place, box: Box = box) -> Tensor:
            return flat[place : place + box.numel].view(box.sizes).permute(back)

        yield mine, view


def _cut(part: Part, split: Split | None, arranged: Arranged) -> Iterator[Part]:
    """A box of a tensor-parallel rank's piece as boxes of the whole parameter."""
    box, get = part
    if not box.numel:
        return
    if split is None:
        yield part
        return
    dim, mesh = split.dim, arranged.mesh
    lengths = chunk_sizes(split.padded_shape[dim], mesh.axis_size("tp"))
    low = sum(lengths[: mesh.axis_rank("tp")]) + box.offsets[dim]
    runs = runs_of(low, box.sizes[dim], split.global_shape[dim], split.units, split.order)
    for run in runs:

        def view(value: Tensor, local: int = run.local, length: int = run.length) -> Tensor:
            return get(value).narrow(dim, local, length)

        yield (
            Box(_with(box.offsets, dim, run.whole), _with(box.sizes, dim, run.length)),
            view,
        )


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _hold_buffers(arranged: Arranged) -> State:
    """Running statistics and the like; where ranks have their own, the first one's count."""
    mesh = arranged.mesh
    apart = ("pp", "copies", "shard") if arranged.local_sync else ("pp",)
    first = all(mesh.axis_rank(axis) == 0 for axis in mesh.sizes if axis not in apart)
    state: State = {}
    for part in arranged.parts:
        for name, buffer in saved_buffers(part).items():
            name = arranged.state_names.get(name, name)
            values = _real(buffer.detach())
            shape = tuple(values.shape)
            state[MODEL + name] = Held(shape, values.dtype, (whole(shape),), (values,), first)
    return state


def saved_buffers(part: nn.Module) -> dict[str, Tensor]:
    """The buffers that are in the module's state dict, of a stage those that are its own."""
    found = {
        f"{path}.{name}" if path else name: buffer
        for path, module in part.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    stale = stale_buffers(part)
    return {name: buffer for name, buffer in found.items() if name not in stale}


def _apart(state: State, arranged: Arranged) -> State:
    """Replicas that step on their own: the first one's state is the model's, the others keep theirs."""
    replica = arranged.mesh.data_rank
    if replica == 0:
        return state
    return {f"{REPLICA}{replica}/{name}": held for name, held in state.items()}


# What is one rank's own


def read_own(arranged: Arranged) -> dict[str, Tensor]:
    """Random generators, and what techniques carry from step to step, as they are now."""
    found = {
        "random/torch": torch.get_rng_state(),
        "random/numpy": _read_numpy(),
        "random/python": _read_python(),
    }
    if arranged.mesh.device.type == "cuda":
        found["random/cuda"] = torch.cuda.get_rng_state(arranged.mesh.device)
    for number, sync in enumerate(arranged.local_sync):
        found[f"sync/{number}"] = sync.read_count()
    if arranged.compression is not None:
        memory = arranged.compression.memory
        found["compress/num_steps"] = torch.tensor(memory.num_steps)
        found |= {f"compress/errors/{name}": value for name, value in memory.errors.items()}
        found |= {f"compress/q/{name}": value for name, value in memory.q.items()}
    return found


def write_own(arranged: Arranged, values: dict[str, Tensor]) -> None:
    """Put back what `read_own` gave, on the same rank of the same layout."""
    device = arranged.mesh.device
    torch.set_rng_state(values["random/torch"])
    _write_numpy(values["random/numpy"])
    _write_python(values["random/python"])
    if device.type == "cuda" and "random/cuda" in values:
        torch.cuda.set_rng_state(values["random/cuda"], device)
    for number, sync in enumerate(arranged.local_sync):
        sync.write_count(values[f"sync/{number}"])
    if arranged.compression is not None:
        memory = arranged.compression.memory
        memory.num_steps = int(values["compress/num_steps"])
        memory.errors, memory.q = (
            {
                name.removeprefix(start): value.to(device)
                for name, value in values.items()
                if name.startswith(start)
            }
            for start in ("compress/errors/", "compress/q/")
        )


def _hold_own(arranged: Arranged) -> State:
    rank = arranged.mesh.env.rank
    state: State = {}
    for name, values in read_own(arranged).items():
        shape = tuple(values.shape)
        state[f"{RANK}{rank}/{name}"] = Held(shape, values.dtype, (whole(shape),), (values,))
    return state


def _read_numpy() -> Tensor:
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    values = [*np.asarray(keys).tolist(), position, has_gauss, cached]
    return torch.tensor(values, dtype=torch.float64)


def _write_numpy(values: Tensor) -> None:
    *keys, position, has_gauss, cached = values.tolist()
    state = ("MT19937", np.array(keys, np.uint32), int(position), int(has_gauss), cached)
    np.random.set_state(state)


def _read_python() -> Tensor:
    version, keys, gauss = random.getstate()
    kept = float("nan") if gauss is None else gauss
    return torch.tensor([version, *keys, kept], dtype=torch.float64)


def _write_python(values: Tensor) -> None:
    version, *keys, gauss = values.tolist()
    kept = None if gauss != gauss else gauss
    random.setstate((int(version), tuple(int(key) for key in keys), kept))
